"""Texts that resemble calls, in any chunks: the same pieces, nothing lost, arguments that are objects."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

from edgespec.text.conversation.call_formats import HERMES, LLAMA, MISTRAL, QWEN_XML, CallFormat
from edgespec.text.conversation.pieces import Piece, joined
from edgespec.text.conversation.tool_calls import CallText
from tests.fuzz.findings import Findings

KNOWN = {"f": {"type": "object", "properties": {"a": {"type": "string"}}}, "now": {}}
BITS = (
    "<tool_call>", "</tool_call>", "<tool", "_call>", "\n", " ", "{", "}", "{{", "}}", '"name"', ":", '"f"',
    '"arguments"', '{"name": "f", "arguments": {"a": "x"}}', '"parameters"', '{"name": "now", "parameters": {}}',
    "[TOOL_CALLS]", "[", "]", ",", "f[ARGS]", '{"a": 1}', "<function=f>", "<parameter=a>", "</parameter>",
    "</function>", "<|python_tag|>", "```", "```json\n", "json", ";", "text", "\\", '"', "é", "<", "`", "NaN",
    "1e999", "null", "[[[[", "😀",
)  # fmt: skip


def pieces(form: CallFormat, chunks: Iterable[str]) -> list[Piece]:
    own = CallText(form, KNOWN, ids="abcdefg")
    return [piece for chunk in chunks for piece in own.feed(chunk)] + own.flush()


def fuzz(chance: random.Random, rounds: Iterable[int], findings: Findings) -> None:
    for _ in rounds:
        form = chance.choice((HERMES, LLAMA, MISTRAL, QWEN_XML))
        text = "".join(chance.choice(BITS) for _ in range(chance.choice((1, 3, 8, 20, 60))))
        whole = pieces(form, [text])
        findings.unless("".join(piece.raw for piece in whole) == text, f"text was lost of {text!r}")
        cut, at = list[str](), 0
        while at < len(text):
            length = chance.choice((1, 1, 2, 3, 7, 30))
            cut.append(text[at : at + length])
            at += length
        findings.unless(joined(pieces(form, cut)) == joined(whole), f"the chunks {cut!r} say something else")
        for piece in whole:
            if piece.call is not None:
                findings.counts["calls"] += 1
                arguments = json.loads(piece.call.arguments)
                findings.unless(isinstance(arguments, dict), f"the arguments of {text!r} must be an object")
        findings.counts["texts"] += 1

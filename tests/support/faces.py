"""Every way to ask a server for an answer or for tokens, and what its replies say, whole and in events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from edgespec.engine.events import Done
from edgespec.server.answers import Part
from edgespec.server.faces.face import Face, Stretch
from edgespec.server.streaming import Collected

# A text and why it ended; None before its end.
Said: TypeAlias = tuple[str, str | None]
Reply: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Way:
    """One route. ``body`` is that of a prompt and the most tokens of its answer, greedy.

    ``whole`` reads the reply, ``piece`` one object of a stream; None: the route never streams.
    """

    path: str
    body: Callable[[str, int], dict[str, Any]]
    whole: Callable[[Reply], Said]
    piece: Callable[[Reply], Said] | None = None

    def streamed(self, lines: Iterable[str]) -> Said:
        """What the lines of a stream say together. Raises ValueError for a stream that ends with an error."""
        assert self.piece is not None
        text, ended = "", None
        for line in lines:
            if (found := line.removeprefix("data: ")).startswith("{"):
                event = json.loads(found)
                if event.get("error") or event.get("type") == "response.failed":  # the response had begun: it waited
                    raise ValueError(found)
                more, reason = self.piece(event)
                text, ended = text + more, reason or ended
        return text, ended


def collected(face: Face, parts: Iterable[Part], done: Done) -> list[list[Stretch]]:
    """What a whole reply is written from: one answer of these parts."""
    found = Collected(face.columns)

    async def collect() -> None:
        await found.begin(0, prompt_tokens=1)
        for part in parts:
            await found.part(0, part)
        await found.end(0, done)

    asyncio.run(collect())
    return found.answers


def user(prompt: str) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": "user", "content": prompt}]


def _chat(prompt: str, tokens: int) -> dict[str, Any]:
    return {"messages": user(prompt), "max_tokens": tokens, "temperature": 0}


def _ollama(prompt: str, tokens: int) -> dict[str, Any]:
    return {"model": "default", "options": {"num_predict": tokens, "temperature": 0}}


def _choice(own: Callable[[Reply], str]) -> Callable[[Reply], Said]:
    """Reads OpenAI's choices. The last chunk of a stream has none."""
    return lambda reply: (
        (own(reply["choices"][0]), reply["choices"][0]["finish_reason"]) if reply["choices"] else NONE
    )


NONE: Said = ("", None)


def _of_blocks(reply: Reply) -> Said:
    return "".join(block.get("text", "") for block in reply["content"]), reply["stop_reason"]


def _of_message(event: Reply) -> Said:
    delta = event.get("delta", {})
    return delta.get("text", ""), delta.get("stop_reason")


def _of_items(reply: Reply) -> Said:
    return "".join(part["text"] for item in reply["output"] for part in item.get("content", ())), reply["status"]


def _of_item(event: Reply) -> Said:
    ended = event["type"] in ("response.completed", "response.incomplete")
    text = event["delta"] if event["type"] == "response.output_text.delta" else ""
    return text, event["response"]["status"] if ended else None


def _ollama_said(own: Callable[[Reply], str]) -> Callable[[Reply], Said]:
    return lambda reply: (own(reply), reply.get("done_reason"))


def _infilled(reply: Reply) -> Said:
    return reply["content"], reply["stop_type"] if reply["stop"] else None


def _ollama_way(path: str, asks: Callable[[str], dict[str, Any]], own: Callable[[Reply], str]) -> Way:
    said = _ollama_said(own)
    return Way(path, lambda prompt, tokens: {**_ollama(prompt, tokens), **asks(prompt)}, said, said)


# The routes that answer.
ANSWERS: Mapping[str, Way] = {
    way.path: way
    for way in (
        Way(
            "/v1/chat/completions",
            _chat,
            _choice(lambda choice: choice["message"]["content"]),
            _choice(lambda choice: choice["delta"].get("content", "")),
        ),
        Way(
            "/v1/responses",
            lambda prompt, tokens: {
                "model": "default",
                "input": prompt,
                "max_output_tokens": tokens,
                "temperature": 0,
            },
            _of_items,
            _of_item,
        ),
        Way(
            "/v1/messages", lambda prompt, tokens: {"model": "any", **_chat(prompt, tokens)}, _of_blocks, _of_message
        ),
        _ollama_way(
            "/api/chat", lambda prompt: {"messages": user(prompt)}, lambda reply: str(reply["message"]["content"])
        ),
        _ollama_way("/api/generate", lambda prompt: {"prompt": prompt}, lambda reply: str(reply["response"])),
    )
}
# Those whose prompt is a text, not a conversation.
_TEXT = _choice(lambda choice: choice["text"])
TEXTS: Mapping[str, Way] = {
    way.path: way
    for way in (
        Way(
            "/v1/completions",
            lambda prompt, tokens: {"prompt": prompt, "max_tokens": tokens, "temperature": 0},
            _TEXT,
            _TEXT,
        ),
        Way(
            "/infill",
            lambda prompt, tokens: {"input_prefix": prompt, "input_suffix": "\nend\n", "n_predict": tokens},
            _infilled,
            _infilled,
        ),
    )
}
# Those that count tokens.
TOKENS: Mapping[str, Way] = {
    way.path: way
    for way in (
        Way("/tokenize", lambda prompt, tokens: {"content": prompt}, lambda reply: (str(reply["tokens"]), None)),
        Way(
            "/v1/messages/count_tokens",
            lambda prompt, tokens: {"model": "any", "messages": user(prompt)},
            lambda reply: (str(reply["input_tokens"]), None),
        ),
    )
}

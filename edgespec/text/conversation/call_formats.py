"""The formats in which models write calls of tools: a row for each. ``CallReader`` reads all of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from edgespec.text.conversation.literals import ESCAPED, JSON, MARKED, PYTHON, PYTHON_JSON, Syntax

# Anthropic's limit of the characters of a tool's name. OpenAI's is 64.
MOST_NAME = 128

# What a mark has between its own characters, and the fewest and the most characters of it. A key may hold quotes.
# A line break stands for any blanks.
_FILLED = {
    "{name}": (r"[\w.-]", 1, MOST_NAME),
    "{key}": (r"[^<>\n]", 1, 256),
    "{kind}": (r"[a-z]", 1, 16),
    "{id}": (r"[\w.:-]", 1, 64),
    "{word}": (r"[A-Za-z]", 0, 16),
    "\n": (r"\s", 0, 64),
}
_READ = ("{name}", "{key}", "{kind}")
_CUTS = re.compile("(" + "|".join(map(re.escape, _FILLED)) + ")")
_NAMED_TAG = re.compile(r'"\{name\}">\Z')  # as in other XML; `<function={name}>` is none


class Mark:
    """A mark with names in it, such as ``<function={name}>``."""

    def __init__(self, text: str) -> None:
        self.parts = [part for part in _CUTS.split(text) if part]

    @cached_property
    def _whole(self) -> re.Pattern[str]:
        return re.compile("".join(map(self._pattern, self.parts)))

    @cached_property
    def _begun(self) -> re.Pattern[str]:
        """The mark without its last characters, at the end of a text."""
        cut, before = list[str](), ""
        for part in self.parts:
            if part in _FILLED:
                characters, _, most = _FILLED[part]
                cut.append(f"{before}{characters}{{0,{most}}}")
            else:
                cut += [before + re.escape(part[:end]) for end in range(len(part))]
            before += re.sub(r"\?P<\w+>", "?:", self._pattern(part))
        return re.compile(rf"(?:{'|'.join(cut)})\Z")

    @staticmethod
    def _pattern(part: str) -> str:
        if part not in _FILLED:
            return re.escape(part)
        characters, fewest, most = _FILLED[part]
        group = f"?P<{part[1:-1]}>" if part in _READ else "?:"
        return f"({group}{characters}{{{fewest},{most}}})"

    def match(self, text: str, at: int, *, final: bool) -> re.Match[str] | None:
        """The mark at a position; None if it is not there, or may be longer unless the text is ``final``."""
        found = self._whole.match(text, at)
        open_end = found is not None and found.end() == len(text) and self.parts[-1] in _FILLED
        return None if open_end and not final else found

    def each_in(self, text: str) -> Iterator[re.Match[str]]:
        """Each mark in a text, with what stands in its places."""
        return self._whole.finditer(text)

    def find(self, text: str) -> int | None:
        """Where the mark is in a text; None without it."""
        found = self._whole.search(text)
        return None if found is None else found.start()

    def begun_at(self, text: str) -> int:
        """Where the text may become the mark, at its end if nowhere before."""
        found = self._begun.search(text)
        return len(text) if found is None else found.start()

    def begins(self, text: str, at: int) -> bool:
        """Whether the text from a position on may become the mark."""
        return self._begun.match(text, at) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How ``models`` write calls. ``shown``: texts that the chat templates of the format have, all of them.

    A block of calls stands between ``opening`` and ``closing``. A call begins with one of the ``heads``, the first
    that fits, which hold its name; without heads it is an object that holds its name and its arguments. The arguments
    are an object in ``syntax``, in Python those of a call, or values between marks: ``parameters`` are those in front
    of a value and behind it, the first pair that fits, with ``padding`` between them and the value. ``ends`` follow
    the arguments.

    Models leave out what is not needed to read a call: the opening if there are heads, the closing, and the ends of
    calls whose arguments are an object. In a block there may also be a list of objects.

    ``bare``: an answer may also begin with a call's JSON itself, or with JSON in a fence of three backquotes.

    ``begins``: what certainly begins a call where its heads begin as other text does. The rest of a head follows it.

    ``written``: the heads as models write them, where ``heads`` read more than that.

    ``call``: without heads, what models write between opening and closing. ``unmarked``: they write neither of these.
    """

    models: str
    shown: tuple[str, ...]
    opening: str = ""
    closing: str = ""
    heads: tuple[str, ...] = ()
    parameters: tuple[tuple[str, str], ...] = ()
    padding: str = ""
    ends: tuple[str, ...] = ()
    syntax: Syntax = JSON
    bare: bool = False
    begins: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    call: str = '{"name": {name}, "arguments": {arguments}}'
    unmarked: bool = False

    @property
    def openings(self) -> tuple[str, ...]:
        """What begins calls anywhere in an answer."""
        firsts = (Mark(head).parts[0] for head in self.heads)
        return tuple(dict.fromkeys(text for text in (self.opening, *firsts) if text and text not in _FILLED))

    @property
    def is_list(self) -> bool:
        """Whether the calls of a block are a list."""
        return not self.heads and (self.syntax.is_python or self.call.startswith("["))

    @property
    def beginnings(self) -> tuple[str, ...]:
        """What certainly begins calls anywhere in an answer."""
        return self.begins or self.openings

    @property
    def whole_beginnings(self) -> tuple[str, ...]:
        """The ``beginnings``, where an XML tag that holds the name is whole: other XML begins like it."""
        tags = {Mark(head).parts[0]: head for head in self.heads if _NAMED_TAG.search(head)}
        return tuple(tags.get(text, text) for text in self.beginnings)

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts in all marks: control tokens among them must become text."""
        return tuple(dict.fromkeys(self._marks()))

    def _marks(self) -> Iterator[str]:
        values = (mark for pair in self.parameters for mark in pair)
        for mark in (self.opening, *self.heads, *values, *self.ends, self.closing):
            yield from (part for part in Mark(mark).parts if part not in _FILLED)
        yield from (quote for quote in self.syntax.quotes if len(quote) > 1)


_LISTED = '[{"name": {name}, "arguments": {arguments}}]'

# fmt: off
QWEN_XML = CallFormat(
    models="Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5", shown=("<tool_call>", "<function=", "<parameter="),
    opening="<tool_call>", heads=("<function={name}>",),
    parameters=(("<parameter={key}>", "</parameter>"),), padding="\n",
    ends=("</function>",), closing="</tool_call>",
)
SEED_OSS = replace(
    QWEN_XML,
    models="Seed-OSS", shown=("<seed:tool_call>",),
    opening="<seed:tool_call>", padding="", closing="</seed:tool_call>",
)
MINIMAX = CallFormat(
    models="MiniMax M2", shown=("<minimax:tool_call>", "<invoke name="),
    opening="<minimax:tool_call>", heads=('<invoke name="{name}">',),
    parameters=(('<parameter name="{key}">', "</parameter>"),),
    ends=("</invoke>",), closing="</minimax:tool_call>",
)
DEEPSEEK_XML = CallFormat(
    models="DeepSeek V3.2", shown=("｜DSML｜", "function_calls"),
    opening="<｜DSML｜function_calls>", heads=('<｜DSML｜invoke name="{name}">',),
    parameters=(('<｜DSML｜parameter name="{key}" string="{kind}">', "</｜DSML｜parameter>"),),
    ends=("</｜DSML｜invoke>",), closing="</｜DSML｜function_calls>",
)
DEEPSEEK_V4 = replace(
    DEEPSEEK_XML,
    models="DeepSeek V4", shown=("｜DSML｜", "tool_calls"),
    opening="<｜DSML｜tool_calls>", closing="</｜DSML｜tool_calls>",
)
DEEPSEEK = CallFormat(
    models="DeepSeek R1, V3, V3.1", shown=("<｜tool▁call▁begin｜>",),
    opening="<｜tool▁calls▁begin｜>",
    heads=(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json",
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
    ),
    ends=("```", "<｜tool▁call▁end｜>"), closing="<｜tool▁calls▁end｜>",
)
KIMI = CallFormat(
    models="Kimi K2", shown=("<|tool_call_argument_begin|>",),
    opening="<|tool_calls_section_begin|>",
    heads=(
        "<|tool_call_begin|>\nfunctions.{name}:{id}\n<|tool_call_argument_begin|>",
        "<|tool_call_begin|>\n{name}:{id}\n<|tool_call_argument_begin|>",
        "<|tool_call_begin|>\n{name}\n<|tool_call_argument_begin|>",
    ),
    ends=("<|tool_call_end|>",), closing="<|tool_calls_section_end|>",
)
HARMONY = CallFormat(
    models="gpt-oss", shown=("<|channel|>", "<|start|>assistant to="),
    heads=(
        "<|channel|>{word}\nto=functions.{name}\n<|constrain|>{word}<|message|>",
        "<|channel|>{word}\nto=functions.{name}\n{word}<|message|>",
        "to=functions.{name}<|channel|>{word}\n<|constrain|>{word}<|message|>",
        "to=functions.{name}<|channel|>{word}\n{word}<|message|>",
    ),
    ends=("<|call|>",), begins=("commentary to=functions.",),
    written=(
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        " to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>",
        " to=functions.{name}<|channel|>commentary json<|message|>",
    ),
)
SOLAR = CallFormat(
    models="Solar Open", shown=("<|tool_call:begin|>",),
    opening="<|tool_calls|>", heads=("<|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|>",),
    ends=("<|tool_call:end|>",), closing="<|calls|>",
)
HUNYUAN = CallFormat(
    models="Hunyuan 3", shown=("<tool_sep", "<arg_key"),
    opening="<tool_calls:opensource>", heads=("<tool_call:opensource>{name}<tool_sep:opensource>",),
    parameters=(
        ("<arg_key:opensource>{key}</arg_key:opensource>\n<arg_value:opensource>", "</arg_value:opensource>"),
    ),
    ends=("</tool_call:opensource>",), closing="</tool_calls:opensource>",
)
GLM = CallFormat(
    models="GLM 4.5 to 4.7, Laguna, Ling 3, Spark 2.5", shown=("<tool_call>", "<arg_key>"),
    heads=("<tool_call>{name}",), parameters=(("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>"),),
    ends=("</tool_call>",),
)
FUNCTIONARY = CallFormat(
    models="Functionary 3.1", shown=("<function=", "</function>", "<|start_header_id|>"),
    heads=("<function={name}>",), ends=("</function>",),
)
MINICPM = CallFormat(
    models="MiniCPM5", shown=('<function name="', '<param name="'),
    heads=('<function name="{name}">',),
    parameters=(('<param name="{key}"><![CDATA[', "]]></param>"), ('<param name="{key}">', "</param>")),
    ends=("</function>",),
)
GEMMA = CallFormat(
    models="Gemma 4", shown=("<|tool_call>", "call:"),
    heads=("<|tool_call>call:{name}",), syntax=MARKED, ends=("<tool_call|>",),
)
FUNCTION_GEMMA = CallFormat(
    models="FunctionGemma", shown=("<start_function_call>",),
    heads=("<start_function_call>call:{name}",), syntax=ESCAPED, ends=("<end_function_call>",),
)
MISTRAL_LISTED = CallFormat(
    models="Mistral Nemo, Mistral 7B v0.3, Ministral 8B", shown=("[TOOL_CALLS]", ', "id": "'),
    opening="[TOOL_CALLS]", call=_LISTED,
)
MISTRAL = CallFormat(
    models="Mistral Small, Devstral, Ministral 3", shown=("[TOOL_CALLS]",),
    opening="[TOOL_CALLS]", heads=("{name}[CALL_ID]{id}[ARGS]", "{name}[ARGS]", "{name}"),
)
LFM2 = CallFormat(
    models="LFM2, LFM2.5", shown=("List of tools: ",),
    opening="<|tool_call_start|>", syntax=PYTHON, closing="<|tool_call_end|>",
)
OLMO = CallFormat(
    models="OLMo 3", shown=("<function_calls>", "environment"),
    opening="<function_calls>", heads=("{name}",), syntax=PYTHON_JSON, closing="</function_calls>",
)
COHERE = CallFormat(
    models="Command R7B, Command A", shown=("<|START_ACTION|>",),
    opening="<|START_ACTION|>", closing="<|END_ACTION|>",
    call='[\n{"tool_call_id": "0", "tool_name": {name}, "parameters": {arguments}}\n]',
)
GRANITE = CallFormat(
    models="Granite 3", shown=("<|tool_call|>",), opening="<|tool_call|>", call=_LISTED
)
LISTED = CallFormat(
    models="Apriel, MiniMax M1", shown=("<tool_calls>",),
    opening="<tool_calls>", closing="</tool_calls>", call=_LISTED,
)
NEMOTRON = CallFormat(
    models="Nemotron Nano 2", shown=("<TOOLCALL>",), opening="<TOOLCALL>", closing="</TOOLCALL>", call=_LISTED
)
APERTUS = CallFormat(
    models="Apertus", shown=("<|tools_prefix|>",), opening="<|tools_prefix|>", closing="<|tools_suffix|>",
    call="[{{name}: {arguments}}]",
)
GIGACHAT_3 = CallFormat(
    models="GigaChat 3.0", shown=("'role': 'function call'",), opening="function call<|role_sep|>"
)
GIGACHAT = CallFormat(models="GigaChat 3.1", shown=("<|function_call|>",), opening="<|function_call|>")
# Qwen2.5-Coder writes the bare JSON in a fence.
HERMES = CallFormat(
    models="Hermes, Qwen2.5, Qwen3, QwQ, Granite 4, MiMo", shown=("<tool_call>", '{"name":'),
    opening="<tool_call>", closing="</tool_call>", bare=True,
)
LLAMA = CallFormat(
    models="Llama 3.1, 3.2, 3.3", shown=("<|start_header_id|>", '{"name":', '"parameters":'),
    opening="<|python_tag|>", closing=";", bare=True,
    call='{"name": {name}, "parameters": {arguments}}', unmarked=True,
)

# The first whose texts a template has is its format.
FORMATS = (
    QWEN_XML, SEED_OSS, MINIMAX, DEEPSEEK_XML, DEEPSEEK_V4, DEEPSEEK, KIMI, HARMONY, SOLAR, HUNYUAN, GLM, MINICPM,
    GEMMA, FUNCTION_GEMMA, LFM2, OLMO, MISTRAL_LISTED, MISTRAL, COHERE, GRANITE, LISTED, NEMOTRON, APERTUS,
    GIGACHAT_3, GIGACHAT, HERMES, FUNCTIONARY, LLAMA,
)
# fmt: on


def call_format(template: str) -> CallFormat | None:
    """The format in which a chat template writes calls; None if it is not one of the known ones."""
    spelled = template.replace('\\"', '"')
    return next((form for form in FORMATS if all(text in spelled for text in form.shown)), None)

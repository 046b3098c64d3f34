"""The fields that only llama.cpp's /infill has, as llama.vim and llama.vscode send them."""

from __future__ import annotations

from typing import Any

from edgespec.server.fields.field import MOST_WHOLE, TEXT, Field, drawing, ignored, whole
from edgespec.server.fields.openai import INFILL
from edgespec.server.json_schema import Schema

# Pieces of other files that one request has: llama.vim sends at most 16, and twice as many while it changes them.
MOST_FILES = 64
_FILES: Schema = {
    "type": ["array", "null"],
    "items": {
        "type": "object",
        "properties": {"filename": {"type": "string"}, "text": {"type": "string"}},
        "required": ["text"],
    },
    "maxItems": MOST_FILES,
}
_NAMES: Schema = {"type": ["array", "null"], "items": {"type": "string"}, "maxItems": MOST_FILES}


def _files(given: list[dict[str, Any]]) -> tuple[tuple[str, str], ...]:
    """llama.cpp's name for a file without one."""
    return tuple((each.get("filename", "tmp"), each["text"]) for each in given)


FIELDS = (
    Field("input_prefix", TEXT, "the text before the hole", INFILL, sets="before", texts=True),
    Field("prompt", TEXT, "more text before the hole, behind `input_prefix`", INFILL, sets="line", texts=True),
    Field("input_suffix", TEXT, "the text after the hole", INFILL, sets="suffix", texts=True),
    Field(
        "input_extra",
        _FILES,
        "other files' names and texts, the most important last",
        INFILL,
        _files,
        "files",
        texts=True,
    ),
    Field("n_indent", whole(0, MOST_WHOLE), "ends the answer before a line with fewer blanks", INFILL, int, "indent"),
    Field(
        "t_max_predict_ms",
        whole(-1, MOST_WHOLE),
        "ends the answer after this time, behind its first line",
        INFILL,
        int,
        "line_ms",
    ),
    Field(
        "response_fields",
        _NAMES,
        "the fields of the reply; a slash leads into an object",
        INFILL,
        tuple,
        "reply_fields",
    ),
    drawing("temperature", apis=INFILL),
    *ignored(
        "samplers", "the order of ways to draw, where nothing is drawn: without `temperature` it is 0", apis=INFILL
    ),
    *ignored("t_max_prompt_ms", "a time for the prompt, which llama.cpp does not obey either", apis=INFILL),
)

"""Reads special tokens, when to add them, and the chat template from seven files that may contradict each other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.errors import ModelFileError
from edgespec.files.checked import DOWNLOAD_AGAIN, Fields, read_fields, read_regular_file
from edgespec.text.tokenizers.vocabulary import ENDS

_MOST_BYTES = 16 << 20  # tokenizer_config.json lists all added tokens: gemma's has 1.2 MB
_MOST_TEMPLATE_BYTES = 1 << 20  # the limit of one value in a GGUF header; real templates stay under 100 kB

# Templates in a list or a folder; models have at most three.
_MOST_TEMPLATES = 16
_DEFAULT = "default"
# What the name of a template may not have in a GGUF key, as llama.cpp's conversion writes it.
_NAME_CHARACTERS = re.compile(r"[^A-Za-z0-9]")

# Names in transformers, with their names in GGUF keys.
_NAMES: Mapping[str, str] = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}

# Tokens with which chat models end a turn. If eos is another token, the GGUF key eot names the turn's end.
_TURN_ENDS = frozenset({"<end_of_turn>", "<|eot_id|>", "<|im_end|>", "<|end|>", "<turn|>"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """``ids`` by the name in GGUF keys: bos, eos, eot, eom, unknown, padding; unstated tokens are absent.

    ``add_bos`` and ``add_eos``: whether raw text gets the bos and eos tokens. ``named_templates`` are further chat
    templates, such as ``tool_use``.
    """

    ids: Mapping[str, int]
    add_bos: bool
    add_eos: bool
    chat_template: str | None
    named_templates: Mapping[str, str] = field(default_factory=dict)


def read_special_tokens(folder: Path, tokenizer: Fields, table: Mapping[str, int]) -> SpecialTokens:
    """Read the special tokens from the files in ``folder``; ``table`` has the id of each token of the model.

    A token's text (tokenizer_config.json, special_tokens_map.json) takes precedence over its id (config.json,
    generation_config.json), which fine-tuning often leaves outdated. Raises ModelFileError for malformed files, and
    if no token ends an answer.
    """
    config = _optional(folder / "tokenizer_config.json")
    numbers = [_optional(folder / name) for name in ("config.json", "generation_config.json")]
    texts = [config, _optional(folder / "special_tokens_map.json")]
    ids: dict[str, int] = {}
    for name, key in _NAMES.items():
        token = _by_text(texts, f"{name}_token", table)
        if token is None:
            token = next(iter(_by_number(numbers, f"{name}_token_id", len(table))), None)
        if token is not None:
            ids[key] = token
    if "eos" not in ids:
        reason = "neither it nor another file names the token that ends an answer (eos_token)"
        raise ModelFileError(folder / "tokenizer_config.json", reason, hint=DOWNLOAD_AGAIN)
    stops = _by_number(numbers, "eos_token_id", len(table))
    turn_end = _turn_end(ids["eos"], stops, table)
    if turn_end is not None:
        ids["eot"] = turn_end
    # A GGUF names one more, the end of a message; readers know the others by their texts.
    known = {ids["eos"], turn_end, *(table[text] for text in ENDS & table.keys())}
    if others := [token for token in stops if token not in known]:
        ids["eom"] = others[0]
    first, last = _template_ends(tokenizer.raw("post_processor"))
    add_bos, add_eos = config.flag("add_bos_token"), config.flag("add_eos_token")
    return SpecialTokens(
        ids=ids,
        add_bos="bos" in ids
        and (first is not None and table.get(first) == ids["bos"] if add_bos is None else add_bos),
        add_eos=last is not None and table.get(last) == ids["eos"] if add_eos is None else add_eos,
        chat_template=_chat_template(folder, config),
        named_templates=_named_templates(folder, config),
    )


def _optional(path: Path) -> Fields:
    """The object in an optional file; a missing file counts as an empty object."""
    return read_fields(path, _MOST_BYTES) if path.exists() else Fields(path, {})


def _by_text(files: list[Fields], name: str, table: Mapping[str, int]) -> int | None:
    """The id of the token ``name``, from the first file that states the text of a token in ``table``."""
    for fields in files:
        member = fields.member(name) if fields.has_object(name) else None
        text = fields.text(name) if member is None else member.text("content")
        if text is not None and text in table:
            return table[text]
    return None


def _by_number(files: list[Fields], name: str, rows: int) -> list[int]:
    """All ids that the files state under ``name`` (a number or an array), in order."""
    found: list[int] = []
    for fields in files:
        values = fields.raw(name)
        if values is None and fields.has_object("text_config"):  # a multimodal model
            values = fields.raw("text_config").get(name)
        for value in values if isinstance(values, list) else [values]:
            if value is None or value in found:
                continue
            if type(value) is not int:
                raise fields.wrong(name, "a token id")
            if 0 <= value < rows:  # -1 and ids beyond the table mean "none"
                found.append(value)
    return found


def _turn_end(eos: int, stops: list[int], table: Mapping[str, int]) -> int | None:
    """The token that ends a turn, if ``eos`` does not."""
    texts = {token: text for text, token in table.items() if token in {eos, *stops}}
    if texts[eos] in _TURN_ENDS:
        return None
    others = [token for token in stops if token != eos]
    return next((token for token in others if texts[token] in _TURN_ENDS), others[0] if others else None)


def _template_ends(post_processor: Any) -> tuple[str | None, str | None]:
    """The special tokens that the tokenizer adds before and after a text."""
    if isinstance(post_processor, dict) and post_processor.get("type") == "Sequence":
        steps = post_processor.get("processors")
    else:
        steps = [post_processor]
    for step in steps if isinstance(steps, list) else []:
        if isinstance(step, dict) and step.get("type") == "TemplateProcessing":
            single = step.get("single")
            if isinstance(single, list) and len(single) > 1:
                return _special(single[0]), _special(single[-1])
    return None, None


def _special(value: Any) -> str | None:
    inner = value.get("SpecialToken") if isinstance(value, dict) else None
    name = inner.get("id") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else None


def _chat_template(folder: Path, config: Fields) -> str | None:
    """The chat template: in a file of Jinja since 2024, before in a string or in several named strings.

    The string is the tokenizer's, or in a file of JSON that models with a processor for images have.
    """
    path = folder / "chat_template.jinja"
    if path.exists():
        return _jinja(path) or None
    return _stated(config).get(_DEFAULT) or _stated(_optional(folder / "chat_template.json")).get(_DEFAULT)


def _named_templates(folder: Path, config: Fields) -> dict[str, str]:
    """The further chat templates: in files of Jinja in a folder, before in a list of named strings."""
    files = sorted((folder / "additional_chat_templates").glob("*.jinja"))[:_MOST_TEMPLATES]
    stated = _stated(config) | {file.stem: _jinja(file) for file in files}
    named = {_NAME_CHARACTERS.sub("_", name): template for name, template in stated.items() if template}
    return {name: template for name, template in named.items() if name not in (_DEFAULT, "")}


def _jinja(path: Path) -> str:
    raw = read_regular_file(path, _MOST_TEMPLATE_BYTES)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelFileError(path, "it is not valid UTF-8", offset=error.start, hint=DOWNLOAD_AGAIN) from None


def _stated(fields: Fields) -> dict[str, str]:
    """The templates that a file of JSON states, by name."""
    if not isinstance(fields.raw("chat_template"), list):
        template = _checked(fields, "chat_template")
        return {} if template is None else {_DEFAULT: template}
    found = dict[str, str]()
    for value in (fields.items("chat_template") or [])[:_MOST_TEMPLATES]:
        if isinstance(value, dict) and isinstance(name := value.get("name"), str):
            template = _checked(Fields(fields.path, value, "chat_template."), "template")
            found.setdefault(name, template or "")
    return found


def _checked(fields: Fields, name: str) -> str | None:
    template = fields.text(name)
    if template is not None and len(template.encode("utf-8")) > _MOST_TEMPLATE_BYTES:
        raise ModelFileError(fields.path, f"{name} is too long: over {_MOST_TEMPLATE_BYTES} bytes of text")
    return template or None

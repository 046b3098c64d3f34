"""Text of any language is kept and shown as it is; only characters that a terminal obeys are refused or escaped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.bench.suite import load_suite
from edgespec.cli.answer_form import file_text
from edgespec.cli.chat.chat import continues
from edgespec.cli.options import resolve_profile
from edgespec.cli.serve import _names, log_line, texts_of
from edgespec.cli.terminal.output import cells, padded, shortened, wrapped
from edgespec.engine.learned.learner import _read
from edgespec.errors import InvalidRequestError, ProfileError
from edgespec.export.trim.token_counts import read_text
from edgespec.files.checked import is_line
from edgespec.planning.simulated.machine_file import machine_from_table
from edgespec.profiles.layers import read_toml
from edgespec.server.schema import Request
from edgespec.server.service import RequestLine
from edgespec.store.references import is_safe
from edgespec.store.scan import found_model
from tests.planning.test_machine_file import TABLE
from tests.support.command_line import run_here, succeeded
from tests.support.other_programs import User
from tests.support.tiny_gguf import write_tiny_gguf

# The ideographic space, both joiners (each joined emoji has one) and the space that does not break.
KEPT = ("山田\u3000太郎", "می\u200cخواهم", "👩\u200d💻", "10\u00a0000")
OBEYED = ("a\x1b[2J", "a\u202egpj")


def accepted(text: str, folder: Path) -> dict[str, bool]:
    """Which readers take the text where a line is asked for."""
    suite = folder / "suite.jsonl"
    suite.write_text(json.dumps({"id": text, "category": text, "prompt": "x"}), encoding="utf-8")
    model = write_tiny_gguf(folder / "a.gguf")
    profile = resolve_profile(None)

    def passes(read: Any) -> bool:
        try:
            return bool(read())
        except (InvalidRequestError, ProfileError):
            return False

    return {
        "line": is_line(text),
        "model of another program": passes(lambda: found_model(text, [model], "Ollama", {})),
        "suite": passes(lambda: load_suite(suite)[0].category == text),
        "alias": passes(lambda: _names(profile, [text])[0] == text),
        "path on the hub": is_safe(f"{text}/x.gguf"),
        "machine": passes(lambda: machine_from_table({**TABLE, "description": text}, "m").description == text),
    }


@pytest.mark.parametrize("text", KEPT)
def test_a_line_of_any_language_is_accepted_and_logged_unchanged(text: str, tmp_path: Path) -> None:
    assert all((found := accepted(text, tmp_path)).values()), found
    asked = Request(messages=({"role": "user", "content": text},))
    answers: list[Any] = [SimpleNamespace(text=text)]
    assert texts_of(asked, answers) == [f"> {text}", f"< {text}"]
    line = RequestLine(client="::1", method="GET", path=f"/{text}", status=0, seconds=0)
    assert log_line(line, "now") == f"now ::1 GET /{text} - 0.00 s"


@pytest.mark.parametrize("text", [*OBEYED, "half \udce4"])
def test_a_line_that_a_terminal_would_obey_is_refused(text: str, tmp_path: Path) -> None:
    assert not any((found := accepted(text, tmp_path)).values()), found


@pytest.mark.parametrize("text", OBEYED)
def test_a_text_that_a_terminal_would_obey_is_logged_with_escapes(text: str) -> None:
    shown = text.encode("unicode_escape").decode()
    asked = Request(messages=({"role": "user", "content": text},))
    assert texts_of(asked, []) == [f"> {shown}"]
    line = RequestLine(client="::1", method="GET", path=f"/{text}", status=0, seconds=0)
    assert log_line(line, "now") == f"now ::1 GET /{shown} - 0.00 s"


def test_models_below_a_folder_of_any_language_are_listed(tmp_path: Path) -> None:
    user = User(tmp_path / KEPT[0])
    model = user.to_lm_studio("repo/x.gguf", write_tiny_gguf(tmp_path / "a.gguf").read_bytes())
    ignored = user.to_lm_studio("repo/y.gguf", b"no model")
    shown = succeeded(run_here("models", home=tmp_path / "home", env=user.environment))
    assert str(model) in shown.out.splitlines()
    assert f"ignored {ignored}: it is not a GGUF file" in shown.err


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Short,  and\non one line.", "Short, and on one line."),
        (f"{'word ' * 20}", f"{'word ' * 11}…"),
        ("山" * 30, "山" * 30),
        ("山" * 99, f"{'山' * 29}…"),
        (f"short {'山' * 99}", f"short {'山' * 26}…"),
        (f"{'山' * 16} {'田' * 99}", f"{'山' * 16} …"),
        ("ก" * 61, f"{'ก' * 58}…"),
    ],
)
def test_a_long_prompt_of_any_language_is_cut_between_words_or_at_the_width(text: str, shown: str) -> None:
    assert shortened(text) == shown
    asked = [{"role": "user", "content": text}]
    assert continues(asked) == f"the last conversation continues: 1 turn, the last one: {shown}"


@pytest.mark.parametrize("columns", range(20, 60))
def test_messages_of_any_language_keep_within_the_columns(columns: int) -> None:
    line = (
        "the model 通义千问、超大规模语言模型，由阿里云自主研发。 runs on our kernels with 가나다라 and\tmore words"
    )
    lines = wrapped(line, columns, "  ")
    assert len(lines) > 1
    assert max(map(cells, lines)) <= columns
    assert not any(each.lstrip().startswith(tuple("、，。")) for each in lines)
    assert re.sub(r"\s", "", "".join(lines)) == re.sub(r"\s", "", line)
    assert all(each.startswith("  ") for each in lines[1:])


def test_columns_of_a_table_are_padded_by_what_a_terminal_shows() -> None:
    assert [padded(name, 6) for name in ("qwen", "千问", "가나다라")] == ["qwen  ", "千问  ", "가나다라"]


READERS: dict[str, Callable[[Path], object]] = {
    "form": lambda path: file_text(str(path), "grammar"),
    "suite": lambda path: [prompt.prompt for prompt in load_suite(path)],
    "text of a trim": read_text,
    "learned text": lambda path: _read(str(path)),
    "profile": lambda path: read_toml(path, "p.toml"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_file_in_utf_16_with_its_mark_gives_the_same_as_in_utf_8(reader: str, tmp_path: Path) -> None:
    text, path = 'name = "né 猫 👩‍💻"\r\n', tmp_path / "a.toml"
    found = []
    for data in (text.encode(), text.encode("utf-8-sig"), text.encode("utf-16"), ("﻿" + text).encode("utf-16-be")):
        path.write_bytes(data)
        found.append(READERS[reader](path))
    assert "猫" in str(found[0])
    assert found[1:] == found[:1] * 3

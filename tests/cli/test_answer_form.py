"""Answers of a given form, by options of ``generate`` and by the chat's ``/json``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.chat.chat_commands import suggest
from edgespec.cli.options import FormFlags
from edgespec.engine.engine import Engine
from edgespec.errors import InvalidRequestError
from edgespec.text.grammar.form import MOST_BYTES, Form
from tests.support.command_line import InProcess
from tests.support.tiny_models import TinyModels

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "new": {"type": "boolean"}},
        "required": ["colour", "new"],
        "additionalProperties": False,
    }
)


def never_read() -> str:
    raise AssertionError("stdin is read")


@pytest.fixture
def options(tiny: TinyModels) -> tuple[str, ...]:
    return ("--target", str(tiny.target), "--draft", "none", "--max-tokens", "60")


def colour(answer: str) -> str:
    found: dict[str, Any] = json.loads(answer)
    assert (list(found), type(found["new"])) == (["colour", "new"], bool)
    return str(found["colour"])


def test_a_schema_is_given_as_json_as_a_file_or_on_stdin(
    options: tuple[str, ...], here: InProcess, tmp_path: Path
) -> None:
    (tmp_path / "level.json").write_text(SCHEMA, encoding="utf-8-sig")
    ways = [
        here("generate", "hello", *options, "--json-schema", given) for given in (SCHEMA, tmp_path / "level.json")
    ]
    ways.append(here("generate", "hello", *options, "--json-schema", "-", stdin=SCHEMA))
    for result in ways:
        assert result.code == 0, result.err
        assert colour(result.out) in ("red", "green")
    assert len({result.out for result in ways}) == 1


def test_a_piped_text_comes_before_the_prompt_with_a_schema_that_is_not_on_stdin(
    options: tuple[str, ...], here: InProcess
) -> None:
    asked = ("generate", "hello", *options, "--json", "--json-schema", SCHEMA)
    alone, piped = here(*asked).json, here(*asked, stdin="a text of several words").json
    assert piped["stats"]["prompt_tokens"] > alone["stats"]["prompt_tokens"]
    assert alone["finish_reason"] == piped["finish_reason"] == "stop"
    assert colour(piped["text"]) in ("red", "green")


def test_an_answer_is_of_an_expression_a_grammar_or_one_of_the_choices(
    options: tuple[str, ...], here: InProcess, tmp_path: Path
) -> None:
    (tmp_path / "own.gbnf").write_text('root ::= "one" | "two" "three"')
    for given, allowed in (
        (("--regex", "[ab]{2}-[0-9]"), "[ab]{2}-[0-9]"),
        (("--grammar", str(tmp_path / "own.gbnf")), "one|twothree"),
        (("--choice", "yes, of course", "--choice", "no"), "yes, of course|no"),
    ):
        result = here("generate", "hello", *options, *given)
        assert (result.code, bool(re.fullmatch(allowed, result.out.removesuffix("\n")))) == (0, True), result


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--json-schema", "[1]"), ("--json-schema: '[1]' cannot be read", "a JSON object or the name of a file")),
        (("--json-schema", "{1}"), ("--json-schema: the schema is not JSON",)),
        (("--json-schema", "\0"), ("--json-schema: ", "cannot be read")),
        (("--json-schema", ""), ("--json-schema: '' cannot be read",)),
        (("--json-schema", "-"), ("--json-schema: the schema is not JSON",)),
        (("--regex", ""), ("--regex: regex must be text that is not empty",)),
        (("--grammar", "absent.gbnf"), ("--grammar: 'absent.gbnf' cannot be read", "No such file")),
        (("--grammar", "binary"), ("--grammar: 'binary' is not UTF-8 text (byte 1)",)),
        (("--grammar", "large"), ("--grammar: 'large' is too large", "256 kB")),
        (("--choice", "a", "--choice", ""), ("--choice: each choice must be text",)),
        (("--regex", "a", "--choice", "b"), ("--regex and --choice were given together", "an answer has one form")),
        (("--json-schema", "-", "--regex", "a"), ("--json-schema and --regex were given together",)),
    ],
)
def test_a_wrong_form_is_an_error_that_names_the_option_before_a_model_is_loaded(
    given: tuple[str, ...],
    words: tuple[str, ...],
    here: InProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_arguments: object, **_settings: object) -> None:
        raise AssertionError("it is loaded")

    monkeypatch.setattr(Engine, "load", load)
    (tmp_path / "binary").write_bytes(b"a\xff")
    (tmp_path / "large").write_bytes(b"a" * (MOST_BYTES + 1))
    here("generate", "hello", *given).failed_well(*words, code=2)


def test_stdin_is_not_both_the_prompt_and_the_schema(here: InProcess) -> None:
    result = here("generate", "-", "--json-schema", "-", stdin=SCHEMA)
    result.failed_well("stdin cannot be both the prompt and --json-schema", code=2)


def test_a_form_that_cannot_be_followed_is_an_error_that_names_the_option(
    options: tuple[str, ...], here: InProcess
) -> None:
    for option, text in (("--json-schema", '{"not": {"type": "string"}}'), ("--regex", "(")):
        result = here("generate", "hello", *options, option, text, "--json")
        result.failed_well(f"{option}: this ", "cannot be followed", code=2)
        assert result.json["error"]["type"] == "InvalidRequestError"


def test_without_an_option_there_is_no_form() -> None:
    assert FormFlags().form(never_read) is FormFlags(choice=[]).form(never_read) is None
    assert FormFlags(regex="a").form(never_read) == Form(kind="regex", text="a")
    assert FormFlags(json_schema="-").form(lambda: "true") == Form(kind="schema", text="{}")
    with pytest.raises(InvalidRequestError, match="--json-schema: the schema is not JSON"):
        FormFlags(json_schema="-").form(lambda: "{")


# ----------------------------------------------------------------------------------------------------- /json


def test_slash_json_makes_the_next_answers_json_until_it_is_off(
    options: tuple[str, ...], here: InProcess, tmp_path: Path
) -> None:
    (tmp_path / "my colour.json").write_text(SCHEMA)
    lines = ["hello", f"/json {SCHEMA}", "hello", "/json 'my colour.json'", "hello", "/json OFF", "/clear", "hello"]
    result = here("chat", *options, "--json", stdin="\n".join(lines))
    assert result.code == 0, result.err
    free, inline, by_file, again = (json.loads(line)["text"] for line in result.out.splitlines())
    assert {colour(inline), colour(by_file)} <= {"red", "green"}
    assert again == free
    assert result.err.count("the next answers are JSON that the schema allows; /json off ends it") == 2
    assert "the next answers may be any text" in result.err


def test_slash_json_alone_is_any_object_and_retry_and_another_model_keep_it(
    options: tuple[str, ...], tiny: TinyModels, here: InProcess
) -> None:
    stdin = f"/json\nhello\n/retry\n/model {tiny.ending}\nhello\n"
    result = here("chat", *options, "--json", stdin=stdin)
    assert "the next answers are JSON objects" in result.err
    answers = [json.loads(line) for line in result.out.splitlines()]
    assert len(answers) == 3, result.err
    for answer in answers:
        assert answer["text"].startswith("{")
        assert answer["finish_reason"] == "length" or isinstance(json.loads(answer["text"]), dict)


def test_a_wrong_schema_is_an_error_and_the_form_before_it_stays(options: tuple[str, ...], here: InProcess) -> None:
    lines = [f"/json {SCHEMA}", "/json {", '/json {"not": {"type": "string"}}', "/json absent.json", "hello"]
    result = here("chat", *options, stdin="\n".join(lines))
    assert result.code == 1, result.err
    for words in ("the schema is not JSON", "this schema cannot be followed", "'absent.json' cannot be read"):
        assert words in result.err
    assert colour(result.out) in ("red", "green")


def test_off_is_suggested_after_slash_json() -> None:
    assert [name for name, _ in suggest(("/json",), "")] == ["off"]
    assert "/json" in [name for name, _ in suggest((), "")]

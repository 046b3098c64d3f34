"""Answers of a given form over HTTP: the fields of four programs, errors, hostile schemas, several clients."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any, Literal, cast

import openai
import pytest
from pydantic import BaseModel

from edgespec.engine.engine import Engine
from edgespec.errors import InvalidRequestError
from edgespec.files.installation import install_command
from edgespec.server.errors import ApiError
from edgespec.server.faces.messages import read_messages
from edgespec.server.faces.openai import read_chat, read_completion
from edgespec.server.forms import MOST_COMPILING, Asked, AskedForm, FormCompiler
from edgespec.text.grammar.compiled import Forms
from edgespec.text.grammar.form import MOST_BYTES, Form
from edgespec.text.request_budget import RequestBudget
from tests.server.test_http import events, failed, text_of
from tests.server.test_schema import HI, refused
from tests.support.http_server import WAIT_S, Running, wait_until

LEVEL = {
    "type": "object",
    "properties": {"name": {"enum": ["low", "high"]}, "steps": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "steps"],
    "additionalProperties": False,
}
BY_OPENAI = {"type": "json_schema", "json_schema": {"name": "level", "strict": True, "schema": LEVEL}}
# Lenient compilation leaves out ``not``.
LOOSE = {"enum": ["a", "b"], "not": {"const": "b"}}


def form_in(**fields: Any) -> Form:
    found = read_chat({"messages": HI, **fields}).form
    assert found is not None
    return found.form


def is_level(text: str) -> bool:
    own = json.loads(text)
    return text == json.dumps(own) and own.keys() == {"name", "steps"} and own["name"] in ("low", "high")


# ---------------------------------------------------------------------------------------------------- the fields


@pytest.mark.parametrize(
    ("field", "value", "kind", "text"),
    [
        ("response_format", BY_OPENAI, "schema", LEVEL),
        ("response_format", {"type": "json_object"}, "schema", {"type": "object"}),
        ("response_format", {"type": "json_object", "schema": LEVEL}, "schema", LEVEL),
        ("response_format", {"type": "json_object", "json_schema": {"schema": LEVEL}}, "schema", LEVEL),
        ("response_format", {"type": "json_object", "json_schema": {"name": "x"}}, "schema", {"type": "object"}),
        ("response_format", {"type": "json_object", "json_schema": "x"}, "schema", {"type": "object"}),
        ("response_format", {"type": "json_object", "json_schema": {}, "schema": LEVEL}, "schema", LEVEL),
        ("response_format", {"type": "json_schema", "schema": LEVEL}, "schema", LEVEL),
        ("json_schema", LEVEL, "schema", LEVEL),
        ("json_schema", {}, "schema", {}),
        ("guided_json", json.dumps(LEVEL), "schema", LEVEL),
        ("format", "json", "schema", {"type": "object"}),
        ("format", LEVEL, "schema", LEVEL),
        ("structured_outputs", {"json": LEVEL}, "schema", LEVEL),
        ("structured_outputs", {"json_object": True, "regex": None}, "schema", {"type": "object"}),
        ("structured_outputs", {"json_object": True, "json": LEVEL}, "schema", LEVEL),
        ("structured_outputs", {"choice": ["a", "b"]}, "choice", ["a", "b"]),
        ("guided_choice", ["a", "b"], "choice", ["a", "b"]),
        ("structured_outputs", {"regex": "a+"}, "regex", "a+"),
        ("guided_regex", "a+", "regex", "a+"),
        ("grammar", 'root ::= "a"', "grammar", 'root ::= "a"'),
        ("guided_grammar", 'root ::= "a"', "grammar", 'root ::= "a"'),
        ("structured_outputs", {"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
    ],
)
def test_each_programs_field_names_the_same_form(field: str, value: Any, kind: str, text: Any) -> None:
    found = form_in(**{field: value})
    assert (found.kind, json.loads(found.text) if kind in ("schema", "choice") else found.text) == (kind, text)
    assert found.spacing == ("free" if text == {"type": "object"} else "line"), "its names, its blanks"
    completion = read_completion({"prompt": "x", field: value}).form
    assert completion is not None
    assert completion.form == found


def test_only_a_strict_schema_is_kept_whole() -> None:
    assert not form_in(response_format=BY_OPENAI).lenient
    for strict, lenient in ((True, False), ("true", False), (None, True), (False, True), ("false", True)):
        member = {"name": "x", "schema": LEVEL, "strict": strict}
        assert form_in(response_format={"type": "json_schema", "json_schema": member}).lenient == lenient
    assert form_in(json_schema=LEVEL).lenient


def test_several_fields_may_name_one_form_and_not_two() -> None:
    lenient = {"type": "json_schema", "json_schema": {"schema": LEVEL}}
    assert form_in(json_schema=LEVEL, guided_json=LEVEL, response_format=lenient) == form_in(json_schema=LEVEL)
    assert form_in(json_schema=LEVEL, response_format={"type": "text"}) == form_in(json_schema=LEVEL)
    strict = form_in(response_format=BY_OPENAI)
    assert form_in(guided_json=LEVEL, response_format=BY_OPENAI) == strict
    assert form_in(response_format={"type": "json_object"}, guided_json=LEVEL) == form_in(guided_json=LEVEL)
    assert form_in(response_format=BY_OPENAI, format="json") == strict
    for two in ({"json_schema": LEVEL, "format": LOOSE}, {"json_schema": LOOSE, "format": "json"}):
        assert refused(read_chat, {"messages": HI, **two}).param == "format"
    error = refused(read_chat, {"messages": HI, "json_schema": LEVEL, "guided_regex": "a"})
    assert error.param == "guided_regex"
    assert "json_schema and guided_regex name two forms" in error.message


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("response_format", "json", "response_format"),
        ("response_format", {"type": 3}, "response_format"),
        ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
        ("response_format", {"type": "json_schema", "json_schema": {}}, "response_format.json_schema.schema"),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}},
            "response_format.json_schema.strict",
        ),
        ("response_format", {"type": "json_object", "schema": 3}, "response_format.schema"),
        ("response_format", {"type": "json_schema", "json_schema": {"a": 1}}, "response_format.json_schema.schema"),
        ("response_format", {"type": "json_schema", "schema": 3}, "response_format.schema"),
        ("json_schema", "{", "json_schema"),
        ("json_schema", [1], "json_schema"),
        ("json_schema", {"enum": ["x" * MOST_BYTES]}, "json_schema"),
        ("json_schema", {"enum": ["\ud800"]}, "json_schema"),
        ("format", "yaml", "format"),
        ("guided_choice", [""], "guided_choice"),
        ("guided_choice", "a", "guided_choice"),
        ("grammar", 3, "grammar"),
        ("guided_regex", "\0", "guided_regex"),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}, "structured_outputs"),
        ("structured_outputs", "json", "structured_outputs"),
        ("structured_outputs", {"structural_tag": "x"}, "structured_outputs"),
    ],
)
def test_a_form_that_cannot_be_read_is_refused_by_its_name(field: str, value: Any, param: str) -> None:
    error = refused(read_chat, {"messages": HI, field: value})
    assert (error.param, error.status) == (param, 400)


def test_a_message_names_the_object_of_a_field_and_what_its_list_holds() -> None:
    error = refused(read_chat, {"messages": HI, "guided_choice": [1, 2]})
    assert error.message == "guided_choice must be a list of texts, not [1, 2]"
    error = refused(read_messages, {"messages": HI, "max_tokens": 1, "output_config": {"format": {"type": "text"}}})
    assert error.message.startswith("output_config.format must be {")


@pytest.mark.parametrize("kind", ["yaml", "grammar", ""])
def test_a_response_format_of_another_type_is_refused_with_a_code(kind: str) -> None:
    error = refused(read_chat, {"messages": HI, "response_format": {"type": kind}})
    assert (error.param, error.code) == ("response_format", "unsupported_parameter")
    assert json.dumps(kind) in error.message


# ---------------------------------------------------------------------------------------------------- the answers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_an_answer_keeps_its_schema_with_guesses(server: Running, stream: bool, temperature: float) -> None:
    response = server.chat("hello", response_format=BY_OPENAI, stream=stream, temperature=temperature, seed=5)
    if stream:
        chunks = events(response)
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        reply = chunks[-1]
    else:
        reply = response.json()
        text = text_of(reply)
    assert is_level(text)
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert "edgespec" not in reply
    plain = server.chat("hello", response_format=BY_OPENAI, temperature=temperature, seed=5)
    assert text_of(plain.json()) == text


def test_a_completion_keeps_its_form_too(server: Running) -> None:
    reply = server.post("/v1/completions", prompt="x", guided_choice=["yes", "no"], max_tokens=20).json()
    assert reply["choices"][0]["text"] in ("yes", "no")


def test_two_clients_have_their_own_schemas_at_the_same_time(server: Running) -> None:
    schemas = [{"enum": [f"{name} number {number}"]} for number in range(4) for name in ("one", "two")]
    asking = [server.asking("hello", json_schema=schema, max_tokens=60) for schema in schemas]
    for schema, future in zip(schemas, asking, strict=True):
        assert json.loads(text_of(future.result(WAIT_S).json())) == schema["enum"][0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_is_kept_in_part_has_a_warning(server: Running, stream: bool) -> None:
    before = len(server.lines)
    response = server.chat("hello", json_schema=LOOSE, stream=stream, max_tokens=20)
    reply = events(response)[-1] if stream else response.json()
    (warning,) = reply["edgespec"]["warnings"]
    assert "not" in warning
    server.wait_until(lambda: any(line.kept_in_part for line in server.lines[before:]))


def test_a_strict_schema_that_cannot_be_kept_is_refused(server: Running) -> None:
    own = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": LOOSE}}
    error = failed(server.chat("hello", response_format=own), 400, "unsupported_schema")
    assert error["param"] == "response_format.json_schema.schema"
    assert '"not"' in error["message"]
    error = failed(server.chat("hello", guided_regex="("), 400)
    assert (error["param"], error["code"]) == ("guided_regex", None)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_loses_its_form_ends_with_an_error(server: Running, engine: Engine, stream: bool) -> None:
    (banned,) = engine.tokenizer.encode("Z")[-1:]
    response = server.chat("hello", guided_regex="Z", logit_bias={str(banned): -100}, stream=stream)
    if stream:
        *_, ended, last = (json.loads(each.removeprefix("data: ")) for each in response.text.strip().split("\n\n"))
        assert (ended["choices"][0]["finish_reason"], "error" in ended) == ("error", False)
        assert (last["error"]["code"], last.keys()) == ("constraint_failed", {"error"})
    else:
        failed(response, 400, "constraint_failed")
    assert server.chat("hello", max_tokens=2).status_code == 200


def test_without_llguidance_a_form_is_refused_with_the_command_that_installs_it(
    server: Running, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(engine.pair, "forms", Forms(engine.tokenizer, engine.pair.vocabulary_size))
    error = failed(server.chat("hello", format="json"), 400, "unsupported_parameter")
    assert error["param"] == "format"
    assert install_command("grammar") in error["message"]
    assert server.chat("hello", max_tokens=1).status_code == 200


def hostile(port: int) -> dict[str, Any]:
    deep: Any = {"type": "integer"}
    for _ in range(50):
        deep = {"type": "array", "items": deep}
    return {
        "remote": {"$ref": f"http://127.0.0.1:{port}/schema.json"},
        "itself": {"$ref": "#"},
        "recursive": {"type": "object", "properties": {"next": {"$ref": "#"}}},
        "deep": deep,
        "many": {"type": "object", "required": [f"p{number}" for number in range(2000)]},
        "large": {"enum": [f"value {number}" for number in range(5000)]},
        "long": {"type": "string", "minLength": 10**9},
        "pattern": {"type": "string", "pattern": "((a{1,99}){1,99}){1,99}$"},
        "powers": {"allOf": [{"anyOf": [{"required": ["a"]}, {"required": ["b"]}]} for _ in range(12)]},
        "wrong": {"type": 7, "properties": []},
    }


def test_hostile_schemas_are_answered_or_refused_and_nothing_is_fetched(server: Running) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        for name, schema in hostile(listening.getsockname()[1]).items():
            response = server.chat("hello", json_schema=schema, max_tokens=4)
            assert response.status_code in (200, 400), name
            if response.status_code == 400:
                assert failed(response, 400)["param"] in ("json_schema", None), name
        with pytest.raises(BlockingIOError):
            listening.accept()
    assert server.chat("hello", max_tokens=1).status_code == 200


# ------------------------------------------------------------------------------------------------------ compiling


class HeldForms:
    """Compiles once ``release`` is set. ``running`` are the forms that are compiled now."""

    def __init__(self) -> None:
        self.release, self.running, self.most, self.prepared = threading.Event(), list[str](), 0, list[Any]()

    def prepare_calls(self, tools: Any, owner: str) -> None:
        self.prepared += tools

    def compiled_form(self, form: Form, tools: Any, must: Any, owner: str) -> Any:
        assert form.text.startswith(owner)
        self.running.append(form.text)
        self.most = max(self.most, len(self.running))
        assert self.release.wait(WAIT_S)
        self.running.remove(form.text)
        return SimpleNamespace(warnings=(form.text,))


@pytest.fixture
def held() -> HeldForms:
    return HeldForms()


def asked(text: str) -> Asked:
    return Asked(form=AskedForm(Form(kind="regex", text=text), "guided_regex"))


@pytest.mark.anyio
async def test_a_client_compiles_one_form_at_a_time_and_all_clients_two(held: HeldForms) -> None:
    compiler, engine = FormCompiler(), cast(Engine, SimpleNamespace(pair=held))
    asks = [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1")]
    tasks = [
        asyncio.create_task(compiler.compile(engine, asked(text), owner, RequestBudget())) for owner, text in asks
    ]
    await asyncio.to_thread(wait_until, lambda: sorted(held.running) == ["a1", "b1"])
    tasks[1].cancel()  # its client leaves
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    assert sorted(held.running) == ["a1", "b1"]
    held.release.set()
    assert [await task for task in (tasks[0], *tasks[2:])] == [("a1",), ("a3",), ("b1",), ("c1",)]
    assert held.most == MOST_COMPILING == 2
    compiler.close()


@pytest.mark.anyio
async def test_a_form_of_a_client_that_left_is_not_compiled(held: HeldForms) -> None:
    compiler, engine = FormCompiler(), cast(Engine, SimpleNamespace(pair=held))
    budget = RequestBudget()
    budget.cancel()
    assert await compiler.compile(engine, asked("a"), "a", budget) == ()
    assert not held.most
    compiler.close()


class RefusingForms:
    """Refuses every form."""

    def compiled_form(self, form: Form, tools: Any, must: Any, owner: str) -> Any:
        raise InvalidRequestError("no form is good enough")


@pytest.mark.anyio
async def test_a_form_that_is_refused_keeps_no_model() -> None:
    compiler, forms = FormCompiler(), RefusingForms()
    engine, watched = cast(Engine, SimpleNamespace(pair=forms)), weakref.ref(forms)
    with pytest.raises(ApiError):
        await compiler.compile(engine, asked("a"), "a", RequestBudget())
    del engine, forms

    def is_freed() -> bool:
        gc.collect()
        return watched() is None

    await asyncio.to_thread(wait_until, is_freed)
    compiler.close()


@pytest.mark.anyio
async def test_calls_that_an_answer_may_begin_are_compiled_before_it(held: HeldForms) -> None:
    compiler, engine = FormCompiler(), cast(Engine, SimpleNamespace(pair=held))
    tool = {"type": "function", "function": {"name": "f"}}
    for choice, count in ((None, 1), ("auto", 2), ("none", 2)):
        assert await compiler.compile(engine, Asked(tools=(tool,), tool_choice=choice), "a", RequestBudget()) == ()
        assert len(held.prepared) == count
    assert await compiler.compile(engine, Asked(), "a", RequestBudget()) == ()
    compiler.close()


# --------------------------------------------------------------------------------------------- the openai package


class Level(BaseModel):
    name: Literal["low", "high"]
    even: bool


def test_the_openai_client_parses_an_answer_into_a_pydantic_model(server: Running) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        ask: Any = [{"role": "user", "content": "hello"}]
        reply = client.beta.chat.completions.parse(model="tiny", messages=ask, response_format=Level)
    assert isinstance(reply.choices[0].message.parsed, Level)

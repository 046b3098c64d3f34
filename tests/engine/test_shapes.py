"""The whole answer, or its pieces of text, from a Generation; and the shapes of the version before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

import edgespec
from edgespec.decoding.sampling import Sampling, SamplingFields
from edgespec.engine.answer import Generation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done, Notice, Text, Token
from edgespec.engine.session import Session
from edgespec.errors import ForwardError, InvalidRequestError, ProfileError
from edgespec.profiles.layers import KEYS, LoadOptions
from tests.engine.answers import plain_text
from tests.support.tiny_models import TinyModels, answer


async def read(generation: Generation) -> tuple[str, str, Done]:
    pieces = [piece async for piece in generation.atexts()]
    return "".join(pieces), await generation.atext(), await generation.aresult()


@pytest.mark.parametrize("awaited", [False, True])
def test_an_answer_can_be_taken_whole_or_as_pieces_of_text(engine: Engine, session: Session, awaited: bool) -> None:
    expected = plain_text(engine, "hello world", max_tokens=30)
    generation = session.generate("hello world", max_tokens=30)
    if awaited:
        text, whole, done = asyncio.run(read(generation))
    else:
        text, whole, done = "".join(generation.texts()), generation.text, generation.result()
    assert text == whole == done.content == expected.content
    assert (done.token_ids, done.finish_reason) == (expected.token_ids, "length")
    assert session.undo() == "hello world"
    assert session.generate("hello world", max_tokens=30).result().token_ids == done.token_ids
    session.clear()
    assert asyncio.run(session.generate("hello world", max_tokens=30).atext()) == text


def test_the_rest_of_an_answer_is_read(session: Session) -> None:
    generation = session.generate("hello world", max_tokens=30)
    first = next(event for event in generation if isinstance(event, Text))
    done = generation.result()
    assert done.content.startswith(first.text)
    assert done.stats.emitted_tokens == 30


def test_the_result_of_an_answer_that_was_left_is_what_was_read(session: Session) -> None:
    generation = session.generate("hello world", max_tokens=30)
    piece = next(generation.texts())
    generation.close()
    done = generation.result()
    assert (done.finish_reason, done.content) == ("cancelled", piece)
    assert generation.text == piece


@pytest.mark.parametrize("ask", [Generation.result, lambda answer: answer.text], ids=["result", "text"])
def test_the_error_of_an_answer_is_raised_each_time(
    session: Session, monkeypatch: pytest.MonkeyPatch, ask: Callable[[Generation], Any]
) -> None:
    generation = session.generate("hello world", max_tokens=30)
    monkeypatch.setattr(generation._task, "_decode", _fail)
    for _ in range(2):
        with pytest.raises(ForwardError, match="broken"):
            ask(generation)
    with pytest.raises(ForwardError, match="broken"):
        asyncio.run(generation.aresult())


def _fail() -> None:
    raise ForwardError("broken")


def test_thinking_and_calls_are_not_in_the_texts(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    events = iter([Text("<think>so</think>", reasoning="so"), Text(""), Text("yes"), Notice("dropped")])
    monkeypatch.setattr(Generation, "__next__", lambda _self: next(events))
    with session.generate("hello", max_tokens=1) as generation:
        assert list(generation.texts()) == ["yes"]


# -------------------------------------------------------------------------------------------------- arguments


def test_fields_of_sampling_are_arguments_of_ask_and_generate(engine: Engine, session: Session) -> None:
    drawn = Sampling(temperature=0.9, top_k=20, seed=4)
    named = session.generate("hello world", max_tokens=20, temperature=0.9, top_k=20, seed=4).result()
    assert named.sampling == drawn
    session.clear()
    changed = session.generate("hello world", max_tokens=20, sampling=replace(drawn, seed=5), seed=4).result()
    assert changed.token_ids == named.token_ids
    assert engine.ask("hello world", max_tokens=20, sampling=replace(drawn, seed=5), seed=4) == named.content


@pytest.mark.parametrize(
    ("name", "hint"), [("temprature", "did you mean temperature?"), ("x", "of sampling there are temperature, top_k")]
)
def test_an_argument_that_is_not_there_is_named_with_the_nearest(
    engine: Engine, session: Session, name: str, hint: str
) -> None:
    asks: list[Callable[..., object]] = [engine.ask, session.generate]
    for ask in asks:
        with pytest.raises(InvalidRequestError, match=f"there is no argument '{name}'") as raised:
            ask("hello", **{name: 1})
        assert (raised.value.hint or "").startswith(hint)
        assert raised.value.param == name


def test_the_typed_options_are_those_of_the_records() -> None:
    assert list(SamplingFields.__annotations__) == [each.name for each in fields(Sampling)]
    assert list(LoadOptions.__annotations__) == [name for name in KEYS if name != "target"]


def test_a_wrong_option_of_load_is_named_as_an_argument(tiny: TinyModels) -> None:
    with pytest.raises(ProfileError, match=r"^context must be"):
        tiny.load(context=1)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("contxt", "context"),
        ("dowload", "download"),
        ("limit", "limits"),
        ("model", "target"),
        ("model_path", "target"),
    ],
)
def test_a_mistyped_argument_of_load_is_named_with_the_nearest(tiny: TinyModels, name: str, meant: str) -> None:
    with pytest.raises(ProfileError, match=rf'^the arguments: unknown key "{name}"$') as raised:
        tiny.load(**{name: 1})  # type: ignore[arg-type]
    assert raised.value.hint == f'Did you mean "{meant}"?'


# ------------------------------------------------------------------------------------------------- old shapes


SCORED = Text("abc", (Token("a", 5, None, -0.5, (Token("b", 7, logprob=-0.1),)), Token("bc", 6, "model", -0.2)))


@pytest.mark.parametrize(
    ("old", "value"),
    [
        (lambda: SCORED.token_ids, (5, 6)),
        (lambda: SCORED.guessed_by, (None, "model")),
        (lambda: SCORED.lengths, (1, 2)),
        (lambda: [(each.token_id, each.logprob, each.top) for each in SCORED.logprobs],
         [(5, -0.5, ((7, -0.1),)), (6, -0.2, ())]),
        (lambda: Text("a", (Token("a", 1),)).logprobs, ()),
        (lambda: Notice("dropped").message, "dropped"),
        (lambda: edgespec.TokenLogprob.__name__, "TokenLogprob"),  # type: ignore[attr-defined]
    ],
)  # fmt: skip
def test_an_old_shape_works_and_says_what_to_use(old: Callable[[], Any], value: object) -> None:
    with pytest.warns(DeprecationWarning, match=r"goes in the next version of edgespec: use \w+") as warned:
        assert old() == value
    assert warned[0].filename == __file__, "the warning names the line that uses it"


def test_a_name_of_the_engine_that_went_says_where_it_is(engine: Engine) -> None:
    with pytest.warns(DeprecationWarning, match=r"Engine\.target_model goes .*use Engine\.pair\.target") as warned:
        assert getattr(engine, "target_model") is engine.pair.target  # noqa: B009  type checkers report the name
    assert warned[0].filename == __file__
    with pytest.raises(AttributeError, match="'Engine' object has no attribute 'targt'"):
        getattr(engine, "targt")  # noqa: B009


def test_answers_warn_about_nothing(session: Session, recwarn: pytest.WarningsRecorder) -> None:
    answer(session.generate("hello", max_tokens=5, logprobs=1))
    assert not recwarn.list

"""``Engine.ask``: one line for scripts."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.errors import ClosedError, InvalidRequestError, TemplateError
from tests.support.http_server import wait_until
from tests.support.tiny_models import TinyModels, answer

QUESTION = "what is water"


@pytest.fixture(scope="module")
def engine(tiny: TinyModels) -> Iterator[Engine]:
    with tiny.load_speculating() as engine:
        yield engine


def expected(engine: Engine, prompt: str, *, system: str | None = None, **settings: object) -> str:
    with engine.session(system=system) as session:
        return answer(session.generate(prompt, **settings)).text  # type: ignore[arg-type]


def test_ask_gives_the_text_of_a_separate_conversation(engine: Engine) -> None:
    text = engine.ask(QUESTION, max_tokens=12)
    assert text == expected(engine, QUESTION, max_tokens=12)
    assert engine.ask("hello", max_tokens=12) == expected(engine, "hello", max_tokens=12)
    assert engine.ask(QUESTION, max_tokens=12) == text, "nothing of the last question is left"


def test_ask_takes_sampling_settings_a_system_message_and_stop_strings(engine: Engine) -> None:
    drawn = engine.ask(QUESTION, system="be kind", max_tokens=12, temperature=0.9, top_k=20, seed=4)
    sampling = Sampling(temperature=0.9, top_k=20, seed=4)
    assert drawn == expected(engine, QUESTION, system="be kind", max_tokens=12, sampling=sampling)
    plain = engine.ask(QUESTION, max_tokens=12)
    assert plain != drawn
    stop = plain[4:6]
    assert engine.ask(QUESTION, max_tokens=12, stop=[stop]) == plain[: plain.index(stop)]


def test_ask_without_a_limit_answers_to_the_end(tiny: TinyModels) -> None:
    with tiny.load(tiny.ending, draft="none") as ending:
        assert ending.ask("hello") == expected(ending, "hello")


def test_ask_keeps_the_cache_of_what_two_questions_share(engine: Engine) -> None:
    system = "be kind " * 20
    engine.ask("one", system=system, max_tokens=2)
    session = engine._asked
    assert session is not None
    before = session._target.length
    engine.ask("two", system=system, max_tokens=2)
    assert engine._asked is session
    generation = session.generate("two", max_tokens=2)
    assert answer(generation).stats.cached_tokens > 0.8 * before
    session.close()
    assert engine.ask("three", max_tokens=2), "another session replaces a closed one"


def test_ask_refuses_what_it_does_not_know_and_works_afterwards(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="there is no argument 'temprature'"):
        engine.ask("hello", temprature=1)
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        engine.ask("")
    with pytest.raises(InvalidRequestError, match="the system message must be text"):
        engine.ask("hello", system=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError):
        engine.ask("hello", temperature=-1)
    assert engine.ask("hello", max_tokens=2)


def test_ask_of_a_model_without_a_template_or_of_a_closed_engine_raises(tiny: TinyModels) -> None:
    with tiny.load(tiny.without_template, draft="none") as base, pytest.raises(TemplateError):
        base.ask("hello")
    with pytest.raises(ClosedError):
        base.ask("hello")


def test_the_thinking_is_left_out_of_what_ask_gives(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{% for m in messages %}{{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}<think>{% endif %}{# </think> #}"
    )
    with tiny.load(tiny.with_template("asked-thinking", template), draft="none") as engine:
        with engine.session() as session:
            done = answer(session.generate("hello", max_tokens=8))
        assert done.reasoning == done.text.strip(), "a tiny model never ends its thinking"
        assert engine.ask("hello", max_tokens=8) == ""


def test_ask_raises_if_its_engine_is_closed_before_the_answer_is_complete(tiny: TinyModels) -> None:
    with tiny.load(tiny.slow, draft="none", context=8192) as engine:
        closing = threading.Thread(target=lambda: (wait_until(lambda: engine.pair.answering), engine.close()))
        closing.start()
        with pytest.raises(ClosedError, match="before the answer was complete"):
            engine.ask("hello", max_tokens=8000)
        closing.join()


def test_calls_of_ask_in_several_threads_wait_for_one_another(engine: Engine) -> None:
    prompts = ("hello", "one two", QUESTION)
    wanted = {prompt: expected(engine, prompt, max_tokens=20) for prompt in prompts}
    found: dict[str, str] = {}
    threads = [
        threading.Thread(target=lambda own=prompt: found.update({own: engine.ask(own, max_tokens=20)}))
        for prompt in prompts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == wanted

"""Answers that fill a hole, and raw prompts that are tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edgespec.engine.engine import Engine
from edgespec.errors import InvalidRequestError
from edgespec.text.conversation.hole import Hole, hole_tokens
from edgespec.text.request_budget import RequestBudget
from tests.support.tiny_gguf import similar_drafter
from tests.support.tiny_models import TinyModels, answer

BEFORE, AFTER = "one two three\nfour five six\n", "\nseven eight"
FILES = [("a.py", "the people of the world\n"), ("b.py", "one two\n")]


@pytest.fixture(scope="module")
def engine(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    drafter = similar_drafter(tiny.filling, tmp_path_factory.mktemp("filling") / "drafter.gguf", 0.2)
    with tiny.load_speculating(tiny.filling, draft=str(drafter)) as engine:
        yield engine


def test_a_hole_is_filled_with_the_same_text_with_and_without_guesses(engine: Engine) -> None:
    for files in ([], FILES):
        found = []
        for depth in (0, None, 3):
            with engine.session() as session:
                found.append(answer(session.generate(BEFORE, suffix=AFTER, files=files, max_tokens=40, depth=depth)))
        plain, planned, deep = found
        assert plain.token_ids == planned.token_ids == deep.token_ids
        assert plain.stats.proposed == 0 < deep.stats.accepted
        hole = Hole(BEFORE, AFTER, tuple(files))
        asked = hole_tokens(engine.tokenizer, hole, engine.plan.context_length - 40, RequestBudget())
        assert plain.stats.prompt_tokens == len(asked)
        with engine.session() as session:
            assert answer(session.generate(asked, raw=True, max_tokens=40)).token_ids == plain.token_ids


def test_a_hole_is_outside_the_conversation(engine: Engine) -> None:
    with engine.session() as session:
        answer(session.generate("hello", max_tokens=4))
        before = session.messages
        assert answer(session.generate("", suffix="", max_tokens=4)).text
        assert session.messages == before


def test_while_text_is_typed_what_is_before_the_hole_stays_cached(engine: Engine) -> None:
    before = "".join(f"the people of the world {number}\n" for number in range(30))
    with engine.session() as session, engine.session() as fresh:
        first = answer(session.generate(before + "one tw", suffix=AFTER, max_tokens=4))
        second = answer(session.generate(before + "one two", suffix=AFTER, max_tokens=4))
        assert first.stats.cached_tokens == 0
        assert second.stats.cached_tokens >= second.stats.prompt_tokens - len(engine.tokenizer.encode(AFTER)) - 6
        assert answer(fresh.generate(before + "one two", suffix=AFTER, max_tokens=4)).token_ids == second.token_ids


def test_a_hole_leaves_room_for_its_answer(engine: Engine) -> None:
    long = "the people of the world\n" * 3000
    context = engine.plan.context_length
    with engine.session() as session:
        for most in (None, 50):
            found = answer(session.generate(long, suffix=long, files=[("a", long)] * 2, max_tokens=most or 30))
            assert context // 3 < found.stats.prompt_tokens <= context - (most or 30)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"prompt": "a", "files": FILES}, "files are read around a hole"),
        ({"prompt": "a", "suffix": 3}, "the suffix must be text, not int 3"),
        ({"suffix": "a"}, "the prompt must be text, not None"),
        ({"prompt": [1], "suffix": "a", "raw": True}, "the prompt must be text, not list"),
        ({"prompt": "a", "suffix": "a", "files": ["ab"]}, "files must be a list of pairs of a name and a text"),
        ({"prompt": "a", "suffix": "a", "files": [("a", 3)]}, "files must be a list of pairs of a name and a text"),
        ({"prompt": "a", "suffix": "a", "files": "ab"}, "files must be a list of pairs of a name and a text"),
        ({"suffix": "a", "messages": [{"role": "user", "content": "a"}]}, "messages cannot be raw"),
        ({"prompt": "a", "suffix": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "raw"),
        ({"prompt": [], "raw": True}, "the prompt is empty"),
        ({"prompt": [10**7], "raw": True}, "prompt names token 10000000, and this model's tokens are 0 to"),
    ],
)
def test_wrong_holes_and_prompts_are_refused_in_words(engine: Engine, asked: Any, said: str) -> None:
    with engine.session() as session, pytest.raises(InvalidRequestError, match=said):
        session.generate(**asked, max_tokens=2)


@pytest.mark.parametrize(
    ("prompt", "raw", "said", "hint"),
    [
        ([1, -1], True, "text or a list of token ids, not list [1, -1]", "whole numbers from 0 on"),
        ([1, "a"], True, "text or a list of token ids, not list [1, 'a']", "whole numbers from 0 on"),
        (np.array([1, 2]), True, "text or a list of token ids, not ndarray array([1, 2])", "tolist()"),
        ([1, 2], False, "text, not list [1, 2]", "raw=True"),
        ([{"role": "user", "content": "a"}], False, "text, not list [{'role'", "messages="),
    ],
)
def test_a_wrong_prompt_is_named_with_what_would_be_right(
    engine: Engine, prompt: Any, raw: bool, said: str, hint: str
) -> None:
    with engine.session() as session, pytest.raises(InvalidRequestError) as raised:
        session.generate(prompt, raw=raw)
    assert raised.value.message.startswith(f"the prompt must be {said}")
    assert hint in (raised.value.hint or "")
    assert raised.value.param == "prompt"


def test_a_model_without_the_tokens_is_named(tiny: TinyModels) -> None:
    with tiny.load(draft="none") as engine, engine.session() as session:
        with pytest.raises(InvalidRequestError, match="cannot fill in the middle"):
            session.generate("a", suffix="b")
        assert answer(session.generate("a", max_tokens=3)).text, "the session works on"

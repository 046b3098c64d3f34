"""What a chat does with its model where another one takes its place and there is no memory for both."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from edgespec.cli.chat.talk import Talk
from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError, MemoryLimitError, ModelNotFoundError
from edgespec.text.conversation.thinking import ThinkingMarks

TURNS = ({"role": "user", "content": "hello"}, {"role": "assistant", "content": "<think>so</think>\n\nhi"})


class FakeSession:
    def __init__(self, system: str | None, messages: list[dict[str, str]], think: bool) -> None:
        self.system, self.turns, self.think, self.closed = system, messages, think, False

    @property
    def messages(self) -> tuple[dict[str, str], ...]:
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        return (*head, *self.turns)

    def close(self) -> None:
        self.closed = True


class FakeEngine:
    """As much of an Engine as a chat asks of one."""

    has_chat_template = True

    def __init__(self, name: str | None, sampling: Sampling) -> None:
        self.name = name
        self.closed = False
        self.file_sampling = sampling
        self.profile = SimpleNamespace(rule="keyed")
        self.plan = SimpleNamespace(target=SimpleNamespace(model=name))
        self.pair = SimpleNamespace(prompts=SimpleNamespace(thinking=ThinkingMarks("<think>", "</think>")))

    def session(self, *, system: str | None, think: bool, messages: Any = ()) -> FakeSession:
        return FakeSession(system, list(messages), think)

    def close(self) -> None:
        self.closed = True


class Machine:
    """Loads up to ``room`` engines; some names fail."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.failing: set[str | None] = set()
        self.made: list[FakeEngine] = []

    def load(self, name: str | None) -> Engine:
        if name in self.failing:
            raise ModelNotFoundError(f"no {name}")
        if sum(not engine.closed for engine in self.made) >= self.room:
            raise MemoryLimitError("no memory", needed_bytes=2, available_bytes=1)
        self.made.append(FakeEngine(name, Sampling(temperature=0.6 if name is None else 0.8)))
        return cast(Engine, self.made[-1])


def talk_on(machine: Machine, **settings: Any) -> Talk:
    given: dict[str, Any] = {"system": "be kind", "think": False, "drawn": {}, "as_file": True, **settings}
    talk = Talk(machine.load(None), machine.load, **given)
    cast(Any, talk.session).turns = list(TURNS)
    return talk


def named(talk: Talk) -> str | None:
    return cast(Any, talk.engine).name


def open_engines(machine: Machine) -> list[str | None]:
    return [engine.name for engine in machine.made if not engine.closed]


@pytest.mark.parametrize("room", [1, 2])
def test_switching_models_keeps_the_conversation(room: int) -> None:
    """Both models are loaded if memory allows; the thinking is removed."""
    machine = Machine(room)
    with talk_on(machine) as talk:
        talk.switch("other")
        assert open_engines(machine) == ["other"]
        session = cast(Any, talk.session)
        assert session.messages == (
            {"role": "system", "content": "be kind"},
            TURNS[0],
            {"role": "assistant", "content": "hi"},
        )
        assert session.think is False
    assert open_engines(machine) == []


@pytest.mark.parametrize("room", [1, 2])
def test_the_old_model_stays_if_the_new_one_cannot_be_loaded(room: int) -> None:
    machine = Machine(room)
    with talk_on(machine) as talk:
        machine.failing = {"other"}
        with pytest.raises(ModelNotFoundError):
            talk.switch("other")
        assert open_engines(machine) == [None]
        assert not talk.session.closed


def test_a_closed_old_model_is_reloaded_if_the_new_one_fails() -> None:
    """There is no memory for both, and the new one turns out to be no use: the conversation is kept."""
    machine = Machine(1)
    with talk_on(machine) as talk:
        calls: list[str | None] = []

        def load(name: str | None) -> Engine:
            calls.append(name)
            engine = machine.load(name)
            if name == "other":
                cast(Any, engine).has_chat_template = False
            return engine

        talk._load = load  # what fails after the old one was closed
        with pytest.raises(EdgespecError, match="other has no chat template"):
            talk.switch("other")
        assert calls == ["other", "other", None]
        assert open_engines(machine) == [None]
        assert [message["content"] for message in talk.session.messages] == ["be kind", "hello", "hi"]


def test_the_session_is_closed_if_neither_model_can_be_loaded() -> None:
    machine = Machine(1)
    with talk_on(machine) as talk:

        def load(name: str | None) -> Engine:
            if open_engines(machine):
                raise MemoryLimitError("no memory", needed_bytes=2, available_bytes=1)
            raise ModelNotFoundError(f"no {name}")

        talk._load = load
        with pytest.raises(ModelNotFoundError):
            talk.switch("other")
        assert talk.session.closed, "which ends the chat"


@pytest.mark.parametrize(
    ("said", "begun"),
    [("so", "so"), ("<think>so</think>\n\n```c\n", "```c\n"), ("<think>so", "")],
)
def test_more_continues_what_is_shown_of_an_answer(said: str, begun: str) -> None:
    with talk_on(Machine(1)) as talk:
        cast(Any, talk.session).turns = [TURNS[0], {"role": "assistant", "content": said}]
        assert talk.begun == begun


def test_a_prompt_that_was_not_answered_comes_back_and_the_answer_before_it_stays() -> None:
    with talk_on(Machine(1)) as talk:
        talk.ask("hello")  # as the turn before it
        assert talk.unanswered == "hello"
        assert talk.take_back() == "hello"
        assert talk.unanswered is None
        assert len(talk.session.messages) == 3


def test_a_prompt_that_fails_when_it_is_repeated_was_not_answered() -> None:
    with talk_on(Machine(1)) as talk:
        talk.ask("hello")  # as the turn before it
        talk.ended(None)
        assert talk.unanswered == "hello"
        talk.ask("hello")
        cast(Any, talk.session).turns = [*TURNS, *TURNS]
        talk.ended(None)  # after some tokens
        assert talk.unanswered is None


def test_a_users_text_keeps_its_marks_and_blanks() -> None:
    asked = {"role": "user", "content": "    What does </think> mean?"}
    with talk_on(Machine(1)) as talk:
        cast(Any, talk.session).turns = [asked, TURNS[1]]
        assert talk.turns() == [asked, {"role": "assistant", "content": "hi"}]


def test_more_judges_the_answer_that_an_undone_one_left() -> None:
    with talk_on(Machine(1)) as talk:
        talk.last = cast(Any, SimpleNamespace(finish_reason="stop"))
        talk.ask("hello")
        talk._began = True
        assert talk.why_complete() == "the answer is complete"
        cast(Any, talk.session).undo = lambda: "hello"
        assert talk.take_back() == "hello"
        assert talk.last is None


def test_sampling_settings_come_from_the_file_until_the_user_sets_them() -> None:
    machine = Machine(2)
    with talk_on(machine) as talk:
        assert talk.sampling == Sampling(temperature=0.6)
        talk.switch("other")
        assert talk.sampling == Sampling(temperature=0.8)
        talk.set(temperature=0.3)
        talk.switch("third")
        assert talk.sampling == Sampling(temperature=0.3)
    with talk_on(Machine(2), drawn={"temperature": 0.1, "seed": 3}) as talk:
        assert talk.sampling == Sampling(temperature=0.1, seed=3)
    with talk_on(Machine(2), as_file=False) as talk:
        assert talk.sampling == Sampling()

"""What a chat talks to, and how: an engine with its session, which another model may replace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

from edgespec.cli.options import sampling_of
from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
from edgespec.engine.session import Session
from edgespec.errors import MemoryLimitError, TemplateError


class Talk:
    """The conversation, the model that it is held with, and how answers are drawn. A context manager."""

    def __init__(
        self,
        engine: Engine,
        load: Callable[[str | None], Engine],
        *,
        system: str | None,
        think: bool,
        drawn: Mapping[str, Any],
        as_file: bool,
    ) -> None:
        """``load`` makes the engine of another model, or for None that of the first one.

        ``drawn`` are options of sampling, to which ``set`` adds; with ``as_file`` the others are the file's.
        """
        self._load = load
        self._model: str | None = None
        self.think = think
        self._drawn = dict(drawn)
        self._as_file = as_file
        self.engine = engine
        self.session: Session = engine.session(system=system, think=think)
        self.sampling = self._sampling()
        self.last: Done | None = None
        self.asked: str | None = None  # the latest prompt, answered or not; None once it is taken back

    def __enter__(self) -> Talk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._free()

    def cancel(self) -> None:
        """End the answer in progress."""
        self.session.cancel()

    def _sampling(self) -> Sampling:
        usual = self.engine.file_sampling if self._as_file else Sampling()
        return sampling_of(usual, rule=self.engine.profile.rule, **self._drawn)

    def set(self, **values: Any) -> None:
        """Change how answers are drawn. Raises InvalidRequestError."""
        self.sampling = replace(self.sampling, **values)
        self._drawn |= values

    def take_back(self) -> str | None:
        """Forget the latest prompt: the turn that it became, or only itself where nothing was answered."""
        asked, self.asked = self.asked, None
        turns = [message["content"] for message in self.session.messages if message["role"] == "user"]
        if asked is not None and turns[-1:] != [asked]:
            return asked
        return self.session.undo()

    def switch(self, model: str) -> None:
        """Go on with another model, which reads the conversation anew.

        Where there is no memory for both the old one is closed first, and loaded again if the new one cannot be.
        Raises EdgespecError, after which the old one goes on, or ``session`` is closed because it could not.
        """
        system, turns = self.session.system, self._turns()
        try:
            self._take(model, system, turns)
        except MemoryLimitError:
            self._free()
            try:
                self._take(model, system, turns)
            except BaseException:
                self._take(self._model, system, turns)
                raise

    def _take(self, model: str | None, system: str | None, turns: list[dict[str, str]]) -> None:
        engine = self._load(model)
        try:
            if not engine.has_chat_template:
                raise TemplateError(
                    f"{engine.plan.target.model} has no chat template",
                    hint="name an instruction-tuned model; `edgespec generate --raw` continues plain text",
                )
            session = engine.session(system=system, messages=turns, think=self.think)
        except BaseException:
            engine.close()
            raise
        before = self.session, self.engine
        self.engine, self.session, self._model = engine, session, model
        self.sampling = self._sampling()
        for part in before:
            part.close()

    def _turns(self) -> list[dict[str, str]]:
        """The conversation without the thinking, whose marks are those of this model."""
        marks = self.engine.pair.prompts.thinking
        turns = [message for message in self.session.messages if message["role"] != "system"]
        if marks is None:
            return turns
        return [{**turn, "content": marks.answer_in(turn["content"]) or turn["content"]} for turn in turns]

    def _free(self) -> None:
        self.session.close()
        self.engine.close()

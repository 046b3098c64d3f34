"""The engine, session and sampling settings of a chat, which can switch models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.decoding.sampling import Sampling
from edgespec.engine.answer import Generation
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
from edgespec.engine.session import Session
from edgespec.errors import InvalidRequestError, MemoryLimitError, TemplateError
from edgespec.text.grammar.form import Form


class Talk:
    """A conversation, its model, its sampling settings, and the form of its answers. A context manager."""

    def __init__(
        self,
        engine: Engine,
        load: Callable[[str | None], Engine],
        *,
        system: str | None,
        messages: Sequence[Mapping[str, Any]] = (),
        think: bool,
        drawn: Mapping[str, Any],
        as_file: bool,
        max_tokens: int | None = None,
        before_reload: Callable[[], None] = lambda: None,
    ) -> None:
        """``load`` opens the engine of the named model, or of the first model for None.

        ``before_reload`` is called before a model is loaded again because its successor was not loaded.

        ``messages`` are earlier turns.

        ``drawn``: the user's sampling options. With ``as_file``, other options come from the model's file.
        """
        self._load = load
        self._before_reload = before_reload
        self._model: str | None = None
        self.think = think
        self._drawn = dict(drawn)
        self._as_file = as_file
        self.engine = engine
        self.session: Session = engine.session(system=system, messages=messages, think=think)
        self.sampling = self._sampling()
        self.form: Form | None = None  # of the next answers
        self.max_tokens = max_tokens  # of an answer; None: as the context allows
        self.last: Done | None = None
        self.asked: str | None = None  # the latest prompt, answered or not; None once it is taken back
        self._began = False  # the answer to it
        self._before = self.session.messages  # when it was asked

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._free()

    def cancel(self) -> None:
        """End the answer in progress."""
        self.session.cancel()

    def _sampling(self) -> Sampling:
        usual = self.engine.file_sampling if self._as_file else Sampling(rule=self.engine.profile.rule)
        return replace(usual, **self._drawn)

    def set(self, **values: Any) -> None:
        """Change sampling settings, or ``max_tokens``. Raises InvalidRequestError."""
        if "max_tokens" in values:
            most = values.pop("max_tokens")
            if most is not None and most < 1:
                raise InvalidRequestError(f"max-tokens must be at least 1, got {most}")
            self.max_tokens = most
        self.sampling = replace(self.sampling, **values)
        self._drawn |= values

    def take_back(self) -> str | None:
        """Remove the latest prompt, with its answer if there is one, and return the prompt."""
        unanswered, self.asked = self.unanswered, None
        if unanswered is not None:
            return unanswered
        self.last = None  # that of an answer which is gone now
        return self.session.undo()

    def ask(self, prompt: str) -> None:
        """Note the prompt that is answered next."""
        self.asked, self._began, self._before = prompt, False, self.session.messages

    def generate(self, prompt: str) -> Generation:
        """The answer to a prompt in the chat's settings and form."""
        self.ask(prompt)
        form = {} if self.form is None else self.form.arguments
        return self.session.generate(prompt, max_tokens=self.max_tokens, sampling=self.sampling, **form)

    @property
    def unanswered(self) -> str | None:
        """The latest prompt, if its answer was stopped or failed before a token: it is not in the conversation."""
        return None if self._began else self.asked

    def ended(self, done: Done | None) -> None:
        """Note that the answer in progress has ended; ``done`` is its last event, None if it failed."""
        if done is None:
            messages = self.session.messages  # may end with an earlier answer to the same prompt
            turns = [message["content"] for message in messages if message["role"] == "user"]
            self._began |= turns[-1:] == [self.asked] and messages != self._before
        else:
            self._began |= bool(done.text or done.token_ids)

    def why_complete(self) -> str | None:
        """Why the latest answer cannot be continued; None if it can."""
        if not self.answered:
            return "there is no answer to continue"
        if self.last is not None and self.last.finish_reason == "stop":
            return "the answer is complete"
        return None if self.form is None else "an answer in JSON cannot be continued; /retry writes it again"

    @property
    def answered(self) -> bool:
        """Whether the conversation ends with an answer."""
        return [message["role"] for message in self.session.messages[-1:]] == ["assistant"]

    @property
    def begun(self) -> str:
        """The latest answer without its thinking; empty while that is open."""
        text, marks = str(self.session.messages[-1]["content"]), self.engine.pair.prompts.thinking
        if marks is None:
            return text
        return "" if marks.left_open_in(text) else marks.answer_in(text)

    def go_on(self) -> Generation:
        """More of the latest answer, which was cut or stopped."""
        messages, most = self.session.messages, self.max_tokens
        return self.session.generate(messages=messages, max_tokens=most, sampling=self.sampling)

    def switch(self, model: str) -> None:
        """Switch to another model, which reads the conversation from the start.

        If memory cannot hold both models, the old model is closed first, and reloaded if the new one fails to load.
        Raises EdgespecError; the old model then continues, or ``session`` is closed if reloading failed too.
        """
        system, turns = self.session.system, self.turns()
        try:
            self._take(model, system, turns)
        except MemoryLimitError:
            self._free()
            try:
                self._take(model, system, turns)
            except BaseException:
                self._before_reload()
                self._take(self._model, system, turns)
                raise

    def restore(self, path: Path) -> None:
        """Continue a saved session instead of this one.

        If memory cannot hold the caches of both, this session's is freed first, and the conversation is read again if
        the file then turns out to be no use. Raises EdgespecError; this conversation then continues.
        """
        system, turns = self.session.system, self._messages()
        try:
            session = self.engine.restore(path, think=self.think)
        except MemoryLimitError:
            self.session.close()
            try:
                session = self.engine.restore(path, think=self.think)
            except BaseException:
                self.session = self.engine.session(system=system, messages=turns, think=self.think)
                raise
        before, self.session = self.session, session
        self.asked = self.last = None
        before.close()

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

    def turns(self) -> list[dict[str, str]]:
        """The conversation without its thinking, whose marks differ between models."""
        marks = self.engine.pair.prompts.thinking
        told = [(each["role"], each["content"]) for each in self._messages()]
        # A user's own text may have the marks: only an answer begins with thinking.
        said = [
            (role, marks.answer_in(text) or text if marks and role == "assistant" else text) for role, text in told
        ]
        return [{"role": role, "content": text} for role, text in said]

    def _messages(self) -> list[dict[str, str]]:
        return [message for message in self.session.messages if message["role"] != "system"]

    def _free(self) -> None:
        self.session.close()
        self.engine.close()

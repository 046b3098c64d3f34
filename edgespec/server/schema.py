"""Requests as data. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from edgespec.server.errors import ApiError
from edgespec.server.forms import AskedForm
from edgespec.server.messages import Message, left_out_parts
from edgespec.text.conversation.hole import Hole
from edgespec.text.conversation.messages import begun

Prompt: TypeAlias = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, checked. ``prompt`` is set for a completion, ``messages`` for a chat.

    A prompt is a text or tokens; ``further`` ones are answered too, ``choices`` each.

    ``suffix`` is the text after a hole that the answer fills, ``files`` are other files' names and texts. Such an
    answer ends before a line with fewer than ``indent`` blanks, and ``line_ms`` after its first token behind a line.
    With ``heal`` an end of the prompt that may begin a longer token is spelled again.
    ``max_tokens`` 0: the prompt is read for later. ``reply_fields``: what of the reply is sent; None: all.
    ``sampling`` has the fields that were given: arguments of Sampling. ``usual_last_n`` is its ``repeat_last_n``
    where neither the request nor the file states one. ``seed`` None: one is drawn. ``logprobs``: how many of the
    likeliest tokens come with each log-probability; None: no log-probabilities. ``show_tokens``: a stream says who
    guessed its tokens. ``show_progress``: a stream says how much of the prompt is read. The session
    checks ``tools`` and ``tool_choice``, whose texts are readable. ``namespaces`` has the namespace and the own name
    of a function, by the name that the model knows. ``warnings`` say what the reader left out. ``repeated`` is what a
    reply repeats of the request, as JSON. ``hide_thinking``: the reply leaves the thinking out. ``keep_alive_s``: for
    how long the model stays loaded after the answer; infinite: always; None: as before. ``store``: later requests may
    name the answer's items.
    """

    model: str | None = None
    messages: tuple[Message, ...] = ()
    prompt: Prompt | None = None
    further: tuple[Prompt, ...] = ()
    suffix: str | None = None
    files: tuple[tuple[str, str], ...] = ()
    indent: int = 0
    line_ms: int | None = None
    heal: bool = True
    reply_fields: tuple[str, ...] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    usual_last_n: int | None = None
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int | None = None
    max_tokens: int | None = None
    form: AskedForm | None = None
    choices: int = 1
    stream: bool = False
    include_usage: bool = False
    show_tokens: bool = False
    show_progress: bool = False
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    logprobs: int | None = None
    tools: tuple[Any, ...] = ()
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    echo: bool = False
    keep_alive_s: float | None = None
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    repeated: Mapping[str, bytes] = field(default_factory=dict, compare=False)
    hide_thinking: bool = False
    store: bool = True

    @property
    def is_chat(self) -> bool:
        return self.prompt is None

    @property
    def wants_answer(self) -> bool:
        """Whether there is something to answer; other requests load or free the model."""
        return self.prompt is not None or bool(self.messages)

    @property
    def answers(self) -> int:
        """How many answers: ``choices`` to each prompt."""
        return self.choices * (1 + len(self.further))

    def of(self, index: int) -> Request:
        """The request for the answer ``index`` alone. The answers to one prompt follow each other."""
        if not self.further:
            return self
        prompt = (self.prompt, *self.further)[index // self.choices]
        return replace(self, prompt=prompt, further=(), choices=1)

    @property
    def hole(self) -> Hole | None:
        """What is around the hole that the answer fills; None for other requests."""
        if self.suffix is None or not isinstance(self.prompt, str):
            return None
        return Hole(self.prompt, self.suffix, self.files)


def request_of(found: dict[str, Any]) -> Request:
    """A Request of what the fields of a body set. Raises ApiError."""
    continues = begun(found.get("messages", ())) is not None
    for name, is_so in (("continue_final_message", continues), ("add_generation_prompt", not continues)):
        if found.pop(name, is_so) != is_so:
            last = "the assistant's, which is continued" if continues else "not the assistant's"
            raise ApiError(f"{name} can only be {json.dumps(is_so)} here: the last message is {last}", param=name)
    if found.get("max_tokens") == -1:  # no limit, as in llama.cpp
        del found["max_tokens"]
    found["warnings"] = (*found.get("warnings", ()), *left_out_parts(found.get("messages", ())))
    own = found.get("form")
    if own is not None and own.form.kind == "schema" and found.get("tool_choice") not in (None, "auto", "none"):
        del found["form"]  # it is that of a text, and the answer is a call
    return Request(**found)

"""A model's chat template: compiled at its first use, and tried before messages are rendered."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from edgespec.errors import TemplateError
from edgespec.text.chat_template.budget import TemplateLimits
from edgespec.text.chat_template.template import ChatTemplate
from edgespec.text.conversation.shapes import TRIAL_TOOL, Shapes
from edgespec.text.conversation.tools import Message
from edgespec.text.request_budget import RequestBudget

# Trials count steps alone: a busy machine must not change what they find.
_TRIAL = TemplateLimits(steps=100_000, deadline_s=math.inf)
# What templates get where a request has none, as in transformers.
_ABSENT: Mapping[str, Any] = {"tools": None, "documents": None}


class ModelTemplate:
    """One chat template of a model."""

    def __init__(self, source: str, tokens: Callable[[], tuple[str, str]]) -> None:
        """``tokens`` gives the texts of the begin- and end-of-sequence tokens."""
        self.source = source
        self._tokens = tokens
        self._shapes = dict[bool, Shapes]()

    def render(
        self,
        values: Mapping[str, Any],
        budget: RequestBudget | None = None,
        limits: TemplateLimits | None = None,
    ) -> str:
        """The prompt text; ``values`` are ``messages``, and whatever else the template may read.

        Raises TemplateError, and what ``budget`` raises.
        """
        given = {**(_ABSENT if self._takes_none else {}), **values}
        return self._compiled.render(given.pop("messages"), extra=given, budget=budget, limits=limits)

    def shaped(self, messages: Sequence[Message], *, tools: bool) -> list[Message]:
        """The messages as this template can show them, next to tools or without. Raises TemplateError."""
        if tools not in self._shapes:
            more = {"tools": [TRIAL_TOOL]} if tools else {}
            self._shapes[tools] = Shapes(lambda own: self.render({"messages": own, **more}, limits=_TRIAL))
        return self._shapes[tools].shaped(messages)

    def reads(self, variable: str) -> bool:
        """Whether the template reads that variable. Raises TemplateError."""
        return variable in self._compiled.reads

    @cached_property
    def _compiled(self) -> ChatTemplate:
        bos, eos = self._tokens()
        return ChatTemplate(self.source, bos_token=bos, eos_token=eos)

    @cached_property
    def _takes_none(self) -> bool:
        """Whether tools and documents may be None; templates that are for tools alone walk through them."""
        asked = [{"role": "user", "content": "a"}]
        try:
            self._compiled.render(asked, extra=_ABSENT, limits=_TRIAL)
        except TemplateError:
            try:
                self._compiled.render(asked, limits=_TRIAL)
            except TemplateError:
                return True
            return False
        return True

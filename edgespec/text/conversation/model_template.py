"""A model's chat templates: chosen by what a request has, compiled once, and tried before messages are rendered."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from edgespec.errors import TemplateError
from edgespec.text.chat_template.budget import TemplateLimits
from edgespec.text.chat_template.template import ABSENT, ChatTemplate
from edgespec.text.conversation.call_formats import call_format
from edgespec.text.conversation.shapes import TRIAL_TOOL, Shapes
from edgespec.text.conversation.tool_use import shows_tools
from edgespec.text.conversation.tools import Message
from edgespec.text.conversation.variables import DOCUMENTS
from edgespec.text.request_budget import RequestBudget

# Trials count steps alone: a busy machine must not change what they find. Real templates take up to 8 000.
_TRIAL = TemplateLimits(steps=30_000, deadline_s=math.inf)


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
        given, absent = dict(values), ABSENT if self._takes_none else {}
        return self._compiled.render(given.pop("messages"), extra=given, budget=budget, limits=limits, absent=absent)

    def shaped(self, messages: Sequence[Message], *, tools: bool) -> list[Message]:
        """The messages as this template can show them, next to tools or without. Raises TemplateError."""
        if tools not in self._shapes:
            more = {"tools": [TRIAL_TOOL]} if tools else {}
            self._shapes[tools] = Shapes(lambda own: self.render({"messages": own, **more}, limits=_TRIAL))
        return self._shapes[tools].shaped(messages)

    def reads(self, variable: str) -> bool:
        """Whether the template reads that variable. Raises TemplateError."""
        return variable in self._compiled.reads

    @property
    def takes_tools(self) -> bool:
        """Whether the template shows tools, and the format of its calls is known."""
        return call_format(self.source) is not None and shows_tools(self.source)

    @property
    def shows_calls(self) -> bool:
        """Whether the template shows calls and their results."""
        return "tool_calls" in self.source

    @cached_property
    def _compiled(self) -> ChatTemplate:
        bos, eos = self._tokens()
        return ChatTemplate(self.source, bos_token=bos, eos_token=eos)

    @cached_property
    def _takes_none(self) -> bool:
        """Whether tools and documents may be None; templates that are for tools alone walk through them."""
        asked = [{"role": "user", "content": "a"}]
        try:
            self._compiled.render(asked, limits=_TRIAL)
        except TemplateError:
            try:
                self._compiled.render(asked, limits=_TRIAL, absent={})
            except TemplateError:
                return True
            return False
        return True


class ModelTemplates:
    """A model's ``default`` template, and the further ones that its file names for tools and documents."""

    def __init__(self, default: str | None, named: Mapping[str, str], tokens: Callable[[], tuple[str, str]]) -> None:
        self.default = None if default is None else ModelTemplate(default, tokens)
        self._named = {name: ModelTemplate(source, tokens) for name, source in named.items()}

    def chosen(self, *, tools: bool = False, calls: bool = False, documents: bool = False) -> ModelTemplate | None:
        """The template for a request with tools, with earlier calls, or with documents.

        It is the default one if that can show them, but with tools ``tool_use`` comes first, as in transformers.
        Raises TemplateError.
        """
        if not (self._named and (tools or calls or documents)):
            return self.default
        first = [self._named[name] for name in ("tool_use",) if tools and name in self._named]
        order = [*first, *filter(None, [self.default]), *self._named.values()]
        able = [
            each for each in order if (not tools or each.takes_tools) and (not calls or tools or each.shows_calls)
        ]
        reading = [each for each in able if documents and each.reads(DOCUMENTS)]
        return next(iter([*reading, *able]), self.default)

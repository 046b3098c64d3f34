"""A model's chat templates: chosen by what a request has, compiled once, and tried before messages are rendered."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from edgespec.errors import TemplateError
from edgespec.text.chat_template.budget import TemplateLimits
from edgespec.text.chat_template.origin import joined
from edgespec.text.chat_template.template import ABSENT, ChatTemplate
from edgespec.text.conversation.call_formats import call_format
from edgespec.text.conversation.shapes import TRIAL_TOOL, Shapes
from edgespec.text.conversation.tools import Message
from edgespec.text.conversation.variables import DOCUMENTS
from edgespec.text.request_budget import RequestBudget

# Trials count steps alone: a busy machine must not change what they find. Real templates take up to 8 000.
_TRIAL = TemplateLimits(steps=30_000, deadline_s=math.inf)


# The names of a request's tools: SmolLM3's template calls them its own way.
_TOOLS = ("tools", "xml_tools")
# Stands for a content in a rendering: no template writes it.
_LAST = "kestrel"


def _texts(value: Any) -> Iterator[str]:
    """All texts inside a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield str(name)
            yield from _texts(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _texts(inner)


class ModelTemplate:
    """One chat template of a model."""

    def __init__(self, source: str, tokens: Callable[[], Mapping[str, str]]) -> None:
        """``tokens`` gives the texts of tokens by their names in templates."""
        self.source = source
        self._tokens = tokens
        self._shapes = dict[bool, Shapes]()

    def render(
        self,
        values: Mapping[str, Any],
        budget: RequestBudget | None = None,
        limits: TemplateLimits | None = None,
        *,
        begins_answer: bool = True,
    ) -> str:
        """The prompt text; ``values`` are ``messages``, and whatever else the template may read.

        With ``begins_answer`` it ends where an answer begins. Raises TemplateError, and what ``budget`` raises.
        """
        given, absent = dict(values), ABSENT if self._takes_none else {}
        if "tools" in given:
            given |= {name: given["tools"] for name in _TOOLS if not given.get(name) and self.reads(name)}
        return self._compiled.render(
            given.pop("messages"),
            add_generation_prompt=begins_answer,
            extra=given,
            budget=budget,
            limits=limits,
            absent=absent,
        )

    def continued(self, values: Mapping[str, Any], budget: RequestBudget | None = None) -> str | None:
        """The prompt text up to the end of the last message's content, which the answer continues.

        A word that no message has stands for the content, so that nothing of the content is trimmed or changed. None
        if the template does not show the last message once. Raises what ``render`` raises.
        """
        *earlier, last = values["messages"]
        word = _LAST
        while any(word in text for text in _texts(values)):
            word += _LAST
        content: str | list[Message] = last["content"]
        begun = content if isinstance(content, str) else content[0]["text"]
        hidden = word if isinstance(content, str) else [{**content[0], "text": word}]
        shown = {**values, "messages": [*earlier, {**last, "content": hidden}]}
        parts = self.render(shown, budget, begins_answer=False).split(word)
        return joined([parts[0], begun]) if len(parts) == 2 else None

    def shaped(self, messages: Sequence[Message], *, tools: bool) -> list[Message]:
        """The messages as this template can show them, next to tools or without. Raises TemplateError."""
        return self._shapes_for(tools).shaped(messages)

    def ignores_messages(self, *, tools: bool) -> bool:
        """Whether the template writes the same for any message, unless another variable is set."""
        return self._shapes_for(tools).ignores

    def _shapes_for(self, tools: bool) -> Shapes:
        if tools not in self._shapes:
            more = {"tools": [TRIAL_TOOL]} if tools else {}
            self._shapes[tools] = Shapes(lambda own: self.render({"messages": own, **more}, limits=_TRIAL))
        return self._shapes[tools]

    def reads(self, variable: str) -> bool:
        """Whether the template reads that variable. Raises TemplateError."""
        return variable in self._compiled.reads

    @property
    def shows_tools(self) -> bool:
        """Whether the template reads tools. Raises TemplateError."""
        return any(map(self.reads, _TOOLS))

    @property
    def takes_tools(self) -> bool:
        """Whether the template shows tools, and the format of its calls is known. One that is refused shows none."""
        with suppress(TemplateError):
            return call_format(self.source) is not None and self.shows_tools
        return False

    @property
    def shows_calls(self) -> bool:
        """Whether the template shows calls and their results."""
        return "tool_calls" in self.source

    @cached_property
    def _compiled(self) -> ChatTemplate:
        return ChatTemplate(self.source, tokens=self._tokens())

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

    def __init__(
        self, default: str | None, named: Mapping[str, str], tokens: Callable[[], Mapping[str, str]]
    ) -> None:
        self.default = None if default is None else ModelTemplate(default, tokens)
        self._named = {name: ModelTemplate(source, tokens) for name, source in named.items()}

    def chosen(self, *, tools: bool = False, calls: bool = False, documents: bool = False) -> ModelTemplate | None:
        """The template for a request with tools, with earlier calls, or with documents.

        It is the default one if that can show them, but with tools ``tool_use`` comes first, as in transformers.
        Raises TemplateError with documents.
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

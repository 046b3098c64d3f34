"""The events of an answer whose calls are apart from its text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from edgespec.engine.events import Done, Event, Text
from edgespec.text.conversation.thinking import ThinkingText
from edgespec.text.conversation.tool_use import CallParts, ToolUse


class CallEvents:
    """Turns the events of an answer into events whose texts leave calls out."""

    def __init__(self, use: ToolUse, thinking: ThinkingText | None) -> None:
        self._parts = CallParts(use, thinking)

    def shaped(self, event: Event) -> list[Event]:
        """The events that replace one event."""
        if isinstance(event, Done):
            return [*(Text(part) if isinstance(part, str) else part for part in self._parts.rest()), event]
        if not isinstance(event, Text):
            return [event]
        parts = self._parts.parts(event.text)
        first = parts.pop(0) if parts and isinstance(parts[0], str) else ""
        assert isinstance(first, str)
        own = replace(event, text=first, lengths=())
        return [own, *(Text(part) if isinstance(part, str) else part for part in parts)]


def shaping(use: ToolUse | None, thinking: ThinkingText | None) -> Callable[[Event], list[Event]]:
    """What turns each event of an answer into the events that its reader gets."""
    return (lambda event: [event]) if use is None else CallEvents(use, thinking).shaped

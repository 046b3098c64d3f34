"""Long pastes in the prompt's editor: a marker stands for the text, which is sent whole."""

from __future__ import annotations

# More would fill half of a terminal of 80x24; a person reads it in the editor they copied it from.
MOST_LINES = 12
MOST_CHARACTERS = 1000


class Pastes:
    """The texts that markers stand for, for example ``[190 lines pasted]``."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._lines: dict[str, str] = {}  # what the editor showed of prompts that were sent

    def shown(self, text: str) -> str:
        """What the editor shows for a text: the text itself, or the marker of a long one."""
        lines = text.count("\n") + 1
        if lines <= MOST_LINES and len(text) <= MOST_CHARACTERS:
            return text
        size = f"{lines} lines" if lines > MOST_LINES else f"{len(text)} characters"
        number, marker = 1, f"[{size} pasted]"
        while self._texts.setdefault(marker, text) != text:  # another text of this size
            number += 1
            marker = f"[{size} pasted, {number}]"
        return marker

    def sent(self, shown: str) -> str:
        """``whole``, for a prompt that is sent."""
        whole = self.whole(shown)
        self._lines[whole] = shown
        return whole

    def line(self, prompt: str) -> str:
        """What the editor shows of a prompt that comes back: the line that was sent, else as ``shown``."""
        return self._lines.get(prompt) or self.shown(prompt)

    def whole(self, shown: str) -> str:
        """The prompt that the editor shows, with its texts in place of their markers."""
        for marker, text in self._texts.items():
            if marker in shown:
                return text.join(self.whole(part) for part in shown.split(marker))
        return shown

    def ends_with(self, shown: str) -> str | None:
        """The marker that is the end of ``shown``; None if there is none."""
        return next((marker for marker in self._texts if shown.endswith(marker)), None)

"""What an answer may consist of: cursors over its tokens, for the target and for its drafters.

A mask depends on the form and on the answer's tokens alone, and a draw on scores, noise and mask. So an answer that
is bound to a form has the same text with any guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edgespec.interfaces.drawing import UintArray


class Cursor(Protocol):
    """A place in the texts of a form. A cursor belongs to one thread at a time."""

    def at(self, tokens: Sequence[int]) -> None:
        """Go behind these tokens of the answer. Raises ConstraintError if the form does not allow them."""

    def allows(self, tokens: Sequence[int]) -> int:
        """How many of the tokens may follow here, in their order."""

    @property
    def mask(self) -> UintArray | None:
        """The tokens that may follow here, as in DrawRequest; None: all. Raises ConstraintError."""

    @property
    def forced(self) -> Sequence[int]:
        """The tokens of the only text that can follow here, as far as there is one. They are likely, not certain."""


class Constraint(Protocol):
    """The form of an answer."""

    def cursor(self) -> Cursor:
        """A new cursor, before the first token."""


class Healing(Protocol):
    """The end of a prompt that was taken back: the first tokens behind the rest spell its bytes again.

    Only the target draws them, before any round, so that drafters change nothing there.
    """

    def mask(self, spelled: int) -> UintArray | None:
        """The tokens that may follow ``spelled`` bytes, as in DrawRequest; None behind all of them: any token."""

    def spelled(self, before: int, token: int) -> tuple[int, int]:
        """How many bytes are spelled once ``token`` follows ``before`` bytes, and how many it has beyond the last."""


class Bound:
    """The cursors of one answer, which begins behind ``prompt_tokens`` tokens of its context."""

    def __init__(self, constraint: Constraint, prompt_tokens: int) -> None:
        self._begins = prompt_tokens
        self._of_target, self._of_drafts = constraint.cursor(), constraint.cursor()

    def target(self, context: Sequence[int]) -> Cursor:
        """The target's cursor behind ``context``. Raises ConstraintError."""
        self._of_target.at(context[self._begins :])
        return self._of_target

    def drafts(self, context: Sequence[int]) -> Cursor | None:
        """The drafters' cursor behind ``context``, which may differ from the target's; None within the prompt.

        Raises ConstraintError.
        """
        if len(context) < self._begins:
            return None
        self._of_drafts.at(context[self._begins :])
        return self._of_drafts

"""A prompt's text to tokens: only names that the template itself wrote become control tokens.

A user who pastes ``<|im_end|>`` asks about the token, or forges a turn: in a message a control token's name is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from edgespec.errors import InvalidRequestError
from edgespec.text.chat_template.origin import OWN, SAID, origins_of
from edgespec.text.request_budget import RequestBudget
from edgespec.text.tokenizers.tokenizer import ControlToken, Tokenizer

# The characters that llama.cpp strips next to a token with a strip flag.
_BLANKS = " \t\n\v\f\r"

# Text with more characters a token is rare, and its tokens are counted in windows first.
_USUAL_CHARACTERS = 8
# Tokenised in a tenth of a second, whatever it is.
_WINDOW = 2**15

Messages = Sequence[Mapping[str, Any]]


def is_far_longer(tokenizer: Tokenizer, text: str, budget: RequestBudget) -> bool:
    """Whether a text has far more tokens than the budget's context. Not all of it is tokenised for that.

    Windows of a text have a few tokens more than the text, so half as many again are allowed.
    """
    most = budget.context_length
    if most is None or len(text) <= _USUAL_CHARACTERS * most:
        return False
    tokens = 0
    for begin in range(0, len(text), _WINDOW):
        window = text[begin : begin + _WINDOW]
        budget.read(len(window))
        tokens += len(tokenizer.encode(window))
        if 2 * tokens > 3 * most:
            return True
    return False


def encode(
    tokenizer: Tokenizer, text: str, *, add_bos: bool = False, budget: RequestBudget | None = None
) -> list[int]:
    """Tokens of a rendering, or of ``written`` text. Plain text has no control tokens.

    Raises InvalidRequestError if the tokenizer makes a control token of ordinary text, and what ``budget`` raises.
    """
    budget = budget or RequestBudget()
    budget.read(len(text))
    origins, plain = origins_of(text), str.__str__(text)
    if SAID not in origins:
        return tokenizer.encode(plain, special=True, add_bos=add_bos)
    made = tokenizer.encode("", add_bos=add_bos)[:1]  # llama.cpp may add an end-of-sequence token as well
    begin, before = 0, None
    for at, token, control in _written_controls(tokenizer, plain, origins):
        budget.check()
        made += _piece(tokenizer, plain[begin:at], before, control)
        made.append(token)
        begin, before = at + len(control.text), control
    return made + _piece(tokenizer, plain[begin:], before, None)


def _written_controls(tokenizer: Tokenizer, text: str, origins: str) -> Iterator[tuple[int, int, ControlToken]]:
    """Where a control token's name begins that the template itself wrote, and the token."""

    @cache  # a template writes the same few texts around every message
    def controls(own: str) -> list[tuple[int, ControlToken]]:
        ids = tokenizer.encode(own, special=True)
        return [(token, control) for token in ids if (control := _control(tokenizer, token)) is not None]

    for run in re.finditer(f"{OWN}+", origins):
        begin, end = run.span()
        for token, control in controls(text[begin:end]):
            at = text.find(control.text, begin, end)
            if at >= 0:  # a token for unknown text is a control token too, and is not spelled
                yield at, token, control
                begin = at + len(control.text)


def _control(tokenizer: Tokenizer, token: int) -> ControlToken | None:
    return tokenizer.control_token(token) or tokenizer.marks.get(token)


def _piece(tokenizer: Tokenizer, text: str, before: ControlToken | None, after: ControlToken | None) -> list[int]:
    """Tokens of text between two control tokens."""
    if before is not None and before.strips_right:
        text = text.lstrip(_BLANKS)
    if after is not None and after.strips_left:
        text = text.rstrip(_BLANKS)
    # The tokenizer makes a mark of any text that spells one, but not of its first character and the rest apart.
    inside = "|".join(
        f"(?<={re.escape(own.text[0])})(?={re.escape(own.text[1:])})" for own in tokenizer.marks.values()
    )
    parts = re.split(inside, text) if inside else [text]
    known = {part: tokenizer.encode(part) for part in set(parts) if part}  # a message may repeat a mark
    ids = [token for part in parts for token in known.get(part, ())]
    if any(control.text in text for token in set(ids) if (control := _control(tokenizer, token)) is not None):
        raise InvalidRequestError(
            "a message spells out a control token of this model, and this model cannot read it as text",
            hint="write it differently, for example with a space inside",
        )
    return ids


def first_that_fits(positions: Sequence[int], fits: Callable[[int], bool]) -> int:
    """The first of the ascending ``positions`` that ``fits``, as all later ones do. The last is not looked at.

    Looks at late positions first: what begins at an early one may be far longer.
    """
    high, step = len(positions) - 1, 1
    while (low := high - step) >= 0 and fits(positions[low]):
        high, step = low, 2 * step
    low = max(low, -1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(positions[middle]) else (middle, high)
    return positions[high]

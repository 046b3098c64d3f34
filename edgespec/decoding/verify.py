"""Verification: which proposed tokens are accepted, and what follows them. Pure functions on numbers.

Target tokens, probabilities and uniform numbers are arguments, without model, clock or random generator, so that a
test can enumerate them. The functions never divide by a draft probability, and a NaN fails every comparison. Floats
and ``fractions.Fraction`` work the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True, slots=True)
class Verdict:
    """``accepted`` leading draft tokens are accepted, and ``next_token`` follows them.

    ``kind`` is ``correction`` after a rejection and ``bonus`` if every draft token was accepted. It is ``open``,
    without a ``next_token``, if the target has not scored the next position, or no token can be chosen there.
    ``evaluated`` draft tokens were compared: the accepted ones and the rejected one.
    """

    accepted: int
    next_token: int | None
    kind: Literal["correction", "bonus", "open"]

    @property
    def following(self) -> tuple[int, ...]:
        """The next token, if there is one."""
        return () if self.next_token is None else (self.next_token,)

    @property
    def evaluated(self) -> int:
        return self.accepted + (self.kind == "correction")


def verify_matching(
    draft_tokens: Sequence[int], target_token: Callable[[int], int], *, bonus: bool = True
) -> Verdict:
    """Accept draft tokens while they equal the target's own choice.

    ``target_token(i)`` is what the target emits after ``draft_tokens[:i]``; it is called in order and never past the
    first difference, nor without ``bonus`` past the last draft token. If target choices depend only on position,
    seed and the target's distribution, the emitted text is plain decoding's for any proposal (drafter-invariant
    speculative decoding: Daliri, Musco, Suresh, 2024). Greedy decoding is the special case of the argmax.
    """
    for index, draft_token in enumerate(draft_tokens):
        token = target_token(index)
        if token != draft_token:
            return Verdict(index, token, "correction")
    if not bonus:
        return Verdict(len(draft_tokens), None, "open")
    return Verdict(len(draft_tokens), target_token(len(draft_tokens)), "bonus")


def accepts(uniform: Any, draft_prob: Any, target_prob: Any) -> bool:
    """Whether a token drawn with ``draft_prob`` is accepted, given a uniform number in [0, 1).

    True with probability min(1, target_prob / draft_prob) (Leviathan, Kalman, Matias, 2023). False for a NaN
    anywhere and for a draft probability outside (0, 1], which no honest proposal has.
    """
    return bool(0 < draft_prob <= 1 and uniform * draft_prob < target_prob)


def residual(target_probs: Any, draft_probs: Any) -> Any:
    """The distribution of the correction: norm(max(target - draft, 0)), same shape and dtype.

    If nothing remains, the target's own distribution is returned; the distributions are then equal, so only rounding
    can cause a rejection.
    """
    left = np.maximum(target_probs - draft_probs, 0)
    total = left.sum()
    return left / total if total > 0 else target_probs


def verify_rejection(
    draft_tokens: Sequence[int],
    draft_probs: Sequence[Any],
    target_probs: Callable[[int], Any],
    uniforms: Sequence[Any],
    draw: Callable[[Any, int], int],
    *,
    bonus: bool = True,
) -> Verdict:
    """Speculative sampling's rejection rule: the emitted tokens follow the target's distribution.

    ``draft_probs[i]`` is the full-vocabulary distribution that draft token i was drawn from, or None if it was
    not drawn at random (then it counts as having probability one). ``target_probs(i)`` is the target's
    distribution after ``draft_tokens[:i]``; ``uniforms[i]`` in [0, 1) is independent of everything drawn so far;
    ``draw(probs, i)`` draws a token for position i from fresh noise. Without ``bonus``, and with all draft tokens
    accepted, nothing is drawn and ``target_probs`` is not called past the last one. Source: Leviathan, Kalman,
    Matias (2023).
    """
    for index, token in enumerate(draft_tokens):
        target = target_probs(index)
        draft = draft_probs[index]
        if draft is None:
            draft = np.zeros_like(target)
            draft[token] = 1
        if not accepts(uniforms[index], draft[token], target[token]):
            return Verdict(index, draw(residual(target, draft), index), "correction")
    last = len(draft_tokens)
    if not bonus:
        return Verdict(last, None, "open")
    return Verdict(last, draw(target_probs(last), last), "bonus")


@dataclass(frozen=True, slots=True)
class TreeVerdict:
    """The draft tokens with the indices of ``path`` are accepted, each below the previous; ``next_token`` follows.

    ``kind`` is ``bonus`` if the path ends at a leaf of the tree, else ``correction``. It is ``open``, without a
    ``next_token``, if no token can be chosen there.
    """

    path: tuple[int, ...]
    next_token: int | None
    kind: Literal["correction", "bonus", "open"]


def verify_tree(
    draft_tokens: Sequence[int], parents: Sequence[int], target_token: Callable[[int], int]
) -> TreeVerdict:
    """Walk down a tree of draft tokens, always to the child that is the target's own choice, until no child is.

    ``parents[i]`` is the index of the token above token i, smaller than i, or -1. ``target_token(i)`` is what the
    target emits after the path to token i (-1: before the tree); it is called once for each token of the path, in
    order. Of children with the same token the first one counts.

    The text is what ``target_token`` returns along the path, for any tree. If choices depend only on position, seed
    and the target's distribution, it is plain decoding's text. Under the rejection rule the target draws from its own
    distribution, with noise independent of the tree, so the text follows that distribution. For tokens not drawn at
    random, drawing and comparing equals accepting each with the target's probability and correcting from the
    residual, for any number of children (SpecInfer: Miao et al., 2024).
    """
    below: dict[int, dict[int, int]] = {}
    for index, (token, parent) in enumerate(zip(draft_tokens, parents, strict=True)):
        below.setdefault(parent, {}).setdefault(int(token), index)
    path: list[int] = []
    while True:
        here = path[-1] if path else -1
        children = below.get(here, {})
        token = target_token(here)
        if token not in children:
            return TreeVerdict(tuple(path), token, "correction" if children else "bonus")
        path.append(children[token])

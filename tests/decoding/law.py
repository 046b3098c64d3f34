"""The distribution of what verification emits, computed exactly, and the checks that verification must pass.

Probabilities are ``Fraction``s in numpy object arrays. Each function takes the module under test, so that the
mutation tests can pass a broken one. A failed check raises AssertionError.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

Law = dict[tuple[int, ...], Fraction]
Conditional = Callable[[tuple[int, ...]], list[Fraction]]
"""The distribution of the token that follows a prefix."""

HALF = Fraction(1, 2)
NAN = float("nan")


def normalised(weights: Sequence[int]) -> list[Fraction]:
    return [Fraction(weight, sum(weights)) for weight in weights]


def top_k(probs: Sequence[Fraction], count: int) -> list[Fraction]:
    """The ``count`` likeliest, ties by lowest id, renormalised."""
    kept = sorted(range(len(probs)), key=lambda i: (-probs[i], i))[:count]
    total = sum((probs[i] for i in kept), Fraction(0))
    return [probs[i] / total if i in kept else Fraction(0) for i in range(len(probs))]


def top_p(probs: Sequence[Fraction], mass: Fraction) -> list[Fraction]:
    """The smallest set of likeliest ids that holds ``mass``, renormalised."""
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    count = next(n for n in range(1, len(order) + 1) if sum((probs[i] for i in order[:n]), Fraction(0)) >= mass)
    return top_k(probs, count)


def as_array(probs: Sequence[Fraction]) -> np.ndarray:
    array = np.empty(len(probs), dtype=object)
    array[:] = probs
    return array


def plain_law(target: Conditional, length: int, prefix: tuple[int, ...] = ()) -> Law:
    """The distribution of ``length`` tokens of plain decoding, including those of ``prefix``."""
    law: Law = {prefix: Fraction(1)}
    for _ in range(length - len(prefix)):
        law = {
            (*tokens, token): mass * prob
            for tokens, mass in law.items()
            for token, prob in enumerate(target(tokens))
            if prob > 0
        }
    return law


def round_law(
    verify: Any,
    chain: tuple[int, ...],
    draft_probs: Sequence[Sequence[Fraction] | None],
    target: Conditional,
    uniforms: Sequence[Fraction],
) -> tuple[int, Law]:
    """Accepted tokens and distribution of what one round emits, given its chain and its uniform numbers."""
    drawn: list[tuple[list[Fraction], int]] = []
    token_to_come = -7

    def draw(probs: Any, index: int) -> int:
        drawn.append((list(probs), index))
        return token_to_come

    verdict = verify.verify_rejection(
        chain,
        [None if probs is None else as_array(probs) for probs in draft_probs],
        lambda index: as_array(target(chain[:index])),
        uniforms,
        draw,
    )
    assert len(drawn) == 1, "exactly one token is drawn"
    probs, index = drawn[0]
    assert verdict.next_token == token_to_come
    assert index == verdict.accepted, "the noise of the place where the token goes"
    assert 0 <= verdict.accepted <= len(chain)
    rejected = verdict.accepted < len(chain)
    assert verdict.kind == ("correction" if rejected else "bonus")
    assert verdict.evaluated == verdict.accepted + rejected
    assert sum(probs) == 1, "what is drawn from is a distribution"
    assert all(prob >= 0 for prob in probs)
    kept = chain[: verdict.accepted]
    return verdict.accepted, {(*kept, token): prob for token, prob in enumerate(probs) if prob > 0}


def cells(draft_prob: Fraction, target_prob: Fraction, *, grid: bool) -> list[tuple[Fraction, Fraction]]:
    """(midpoint, length) of intervals of [0, 1) on which the acceptance test cannot change.

    With ``grid`` a fine equal grid on which the thresholds of wrong tests (target over draft, draft over target,
    either alone) are grid points as well; otherwise the two sides of the right threshold.
    """
    ratios = {Fraction(0), Fraction(1), target_prob, draft_prob}
    if draft_prob > 0:
        ratios.add(target_prob / draft_prob)
    if target_prob > 0:
        ratios.add(draft_prob / target_prob)
    borders = sorted(border for border in ratios if 0 <= border <= 1)
    if grid:
        size = math.lcm(*(border.denominator for border in borders))
        borders = [Fraction(step, size) for step in range(size + 1)]
    return [((low + high) / 2, high - low) for low, high in itertools.pairwise(borders)]


def speculative_law(
    verify: Any, target: Conditional, draft: Conditional | None, chain_of: Any, depth: int, *, grid: bool = False
) -> tuple[Law, Fraction]:
    """The joint distribution of depth + 1 tokens (one round, then plain decoding), and the expected number accepted.

    Chains are drawn from ``draft``; if ``draft`` is None, the single chain ``chain_of`` is proposed without drawing.
    """
    vocabulary = range(len(target(())))
    chains: Iterable[tuple[int, ...]]
    chains = [tuple(chain_of)] if draft is None else itertools.product(vocabulary, repeat=depth)
    law: Law = defaultdict(Fraction)
    expected = Fraction(0)
    for chain in chains:
        own = [None if draft is None else draft(chain[:i]) for i in range(depth)]
        probs = [Fraction(1) if own_probs is None else own_probs[chain[i]] for i, own_probs in enumerate(own)]
        weight = math.prod(probs, start=Fraction(1))
        if weight == 0:
            continue
        places = [cells(probs[i], target(chain[:i])[chain[i]], grid=grid) for i in range(depth)]
        for choice in itertools.product(*places):
            share = math.prod((length for _, length in choice), start=weight)
            accepted, emitted = round_law(verify, chain, own, target, [middle for middle, _ in choice])
            expected += share * accepted
            for tokens, mass in emitted.items():
                for full, rest in plain_law(target, depth + 1, tokens).items():
                    law[full] += share * mass * rest
    return dict(law), expected


def check_one_step(verify: Any, target: Sequence[Fraction], draft: Sequence[Fraction]) -> None:
    """One draft token: the distribution is the target's, and acceptance is the highest possible (sum of minima)."""
    law, accepted = speculative_law(verify, lambda _: list(target), lambda _: list(draft), None, 1, grid=True)
    assert law == plain_law(lambda _: list(target), 2)
    assert accepted == sum(min(t, d) for t, d in zip(target, draft, strict=True))


def check_chain(verify: Any, target: Conditional, draft: Conditional, depth: int) -> None:
    """``depth`` drawn tokens with targets that depend on the earlier tokens."""
    law, _ = speculative_law(verify, target, draft, None, depth)
    assert law == plain_law(target, depth + 1)


def check_copied(verify: Any, target: Conditional, chain: Sequence[int]) -> None:
    """A chain that was not drawn at random: each token is accepted with the target's probability of it."""
    law, accepted = speculative_law(verify, target, None, chain, len(chain))
    assert law == plain_law(target, len(chain) + 1)
    reach = Fraction(1)
    wanted = Fraction(0)
    for index, token in enumerate(chain):
        reach *= target(tuple(chain[:index]))[token]
        wanted += reach
    assert accepted == wanted


def check_matching(verify: Any, vocabulary_size: int, depth: int) -> None:
    """Every chain against every outcome of the target: the emitted text is the target's own."""
    for chain in itertools.product(range(vocabulary_size), repeat=depth):
        for own in itertools.product(range(vocabulary_size), repeat=depth + 1):
            asked: list[int] = []

            def target_token(index: int, own: tuple[int, ...] = own, asked: list[int] = asked) -> int:
                assert 0 <= index < len(own)
                asked.append(index)
                return own[index]

            verdict = verify.verify_matching(chain, target_token)
            agreed = next((i for i in range(depth) if chain[i] != own[i]), depth)
            assert verdict.accepted == agreed
            assert (*chain[:agreed], verdict.next_token) == own[: agreed + 1]
            assert verdict.kind == ("bonus" if agreed == depth else "correction")
            assert verdict.evaluated == agreed + (agreed < depth)
            assert asked == list(range(agreed + 1)), "in order, and never past the first difference"


def check_open(verify: Any, target: Conditional, draft: Conditional, depth: int) -> None:
    """Without a bonus, nothing follows a fully accepted chain; everything else is as with a bonus."""
    vocabulary = range(len(target(())))
    for chain in itertools.product(vocabulary, repeat=depth):
        own = [as_array(draft(chain[:i])) for i in range(depth)]
        places = [cells(own[i][chain[i]], target(chain[:i])[chain[i]], grid=False) for i in range(depth)]
        for choice in itertools.product(*places):
            found, asked = [], []
            for bonus in (True, False):
                rows: list[int] = []
                drawn: list[tuple[list[Fraction], int]] = []

                def probs(index: int, rows: list[int] = rows, chain: tuple[int, ...] = chain) -> np.ndarray:
                    rows.append(index)
                    return as_array(target(chain[:index]))

                def draw(left: Any, index: int, drawn: list[tuple[list[Fraction], int]] = drawn) -> int:
                    drawn.append((list(left), index))
                    return -7

                middles = [middle for middle, _ in choice]
                verdict = verify.verify_rejection(chain, own, probs, middles, draw, bonus=bonus)
                found.append((verdict.accepted, verdict.evaluated, drawn))
                asked.append((verdict.kind, verdict.following, rows))
            if asked[0][0] == "bonus":
                assert (found[1][:2], found[1][2]) == (found[0][:2], [])
                assert asked[1] == ("open", (), list(range(depth)))
            else:
                assert found[0] == found[1]
                assert asked[0] == asked[1]
    for chain in itertools.product(vocabulary, repeat=depth):
        for wanted in itertools.product(vocabulary, repeat=depth):

            def token(index: int, wanted: tuple[int, ...] = wanted) -> int:
                assert index < len(wanted), "past the last draft token"
                return wanted[index]

            verdict = verify.verify_matching(chain, token, bonus=False)
            if chain == wanted:
                assert (verdict.accepted, verdict.evaluated, verdict.kind) == (depth, depth, "open")
                assert verdict.following == ()
            else:
                assert verdict == verify.verify_matching(chain, token)


def check_tree(verify: Any, target: Conditional, tokens: Sequence[int], parents: Sequence[int]) -> None:
    """A tree, which is not drawn at random, against every outcome of the target's draws at each of its nodes."""
    texts: dict[int, tuple[int, ...]] = {-1: ()}
    for index, parent in enumerate(parents):
        texts[index] = (*texts[parent], tokens[index])
    depth = max(len(text) for text in texts.values())
    law: Law = defaultdict(Fraction)
    for own in itertools.product(range(len(target(()))), repeat=len(texts)):
        weight = math.prod((target(texts[node])[own[node + 1]] for node in texts), start=Fraction(1))
        if weight == 0:
            continue
        asked: list[int] = []

        def target_token(node: int, own: tuple[int, ...] = own, asked: list[int] = asked) -> int:
            assert node in texts, "no token has this index"
            assert len(asked) < len(texts), "a walk ends"
            asked.append(node)
            return own[node + 1]

        verdict = verify.verify_tree(tokens, parents, target_token)
        above = -1
        for index in verdict.path:
            children = [child for child, parent in enumerate(parents) if parent == above]
            assert index == next(child for child in children if tokens[child] == own[above + 1])
            above = index
        below = {tokens[child] for child, parent in enumerate(parents) if parent == above}
        assert verdict.next_token == own[above + 1]
        assert verdict.next_token not in below, "one more token had to be accepted"
        assert verdict.kind == ("correction" if below else "bonus")
        assert asked == [-1, *verdict.path], "in order, and only along the path"
        emitted = (*(tokens[index] for index in verdict.path), verdict.next_token)
        for full, rest in plain_law(target, depth + 1, emitted).items():
            law[full] += weight * rest
    assert law == plain_law(target, depth + 1)


# Every shape of up to three nodes, and a few larger ones.
TREES: list[tuple[int, ...]] = [
    (),
    (-1,),
    (-1, -1),
    (-1, 0),
    (-1, -1, -1),
    (-1, -1, 0),
    (-1, -1, 1),
    (-1, 0, -1),
    (-1, 0, 0),
    (-1, 0, 1),
    (-1, -1, 0, 1),
]


def check_acceptance_edges(verify: Any) -> None:
    """Probabilities that no honest drafter sends are never accepted, nor a token with target probability 0."""
    never = [
        (HALF, 0, HALF),
        (0, 0, HALF),
        (HALF, -HALF, HALF),
        (HALF, Fraction(3, 2), Fraction(1)),
        (0, HALF, 0),
        (HALF, HALF, -HALF),
        (0.5, NAN, 0.5),
        (0.5, 0.5, NAN),
        (NAN, 0.5, 0.5),
        (0.5, float("inf"), 0.5),
        (0.5, -0.0, 0.5),
    ]
    for uniform, draft_prob, target_prob in never:
        answer = verify.accepts(uniform, draft_prob, target_prob)
        assert answer is False, f"accepts({uniform}, {draft_prob}, {target_prob})"
    for uniform, draft_prob, target_prob in [(0, HALF, HALF), (0.999, 0.25, 0.25), (0, 1.0, 1e-300), (0.5, 1, 1)]:
        answer = verify.accepts(uniform, draft_prob, target_prob)
        assert answer is True, f"accepts({uniform}, {draft_prob}, {target_prob})"
    left = verify.residual(np.array([0.25, 0.75]), np.array([NAN, NAN]))
    assert left.tolist() == [0.25, 0.75], "a draft that cannot be subtracted leaves the target"


def random_conditional(seed: int, vocabulary_size: int, *, zeros: bool = True) -> Conditional:
    """A table of small rational distributions, one for each prefix."""

    def conditional(prefix: tuple[int, ...]) -> list[Fraction]:
        source = random.Random(f"{seed} {prefix}")
        weights = [source.randrange(0 if zeros else 1, 5) for _ in range(vocabulary_size)]
        weights[source.randrange(vocabulary_size)] += 1
        return normalised(weights)

    return conditional


# (target, draft) weights: generic, disjoint, zeros on either side, ties, equal, certain, one token only.
PAIRS: list[tuple[list[int], list[int]]] = [
    ([1, 2, 3], [3, 2, 1]),
    ([5, 1, 1, 1], [1, 1, 1, 5]),
    ([1, 1, 0, 0], [0, 0, 1, 3]),
    ([0, 2, 3], [1, 1, 1]),
    ([1, 1, 1], [0, 2, 3]),
    ([1, 1, 1], [1, 1, 1]),
    ([1, 4, 2], [1, 4, 2]),
    ([0, 1, 0], [1, 0, 1]),
    ([1, 1], [1, 0]),
    ([1], [1]),
]


def check_all(verify: Any) -> None:
    """A short, fixed selection of every check, which each mutation has to fail."""
    check_acceptance_edges(verify)
    for target_weights, draft_weights in PAIRS:
        check_one_step(verify, normalised(target_weights), normalised(draft_weights))
    for depth in (0, 1, 2, 3):
        check_matching(verify, 2, depth)
        target = random_conditional(11 + depth, 2, zeros=False)
        check_chain(verify, target, random_conditional(50 + depth, 2), depth)
        check_open(verify, target, random_conditional(50 + depth, 2), depth)
        for chain in itertools.product(range(2), repeat=depth):
            check_copied(verify, target, chain)
    for parents in TREES:
        for tokens in itertools.product(range(2), repeat=len(parents)):
            check_tree(verify, random_conditional(17, 2, zeros=False), tokens, parents)

"""What would each drafting method have guessed? Counted offline in logs of `edgespec bench --log FILE`.

    edgespec bench --suite SUITE --arms plain --passes 1 --log FILE.jsonl
    python benchmarks/draft_counts.py FILE.jsonl ... [--fit]

Each place of an answer is a question: which token follows? Counted is how often a source answers, and how often it is
right (the target's token). All sources see the prompt and the answer so far, nothing of other prompts.

- `drafter`: the drafting model's best token, and which of its next choices would have been right.
- `copies`: what followed the longest earlier match of at least 3 tokens (edgespec's lookup drafter).
- `suffix`: the most frequent token after the longest earlier match of at least 1 token, by length of the match
  (SuffixDecoding, Oliaro et al., 2024).
- `recycled`: the target's best token when it last followed the same token, or the same two tokens (Token Recycling,
  Luo et al., 2024).
- `for_the_drafter`: the same sources asked for the drafter's token instead of the target's, as guessing for
  the drafter needs it (Cascade Speculative Drafting, Chen et al., 2023).

`--fit` fits a re-ranking of the drafter's four best tokens by these sources. The answers are left out in up to
ten groups in turn; each group is judged by the others' weights. It needs a log of at least two answers.

Prints one JSON object with the counts of each log.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

LEAST_COPIED = 3  # as in edgespec/drafters/lookup.py
LONGEST_MATCH = 32
STEPS, RATE = 300, 0.5  # of the gradient descent of --fit, which has converged to 1e-4 by then


@dataclass
class Sources:
    """What is known of a text so far: every earlier context of its tokens, and the target's own choices there."""

    tokens: list[int] = field(default_factory=list)
    ends: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # where each token was followed
    recycled: dict[tuple[int, ...], list[tuple[int, float]]] = field(default_factory=dict)

    def extend(self, token: int) -> None:
        if self.tokens:
            self.ends[self.tokens[-1]].append(len(self.tokens))
        self.tokens.append(token)

    def saw(self, best: list[tuple[int, float]]) -> None:
        """The target's best tokens at the text's end."""
        for length in (1, 2):
            self.recycled[tuple(self.tokens[-length:])] = best

    def matches(self) -> list[tuple[int, int]]:
        """(length of the match, token that followed) for each earlier place that ends as the text does."""
        tokens, found = self.tokens, []
        for end in self.ends.get(tokens[-1], []) if tokens else []:
            length = 1
            while length < min(end, LONGEST_MATCH) and tokens[end - length - 1] == tokens[len(tokens) - length - 1]:
                length += 1
            found.append((length, tokens[end]))
        return found


@dataclass(frozen=True)
class Place:
    """A place of an answer: what was said there, and what each source would have guessed (None: nothing)."""

    category: str
    token: int
    drafter: list[tuple[int, float]]
    copied: int | None
    suffix: int | None
    matched: int  # tokens of the longest match
    followed: Counter[int]  # what followed the longest match
    recycled: list[tuple[int, float]]  # after the same two tokens, else after the same one
    recycled_length: int


def places(line: dict[str, Any]) -> Iterator[Place]:
    """The places of one logged answer."""
    known = Sources()
    for token in line["prompt_tokens"]:
        known.extend(token)
    drafter = line["drafter"] or [[]] * len(line["token_ids"])
    for token, target, guessed in zip(line["token_ids"], line["target"], drafter, strict=True):
        found = known.matches()
        longest = max((length for length, _ in found), default=0)
        followed = Counter(after for length, after in found if length == longest)
        copied = next((after for length, after in reversed(found) if length == longest >= LEAST_COPIED), None)
        recycled, recycled_length = [], 0
        for length in (2, 1):
            recycled = known.recycled.get(tuple(known.tokens[-length:]), [])
            if recycled:
                recycled_length = length
                break
        yield Place(
            category=line["category"],
            token=token,
            drafter=[(int(other), float(odds)) for other, odds in guessed],
            copied=copied,
            suffix=followed.most_common(1)[0][0] if followed else None,
            matched=longest,
            followed=followed,
            recycled=recycled,
            recycled_length=recycled_length,
        )
        known.saw([(int(other), float(odds)) for other, odds in target])
        known.extend(token)


def share(hits: int, of: int) -> dict[str, Any]:
    return {"of": of, "right": round(hits / of, 4) if of else None}


def counts(found: Sequence[Place]) -> dict[str, Any]:
    """The hit rates of all sources."""
    total = len(found)
    drafted = [place for place in found if place.drafter]
    choices = [
        sum(len(p.drafter) > rank and p.drafter[rank][0] == p.token for p in drafted) / max(1, len(drafted))
        for rank in range(4)
    ]
    lengths = {"1": (1, 1), "2": (2, 2), "3 to 4": (3, 4), "5 to 8": (5, 8), "9 to 32": (9, LONGEST_MATCH)}
    report: dict[str, Any] = {
        "places": total,
        "drafter": {"places": len(drafted), "choices_right": [round(own, 4) for own in choices]},
        "copies": _rate(found, "copied"),
        "suffix": {
            "all": _rate(found, "suffix"),
            **{
                name: _rate([p for p in found if low <= p.matched <= high], "suffix")
                for name, (low, high) in lengths.items()
            },
        },
        "recycled": {
            str(length): share(
                sum(p.recycled[0][0] == p.token for p in found if p.recycled_length == length),
                sum(p.recycled_length == length for p in found),
            )
            for length in (2, 1)
        },
        "recycled_first_four": share(
            sum(p.token in [token for token, _ in p.recycled] for p in found if p.recycled),
            sum(bool(p.recycled) for p in found),
        ),
        "right_where_drafter_is_wrong": {
            name: share(
                sum(getattr(p, name) == p.token for p in drafted if p.drafter[0][0] != p.token),
                sum(p.drafter[0][0] != p.token for p in drafted),
            )
            for name in ("copied", "suffix")
        },
    }
    if drafted:
        report["where_a_copy_is_offered"] = together([p for p in drafted if p.copied is not None])
        report["any_of_several_right"] = together(drafted)
        report["for_the_drafter"] = for_the_drafter(drafted)
    return report


def together(found: Sequence[Place]) -> dict[str, Any]:
    """How often any guess of a group is right, on the same places. The groups name what a tree could begin with."""
    groups: dict[str, Callable[[Place], list[int | None]]] = {
        "drafter": lambda p: [p.drafter[0][0]],
        "copy": lambda p: [p.copied],
        "drafter, copy": lambda p: [p.drafter[0][0], p.copied],
        "drafter, suffix": lambda p: [p.drafter[0][0], p.suffix],
        "drafter's two": lambda p: [token for token, _ in p.drafter[:2]],
        "drafter's two, suffix": lambda p: [*(token for token, _ in p.drafter[:2]), p.suffix],
        "drafter's two, suffix, recycled": lambda p: [
            *(token for token, _ in p.drafter[:2]),
            p.suffix,
            *(token for token, _ in p.recycled[:1]),
        ],
        "drafter's four": lambda p: [token for token, _ in p.drafter],
    }
    if not found:
        return {"places": 0}
    rates = {name: sum(p.token in group(p) for p in found) / len(found) for name, group in groups.items()}
    return {"places": len(found), **{name: round(rate, 4) for name, rate in rates.items()}}


def _rate(found: Sequence[Place], name: str) -> dict[str, Any]:
    guessed = [place for place in found if getattr(place, name) is not None]
    hits = sum(getattr(place, name) == place.token for place in guessed)
    return share(hits, len(guessed)) | {"answered": round(len(guessed) / max(1, len(found)), 4)}


def guesses(place: Place, count: int) -> list[int]:
    """The free sources' best guesses: what the text says after 2 tokens or more, recycled tokens, other text."""
    text = [token for token, _ in place.followed.most_common(2)]
    recycled = [token for token, _ in place.recycled]
    ranked = [*text, *recycled] if place.matched >= 2 else [*recycled, *text]
    return list(dict.fromkeys(ranked))[:count]


def for_the_drafter(found: Sequence[Place]) -> dict[str, Any]:
    """How often the free sources guess the drafter's own token, and how often any of a few guesses does.

    ``forwards_per_token``: the drafter's forwards for each of its tokens if every forward took a tree of guesses: so
    many for its next token, and below the one that is right one guess a level, ``levels`` deep in all.
    """
    right = {count: [place.drafter[0][0] in guesses(place, count) for place in found] for count in (1, 2, 3, 4, 7)}
    by_odds: dict[str, Any] = {}
    for name, low, high in (("0.9 and more", 0.9, 1.01), ("below 0.9", 0.0, 0.9)):
        some = [hit for place, hit in zip(found, right[4], strict=True) if low <= place.drafter[0][1] < high]
        by_odds[name] = share(sum(some), len(some))
    return {
        "guesses_right": {str(count): round(sum(hits) / len(found), 4) for count, hits in right.items()},
        "four_guesses_by_drafter_odds": by_odds,
        "forwards_per_token": {
            f"{first} first, {levels} levels": round(forwards(right[first], right[1], levels) / len(found), 4)
            for first, levels in ((1, 1), (1, 2), (1, 4), (2, 2), (4, 1), (4, 2), (4, 4))
        },
    }


def forwards(first: Sequence[bool], below: Sequence[bool], levels: int) -> int:
    """The number of forwards for all tokens. ``first`` and ``below`` tell which tokens were guessed right."""
    count = place = 0
    while place < len(first):
        count += 1
        level = 0
        while level < levels and place < len(first) and (below if level else first)[place]:
            place, level = place + 1, level + 1
        place += 1
    return count


# ------------------------------------------------------------------------------------------------ re-ranking


def features(place: Place) -> np.ndarray:
    """Of each of the drafter's choices: float64 (choices, 6)."""
    total = sum(place.followed.values())
    target = dict(place.recycled)
    rows = []
    for token, odds in place.drafter:
        text = (place.followed[token] + 0.1) / (total + 1.0)
        own = max(target.get(token, 0.0), 0.003)
        rows.append(
            [
                math.log(max(odds, 1e-6)),
                math.log(text) * (total > 0) * (place.matched == 1),
                math.log(text) * (total > 0) * (2 <= place.matched <= 4),
                math.log(text) * (total > 0) * (place.matched > 4),
                math.log(own) * (place.recycled_length == 1),
                math.log(own) * (place.recycled_length == 2),
            ]
        )
    return np.array(rows)


def fitted(examples: Sequence[tuple[np.ndarray, int]]) -> np.ndarray:
    """Weights of a softmax regression over each place's choices; it starts as the drafter's own order."""
    weights = np.array([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    padded = np.full((len(examples), 4, 6), 0.0)
    missing = np.ones((len(examples), 4), dtype=bool)
    right = np.zeros((len(examples), 4))
    for number, (rows, index) in enumerate(examples):
        padded[number, : len(rows)], missing[number, : len(rows)] = rows, False
        right[number, index] = 1.0
    for _ in range(STEPS):
        scores = padded @ weights
        scores[missing] = -1e9
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        odds /= odds.sum(axis=1, keepdims=True)
        weights += RATE * np.einsum("nk,nkf->f", right - odds, padded) / len(examples)
    return weights


def reranked(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Hits of the drafter's first choice, before and after re-ranking by the weights of other answers.

    Raises ValueError for fewer than two answers.
    """
    if len(lines) < 2:
        raise ValueError("a re-ranking is judged on other answers, so that --fit needs a log of at least two")
    by_prompt = [[place for place in places(line) if place.drafter] for line in lines]
    examples = [
        [
            (features(place), index)
            for place in own
            for index, (token, _) in enumerate(place.drafter)
            if token == place.token
        ]
        for own in by_prompt
    ]
    before = after = total = 0
    folds = min(10, len(lines))  # ten groups, because fitting takes most of the time
    weights = np.zeros(6)
    for fold in range(folds):
        weights = fitted([each for number, own in enumerate(examples) if number % folds != fold for each in own])
        for number, own in enumerate(by_prompt):
            if number % folds == fold:
                for place in own:
                    best = int(np.argmax(features(place) @ weights))
                    before += place.drafter[0][0] == place.token
                    after += place.drafter[best][0] == place.token
                    total += 1
    return {
        "places": total,
        "before": round(before / total, 4),
        "after": round(after / total, 4),
        "weights": [round(float(own), 3) for own in weights],
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--fit", action="store_true", help="fit the re-ranking as well")
    parser.add_argument("--by-category", action="store_true")
    arguments = parser.parse_args()
    report: dict[str, Any] = {}
    for path in arguments.logs:
        header, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found = [place for line in lines for place in places(line)]
        own: dict[str, Any] = {"models": [header["target"], header["drafter"]], "answers": len(lines)}
        own |= counts(found)
        if arguments.fit and header["drafter"]:
            own["reranked"] = reranked(lines)
        if arguments.by_category:
            categories = sorted({place.category for place in found})
            own["by_category"] = {name: counts([p for p in found if p.category == name]) for name in categories}
        report[path.name] = own
    json.dump(report, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()

"""The exactness check: does speculation emit plain decoding's tokens, on real prompts, at every permitted depth?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from edgespec.bench.run import read_answer
from edgespec.bench.suite import Prompt
from edgespec.decoding.sampling import Sampling, request_of
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
from edgespec.engine.pair.loaded_pair import Speculation
from edgespec.engine.session import Session
from edgespec.errors import EdgespecError
from edgespec.interfaces.counted_text import MOST_NODES, common_prefix
from edgespec.interfaces.drafting import MODEL, Choice, DraftTree
from edgespec.interfaces.policy import Allowance
from edgespec.planning.choice.plan import Exactness, Plan
from edgespec.planning.cost.widths import WidthProbe, width_classes
from edgespec.planning.depth.base import OFF, FixedDepth
from edgespec.planning.depth.pipeline_budget import MeasuredBudget
from edgespec.planning.depth.price import choose_nodes

# The sampling that is checked besides greedy decoding: a common chat setting.
SAMPLED = Sampling(temperature=0.7, top_p=0.9, seed=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first token that differs. ``gap``: the distance of the two best choices there, in logits.

    ``depth``: tokens proposed in a round; with ``tree`` up to half of these tokens were alternatives.
    """

    prompt_id: str
    position: int
    gap: float
    depth: int
    sampled: bool
    tree: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    """One prompt, decoded plainly, at every depth and with trees, each greedily and sampled.

    ``alternative_count`` of the ``proposed`` tokens were alternatives.
    """

    prompt_id: str
    category: str
    prompt_tokens: int
    emitted_tokens: int
    comparisons: int
    proposed: int
    accepted: int
    alternative_count: int
    divergences: tuple[Divergence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualityReport:
    """``bound``: the most by which two scores may differ at unstable widths, in logits; 0 within the stable class.

    ``samplings``: the samplings of every prompt, each with its seed. ``why``: the reason if nothing was proposed.
    """

    plan: Plan
    probe: WidthProbe | None
    level: Exactness
    depths: tuple[int, ...]
    bound: float
    samplings: tuple[Sampling, ...]
    results: tuple[PromptResult, ...]
    why: str | None = None

    @property
    def trees(self) -> bool:
        """Whether trees were compared too."""
        return any(result.alternative_count for result in self.results)

    @property
    def nothing_proposed(self) -> bool:
        """Whether every answer was decoded plainly (``why`` has the reason), so that equality proves nothing."""
        return not any(result.proposed for result in self.results)

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        return tuple(divergence for result in self.results for divergence in result.divergences)

    @property
    def identical(self) -> int:
        """Number of prompts whose comparisons were all identical, token for token."""
        return sum(not result.divergences for result in self.results)

    @property
    def kept(self) -> bool:
        """Whether the plan's exactness level held in a check with proposals."""
        if self.nothing_proposed:
            return False
        if self.level == "N":
            return all(divergence.gap <= self.bound for divergence in self.divergences)
        return self.identical == len(self.results)

    def as_json(self) -> dict[str, Any]:
        """The object that ``verify --json`` prints."""
        return {
            "level": self.level,
            "width_classes": width_classes(
                self.plan.target.model,
                self.plan.target.runtime,
                {**self.plan.numeric_class.settings, "kv_type": self.plan.numeric_class.kv_type},
                self.probe,
            ),
            "depths": list(self.depths),
            "trees": self.trees,
            "bound": self.bound,
            "samplings": [asdict(sampling) for sampling in self.samplings],
            "prompts": len(self.results),
            "identical": self.identical,
            "comparisons": sum(result.comparisons for result in self.results),
            "proposed": sum(result.proposed for result in self.results),
            "accepted": sum(result.accepted for result in self.results),
            "divergences": [
                {
                    "id": divergence.prompt_id,
                    "position": divergence.position,
                    "gap": divergence.gap,
                    "depth": divergence.depth,
                    "sampled": divergence.sampled,
                    "tree": divergence.tree,
                }
                for divergence in self.divergences
            ],
            "results": [
                {
                    "id": result.prompt_id,
                    "category": result.category,
                    "prompt_tokens": result.prompt_tokens,
                    "emitted_tokens": result.emitted_tokens,
                    "proposed": result.proposed,
                    "accepted": result.accepted,
                    "identical": not result.divergences,
                }
                for result in self.results
            ],
            "plan": self.plan.as_json(),
        }


def depths_to_check(engine: Engine) -> tuple[int, ...]:
    """Every depth of the stable class, planned or not; under near exactness the requested depth."""
    cap, wanted = engine.pair.depth_cap_allowed, engine.profile.depth
    if wanted != "auto":
        cap = min(cap, wanted)
    if cap < 1 or not engine.drafters:
        return ()
    return (cap,) if engine.profile.exactness == "near" and cap > _stable_cap(engine) else tuple(range(1, cap + 1))


def checks_trees(engine: Engine, depths: Sequence[int]) -> bool:
    """Whether trees are compared too: a serial plan may propose trees as deep as its depth policy allows."""
    may = engine.pair.target.facts.can_branch and engine.profile.depth == "auto" and not _is_pipelined(engine)
    deepest = max(depths, default=0)
    return may and 1 < deepest <= _stable_cap(engine) and any(each.kind == MODEL for each in engine.drafters)


def _is_pipelined(engine: Engine) -> bool:
    """The plan's mode, or the one that the profile asks for."""
    return "pipelined" in (engine.profile.mode, engine.plan.mode)


def _stable_cap(engine: Engine) -> int:
    return 0 if engine.pair.probe is None else engine.pair.probe.depth_cap


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """``count`` of the prompts, evenly spaced; all prompts if there are fewer."""
    if count >= len(prompts):
        return list(prompts)
    return [prompts[index * len(prompts) // count] for index in range(count)]


def check_equality(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int = 96,
    samplings: Iterable[Sampling] | None = None,
    depths: Sequence[int] | None = None,
    on_result: Callable[[PromptResult], None] | None = None,
) -> EqualityReport:
    """Decode every prompt plainly and speculatively and compare token ids. Raises what generating raises.

    Besides chains of each depth, trees of up to MOST_NODES nodes, with paths as long as the deepest chain, are
    compared if the plan may use trees.

    ``samplings`` default to greedy and ``SAMPLED``; under near exactness to greedy alone, where the gap between the
    two best scores, which the bound limits, is the only thing that decides. ``depths`` default to
    ``depths_to_check``.
    """
    depths = depths_to_check(engine) if depths is None else tuple(depths)
    near = any(depth > _stable_cap(engine) for depth in depths)
    if samplings is None:
        samplings = (Sampling(),) if near else (Sampling(), SAMPLED)
    samplings = tuple(samplings)
    bound = 2 * engine.pair.probe.max_abs_diff if engine.pair.probe is not None and near else 0.0
    # All drafters of the plan's class: a drafter that is too slow on these texts may be used on others.
    cap = max(depths, default=0)
    costs = engine.pair.measurements.costs()
    trees = checks_trees(engine, depths)
    every = Speculation(
        drafters=engine.drafters,
        policy=FullTrees(cap, MODEL) if trees else FixedDepth(cap),
        depth_cap=cap,
        budget=(lambda: MeasuredBudget(cap, costs, waits=True)) if _is_pipelined(engine) else None,
    )
    ways = [*((depth, depth) for depth in depths), *([(None, cap)] if trees else [])]
    if cap:
        with suppress(EdgespecError):  # ``why`` then states the failure
            engine.load_drafter()
    results = []
    with engine.session(_speculation=every) as session:
        for prompt in prompts:
            result = _check_prompt(engine, session, prompt, ways, samplings, prompt.longest(max_tokens))
            results.append(result)
            if on_result is not None:
                on_result(result)
        why = session.speculation_off
    level: Exactness = "N" if near else "W"
    return EqualityReport(
        plan=engine.plan,
        level=level,
        probe=engine.pair.probe,
        depths=depths,
        bound=bound,
        samplings=samplings,
        results=tuple(results),
        why=why,
    )


def _check_prompt(
    engine: Engine,
    session: Session,
    prompt: Prompt,
    ways: Sequence[tuple[int | None, int]],
    samplings: Sequence[Sampling],
    max_tokens: int,
) -> PromptResult:
    """Compare one prompt. ``ways``: a depth, or None for the session's own trees, and the number of tokens."""
    divergences: list[Divergence] = []
    proposed = accepted = alternative_count = emitted = prompt_tokens = 0
    for sampling in samplings:
        plain, _ = _answer(session, prompt, sampling, 0, max_tokens)
        emitted += plain.stats.emitted_tokens
        prompt_tokens = plain.stats.prompt_tokens
        for wanted, depth in ways:
            answer, alternatives = _answer(session, prompt, sampling, wanted, max_tokens)
            alternative_count += alternatives
            proposed += answer.stats.proposed
            accepted += answer.stats.accepted
            if answer.token_ids != plain.token_ids:
                position = common_prefix(list(plain.token_ids), list(answer.token_ids))
                divergences.append(
                    Divergence(
                        prompt_id=prompt.id,
                        position=position,
                        gap=_gap(engine, prompt, plain.token_ids[:position], sampling),
                        depth=depth,
                        sampled=not sampling.greedy,
                        tree=wanted is None,
                    )
                )
    return PromptResult(
        prompt_id=prompt.id,
        category=prompt.category,
        prompt_tokens=prompt_tokens,
        emitted_tokens=emitted,
        comparisons=len(ways) * len(samplings),
        proposed=proposed,
        accepted=accepted,
        alternative_count=alternative_count,
        divergences=tuple(divergences),
    )


def _answer(
    session: Session, prompt: Prompt, sampling: Sampling, depth: int | None, max_tokens: int
) -> tuple[Done, int]:
    """An answer, and the number of alternatives proposed for it."""
    session.clear()
    done, rounds = read_answer(session.generate(prompt.prompt, max_tokens=max_tokens, sampling=sampling, depth=depth))
    return done, sum(each.alternative_count for each in rounds)


def _gap(engine: Engine, prompt: Prompt, prefix: Sequence[int], sampling: Sampling) -> float:
    """The gap between plain decoding's two best choices after ``prefix``, in logits, the keyed noise included."""
    prompts = engine.pair.prompts
    prompt_tokens = prompts.request_tokens(prompt.prompt)
    tokens = [*prompt_tokens, *prefix]
    with closing(engine.pair.target.open(engine.plan.context_length)) as target:
        # As plain decoding does: the prompt without its last token in one forward, then one token per forward.
        if len(prompt_tokens) > 1:
            target.forward(prompt_tokens[:-1], 0)
        for token in tokens[len(prompt_tokens) - 1 : -1]:
            target.forward([token], 0)
        rows = target.forward(tokens[-1:], 1)
        if sampling.greedy:
            _, scores = rows.top_k(2)
            return float(scores[0, 0] - scores[0, 1])
        drawn = rows.draw(0, request_of(sampling, tokens, begins=len(prompt_tokens), wanted=2))
    if len(drawn.tokens) < 2:
        return float("inf")
    return math.log(drawn.odds[0] / drawn.odds[1])


class FullTrees(FixedDepth):
    """Proposes as many nodes as a forward scores in every round, for checking the exactness of trees.

    A chain of ``source``, half as long as the paths may be, its alternatives, and the guesses of free drafters.
    """

    def __init__(self, depth_cap: int, source: str) -> None:
        super().__init__(depth_cap, gate=lambda: _FullTree((depth_cap + 1) // 2))
        self._source = source

    def allow(self, source: str, lag: int = 0, unread: int = 0) -> Allowance:
        return replace(super().allow(source, lag, unread), nodes=MOST_NODES) if source == self._source else OFF


class _FullTree:
    """Admits a chain of ``length`` tokens, and chooses the likeliest nodes whatever they cost."""

    needs_entropy = False

    def __init__(self, length: int) -> None:
        self._left = length
        self.believed: list[float] = []

    def admits(self, confidence: float, entropy: float | None) -> bool:
        self._left -= 1
        if self._left < 0:
            return False
        self.believed.append(0.5)  # half of the probability is left for the guesses outside the chain
        return True

    def goes_on(self) -> bool:
        return self._left > 0

    def believes(self, confidence: float) -> float:
        return confidence

    def believes_alternative(self, odds: float) -> float:
        return odds

    def choose(self, tree: DraftTree, most: int) -> Choice:
        return choose_nodes([0.0] * (len(tree) + 1), tree, most, tokens_per_s=0.0)

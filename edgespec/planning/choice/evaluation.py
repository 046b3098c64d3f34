"""One target option with one drafter option, weighed against the fastest plain decoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from edgespec.files.disk import gib
from edgespec.interfaces.model import HOST
from edgespec.planning.choice.options import Candidate, DrafterOption, Rejected, TargetOption
from edgespec.planning.choice.plan import Exactness, Mode
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.curve import Curve, DraftCost, by_position, expected_tokens, round_seconds
from edgespec.planning.cost.margins import SLOWER_ALLOWED
from edgespec.planning.cost.round_simulation import SimulatedPair, SimulatedRounds, expected_pipelined


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """What a round at some depth is expected to bring."""

    depth: int
    tokens: float
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One target option with one drafter option, against the fastest plain decoding."""

    target: TargetOption
    drafter: DrafterOption
    name: str
    drafter_name: str
    fastest: TargetOption
    fastest_name: str
    cap: int | None
    margin: float
    headroom_bytes: int

    @property
    def what(self) -> str:
        return f"{self.drafter_name} drafting for {self.name}"

    def refused(self, memory_bytes: Mapping[str, int]) -> Rejected | None:
        """Why the pair cannot draft at all, in whatever mode; None if it can."""
        needed, place = self.drafter.needed_bytes(self.headroom_bytes), self.drafter.memory_name
        if place is not None:
            taken = taken_bytes(self.target, None, self.headroom_bytes).get(place, 0)
            if place not in memory_bytes:
                return self._reject(f"how much memory {place} has is not known")
            left = memory_bytes[place] - taken
            if needed > left:
                where = "are left beside the target" if taken else "may be used"
                reason = f"needs {gib(needed)} on {place} and {gib(left)} {where}"
                return self._reject(reason, needed_bytes=needed, available_bytes=left)
        if self.cap is None:
            return self._reject("which widths are bit-equal to plain decoding has not been measured there")
        if self.cap >= 1:
            return None
        if self.target.curve.widths == (1,):  # where widths were compared, they were timed as well
            return self._reject("only plain decoding has been measured there")
        return self._reject("no width beyond 1 is bit-equal to plain decoding there")

    def serial(self, hand_over_s: float) -> Candidate | Rejected:
        cost = replace(self.drafter.cost, round_s=self.drafter.cost.round_s + hand_over_s)
        curve = self.target.curve
        expected = max(
            _serial_rounds(curve, cost, by_position(self.drafter.acceptance, self._cap)),
            key=lambda one: one.tokens_per_s,
        )
        surest = max(_serial_rounds(curve, cost, (1.0,) * self._cap), key=lambda one: one.tokens_per_s)
        return self._judge("serial", expected, surest, ())

    def pipelined(self, contention: Contention | None, hand_over_s: float) -> Candidate | Rejected:
        if contention is None:
            both = f"{self.target.device} and {self.drafter.device}"
            return self._reject(f"what {both} cost each other when both run is not known", mode="pipelined")
        pair = SimulatedPair(
            curve=self.target.curve,
            draft=self.drafter.cost,
            acceptance=self.drafter.acceptance,
            hand_over_s=hand_over_s,
            contention=contention,
        )
        depth, simulated = _best_pipeline(pair, self._cap)
        sure_depth, sure = _best_pipeline(replace(pair, acceptance=(1.0,)), self._cap)
        both = _contended(contention)
        busy = 100 * simulated.target_busy, 100 * simulated.drafter_busy
        shares = f"the target is at work {busy[0]:.0f} % of the time and the drafter {busy[1]:.0f} %"
        expected = _Round(depth=depth, tokens=simulated.tokens_per_round, seconds=simulated.round_s)
        surest = _Round(depth=sure_depth, tokens=sure.tokens_per_round, seconds=sure.round_s)
        return self._judge("pipelined", expected, surest, (both, shares))

    @property
    def _cap(self) -> int:
        return self.cap or 0

    def _judge(self, mode: Mode, expected: _Round, surest: _Round, said: tuple[str, ...]) -> Candidate | Rejected:
        plain = 1 / self.fastest.curve.plain_s
        speedup = expected.tokens_per_s / plain
        possible = max(speedup, surest.tokens_per_s / plain)
        slower = self.target.curve.plain_s / self.fastest.curve.plain_s
        if speedup < 1 + self.margin or speedup <= 1:
            reason = "; ".join([self._too_slow(expected, speedup, possible, slower), *said[:1]])
            return self._reject(reason, mode=mode, speedup=speedup, possible_speedup=possible)
        sentences = [
            f"{self.drafter_name} drafts {expected.depth} for {self.name}, {mode}: {expected.tokens:.2f} tokens "
            f"expected of a round of {_ms(expected.seconds)}",
            f"{rate(expected.tokens_per_s)} tokens/s, {speedup:.2f}x the fastest plain decoding "
            f"({rate(plain)}, {self.fastest_name})",
            *said,
        ]
        if slower > SLOWER_ALLOWED:
            sentences.append(
                f"plain decoding takes {slower:.2f}x as long there as in the fastest configuration, and drafting "
                "repays it"
            )
        target_bytes = self.target.weights_bytes
        return Candidate(
            what=f"{self.what}, {mode}, depth {expected.depth}",
            target=self.target,
            drafter=self.drafter,
            mode=mode,
            depth=expected.depth,
            exactness=_level(self.target, expected.depth),
            tokens_per_round=expected.tokens,
            round_s=expected.seconds,
            tokens_per_s=expected.tokens_per_s,
            speedup=speedup,
            memory_bytes=taken_bytes(self.target, self.drafter, self.headroom_bytes),
            memory_bound_speedup=expected.tokens
            / (1 + expected.depth * self.drafter.bytes_per_forward / target_bytes),
            reasons=tuple(sentences),
        )

    def _too_slow(self, expected: _Round, speedup: float, possible: float, slower: float) -> str:
        if possible < 1 + self.margin:
            reason = f"even if every token were accepted {possible:.3f}x the fastest plain decoding"
        else:
            reason = (
                f"predicted {speedup:.3f}x the fastest plain decoding ({expected.tokens:.2f} tokens a round at depth "
                f"{expected.depth})"
            )
            if speedup > 1:
                reason += f", and a gain below {100 * self.margin:g} % cannot be told from noise"
        if slower > SLOWER_ALLOWED:
            reason += f"; plain decoding takes {slower:.2f}x as long there as in the fastest configuration"
        return reason

    def _reject(
        self,
        reason: str,
        *,
        mode: Mode | None = None,
        speedup: float | None = None,
        possible_speedup: float | None = None,
        needed_bytes: int | None = None,
        available_bytes: int | None = None,
    ) -> Rejected:
        return Rejected(
            what=self.what if mode is None else f"{self.what}, {mode}",
            reason=reason,
            target=self.target,
            drafter=self.drafter,
            mode=mode,
            speedup=speedup,
            possible_speedup=possible_speedup,
            needed_bytes=needed_bytes,
            available_bytes=available_bytes,
        )


# ------------------------------------------------------------------------------------------ rounds, depth by depth


def _serial_rounds(curve: Curve, cost: DraftCost, acceptance: Sequence[float]) -> Iterator[_Round]:
    """Depth 1 to the length of ``acceptance``.

    Plain decoding is not among them: a drafter that loses is told by how much.
    """
    for depth in range(1, len(acceptance) + 1):
        yield _Round(
            depth=depth, tokens=expected_tokens(acceptance[:depth]), seconds=round_seconds(curve, cost, depth)
        )


def _best_pipeline(pair: SimulatedPair, depth_cap: int) -> tuple[int, SimulatedRounds]:
    """The depth, from 1 to ``depth_cap``, at which our pipelined loop is simulated to be fastest."""
    simulated = {depth: expected_pipelined(pair, depth) for depth in range(1, depth_cap + 1)}
    # Deeper caps that the loop never uses differ from lesser ones in the last digits only.
    best = max(simulated, key=lambda depth: float(f"{simulated[depth].tokens_per_s:.9g}"))
    return best, simulated[best]


def _contended(contention: Contention) -> str:
    target, drafter = max(1.0, contention.target_factor), max(1.0, contention.drafter_factor)
    if target == drafter == 1.0:
        return "at once neither side slows the other down"
    return f"both at once, the target {target:.2f}x and the drafter {drafter:.2f}x as slow as alone"


def _level(target: TargetOption, depth: int) -> Exactness:
    if target.depth_cap_stable is None:
        return "D"
    return "W" if depth <= target.depth_cap_stable else "N"


# -------------------------------------------------------------------------------------------------- in words


def taken_bytes(target: TargetOption, drafter: DrafterOption | None, headroom_bytes: int) -> dict[str, int]:
    """What the two take of each memory."""
    taken = {target.memory_name: target.needed_bytes(headroom_bytes)}
    if target.host_bytes:
        taken[HOST] = taken.get(HOST, 0) + target.host_bytes
    if drafter is not None and drafter.memory_name is not None:
        place = drafter.memory_name
        taken[place] = taken.get(place, 0) + drafter.needed_bytes(headroom_bytes)
    return taken


def rate(tokens_per_s: float) -> str:
    """Tokens a second, three digits or so."""
    return f"{tokens_per_s:.1f}" if tokens_per_s >= 10 else f"{tokens_per_s:.2f}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"

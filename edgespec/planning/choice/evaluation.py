"""Evaluates one target option with one drafter option against the fastest plain decoding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from edgespec.files.disk import counted, gib
from edgespec.interfaces.reasons import Reason
from edgespec.planning.choice.options import HEADROOM_BYTES, Candidate, DrafterOption, Rejected, TargetOption
from edgespec.planning.choice.plan import Exactness, Mode
from edgespec.planning.cost.acceptance import UNKNOWN
from edgespec.planning.cost.contention import Contention
from edgespec.planning.cost.curve import Curve, DraftCost, by_position, expected_tokens, round_seconds
from edgespec.planning.cost.margins import SLOWER_ALLOWED, TREES_GAIN
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
    """One target option with one drafter option, against the fastest plain decoding.

    ``cap`` is the deepest draft allowed, None if it depends on a missing measurement. ``asked`` is the requested
    depth. ``margin`` is the speed-up that the drafter has to exceed with every token right.
    """

    target: TargetOption
    drafter: DrafterOption
    name: str
    drafter_name: str
    fastest: TargetOption
    cap: int | None
    asked: int | None
    margin: float

    @property
    def what(self) -> str:
        return f"{self.drafter_name} drafting for {self.name}"

    def refused(self, memory_bytes: Mapping[str, int]) -> Rejected | None:
        """Why the pair cannot draft in any mode; None if it can."""
        if self.drafter.footprint is not None:
            memory, needed = self.drafter.footprint.memory, self.drafter.footprint.device_bytes + HEADROOM_BYTES
            taken = self.target.footprint.taken().get(memory, 0)
            if memory not in memory_bytes:
                return self._reject(memory_not_known(memory))
            left = memory_bytes[memory] - taken
            if needed > left:
                where = "are free with the target loaded" if taken else "may be used"
                return self._reject(no_room(memory, needed, left, where), needed_bytes=needed, available_bytes=left)
        if self.cap is None:
            return self._reject(
                Reason("widths_not_measured", "how many guesses keep the text identical has not been measured there")
            )
        if self.cap >= 1:
            return None
        if self.target.curve.widths == (1,):  # widths are timed when they are compared
            return self._reject(Reason("only_plain_measured", "only plain decoding has been measured there"))
        return self._reject(Reason("no_equal_width", "no guess keeps plain decoding's text identical there"))

    def verdicts(
        self,
        modes: Sequence[Mode],
        contention: Contention | None,
        hand_over_s: float,
        *,
        known: bool,
        agreed: Mode | None,
    ) -> list[Candidate | Rejected]:
        """Evaluate the pair in each of ``modes`` open to it.

        ``known``: whether a pipelined speed is predicted. ``agreed``: the mode that answers found faster, if any.
        """
        found: list[Candidate | Rejected] = []
        if self.drafter.facts is None:  # drafting that takes no time is the same in either mode
            mode: Mode = "serial" if "serial" in modes else "pipelined"
            return [self._serial(hand_over_s, mode)] if {"serial", "pipelined"} & set(modes) else []
        serial = self._serial(hand_over_s) if "serial" in modes else None
        if serial is not None:
            found.append(serial)
        if "pipelined" in modes and known:
            pipelined = self._pipelined(contention, hand_over_s)
            if serial is not None:
                pipelined = self._against_turns(pipelined, serial, agreed)
            found.append(pipelined)
        return [self._open_to_this_plan(verdict) for verdict in found]

    def _serial(self, hand_over_s: float, mode: Mode = "serial") -> Candidate | Rejected:
        cost = replace(self.drafter.cost, round_s=self.drafter.cost.round_s + hand_over_s)
        curve, depths = self.target.curve, self._depths
        rates = by_position(self.drafter.acceptance or (UNKNOWN,), self._cap)
        drafted = [_serial_round(curve, cost, rates, depth) for depth in depths]
        sure = [_serial_round(curve, cost, (1.0,) * self._cap, depth) for depth in depths]
        return self._judge(mode, max(drafted, key=_rate), max(sure, key=_rate), ())

    def _pipelined(self, contention: Contention | None, hand_over_s: float) -> Candidate | Rejected:
        if self.drafter.cost.one_pass is not None:
            # The simulated rounds draft token by token, and so do the times of a pipeline's budget.
            alone = "pipelined drafting is not predicted for a drafter that drafts all tokens in one forward"
            return self._reject(Reason("drafter_one_pass", alone), mode="pipelined")
        if self.drafter.facts is not None and self.drafter.facts.follows:
            alone = "it reads what the target computes, so that it cannot draft at the same time"
            return self._reject(Reason("drafter_layer", alone), mode="pipelined")
        if contention is None:
            both = f"{self.target.facts.device} and {self.drafter.device}"
            reason = f"how much {both} slow each other down is not known"
            return self._reject(Reason("contention_not_measured", reason), mode="pipelined")
        pair = SimulatedPair(
            curve=self.target.curve,
            draft=self.drafter.cost,
            acceptance=self.drafter.acceptance or (UNKNOWN,),
            hand_over_s=hand_over_s,
            contention=contention,
        )
        depth, simulated = _best_pipeline(pair, self._depths)
        sure_depth, sure = _best_pipeline(replace(pair, acceptance=(1.0,)), self._depths)
        drafted = _Round(depth=depth, tokens=simulated.tokens_per_round, seconds=simulated.round_s)
        surest = _Round(depth=sure_depth, tokens=sure.tokens_per_round, seconds=sure.round_s)
        busy = 100 * simulated.target_busy, 100 * simulated.drafter_busy
        shares = f"the target is busy {busy[0]:.0f} % of the time and the drafter {busy[1]:.0f} %"
        said = (Reason("contention", contention_words(contention)), Reason("device_shares", shares))
        return self._judge("pipelined", drafted, surest, said)

    @property
    def _cap(self) -> int:
        return self.cap or 0

    @property
    def _depths(self) -> Sequence[int]:
        """The depths to choose from."""
        return range(1, self._cap + 1) if self.asked is None else (min(self.asked, self._cap),)

    def _judge(self, mode: Mode, drafted: _Round, surest: _Round, said: tuple[Reason, ...]) -> Candidate | Rejected:
        plain, own = 1 / self.fastest.curve.plain_s, 1 / self.target.curve.plain_s
        possible = max(drafted.tokens_per_s, surest.tokens_per_s) / plain
        if self.asked is None and possible <= self.margin:
            reason = Reason("cannot_pay", f"cannot speed this up here ({possible:.2f}x at best): off")
            return self._reject(reason, mode=mode, speedup=drafted.tokens_per_s / plain, possible_speedup=possible)
        expected = _Round(depth=0, tokens=1.0, seconds=self.target.curve.plain_s)
        if self.drafter.acceptance and (self.asked is not None or drafted.tokens_per_s > own):
            expected = drafted
        speedup = expected.tokens_per_s / plain
        slower = self.target.curve.plain_s / self.fastest.curve.plain_s
        repaid: tuple[Reason, ...] = ()
        if slower > SLOWER_ALLOWED and speedup > 1:
            said_so = f"plain decoding takes {slower:.2f}x as long as on the fastest device, and guessing repays it"
            repaid = (Reason("slower_plain", said_so),)
        most = f"up to {possible:.2f}x with {guesses(surest.depth, 'right ')} at a time"
        return Candidate(
            what=f"{self.what}, {mode}",
            target=self.target,
            drafter=self.drafter,
            mode=mode,
            depth=expected.depth,
            exactness=_level(self.target, max(self._depths)),
            tokens_per_round=expected.tokens,
            round_s=expected.seconds,
            tokens_per_s=expected.tokens_per_s,
            speedup=speedup,
            possible_speedup=possible,
            possible_depth=surest.depth,
            drafted_tokens_per_s=drafted.tokens_per_s,
            memory_bytes=taken_bytes(self.target, (self.drafter,)),
            memory_bound_speedup=expected.tokens / (1 + self._bytes_share(expected.depth)),
            why=(self._verdict(expected, drafted, speedup, most), *said, *repaid),
        )

    def _bytes_share(self, depth: int) -> float:
        """What the forwards of a draft read, divided by what a forward of the target reads."""
        read = 0 if self.drafter.facts is None else self.drafter.facts.bytes_per_forward
        return self.drafter.cost.forwards(depth) * read / max(1, self.target.facts.bytes_per_forward)

    def _verdict(self, expected: _Round, drafted: _Round, speedup: float, most: str) -> Reason:
        """Why the pair is a candidate; ``most`` says what it could bring."""
        if self.asked is not None:
            expects = f"{speedup:.2f}x plain expected, " if self.drafter.acceptance else ""
            return Reason("depth_asked", f"depth {drafted.depth} was asked for: {expects}{most}")
        if expected.depth:
            about = "" if self.target.measured else "about "
            tokens = f"{expected.tokens:.2f} tokens in a round of {_ms(expected.seconds)}"
            return Reason(
                "expected_gain",
                f"{about}{rate(expected.tokens_per_s)} tokens/s expected, {speedup:.2f}x the fastest plain decoding "
                f"({tokens}, {guesses(expected.depth)} at a time); {most}",
            )
        if not self.drafter.acceptance:
            return Reason("gain_not_known", f"the gain depends on the text: {most}")
        return Reason(
            "possible_gain",
            f"no gain expected ({drafted.tokens_per_s * self.fastest.curve.plain_s:.2f}x if it guessed all the "
            f"time), {most}: guesses only while they pay",
        )

    def _against_turns(
        self, pipelined: Candidate | Rejected, serial: Candidate | Rejected, agreed: Mode | None
    ) -> Candidate | Rejected:
        """Reject pipelined drafting unless it beats serial drafting and plain decoding by more than the noise.

        Serial drafting has trees, which the forecast does not count. Answers overrule the forecast, and two models on
        one device run in parallel only after answers that gained by it.
        """
        plain_s = self.fastest.curve.plain_s
        at_once = pipelined.speedup
        if isinstance(pipelined, Candidate):
            at_once = plain_s * pipelined.drafted_tokens_per_s
        if at_once is None or (isinstance(serial, Rejected) and isinstance(pipelined, Rejected)):
            return pipelined  # the contention was not measured, or neither mode can pay
        said, rival = f"pipelined {at_once:.2f}x", 0.0
        if isinstance(serial, Candidate):
            rival = self._trees_gain * plain_s * serial.drafted_tokens_per_s
            said += f", serial {rival:.2f}x"
            if self.asked is None:
                rival = max(rival, plain_s / self.target.curve.plain_s)
        if isinstance(pipelined, Candidate) and at_once > self.margin * rival:
            if agreed == "serial":
                said += " expected, but the last answers in parallel were slower than serial ones"
            elif agreed is None and self.drafter.device == self.target.facts.device:
                said += " expected, but on one device only answers show a gain of running in parallel"
            else:
                return pipelined
        return self._reject(
            Reason("in_turns", f"{said}: serial"),
            mode="pipelined",
            speedup=at_once,
            possible_speedup=pipelined.possible_speedup,
        )

    @property
    def _trees_gain(self) -> float:
        """How many times as fast serial drafting is as with chains alone."""
        return TREES_GAIN if self.drafter.copies and self.target.facts.can_branch else 1.0

    def _open_to_this_plan(self, verdict: Candidate | Rejected) -> Candidate | Rejected:
        """Reject a drafter that would have to move: a loaded drafter stays on its device until the next start."""
        if self.drafter.eligible or isinstance(verdict, Rejected):
            return verdict
        said = f"{verdict.speedup:.2f}x expected, but the drafter stays where it is loaded until the next start"
        return self._reject(
            Reason("drafter_stays", said),
            mode=verdict.mode,
            speedup=verdict.speedup,
            possible_speedup=verdict.possible_speedup,
        )

    def _reject(
        self,
        verdict: Reason,
        *,
        mode: Mode | None = None,
        speedup: float | None = None,
        possible_speedup: float | None = None,
        needed_bytes: int | None = None,
        available_bytes: int | None = None,
    ) -> Rejected:
        return Rejected(
            what=self.what if mode is None else f"{self.what}, {mode}",
            verdict=verdict,
            target=self.target,
            drafter=self.drafter,
            mode=mode,
            speedup=speedup,
            possible_speedup=possible_speedup,
            needed_bytes=needed_bytes,
            available_bytes=available_bytes,
        )


# ------------------------------------------------------------------------------------------ rounds, depth by depth


def _serial_round(curve: Curve, cost: DraftCost, acceptance: Sequence[float], depth: int) -> _Round:
    tokens = expected_tokens(acceptance[:depth])
    return _Round(depth=depth, tokens=tokens, seconds=round_seconds(curve, cost, depth, tokens))


def _rate(one: _Round) -> float:
    return one.tokens_per_s


def _best_pipeline(pair: SimulatedPair, depths: Sequence[int]) -> tuple[int, SimulatedRounds]:
    """The depth at which our pipelined loop is simulated to be fastest."""
    simulated = {depth: expected_pipelined(pair, depth) for depth in depths}
    # Caps deeper than the loop uses change only the last digits.
    best = max(simulated, key=lambda depth: float(f"{simulated[depth].tokens_per_s:.9g}"))
    return best, simulated[best]


def contention_words(contention: Contention) -> str:
    """How much target and drafter slow each other down, in words."""
    target, drafter = max(1.0, contention.target_factor), max(1.0, contention.drafter_factor)
    if target == drafter == 1.0:
        return "in parallel neither side slows the other down"
    return f"in parallel the target takes {target:.2f}x and the drafter {drafter:.2f}x as long as alone"


def _level(target: TargetOption, depth: int) -> Exactness:
    if target.depth_cap_stable is None:
        return "D"
    return "W" if depth <= target.depth_cap_stable else "N"


# -------------------------------------------------------------------------------------------------- in words


def memory_not_known(device: str) -> Reason:
    """The reason for a device whose memory size is unknown."""
    return Reason("memory_not_known", f"how much memory {device} has is not known")


def no_room(memory: str, needed: int, available: int, where: str = "may be used") -> Reason:
    """The reason for a memory with too few available bytes."""
    return Reason("no_room", f"needs {gib(needed)} on {memory} and {gib(available)} {where}")


def taken_bytes(target: TargetOption, drafters: Iterable[DrafterOption]) -> dict[str, int]:
    """Bytes that target and drafters take of each memory."""
    taken = target.footprint.taken()
    for drafter in drafters:
        if drafter.footprint is not None:
            for memory, needed in drafter.footprint.taken().items():
                taken[memory] = taken.get(memory, 0) + needed
    return taken


def guesses(count: int, kind: str = "") -> str:
    """ "N guesses", with an optional ``kind``."""
    return counted(count, f"{kind}guess", f"{kind}guesses")


def rate(tokens_per_s: float) -> str:
    """Tokens a second, with about three digits."""
    return f"{tokens_per_s:.1f}" if tokens_per_s >= 10 else f"{tokens_per_s:.2f}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"

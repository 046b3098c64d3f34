"""Why the drafters of a session did not draft in its latest answer."""

from __future__ import annotations

from edgespec.drafters.combination import CombinationState
from edgespec.engine.pair.loaded_pair import LoadedPair
from edgespec.interfaces.policy import AnswerPolicy
from edgespec.interfaces.reasons import Reason
from edgespec.planning.choice.plan import Plan

_PLAIN = "plain: "  # how a plan's reasons for plain decoding begin

# Reason codes that may no longer hold once the drafter is loaded.
_FOR_NOW = ("answer_too_short", "not_paying_now")


def why_no_drafts(
    pair: LoadedPair, plan: Plan, depth: AnswerPolicy, drafts: CombinationState, history_length: int
) -> Reason | None:
    """Why a drafter was not used in the latest answer, or is off now; None if every drafter is on."""
    if failures := drafts.failures:
        return Reason("drafter_failed", f"{'; '.join(failures.values())}; this session continues without it")
    drafters = pair.drafters
    plain_because, off = plan.plain_because, plan.drafter_off
    if off is not None and not (plain_because and drafters):
        return Reason("no_model_drafter", off)
    if plain_because is not None:
        lost = [] if off is None else [f"no model drafter: {off}"]
        return Reason(plain_because.code, "; ".join([plain_because.text.removeprefix(_PLAIN), *lost]))
    longest = pair.exact_length
    if drafters and longest is not None and history_length >= longest:
        said = (
            f"guesses are checked to keep the text up to {longest} tokens of context, and this context is longer "
            f"(`{pair.request.calibrate}` checks the whole context)"
        )
        return Reason("context_too_long", said)
    reasons = [why for each in drafters if (why := _why_off(each.kind, depth, drafts)) is not None]
    uncalibrated = pair.request.not_calibrated
    texts = (uncalibrated.text.removeprefix(_PLAIN) if why.code == uncalibrated.code else why.text for why in reasons)
    return Reason(reasons[0].code, "; ".join(dict.fromkeys(texts))) if reasons else None


def _why_off(kind: str, depth: AnswerPolicy, drafts: CombinationState) -> Reason | None:
    """Why an available drafter did not draft: its own reason to wait, else the depth policy's reason."""
    why, silence = depth.why_off(kind), drafts.silences.get(kind)
    if silence is not None and (why is None or why.code in _FOR_NOW):
        return Reason("drafter_waits", silence)
    return why

"""Reasons of decisions: a sentence for people, and a code that programs can translate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# Every code, and when it is given. The codes stay; the sentences may change. docs/reason-codes.md is this list.
CODES: Mapping[str, str] = MappingProxyType(
    {
        # What the plan is based on.
        "target_place": "where the target runs, and on how many threads",
        "target_taken_over": "the target moved because two calibrations found another place faster",
        "target_may_move": "the last calibration found another place faster; the next one has to confirm it",
        "drafter_lost": "the drafting model could not be loaded or its process died",
        "measured_busy": "other programs disturbed the measurements; they are made again",
        "times_contradicted": "answers contradicted the measured times: estimates are used, where there are any",
        "measurement_ignored": "a stored measurement could not be used and is made again",
        "times_estimated": "times are those of similar machines until this machine is measured",
        "plain_step": "the time of a plain step, and of a step that verifies guesses",
        # How many guesses at a time.
        "depth_limit": "how many guesses at a time keep plain decoding's text",
        "depth_beyond_limit": "a depth was asked for that would not keep plain decoding's text",
        "near_exactness": "near exactness was asked for, which allows more guesses at a time",
        "context_chosen": "how long the context is, unless a profile or an option sets a length that the model has",
        "context_limit": "decoding is plain beyond this context length",
        # Verdicts on a way to run.
        "plain_speed": "the measured speed of plain decoding",
        "expected_gain": "guessing is expected to be faster than plain decoding",
        "possible_gain": "guessing is not expected to be faster, but may be where the guesses are right",
        "gain_not_known": "how often the guesses are right is not known yet, so they are tried",
        "depth_asked": "the caller chose this number of guesses at a time",
        "cannot_pay": "guessing would be slower than plain decoding even if every guess were right",
        "in_turns": "running target and drafter in parallel would not be faster",
        "no_room": "it does not fit in the memory that may be used",
        "memory_not_known": "the device's memory size is not known",
        "widths_not_measured": "how many guesses at a time keep the text identical has not been measured there",
        "only_plain_measured": "only plain decoding has been measured there",
        "no_equal_width": "no guess keeps the text identical there",
        "contention_not_measured": "how much two devices slow each other down is not known",
        "target_stays": "the target stays where it is until another place is found faster twice",
        "drafter_stays": "the drafter stays where it is loaded until the next start",
        "not_measured": "this place has not been measured",
        # How a plan drafts.
        "mode_asked": "the caller chose serial or pipelined drafting",
        "contention": "how much target and drafter slow each other down",
        "device_shares": "the share of the time that target and drafter are busy",
        "slower_plain": "plain decoding is slower there than in the fastest place, but guessing more than repays it",
        "drafter_requantized": "the drafter's weights are stored in four bits",
        "drafter_short_head": "the drafter scores only a part of its vocabulary",
        "drafter_translated": "the drafter has another vocabulary, and its tokens are translated",
        "drafter_one_pass": "the drafter drafts all tokens in one forward",
        "drafter_layer": "the drafter reads what the model computes, and drafts between its forwards",
        "drafter_alternatives": "the drafter's next-best tokens are verified too",
        "follows_the_text": "each round guesses as many tokens as are expected to save time",
        "drafter_found": "the drafter was found among another program's models, by its vocabulary",
        # Why a model on this machine does not draft.
        "other_vocabulary": "its vocabulary is not the target's and shares too little with it to be translated",
        "not_smaller": "it is as large as the target",
        "not_expected_to_pay": "it is too large to be expected to make this target faster",
        "other_drafter": "another model is expected to be at least as fast",
        "cannot_run": "no installed runtime runs it",
        "not_a_drafter": "it is not a model that generates text",
        "unreadable": "its file cannot be read",
        "not_looked_at": "its file was not read yet; the next start reads it",
        # Why decoding is plain, or without a model.
        "not_calibrated": "this machine is not measured yet",
        "depth_zero": "plain decoding was asked for",
        "no_drafter": "no drafter is available",
        "no_drafter_pays": "no drafter can be faster than plain decoding here",
        "cannot_rewind": "this kind of model cannot remove rejected guesses from its cache",
        "no_model_drafter": "why no drafting model is used",
        # Why an answer was not drafted, in addition to the plan's reasons.
        "drafter_failed": "a drafter failed in this answer",
        "context_too_long": "the answer's context is longer than the widths were compared to",
        "not_paying_now": (
            "the drafting model's guesses do not save time in this text or beside other requests, or did not recently"
        ),
        "drafter_waits": "the drafting model is being loaded or restarted",
        "answer_too_short": "the answer was too short for guessing to save time",
    }
)

# The codes of reasons for plain decoding.
PLAIN_CODES = frozenset(
    {
        "not_calibrated",
        "depth_zero",
        "no_drafter",
        "no_drafter_pays",
        "cannot_rewind",
        "widths_not_measured",
        "no_equal_width",
    }
)


@dataclass(frozen=True, slots=True)
class Reason:
    """``code`` is one of ``CODES``; ``text`` is the sentence, with the numbers of this machine. Raises ValueError."""

    code: str
    text: str

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError(f"{self.code!r} is not a reason code")

    def as_json(self) -> dict[str, str]:
        """``reason`` and ``reason_code``."""
        return {"reason": self.text, "reason_code": self.code}

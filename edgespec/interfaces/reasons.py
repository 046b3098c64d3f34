"""Why something was decided: a sentence for people, and a code beside it that programs can translate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# Every code, and when it is given. The codes stay; the sentences may change. docs/reason-codes.md is this list.
CODES: Mapping[str, str] = MappingProxyType(
    {
        # What the plan stands on.
        "target_place": "where the target runs, and on how many threads",
        "target_taken_over": "another place runs the target since two calibrations found it faster",
        "target_may_move": "the last calibration found another place faster; the next has to agree",
        "drafter_lost": "the drafting model could not be loaded or has died",
        "measured_busy": "other programs disturbed the measurements; they are made again",
        "measurement_ignored": "a stored measurement could not be used; it is made again",
        "times_estimated": "times are those of similar machines until they are measured here",
        "plain_step": "what a plain step takes, and one that verifies guesses",
        # How many guesses at a time.
        "depth_limit": "how many guesses at a time keep plain decoding's text",
        "depth_beyond_limit": "a depth was asked for that would not keep plain decoding's text",
        "near_exactness": "near exactness was asked for, which allows more guesses at a time",
        "context_limit": "beyond a length of context decoding is plain",
        # Verdicts on a way to run.
        "plain_speed": "plain decoding, as fast as it was measured",
        "expected_gain": "guessing is expected to be faster than plain decoding",
        "possible_gain": "guessing is not expected to gain, and could where the guesses are right",
        "gain_not_known": "how often the guesses are right is not known yet; they are tried",
        "depth_asked": "so many guesses at a time were asked for",
        "cannot_pay": "not even right guesses would make this faster than plain decoding",
        "in_turns": "target and drafter at the same time are no faster than in turns",
        "no_room": "it does not fit in the memory that may be used",
        "memory_not_known": "how much memory a device has is not known",
        "widths_not_measured": "how many guesses at a time keep the text identical has not been measured there",
        "only_plain_measured": "only plain decoding has been measured there",
        "no_equal_width": "no guess keeps the text identical there",
        "contention_not_measured": "what two devices cost each other at the same time is not known",
        "target_stays": "the target stays where it is until another place is found faster twice",
        "drafter_stays": "the drafter stays where it is loaded until the next start",
        "not_measured": "this place has not been measured",
        # How a plan drafts.
        "mode_asked": "in turns or at the same time was asked for",
        "contention": "how much target and drafter slow each other down",
        "device_shares": "how much of the time target and drafter are at work",
        "slower_plain": "plain decoding is slower there than in the fastest place, and guessing repays it",
        "drafter_requantized": "the drafter's weights are kept in four bits",
        "drafter_short_head": "the drafter reads a part of its output head",
        "drafter_alternatives": "what the drafter might have said instead is verified too",
        "follows_the_text": "each round guesses as far as that is expected to pay",
        "drafter_found": "the drafter was found among another program's models, by its vocabulary",
        # Why a model on this machine does not draft.
        "other_vocabulary": "it has another vocabulary than the target",
        "not_smaller": "it is as large as the target",
        "not_expected_to_pay": "it is too large to be expected to make this target faster",
        "other_drafter": "another model is expected to gain as much or more",
        "cannot_run": "no runtime that is installed runs it",
        "not_a_drafter": "it is no model that writes text by itself",
        "unreadable": "its file cannot be read",
        "not_looked_at": "its file was not read yet; the next start goes on",
        # Why decoding is plain, or without a model.
        "not_calibrated": "this machine is not measured yet",
        "depth_zero": "plain decoding was asked for",
        "no_drafter": "nothing is there to guess with",
        "no_drafter_pays": "no drafter can be faster than plain decoding here",
        "cannot_rewind": "this kind of model cannot take rejected guesses back",
        "no_model_drafter": "why no drafting model is used",
        # Why an answer was not drafted, beside those of its plan.
        "drafter_failed": "a drafter failed in this answer",
        "context_too_long": "the answer's context is longer than the widths were compared to",
        "not_paying_now": "the drafting model's guesses do not pay in this text, or have not of late",
        "drafter_waits": "the drafting model is being loaded, or started again",
        "answer_too_short": "the answer was too short to repay what guessing takes before it saves anything",
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
            raise ValueError(f"{self.code!r} is no reason code")

    def as_json(self) -> dict[str, str]:
        """``reason`` and ``reason_code``."""
        return {"reason": self.text, "reason_code": self.code}

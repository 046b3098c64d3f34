"""The line after an answer, and what /stats shows: plain words, once what is to be said once, at any width."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from edgespec.cli.chat.idle_calibration import IdleCalibration
from edgespec.cli.terminal import output
from edgespec.cli.terminal.status import FEWEST_FOR_A_RATIO, StatusLine, stats_lines
from edgespec.decoding.round_base import DecodeStats
from edgespec.decoding.sampling import Sampling
from edgespec.engine.events import Done
from edgespec.interfaces.model import NumericClass
from edgespec.interfaces.reasons import Reason
from edgespec.planning.choice.plan import Exactness, Mode, Plan, PlannedDrafter, PlannedModel
from edgespec.planning.choice.planner import NOT_CALIBRATED
from edgespec.planning.cost.costs import Costs
from tests.support.command_line import InProcess, command, environment, status_lines
from tests.support.pages import fenced, read_page
from tests.support.planning import model_facts
from tests.support.tiny_models import TinyModels

TARGET = model_facts("qwen2.5-coder-1.5b", runtime="native", threads=2)
SAMPLED = Sampling(temperature=0.7, seed=12)


def plan(
    drafter: str | None = "qwen2.5-coder-0.5b",
    exactness: Exactness = "W",
    mode: Mode = "serial",
    predicted: float | None = None,
) -> Plan:
    return Plan(
        mode=mode,
        exactness=exactness,
        numeric_class=NumericClass.of(TARGET, (1, 2, 3)),
        target=PlannedModel(TARGET),
        drafter=None if drafter is None else PlannedDrafter(kind="model", facts=model_facts(drafter)),
        depth_cap=7,
        context_length=4096,
        predicted_tokens_per_s=predicted,
        why=(Reason("no_drafter", "plain: so it is"),),
    )


def drafted(**changed: Any) -> DecodeStats:
    settings: dict[str, Any] = {
        "prompt_tokens": 310,
        "cached_tokens": 280,
        "emitted_tokens": 158,
        "guessed_tokens": 88,
        "rounds": 69,
        "proposed": 101,
        "evaluated": 95,
        "accepted": 88,
        "draft_s": 0.6123,
        "verify_s": 4.2666,
        "ttft_s": 0.36049,
        "decode_s": 5.0,
        "guessing_s": changed.get("decode_s", 5.0) or 0.0,
        "guessing_rounds": changed.get("rounds", 69),
        "accepted_lengths": {0: 7, 1: 20, 2: 34},
        "rounds_by_source": {"lookup": 9, "model": 52},
    }
    return DecodeStats(**{**settings, **changed})


def plainly(**changed: Any) -> DecodeStats:
    none = {"guessed_tokens": 0, "proposed": 0, "evaluated": 0, "accepted": 0, "rounds": 157, "draft_s": 0.0}
    return drafted(**{**none, "accepted_lengths": {}, "rounds_by_source": {}, **changed})


def done(stats: DecodeStats | None = None, **changed: Any) -> Done:
    settings: dict[str, Any] = {
        "finish_reason": "stop",
        "text": "",
        "token_ids": (),
        "stats": stats or drafted(),
        "plan": plan(),
        "sampling": Sampling(),
        "plain_tokens_per_s": 23.26,
    }
    return Done(**{**settings, **changed})


def line(*answers: Done) -> str:
    """The whole status line of the last of these answers of a session."""
    status = StatusLine(verbose=True)
    return [status.text(each) for each in answers][-1]


# ---------------------------------------------------------------------------------------------------- one line


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (done(), "31 tok/s · 1.3x"),
        (done(plainly()), "31 tok/s"),
        (done(drafted(emitted_tokens=FEWEST_FOR_A_RATIO)), "6.2 tok/s · 0.3x"),
        (done(drafted(emitted_tokens=FEWEST_FOR_A_RATIO - 1)), "6.0 tok/s"),
        (done(plain_tokens_per_s=None), "31 tok/s"),
        (done(drafted(decode_s=15.79)), "9.9 tok/s · 0.4x"),
        (done(drafted(decode_s=15.75)), "10 tok/s · 0.4x"),
        (done(plainly(emitted_tokens=1, rounds=0, decode_s=0.0)), "1 token"),
        (done(finish_reason="cancelled"), "31 tok/s · 1.3x · stopped"),
        (done(finish_reason="length"), "31 tok/s · 1.3x · cut at the token limit"),
        (done(plan=plan(exactness="N")), "31 tok/s · 1.3x · may differ in rare ties"),
        (done(plainly(), plan=plan(exactness="N")), "31 tok/s"),
        (done(sampling=SAMPLED), "31 tok/s · 1.3x"),
        (done(plainly(), speculation_off="none known", speculation_off_code="no_model_drafter"), "31 tok/s"),
    ],
)
def test_the_status_line_is_speed_and_gain(answer: Done, said: str) -> None:
    assert StatusLine().text(answer) == said


def test_the_status_line_says_once_that_a_drafter_failed() -> None:
    lost = done(plainly(), speculation_off="it died; this session continues", speculation_off_code="drafter_failed")
    status = StatusLine()
    assert [status.text(lost) for _ in range(2)] == [
        "31 tok/s · no guesses: it died; this session continues", "31 tok/s"
    ]  # fmt: skip
    assert StatusLine(reasons=False).text(lost) == "31 tok/s"


def test_a_pipe_gets_only_the_answer(tiny: TinyModels, here: InProcess) -> None:
    asked = ("generate", "hello", "--target", tiny.target, "--draft", "none", "--max-tokens", "4")
    assert here(*asked).err == ""
    assert here(*asked, "--quiet").err == ""
    loud = here(*asked, "--verbose").err
    assert "loading" in loud
    assert len(status_lines(loud)) == 1
    assert here(*asked, "--verbose", "--json").err == ""


def test_a_quiet_terminal_gets_no_status_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("edgespec.cli.terminal.status.stderr_columns", lambda: 80)
    StatusLine().print(done())
    assert capsys.readouterr().err == "31 tok/s · 1.3x\n"
    StatusLine(quiet=True).print(done())
    assert capsys.readouterr() == ("\n", "")


# ------------------------------------------------------------------------------------------- words of --verbose


def test_the_status_line_shows_speed_gain_guesses_and_exactness() -> None:
    assert line(done()) == (
        "31.4 tok/s · 1.35x faster than without · 88 of 101 guesses right (0.5B drafter + copies) · "
        "same text as without guessing"
    )


def test_the_status_line_of_a_plain_answer_shows_only_its_speed() -> None:
    status = StatusLine(verbose=True)
    assert status.text(done(plainly())) == "31.4 tok/s · no guesses: nothing to guess from yet"
    assert status.text(done(plainly())) == "31.4 tok/s"


@pytest.mark.parametrize("exactness", ["W", "N", "D"])
@pytest.mark.parametrize("stats", [drafted(), plainly()], ids=["drafted", "plain"])
def test_the_status_line_shows_no_exactness_letter(exactness: Exactness, stats: DecodeStats) -> None:
    shown = line(done(stats, plan=plan(exactness=exactness)))
    assert not re.search(r"\b[WND]\b", shown)
    words = {"W": "same text as without guessing", "N": "may differ in rare ties", "D": "not checked on this machine"}
    assert {each for each in words.values() if each in shown} == ({words[exactness]} if stats.proposed else set())


def test_the_rejection_rule_promises_only_the_probabilities() -> None:
    rejection = Sampling(temperature=0.7, seed=12, rule="rejection")
    assert "same probabilities as without guessing, but not the same text · seed 12" in line(done(sampling=rejection))
    assert "same text as without guessing · seed 12" in line(done(sampling=SAMPLED))


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        (None, None),
        (15.7, "2.00x faster than without"),
        (31.3, "as fast as without"),
        (31.5, "as fast as without"),
        (39.25, "0.80x the speed without"),
    ],
)
def test_the_gain_is_shown_if_plain_decoding_was_measured(plain: float | None, words: str | None) -> None:
    parts = line(done(plain_tokens_per_s=plain)).split(" · ")
    assert [part for part in parts if "without" in part and "guess" not in part] == ([] if words is None else [words])


def test_the_gain_shown_is_at_most_the_tokens_per_round() -> None:
    useless = drafted(accepted=0, guessed_tokens=0, rounds=157)
    assert "as fast as without" in line(done(useless, plain_tokens_per_s=15.7))
    assert "0.80x the speed without" in line(done(useless, plain_tokens_per_s=39.25))


def test_slow_rounds_without_guesses_are_not_charged_to_guessing() -> None:
    """One round of 10 tokens took 0.1 s; 148 others 4.9 s, more than plain decoding takes for them."""
    stats = drafted(rounds=149, guessing_rounds=1, guessing_s=0.1)
    assert stats.times_plain(100.0) == pytest.approx((4.9 + 9 / 100) / 5.0)
    assert stats.times_plain(2.0) == stats.tokens_per_round
    assert drafted(decode_s=None).times_plain(20.0) is None
    assert drafted(rounds=0, guessing_rounds=0).times_plain(20.0) is None


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("qwen2.5-coder-0.5b", "0.5B drafter"),
        ("smollm2-135m", "135M drafter"),
        ("Qwen3-0.6B-Q8_0", "0.6B drafter"),
        ("Qwen3-30B-A3B", "30B drafter"),
        ("small-head", "drafter"),
        ("gemma3b", "drafter"),
        (None, "drafter"),
    ],
)
def test_a_drafter_is_named_by_its_size(model: str | None, said: str) -> None:
    stats = drafted(rounds_by_source={"model": 3})
    assert f" guesses right ({said}) · " in line(done(stats, plan=plan(model)))


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ({"lookup": 1}, " (copies)"),
        ({"oracle": 2}, " (oracle)"),
        ({"lookup": 5, "model": 1}, " (0.5B drafter + copies)"),
        ({}, ""),
    ],
)
def test_the_status_line_names_the_drafters_that_guessed(sources: dict[str, int], said: str) -> None:
    assert f"guesses right{said} · " in line(done(drafted(rounds_by_source=sources)))


def test_one_guess_is_printed_in_the_singular() -> None:
    shown = line(done(drafted(emitted_tokens=1, decode_s=None, proposed=1, accepted=0)))
    assert shown.startswith("1 token · 0 of 1 guess right (")
    assert line(done(plainly(emitted_tokens=0, decode_s=None, rounds=0))) == "0 tokens"


def test_the_status_line_shows_a_stopped_or_cut_answer() -> None:
    assert line(done(finish_reason="cancelled")).endswith(" · stopped")
    assert line(done(finish_reason="length")).endswith(" · cut at the token limit")


def test_the_readme_shows_current_status_lines() -> None:
    (transcript,) = re.findall(r"````text\n(.*?)````", read_page("README.md"), re.DOTALL)
    shown = [each for each in transcript.splitlines() if "tok/s" in each]
    assert len(shown) == len(re.findall("^> ", transcript, re.MULTILINE))
    for each in shown:
        assert as_printed(each) == each


def test_the_chat_page_explains_every_part_of_a_status_line() -> None:
    page = read_page("docs/guide/chat.md")
    (block,) = [text for text in fenced("docs/guide/chat.md", "text") if "tok/s" in text]
    shown = " · ".join(block.splitlines())
    assert as_printed(shown) == shown
    parts = re.findall(r"^\| `([^`]+)` \|", page[page.index("| part | meaning |") :].split("\n\n")[0], re.MULTILINE)
    assert [part for part in parts if part in shown] == shown.split(" · ")
    for part in ("may differ in rare ties", "cut at the token limit", "stopped", "no guesses: …"):
        assert part in parts


def as_printed(shown: str) -> str:
    """The status line of an answer with the figures of a line that a page shows."""
    speed, times = map(float, re.findall(r"\d+(?:\.\d+)?", shown)[:2])
    return StatusLine().text(done(drafted(decode_s=157 / speed), plain_tokens_per_s=speed / times))


# -------------------------------------------------------------------------------------- why there are no guesses


def test_a_reason_for_no_guesses_is_shown_once_in_a_session() -> None:
    off = done(plainly(), speculation_off="the drafter is still loading")
    assert line(off) == "31.4 tok/s · no guesses: the drafter is still loading"
    assert line(off, off) == "31.4 tok/s"
    assert line(off, done(), off) == "31.4 tok/s"
    assert line(done(), off) == line(off)


def test_a_reason_with_other_figures_is_not_repeated() -> None:
    first, second, third = (
        done(plainly(), speculation_off=f"guesses would reach {figure}x at best here: off")
        for figure in ("0.82", "0.9", "1.01")
    )
    assert line(first).endswith("no guesses: guesses would reach 0.82x at best here: off")
    assert line(first, second, third) == "31.4 tok/s"
    lost = done(plainly(), speculation_off="the drafter was lost")
    assert line(first, lost) == "31.4 tok/s · no guesses: the drafter was lost"


def test_a_chat_that_measures_itself_does_not_suggest_calibrate() -> None:
    unknown = done(plainly(), speculation_off=NOT_CALIBRATED.text, speculation_off_code="not_calibrated")
    assert "`edgespec calibrate --quick`" in line(unknown)
    measuring = StatusLine(measuring=True, verbose=True)
    said = "31.4 tok/s · no guesses: measuring this machine between answers; guessing starts when that is done"
    assert [measuring.text(unknown), measuring.text(unknown)] == [said, "31.4 tok/s"]
    lost = done(plainly(), speculation_off="the drafter was lost", speculation_off_code="drafter_failed")
    assert StatusLine(measuring=True, verbose=True).text(lost) == line(lost)


def test_a_reason_for_one_idle_drafter_is_shown_while_another_guesses() -> None:
    half = done(speculation_off="no drafter is known for tiny; name one")
    assert line(half).endswith("same text as without guessing · no drafter is known for tiny; name one")
    assert "is known" not in line(half, half)


@pytest.mark.parametrize("asking", [("generate", "hello"), ("chat",)], ids=["generate", "chat"])
def test_plain_decoding_that_was_asked_for_needs_no_reason(
    tiny: TinyModels, here: InProcess, asking: tuple[str, ...]
) -> None:
    asked = (*asking, "--target", str(tiny.target), "--draft", "none", "--max-tokens", "4", "--verbose")
    stdin = "hello\n" if asking == ("chat",) else ""
    assert " · no guesses: " in here(*asked, stdin=stdin).err.splitlines()[-1]
    plain = here(*asked, "--plain", stdin=stdin).err.splitlines()[-1]
    assert re.fullmatch(r"\d+\.\d tok/s · cut at the token limit", plain)


def test_an_answer_of_one_token_had_nothing_to_guess() -> None:
    assert line(done(plainly(emitted_tokens=1, rounds=0, decode_s=0.0))) == "1 token"


# ------------------------------------------------------------------------------------------------------- widths


@pytest.mark.parametrize("columns", [20, 30, 40, 60, 80, 121, 200])
def test_no_line_is_longer_than_the_terminal(columns: int) -> None:
    answer = done(sampling=SAMPLED, finish_reason="length", speculation_off="a drafter was lost, " * 6)
    whole, shown = (StatusLine(verbose=True).text(answer, width) for width in (None, columns))
    lines = shown.splitlines()
    assert max(map(len, lines)) <= columns
    assert re.sub(r"[\s·]+", " ", shown) == re.sub(r"[\s·]+", " ", whole).strip(), "no word is cut or lost"


def test_a_status_line_that_fits_is_not_wrapped() -> None:
    whole = StatusLine(verbose=True).text(done())
    assert StatusLine(verbose=True).text(done(), len(whole)) == whole
    assert StatusLine(verbose=True).text(done(), 80) == (
        "31.4 tok/s · 1.35x faster than without\n"
        "88 of 101 guesses right (0.5B drafter + copies) · same text as without guessing"
    )


# ------------------------------------------------------------------------------------------------------- /stats


def test_stats_are_rounded_and_have_units() -> None:
    assert stats_lines(done()) == [
        "prompt         310 tokens, 280 of them cached",
        "answer         158 tokens, 31.4 tok/s",
        "first token    360 ms",
        "decoding       5.0 s",
        "  target       4.3 s",
        "  drafters     612 ms",
        "rounds         69, 2.28 tokens/round",
        "guesses        88 of 101 right (87 %)",
        "guessed by     copies in 9 rounds, 0.5B drafter in 52",
        "right in a row none in 7 rounds, 1 in 20, 2 in 34",
        "gain           1.35x faster than without",
        "text           same text as without guessing",
    ]
    short = done(drafted(emitted_tokens=FEWEST_FOR_A_RATIO - 1))
    assert "gain           not measured" in stats_lines(short)
    assert "6.0 tok/s · 88 of 101" in line(short)
    rest = stats_lines(done(plain_tokens_per_s=None, sampling=SAMPLED, speculation_off="none is known"))[-4:]
    assert rest == [
        "gain           not measured",
        "text           same text as without guessing",
        f"seed           {SAMPLED.seed}",
        "idle drafter   none is known",
    ]
    assert stats_lines(done(plainly(), speculation_off="none is known"))[-1] == "no guesses     none is known"


def test_stats_of_a_plain_answer_name_no_guesses() -> None:
    shown = stats_lines(done(plainly(cached_tokens=0)))
    assert [each.split()[0] for each in shown] == [
        "prompt", "answer", "first", "decoding", "target", "drafters", "rounds"
    ]  # fmt: skip
    assert shown[0] == "prompt         310 tokens"


def test_stats_of_an_empty_answer_show_not_measured() -> None:
    none = DecodeStats(prompt_tokens=1)
    assert stats_lines(done(none))[:4] == [
        "prompt         1 token",
        "answer         0 tokens",
        "first token    not measured",
        "decoding       not measured",
    ]


def test_stats_count_malformed_guesses() -> None:
    assert "malformed      1 guess" in stats_lines(done(drafted(invalid_proposals=1)))


# ---------------------------------------------------------------------------------------------------- measured:


class Measured:
    """An engine whose pause was long enough to measure everything."""

    can_calibrate = True

    def __init__(self, made: Plan, plain_s: float | None) -> None:
        self.plan, self._plain_s = made, plain_s
        self.pair = self.measurements = self

    def costs(self) -> Costs:
        return Costs(plain_s=self._plain_s)

    def calibrate_for(self, **_settings: object) -> tuple[str, ...]:
        return ("six", "sentences", "of reasons")


@pytest.mark.parametrize(
    ("made", "plain_s", "said"),
    [
        (plan(predicted=45.0), 0.04, "guessing is worth about 1.8x here"),
        (plan(predicted=25.0), 0.04, "guessing is used where the text makes it faster"),
        (plan(predicted=None), 0.04, "guessing is used where the text makes it faster"),
        (plan(predicted=45.0), None, "guessing is used where the text makes it faster"),
        (plan(mode="plain", predicted=25.0), 0.04, "decoding without guesses is fastest here"),
    ],
)
def test_the_result_of_measuring_is_one_line(made: Plan, plain_s: float | None, said: str) -> None:
    with IdleCalibration(Measured(made, plain_s)) as idle:  # type: ignore[arg-type]
        idle.start()
        line = None
        while line is None:
            line = idle.stop()
            idle.start()
    assert line == f"measured: {said} (/plan says why)"


# ---------------------------------------------------------------------------------------------- a real terminal


@pytest.mark.skipif(sys.platform == "win32", reason="terminals are a matter of POSIX")
@pytest.mark.parametrize("columns", [40, 60, 80])
def test_answer_and_status_line_fit_the_terminal(tiny: TinyModels, columns: int) -> None:
    from tests.support.terminal import Terminal

    arguments = command("chat", "--target", tiny.target, "--draft", "none", "--depth", "0", "--max-tokens", "3")
    chat = Terminal(arguments, {**environment(tiny.home.root), "COLUMNS": str(columns)})
    try:
        chat.wait_for(r"is ready")
        chat.wait_for(r"\n> ")
        for asked in ("hello", "/help", "/plan", "/stats"):
            chat.type(f"{asked}\r")
            chat.wait_for(asked)
            shown = chat.wait_for(r"\r\n(.|\n)*?\r\n> ").split("\r\n")
            # The answer itself stands before its status line, and is the terminal's to break.
            first = next(
                at for at, each in enumerate(shown) if asked != "hello" or re.match(r"\d+(\.\d)? tok/s", each)
            )
            own = shown[first:]
            assert max(map(len, own)) <= columns, (asked, own)
            assert sum(map(bool, own)) > 1
        chat.type("/exit\r")
        assert chat.exit_code() == 0
    finally:
        chat.close()


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        (None, ["- a line of words that is long", ""]),
        (80, ["- a line of words that is long", ""]),
        (20, ["- a line of words", "  that is long", ""]),
        (5, ["- a line of words", "  that is long", ""]),
    ],
)
def test_notes_are_broken_between_words(
    columns: int | None, lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "stderr_columns", lambda: columns)
    output.note("- a line of words that is long\n")
    assert capsys.readouterr().err.split("\n")[:-1] == lines


@pytest.mark.parametrize(("columns", "indent"), [(40, 14), (30, 2)], ids=["room", "no-room"])
def test_notes_in_columns_hang_where_there_is_room(
    columns: int, indent: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "stderr_columns", lambda: columns)
    output.note("/set          the sampling settings, in words that take several lines", hang=14)
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith("/set          the")
    assert len(others) > 0
    assert all(re.match(f" {{{indent}}}\\S", line) for line in others)


def test_a_word_that_is_too_long_stays_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "stderr_columns", lambda: 20)
    output.note("see /a/path/that/is/too/long/for-a-line and go")
    assert capsys.readouterr().err == "see\n  /a/path/that/is/too/long/for-a-line\n  and go\n"

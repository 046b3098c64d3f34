"""``edgespec plan``: described machines in full, and this machine's plan."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from edgespec.files.home import Home
from edgespec.planning.depth.outcome import Outcome, Spread
from edgespec.profiles.machines import machine_names
from tests.support.command_line import InProcess, run_here
from tests.support.tiny_models import TinyModels

MACHINES = Path(__file__).parents[2] / "edgespec" / "profiles" / "machines"

# What people have who run a model at home.
USUAL = ("laptop-igpu", "laptop-small-gpu", "desktop-12gb-gpu", "phone-npu", "mini-pc")


def labels(out: str) -> dict[str, str]:
    return {line[:12].strip(): line[12:] for line in out.splitlines() if line[:1].strip()}


@pytest.mark.parametrize("name", machine_names())
def test_every_described_machine_is_planned(here: InProcess, name: str) -> None:
    result = here("plan", "--simulate", name)
    assert result.code == 0, result.err
    shown = labels(result.out)
    assert shown["machine"].startswith(f"{name} (described, not measured). ")
    assert list(shown) == ["machine", "model", "drafter", "speed", "limit", "to do"]
    assert re.match(r"\d+\.\d tokens/s", shown["speed"])
    assert result.err == ""


@pytest.mark.parametrize("name", USUAL)
def test_a_described_machine_gets_devices_mode_depth_speed_and_reasons(here: InProcess, name: str) -> None:
    shown = labels(here("plan", "--simulate", name, "--explain").out)
    found = here("plan", "--simulate", name, "--json").json
    plan, best = found["plan"], found["candidates"][0]
    assert shown["mode"] == plan["mode"] == best["mode"]
    assert shown["model"].startswith(f"{plan['target']['model']} on {plan['target']['device']} (")
    assert shown["speed"].startswith(f"{plan['predicted_tokens_per_s']:.1f} tokens/s")
    assert shown["considered"] == plan["reasons"][0]
    if plan["mode"] == "plain":
        assert (shown["drafter"], plan["drafter"], plan["depth_cap"]) == ("none", None, 0)
    else:
        assert shown["drafter"].startswith(f"{plan['drafter']['model']} on {plan['drafter']['device']} (")
        assert shown["depth"] == f"up to {plan['depth_cap']}"
        assert f", {best['speedup']:.2f}x plain decoding" in shown["speed"]
        assert re.search(
            rf"at most {best['possible_speedup']:.1f}x, if all (the drafter's )?guesses are right; ", shown["limit"]
        )
        assert f"{best['speedup']:.2f}x the fastest plain decoding" in plan["reasons"][0]
        assert plan["reasons"][0] == f"{best['what']}: {best['reason']}"
    assert plan["reason_codes"][0] == best["reason_code"]
    assert len(plan["reason_codes"]) == len(plan["reasons"])
    assert any(one["mode"] == "plain" for one in found["candidates"])


def test_plan_prints_five_labelled_lines(here: InProcess) -> None:
    shown = labels(here("plan", "--simulate", "laptop-small-gpu").out)
    assert shown["model"] == "llama-3.1-8b on CUDA0+cpu (llama, 8 threads), context 8192"
    assert shown["drafter"] == "llama-3.2-1b on CUDA0 (llama)"
    assert re.fullmatch(
        r"\d+\.\d tokens/s, 1\.\d\dx plain decoding; the text: not checked on this machine", shown["speed"]
    )
    assert re.fullmatch(r"at most \d\.\dx, .*; 2\.\d tokens are expected of a round", shown["limit"])
    assert shown["to do"] == "nothing; --explain says why"


@pytest.mark.parametrize("more", ["--explain", "--verbose"])
def test_more_is_printed_when_it_is_asked_for(here: InProcess, more: str) -> None:
    shown = labels(here("plan", "--simulate", "laptop-small-gpu", more).out)
    assert shown["depth"].startswith("up to ")
    assert shown["exactness"].startswith("not checked on this machine (D)")
    assert re.fullmatch(r"\d\.\d\d GiB of CUDA0, \d\.\d\d GiB of cpu", shown["memory"])
    assert shown["considered"]


def test_a_plain_plan_prints_no_depth(here: InProcess) -> None:
    shown = labels(here("plan", "--simulate", "board-4gb", "--explain").out)
    assert (shown["mode"], shown["drafter"]) == ("plain", "none")
    assert not {"depth", "exactness"} & set(shown)
    assert "plain decoding" not in shown["speed"]


def test_a_lookup_drafter_is_printed_without_a_device(here: InProcess, tmp_path: Path) -> None:
    text = (MACHINES / "ultrabook-8gb-flat.toml").read_text(encoding="utf-8")
    assert "acceptance = [0.1, " in text
    (tmp_path / "copying.toml").write_text(
        text.replace("acceptance = [0.1, ", "acceptance = [0.9, "), encoding="utf-8"
    )
    shown = labels(here("plan", "--simulate", tmp_path / "copying.toml").out)
    assert shown["drafter"] == "copies of the text"
    assert shown["machine"].startswith("copying (described, not measured). Ultrabook")


def test_plan_says_if_memory_is_too_small(here: InProcess) -> None:
    assert "GiB are free with the target loaded" in here("plan", "--simulate", "board-4gb").out


def test_explain_shows_every_candidate_and_every_rejection(here: InProcess) -> None:
    found = here("plan", "--simulate", "desktop-big-gpu", "--json").json
    result = here("plan", "--simulate", "desktop-big-gpu", "--explain")
    lines = result.out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("considered"))
    considered = [line[12:] for line in lines[start:]]
    said = [line[12:].removeprefix("not ") for line in lines]
    assert len(set(said)) == len(said), "no line comes twice"
    assert len(considered) == len(found["candidates"]) + len(found["rejected"])
    for candidate, line in zip(found["candidates"], considered, strict=False):
        assert line == f"{candidate['what']}: {candidate['reason']}"
    for refusal in found["rejected"]:
        assert f"not {refusal['what']}: {refusal['reason']}" in considered


def test_plan_json_has_plan_candidates_and_rejections(here: InProcess) -> None:
    result = here("plan", "--simulate", "desktop-full-gpu", "--json")
    assert result.code == 0
    found = result.json
    assert found["schema_version"] == 1
    plan = found["plan"]
    assert (plan["mode"], plan["exactness"], plan["numeric_class"]["widths"]) == ("pipelined", "D", [])
    assert plan["target"] == {"model": "qwen2.5-32b", "runtime": "llama", "device": "CUDA0", "threads": 1}
    assert plan["drafter"]["device"] == "cpu"
    assert plan["predicted_tokens_per_s"] == found["candidates"][0]["predicted_tokens_per_s"]
    assert found["candidates"][-1]["mode"] == "plain"
    assert found["simulated"]["name"] == "desktop-full-gpu"
    assert plan["reasons"]


def test_plan_prints_the_layers_of_a_split_target(here: InProcess) -> None:
    plan = here("plan", "--simulate", "laptop-small-gpu", "--json").json["plan"]
    assert plan["target"]["device"] == "CUDA0+cpu"
    layers = plan["numeric_class"]["settings"]["gpu_layers"]
    assert f"{layers} of 32 layers on CUDA0+cpu" in plan["reasons"][0]


@pytest.mark.slow
@pytest.mark.parametrize("name", machine_names())
def test_plan_wraps_to_a_narrow_terminal(
    here: InProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    whole = here("plan", "--simulate", name, "--explain").out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert shutil.get_terminal_size().columns == 60
    folded = here("plan", "--simulate", name, "--explain").out
    assert max(map(len, folded.splitlines())) <= 60
    assert folded.split() == whole.split()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--simulate", "laptop-small-gp"), ("no described machine", "Did you mean laptop-small-gpu?")),
        (("--simulate", "none.toml"), ("no machine file none.toml", "Described machines: ")),
        (("--simulate", "laptop-small-gpu", "--target", "x"), ("--model cannot be combined with --simulate",)),
        (("--simulate", "laptop-small-gpu", "--context", "512"), ("--context cannot be combined with --simulate",)),
        (("--simulate", "laptop-small-gpu", "--depth", "2"), ("--set cannot be combined with --simulate",)),
    ],
)
def test_wrong_arguments_of_simulate_are_errors(
    here: InProcess, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    here("plan", *arguments).failed_well(*words, code=2)


def test_a_mistake_in_a_described_machine_is_named(here: InProcess, tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text("description = 'x'\ncontext = 2048\ndevice = 1\n", encoding="utf-8")
    here("plan", "--simulate", tmp_path / "m.toml").failed_well(
        'm.toml: unknown key "device"', 'Did you mean "devices"?', code=2
    )


def test_a_described_target_larger_than_memory_is_an_error(here: InProcess, tmp_path: Path) -> None:
    text = (MACHINES / "board-4gb.toml").read_text(encoding="utf-8")
    (tmp_path / "small.toml").write_text(text.replace("1_700_000_000", "1_000_000_000"), encoding="utf-8")
    here("plan", "--simulate", tmp_path / "small.toml").failed_well("fits nowhere", "0.93 GiB may be used")
    failed = here("plan", "--simulate", tmp_path / "small.toml", "--json")
    assert failed.json["error"]["type"] == "MemoryLimitError"


def test_explain_compares_the_latest_answer_with_what_the_plan_promised(
    here: InProcess, tiny: TinyModels, tmp_path: Path
) -> None:
    pair = ("--target", tiny.target, "--draft", tiny.drafter, "--threads", "1")
    assert "answers" not in labels(here("plan", *pair, "--explain").out)
    got = Outcome(
        rounds=9,
        tokens_per_round=Spread(2.0, 1.5, 2.5),
        token_s=Spread(0.02, 0.01, 0.03),
        promised_tokens_per_round=3.0,
        promised_token_s=0.015,
    )
    with tiny.load(store_home=Home(tmp_path / "home")) as engine:
        engine.pair.measurements.learn_answer(got)
    assert labels(here("plan", *pair, "--explain").out)["answers"] == f"the latest: {got}"
    assert "answers" not in labels(here("plan", *pair).out)


def test_what_to_do_names_the_models_that_were_asked_about(here: InProcess, tiny: TinyModels) -> None:
    in_llama = ("--set", "runtime=llama", "--set", "draft_runtime=llama")  # nothing is estimated there
    shown = labels(here("plan", tiny.target, "--draft", tiny.drafter, *in_llama).out)
    command = f"edgespec calibrate {tiny.target} --draft {tiny.drafter} --quick"
    assert shown["to do"] == f"`{command}` measures this machine; --explain says why"


@pytest.mark.slow
def test_plan_prints_the_plan_of_this_machine(tiny: TinyModels) -> None:
    pair = ("--target", tiny.target, "--draft", tiny.drafter)
    result = run_here("plan", *pair, "--explain", home=tiny.home.root)
    assert result.code == 0, result.err
    shown = labels(result.out)
    assert list(shown)[:5] == ["model", "drafter", "speed", "limit", "to do"]
    assert shown["machine"].endswith((" core", " cores"))
    assert shown["speed"] == "not measured" or "tokens/s" in shown["speed"]
    assert shown["why"]
    found = run_here("plan", *pair, "--json", home=tiny.home.root).json
    assert found["plan"]["mode"] == shown["mode"]
    assert found["plan"]["reasons"][0] == shown["why"]

"""What `edgespec verify` says of a promise that holds, one that does not, and one that was not put to the test."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.bench import equality
from edgespec.bench.equality import Divergence, EqualityReport
from edgespec.bench.suite import Prompt
from edgespec.errors import EdgespecError, HashMismatchError
from edgespec.store.store import Store
from tests.support.command_line import InProcess, Result
from tests.support.tiny_models import TinyModels

HINT = "please report it with the output of `edgespec verify --json` and `edgespec doctor --json`"
Verify = Callable[..., Result]


@pytest.fixture
def verify(tiny: TinyModels, here: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verify:
    """Runs the command; ``change`` is what became of the report."""
    suite = tmp_path / "suite.jsonl"
    suite.write_text('{"id": "p", "category": "chat", "prompt": "hello"}\n')

    def run(change: Callable[[EqualityReport], EqualityReport], *options: str | Path) -> Result:
        real = equality.check_equality

        def check(*arguments: Any, **settings: Any) -> EqualityReport:
            return change(real(*arguments, **settings))

        with monkeypatch.context() as patch:
            patch.setattr(equality, "check_equality", check)
            pair = ("--target", tiny.target, "--draft", tiny.drafter, "--depth", "1", "--max-tokens", "8")
            return here("verify", *pair, "--suite", suite, *options)

    return run


def diverging(report: EqualityReport) -> EqualityReport:
    differs = Divergence(prompt_id="p", position=3, gap=0.5, depth=1, sampled=False)
    return replace(report, results=(replace(report.results[0], proposed=4, divergences=(differs,)),))


def test_verify_succeeds_if_all_tokens_are_identical(verify: Verify) -> None:
    found = verify(lambda report: report)
    assert found.code == 0
    assert found.out.splitlines()[0] == "exactness   same text as without guessing (W)"
    assert found.out.splitlines()[-1] == "the promise holds"
    assert "hint:" not in found.err
    assert "sampling    greedy; temperature 0.7, top-p 0.9, seed 1\n" in found.out
    assert "greedy and sampled (temperature 0.7, top-p 0.9, seed 1), depths 1" in found.err
    assert "against plain decoding: less than a minute\n" in found.err
    assert "\n1 prompt, 8 tokens, " in f"\n{found.err}"
    greedy, sampled = verify(lambda report: report, "--json").json["samplings"]
    assert (greedy["temperature"], sampled["temperature"], sampled["top_p"], sampled["seed"]) == (0.0, 0.7, 0.9, 1)


def test_verify_fails_with_a_hint_if_tokens_differ(verify: Verify) -> None:
    found = verify(diverging)
    assert found.code == 1
    assert "divergence  p at token 3, depth 1, greedy: gap 0.5000, bound 0.0000" in found.out
    assert found.out.splitlines()[-1] == "the promise does not hold: guessing changed the text"
    safe = "--plain, or depth = 0 in a profile, keeps this model to plain decoding's text"
    assert found.hint == f"{safe}; {HINT}"
    told = verify(diverging, "--json")
    assert (told.code, told.json["identical"], told.hint) == (1, 0, found.hint)


def test_verify_of_near_exactness_hints_at_stable_if_tokens_differ(verify: Verify) -> None:
    found = verify(lambda report: replace(diverging(report), level="N"))
    assert found.code == 1
    assert found.hint == f"--set exactness=stable keeps this model to plain decoding's text; {HINT}"


def test_verify_fails_if_nothing_was_guessed(verify: Verify) -> None:
    def silent(report: EqualityReport) -> EqualityReport:
        return replace(report, results=(replace(report.results[0], proposed=0),), why="the drafter was lost")

    found = verify(silent)
    assert found.code == 1
    assert found.out.splitlines()[-1] == "nothing was guessed, so nothing was verified: the drafter was lost"
    assert found.hint.startswith("longer answers (--max-tokens) give more to guess")


@pytest.fixture
def prompts(here: InProcess, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Runs the command up to its prompts: how many there are to choose from, and what was said.

    ``find`` takes the place of a look into the store.
    """

    def run(find: Callable[[str], Any], *options: str) -> tuple[int, str]:
        offered: list[int] = []

        def spread(prompts: Sequence[Prompt], _count: int) -> list[Prompt]:
            offered.append(len(prompts))
            raise EdgespecError("enough")

        monkeypatch.setattr(equality, "spread", spread)
        monkeypatch.setattr(Store, "find", lambda _store, name: find(name))
        found = here("verify", *options)
        return offered[0], found.err.removesuffix("edgespec: enough\n")

    return run


def test_only_prompts_on_the_disk_are_taken(prompts: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    problems = (json.dumps({"task_id": f"p{number}", "prompt": "def f():"}) for number in range(20))
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(problems).encode()))

    def damaged(name: str) -> Any:
        raise HashMismatchError(name, "it has changed")

    assert prompts(lambda _name: None) == (20, "")
    hint = "20 prompts are built in; `edgespec pull humaneval` fetches 20 more\n"
    assert prompts(lambda _name: None, "--prompts", "21") == (20, hint)
    assert prompts(lambda _name: SimpleNamespace(path=path), "--prompts", "21") == (40, "")
    assert prompts(damaged) == (20, "without humaneval: humaneval: it has changed\n")

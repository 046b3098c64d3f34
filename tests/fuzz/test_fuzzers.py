"""A few rounds of every fuzzer, so that they keep working; `make fuzz` runs them for minutes."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.__main__ import FUZZERS
from tests.fuzz.findings import MOST_KEPT, Findings
from tests.support.kernel_calls import require_native

ROUNDS = {
    "kernels": 2,
    "scheduler": 6,
    "tool-calls": 200,
    "forms": 12,
    "gguf": 60,
    "models": 1,  # tests/runtimes/test_native_hostile.py runs 150 of each kind
    "forgotten": 3,
    "server": 3,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUZZERS)
def test_a_few_rounds_of_a_fuzzer_find_nothing(name: str) -> None:
    if name in ("kernels", "models", "forgotten"):
        require_native()
    findings = Findings()
    FUZZERS[name](random.Random(1), range(ROUNDS[name]), findings)
    assert findings.wrong == []
    assert sum(findings.counts.values()) >= ROUNDS[name]


def test_findings_count_everything_and_keep_some_sentences() -> None:
    findings = Findings()
    for number in range(MOST_KEPT + 5):
        findings.unless(number % 2 == 1 or number > MOST_KEPT, f"{number} is even")
    findings.unless(False, "no")
    assert (findings.counts["wrong"], findings.wrong[:2]) == (12, ["0 is even", "2 is even"])
    for _ in range(2 * MOST_KEPT):
        findings.unless(False, "no")
    assert len(findings.wrong) == MOST_KEPT

"""The benchmark of unequal cores on a tiny model: its pool matches the product's, and all arms agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import unequal_cores
from tests.support.kernel_calls import require_native
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.mark.slow
def test_every_arm_of_the_unequal_cores_benchmark_computes_the_same_bits(tmp_path: Path) -> None:
    require_native()
    model = write_tiny_gguf(tmp_path / "tiny.gguf", width=128, quant="Q4_0")
    library = unequal_cores.build(tmp_path, ["-O0"])
    seconds = unequal_cores.measure(
        model, library, threads=2, held=1, context=20, turns=2, widths=list(unequal_cores.WIDTHS)
    )
    assert set(seconds) == {1, 8, 256}
    for width, arms in seconds.items():
        assert {name: len(turns) for name, turns in arms.items()} == dict.fromkeys(unequal_cores.ARMS, 2)
        report = unequal_cores.report(arms, 2)
        assert set(report) >= {"ms", "shared over equal", "shared, one held, over ideal"}, width


def test_the_ideal_time_on_unequal_cores_divides_work_by_speed() -> None:
    seconds = {name: [1.0, 1.0] for name in unequal_cores.ARMS}
    seconds["shared, one held"] = [1.5, 1.5]  # two threads, one at a third of the speed: 2 / (1 + 1/3)
    seconds["equal, one held"] = [3.0, 3.0]
    report = unequal_cores.report(seconds, 2)
    assert report["shared, one held, over ideal"] == {"median": 1.0, "from": 1.0, "to": 1.0}
    assert report["equal, one held, over ideal"] == {"median": 2.0, "from": 2.0, "to": 2.0}

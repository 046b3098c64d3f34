"""Every benchmark can be started."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
PARTS = {"processes", "random_schemas", "score_distance", "shape_files", "shape_tables"}  # of other benchmarks
NAMES = sorted({path.stem for path in FOLDER.glob("*.py")} - PARTS)


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_answers_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as raised:
        import_module(f"benchmarks.{name}").main()
    assert raised.value.code == 0
    assert "usage:" in capsys.readouterr().out

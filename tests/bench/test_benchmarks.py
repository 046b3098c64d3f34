"""Every benchmark can be started, finds its models as commands do, and compares what takes time."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks import processes, server_against_llama, versions
from tests.support.tiny_models import TinyModels

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


def test_llama_cpps_server_gets_the_file_of_any_model(tiny: TinyModels) -> None:
    assert server_against_llama.file_of(str(tiny.target)) == tiny.target


def test_a_fresh_home_shares_the_folder_of_models_that_a_new_home_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "new"))
    environment = processes.fresh_home(tmp_path / "fresh")
    assert (Path(environment["EDGESPEC_HOME"]) / "models").is_dir()


def test_versions_are_not_compared_on_answers_of_one_token() -> None:
    def row(version: str, prompt: str, tokens: int, decode_s: float) -> dict[str, Any]:
        own = {"id": prompt, "version": version, "emitted_tokens": tokens, "decode_s": decode_s, "ttft_s": 1.0}
        return own | {"category": "chat", "tokens_per_round": 1.0, "token_ids": [*range(tokens)]}

    rows = [row("old", "a", 3, 2.0), row("new", "a", 3, 1.0), row("old", "b", 1, 0.0), row("new", "b", 1, 0.0)]
    found = versions.report(rows, ["old", "new"], whole=False)["versions"]["new"]
    assert (found["geomean"], found["tokens_per_s"]) == (2.0, 2.0)
    whole = versions.report(rows, ["old", "new"], whole=True)["versions"]["new"]
    assert whole["geomean"] == pytest.approx(1.5**0.5)

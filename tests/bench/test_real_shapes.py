"""Files of real shapes run in both runtimes, and their table."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import benchmarks.real_shapes as module
from benchmarks.shape_files import SHAPES, bytes_of, write_shape
from edgespec.files.gguf.header import read_header
from tests.support.kernel_calls import require_native

require_native()


def test_a_file_of_a_shape_has_its_types_and_runs_in_both_runtimes(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    path = tmp_path / "small.gguf"
    write_shape(SHAPES["small"], path)
    header = read_header(path)
    types = Counter(tensor.type_name for tensor in header.tensors if len(tensor.shape) > 1)
    assert types == {"F32": 2, "Q4_K": 2 * 5 + 1 + 2, "Q6_K": 2 + 1}
    assert header.tensor_bytes == bytes_of(SHAPES["small"])
    own, theirs = (run(path, 1, 1) for run in module.RUNTIMES.values())
    assert [len(own), len(theirs)] == [1, 2]
    assert set(own[0]["forward_s"]) == set(theirs[0]["forward_s"]) == set(module.WIDTHS)
    assert {width: len(ratios) for width, ratios in own[0]["predicted"].items()} == dict.fromkeys((2, 4, 8), 3)


def measured(t1_s: float, prompt_s: float) -> dict[str, Any]:
    forward_s = {str(width): t1_s * (1 + width / 10) / 1.1 for width in module.WIDTHS}
    return {"setting": "s", "load_s": 1.0, "forward_s": forward_s, "prompt_s": prompt_s}


def test_llama_cpp_counts_with_its_fastest_setting_of_each_kind() -> None:
    turn = {"native": [measured(0.1, 1.0)], "llama": [measured(0.2, 1.5), measured(0.12, 4.0)]}
    report = module.report_of("Qwen3-30B-A3B", 16, [turn, turn, turn])
    assert (report["t1_over_native"], report["prompt_speedup"]) == (1.2, 1.5)
    table = module.table_of([report])
    assert table.splitlines()[2].startswith(
        "| Qwen3-30B-A3B, 16 of 48 layers | 100.0 | 1.09, 1.27, 1.64 | 512 | 1.0 |"
    )
    page = module.with_table("# Page\n\nText.\n", table)
    assert page == f"# Page\n\nText.\n\n{table}\n"
    assert module.with_table(page + "\nMore.\n", table) == page + "\nMore.\n"

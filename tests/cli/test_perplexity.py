"""``edgespec export`` says what rounding costs: the numbers themselves, when there are none, and why."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.bench.suite import calibration_prompts
from edgespec.errors import RuntimeUnavailableError
from edgespec.export import perplexity
from edgespec.export.onnx.export import export_onnx
from edgespec.export.perplexity import Cost, PerplexityCost, rounded_types
from edgespec.export.provenance import Provenance
from edgespec.files.gguf.header import read_header
from edgespec.placement.prepared import PreparedModel
from edgespec.runtimes.llama.context import LlamaSettings
from edgespec.text.tokenizers.llama_cpp import LlamaTokenizer
from tests.support.command_line import InProcess, succeeded
from tests.support.exporting import GGUF
from tests.support.fake_runtime import FakeModel
from tests.support.loading import load_model
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import TinyModels
from tests.support.tiny_onnx import write_tiny_model

ONNX = ("--to", "onnx")
Q4_0 = (*GGUF, "--quant", "q4_0")


def perplexity_by_hand(path: Path, tokens: Sequence[int]) -> float:
    """With forwards as wide as those of the program, since widths differ in how they round."""
    losses = []
    with load_model(path, LlamaSettings(kv_type="f16")) as model, closing(model.open(len(tokens))) as sequence:
        for first in range(0, len(tokens) - 1, 64):
            fed = tokens[first : min(first + 64, len(tokens) - 1)]
            rows = sequence.forward(fed, len(fed))
            for index, following in enumerate(tokens[first + 1 : first + 1 + len(fed)]):
                row = rows.logits(index).astype(np.float64)
                losses.append(math.log(math.fsum(np.exp(row))) - row[following])
    return math.exp(math.fsum(losses) / len(losses))


def tokens_of(path: Path, count: int) -> list[int]:
    with closing(LlamaTokenizer(path)) as vocabulary:
        text = "\n\n".join(prompt.prompt for prompt in calibration_prompts())
        return vocabulary.encode(text, add_bos=True)[: count + 1]


# ------------------------------------------------------------------------------------------ what is measured


def test_the_perplexity_of_source_and_export_is_measured(tiny: TinyModels, here: InProcess, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = succeeded(here("export", tiny.target, *Q4_0, "-o", out, "--json")).json["perplexity"]
    assert set(found) == {"before", "after", "tokens"}
    assert found["tokens"] == perplexity.TOKENS == 512
    tokens = tokens_of(tiny.target, 512)
    assert found["before"] == pytest.approx(perplexity_by_hand(tiny.target, tokens), rel=1e-3)
    assert found["after"] == pytest.approx(perplexity_by_hand(out / "model.gguf", tokens), rel=1e-3)
    assert found["before"] != found["after"]


def test_only_weights_are_rounded_while_measuring_perplexity(
    tiny: TinyModels, here: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    load = PreparedModel.load
    monkeypatch.setattr(PreparedModel, "load", lambda model, *_: (seen.append(model.settings), load(model))[1])
    succeeded(here("export", tiny.target, *Q4_0, "-o", tmp_path / "out"))
    assert [each.kv_type for each in seen] == ["f16", "f16"]


def test_export_prints_the_perplexity_before_and_after(tiny: TinyModels, here: InProcess, tmp_path: Path) -> None:
    told = succeeded(here("export", tiny.target, *Q4_0, "-o", tmp_path / "out"))
    assert re.search(r"^requantised +weights stored as Q8_0 were rounded a second time$", told.out, re.MULTILINE)
    line = r"^perplexity +[\d.]+ before, [\d.]+ after \([+-][\d.]+%\), on 512 tokens$"
    assert re.search(line, told.out, re.MULTILINE)
    assert "measuring the perplexity before" in told.err
    assert "measuring the perplexity after" in told.err


def test_rounding_unquantised_weights_is_not_called_a_second_rounding(here: InProcess, tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "float.gguf", heads=2, kv_heads=1)
    told = succeeded(here("export", source, *Q4_0, "-o", tmp_path / "out"))
    assert "requantised" not in told.out
    assert re.search(r"^perplexity +[\d.]+ before", told.out, re.MULTILINE)


def test_an_onnx_export_is_measured_in_onnx_runtime(here: InProcess, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "tiny.gguf", quant="Q8_0", context_length=96)
    found = succeeded(here("export", source, *ONNX, "--quant", "q4", "-o", tmp_path / "a", "--json")).json
    assert found["perplexity"]["tokens"] == 96  # no more than the model has positions for
    exact = succeeded(here("export", source, *ONNX, "-o", tmp_path / "b"))
    assert "perplexity" not in exact.out


@pytest.mark.parametrize("options", [(), ("--quant", "f32"), ("--quant", "q8_0")])
def test_exact_copies_have_no_perplexity_measured(
    tiny: TinyModels, here: InProcess, tmp_path: Path, options: tuple[str]
) -> None:
    result = succeeded(here("export", tiny.drafter, *GGUF, *options, "-o", tmp_path / "out", "--json"))
    assert result.json["perplexity"] is None
    told = succeeded(here("export", tiny.drafter, *GGUF, *options, "-o", tmp_path / "out"))
    assert "perplexity" not in told.out + told.err


# -------------------------------------------------------------------------------------- what is not, and why


@pytest.mark.usefixtures("few_prompts")
def test_a_trimmed_head_has_no_perplexity(tiny: TinyModels, here: InProcess, tmp_path: Path, text: Path) -> None:
    options = ("--trim-vocab", "400", "--trim-from", text)
    told = succeeded(here("export", tiny.target, *Q4_0, *options, "-o", tmp_path / "out"))
    assert re.search(r"^perplexity +not measured: a trimmed head lacks tokens", told.out, re.MULTILINE)
    found = succeeded(here("export", tiny.target, *Q4_0, *options, "-o", tmp_path / "out", "--json")).json
    assert found["perplexity"] is None


def test_too_little_memory_skips_the_perplexity_and_says_why(
    tiny: TinyModels, here: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(perplexity.describe_machine(), available_memory_bytes=1 << 20)
    monkeypatch.setattr(perplexity, "describe_machine", lambda: machine)
    told = succeeded(here("export", tiny.target, *Q4_0, "-o", tmp_path / "out"))
    assert re.search(r"^perplexity +not measured: target needs about .* may be used$", told.out, re.MULTILINE)
    assert (tmp_path / "out" / "model.gguf").exists()


def test_a_missing_runtime_skips_the_perplexity_but_not_the_export(
    tiny: TinyModels, here: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeUnavailableError("there is no such runtime", hint="install it")

    monkeypatch.setattr(PreparedModel, "load", refuse)
    told = succeeded(here("export", tiny.target, *Q4_0, "-o", tmp_path / "out"))
    assert re.search(r"^perplexity +not measured: there is no such runtime$", told.out, re.MULTILINE)


def test_scores_that_are_not_finite_are_the_reason_for_no_perplexity(
    tiny: TinyModels, here: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = read_header(tiny.target).vocabulary_size
    broken = FakeModel(size, table=lambda _prefix: [math.nan] * size)
    monkeypatch.setattr(PreparedModel, "load", lambda *_: nullcontext(broken))
    told = succeeded(here("export", tiny.target, *Q4_0, "-o", tmp_path / "out"))
    assert "not measured: target computes scores that are not finite numbers" in told.out


# ------------------------------------------------------------------------------------------- what was rounded


def test_the_rounded_types_of_an_onnx_export_come_from_its_manifest(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "mixed.gguf", quant="Q4_1", head_quant="Q8_0")
    header = read_header(source)
    kept = export_onnx(source, tmp_path / "keep", Provenance(name="mixed"))
    assert rounded_types(header, tmp_path / "keep", kept) == ("Q4_1",)
    small = export_onnx(source, tmp_path / "q4", Provenance(name="mixed", quant="q4"))
    assert "Q4_1" in rounded_types(header, tmp_path / "q4", small)
    exact = write_tiny_model(tmp_path / "exact.gguf", quant="Q4_0", head_quant="Q8_0")
    same = export_onnx(exact, tmp_path / "same", Provenance(name="exact"))
    assert rounded_types(read_header(exact), tmp_path / "same", same) == ()


def test_perplexity_lines_name_rounded_types_and_the_rise() -> None:
    measured = PerplexityCost(before=8.0, after=8.2, tokens=512)
    assert measured.rise == pytest.approx(0.025)
    assert str(measured) == "8.00 before, 8.20 after (+2.5%), on 512 tokens"
    cost = Cost(rounded=("Q4_K", "Q6_K"), measured=measured)
    assert next(cost.lines()) == ("requantised", "weights stored as Q4_K, Q6_K were rounded a second time")
    assert cost.as_json() == {"before": 8.0, "after": 8.2, "tokens": 512}
    plain = Cost(rounded=("BF16", "F16"), measured=None, reason="no reason")
    assert list(plain.lines()) == [("perplexity", "not measured: no reason")]
    assert plain.as_json() is None


def test_ctrl_c_while_measuring_perplexity_says_the_export_is_complete(
    tiny: TinyModels, here: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_arguments: object, **_settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(perplexity, "cost_of_rounding", interrupted)
    out = tmp_path / "out"
    found = here("export", tiny.target, *Q4_0, "-o", out)
    assert found.code == 130
    assert f"{out} is complete; only its perplexity was not measured" in found.err
    assert found.err.splitlines()[-1] == "interrupted"
    assert (out / "model.gguf").is_file()

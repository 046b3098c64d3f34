"""``edgespec export --static-cache``: what it writes and refuses, and a drafter whose cache ends before the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgespec.export.onnx.export import LEAST_STATIC_CACHE
from edgespec.files.gguf.header import read_header
from edgespec.files.onnx.folder import read_onnx_folder
from tests.support.command_line import InProcess, succeeded
from tests.support.tiny_models import TinyModels

FIXED = ("--to", "onnx", "--static-cache", str(LEAST_STATIC_CACHE))


@pytest.fixture
def drafter(tiny: TinyModels, here: InProcess, tmp_path: Path) -> Path:
    found = succeeded(here("export", tiny.drafter, *FIXED, "-o", tmp_path / "fixed", "--json")).json
    manifest = found["manifest"]
    assert (manifest["cache"], manifest["static_cache"]) == ("rows", LEAST_STATIC_CACHE)
    return tmp_path / "fixed"


def test_a_static_cache_export_has_fixed_shapes(
    drafter: Path, here: InProcess, tiny: TinyModels, tmp_path: Path
) -> None:
    artefact = read_onnx_folder(drafter)
    assert (artefact.cache, artefact.static_cache) == ("rows", LEAST_STATIC_CACHE)
    succeeded(here("export", tiny.drafter, "--to", "onnx", "-o", tmp_path / "other"))
    assert read_onnx_folder(tmp_path / "other").static_cache is None  # unless it is asked for


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--to", "gguf", "--static-cache", "512"), ("--static-cache is for ONNX models only",)),
        (("--to", "onnx", "--static-cache", str(LEAST_STATIC_CACHE - 1)), (f"{LEAST_STATIC_CACHE - 1} tokens",)),
        (("--to", "onnx", "--static-cache", "-1"), ("-1 tokens",)),
        (("--to", "onnx", "--static-cache", str(10**12)), (f"{10**12} tokens",)),
        (("--to", "onnx", "--static-cache", "many"), ("--static-cache must be a whole number",)),
        # Said before rows are counted: the text does not exist.
        ((*FIXED[:3], "3", "--trim-vocab", "300", "--trim-from", "missing.txt"), ("3 tokens",)),
    ],
)
def test_wrong_static_cache_options_are_errors(
    tiny: TinyModels, here: InProcess, tmp_path: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    result = here("export", tiny.drafter, "-o", tmp_path / "out", *options, "--json")
    result.failed_well(*words, code=2)
    assert not (tmp_path / "out").exists()


def test_the_hint_of_a_wrong_static_cache_names_the_limits(tiny: TinyModels, here: InProcess, tmp_path: Path) -> None:
    result = here("export", tiny.drafter, "--to", "onnx", "--static-cache", "5", "-o", tmp_path / "out", "--json")
    for bound in (LEAST_STATIC_CACHE, read_header(tiny.drafter).context_length):
        assert str(bound) in (result.hint or "")


@pytest.mark.parametrize(("words", "drafted"), [(20, True), (200, True), (400, False)])
def test_a_drafter_with_a_full_static_cache_stops_drafting(
    drafter: Path, tiny: TinyModels, here: InProcess, loaded_drafter: None, words: int, drafted: bool
) -> None:
    """The text begins well before the end of the cache, reaches it in the answer, or is longer from the start."""

    def answer(*options: str) -> Any:
        arguments = ("--raw", "water " * words, "--target", tiny.target, "--max-tokens", "80", "--context", "1024")
        return succeeded(here("generate", *arguments, *options, "--json")).json

    plain = answer("--draft", str(drafter), "--plain")
    found = answer("--draft", str(drafter), "--depth", "2")
    assert found["token_ids"] == plain["token_ids"]
    assert ("model" in found["stats"]["rounds_by_source"]) == drafted
    assert found["plan"]["drafter"]["runtime"] == "onnx"


def test_a_static_cache_is_the_context_of_a_target(drafter: Path, here: InProcess, loaded_drafter: None) -> None:
    answer = succeeded(
        here("generate", "water", "--raw", "--target", str(drafter), "--draft", "none", "--max-tokens", "3", "--json")
    )
    assert answer.json["plan"]["context_length"] == LEAST_STATIC_CACHE
    assert len(answer.json["token_ids"]) == 3

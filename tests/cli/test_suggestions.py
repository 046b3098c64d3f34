"""What a shell completes: names of models, profiles, suites and their categories, and paths."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.cli import suggestions
from edgespec.files.home import Home
from tests.support.command_line import InProcess, command, environment
from tests.support.tiny_models import put_into_store


@pytest.fixture(autouse=True)
def nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A separate home without models of other programs."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    for name in ("HF_HOME", "HF_HUB_CACHE", "OLLAMA_MODELS"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    suggestions.models_to_name.cache_clear()
    yield
    suggestions.models_to_name.cache_clear()


def values(found: object) -> list[str]:
    return [value for value, _ in found]  # type: ignore[attr-defined]


def test_completion_suggests_models_and_drafters() -> None:
    assert values(suggestions.for_model("qwen2.5-coder-1")) == ["qwen2.5-coder-1.5b"]
    assert values(suggestions.for_drafter("")) == ["auto", "none", *values(suggestions.for_model(""))]
    assert values(suggestions.for_drafter("n")) == ["none"]
    assert values(suggestions.for_stored_model("")) == [], "nothing was fetched"


def test_completion_suggests_paths_after_a_path_prefix(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("model.gguf", "notes.txt", "mine.toml", "own.jsonl"):
        (tmp_path / name).touch()
    assert values(suggestions.for_model("./m")) == ["./model.gguf"]
    assert values(suggestions.for_model(f"{tmp_path}/")) == [f"{tmp_path}/folder/", f"{tmp_path}/model.gguf"]
    assert values(suggestions.for_profile("./m")) == ["./mine.toml"]
    assert values(suggestions.for_suite("./o")) == ["./own.jsonl"]
    assert values(suggestions.for_machine("./m")) == ["./mine.toml"]
    assert values(suggestions.for_model("/no/such/folder/")) == []


def test_completion_suggests_names_in_a_folder_that_may_only_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "model.gguf").touch()
    monkeypatch.setattr(Path, "is_dir", refuse)
    assert values(suggestions.for_model("./m")) == ["./model.gguf"]


def test_completion_suggests_profiles_and_suites() -> None:
    assert values(suggestions.for_profile("laptop")) == ["laptop"]
    assert values(suggestions.for_suite("")) == ["ours", "quick", "long-prompts", "short", "verify"]
    assert suggestions.one_of("gguf", "onnx")("o") == [("onnx", "")]
    assert values(suggestions.for_setting("exact")) == ["exactness="]
    assert values(suggestions.for_machine("laptop-small")) == ["laptop-small-gpu"]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("edgespec chat smo", "smollm2-135m"),
        ("edgespec generate hi --model gem", "gemma3-270m"),
        ("edgespec bench --suite short --category cl", "classification"),
        ("edgespec bench --category extract", "extract-json"),
        ("edgespec plan smo", "smollm2-135m"),
        ("edgespec profiles show lap", "laptop"),
        ("edgespec mem", "memory"),
    ],
)
def test_shell_completion_prints_suggestions(tmp_path: Path, words: str, found: str) -> None:
    """Through the program, as bash asks it."""
    env = environment(tmp_path / "home", {"_EDGESPEC_COMPLETE": "complete_bash", "COMP_WORDS": words})
    env["COMP_CWORD"] = str(len(words.split()) - 1)
    done = subprocess.run(command(), capture_output=True, text=True, env=env, check=False, timeout=60)
    assert done.stdout.split() == [found]
    assert done.stderr == ""


@pytest.mark.parametrize("given", [{}, {"COMP_CWORD": "x", "COMP_WORDS": "edgespec"}, {"COMP_CWORD": "-1"}])
def test_bash_that_does_not_say_what_was_typed_gets_no_error(
    given: dict[str, str], here: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_EDGESPEC_COMPLETE", "complete_bash")
    for name in ("COMP_CWORD", "COMP_WORDS"):
        monkeypatch.setenv(name, "")  # restored afterwards: completing sets them
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    done = here()
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("models", "rm", "hf", ":", "or"), ["org/repo:Q4_0", "org/repo:Q8_0"]),
        (("models", "rm", "hf", ":", "org/repo", ":"), ["Q4_0", "Q8_0"]),
        (("models", "rm", "hf", ":", "org/repo", ":", "Q4_0", "hf", ":", "org/repo", ":", "Q8"), ["Q8_0"]),
        (("models", "rm", "'hf:org/repo:Q4"), ["hf:org/repo:Q4_0"]),
        (("models", "rm", "h"), ["hf:org/repo:Q4_0", "hf:org/repo:Q8_0"]),
        (("models", "rm", "hf", ":", "org/repo", ":", "Q4_0", ""), ["hf:org/repo:Q4_0", "hf:org/repo:Q8_0"]),
    ],
)
def test_bash_which_splits_words_at_colons_completes_names_that_have_some(
    words: tuple[str, ...], found: list[str], here: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for quant in ("Q4_0", "Q8_0"):
        put_into_store(Home(here.home), f"hf:org/repo:{quant}", b"GGUF")
    monkeypatch.setenv("_EDGESPEC_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(("edgespec", *words)))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    assert here().out.splitlines() == found

"""The core installation: no llama.cpp, no package for exporting, and whatever does not need them works."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.files.installation import install_command
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import TinyModels
from tests.support.vocabularies import byte_letters, write_vocabulary

# What the extras install cannot be imported, as if it were not there.
CODE = (
    "import sys\n"
    "for name in ('llama_cpp', 'gguf', 'onnx', 'onnxruntime', 'matplotlib'): sys.modules[name] = None\n"
    "from edgespec.cli import main; main()"
)
ROOT = Path(__file__).parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", CODE, *map(str, arguments)],
            input=stdin,
            env={"EDGESPEC_HOME": str(tmp_path / "home"), "PATH": "/nonexistent", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    return run


def test_without_llama_cpp_drafted_text_equals_plain_decoding(run: Run, tiny: TinyModels) -> None:
    models = ("--target", tiny.target, "--draft", tiny.drafter, "--max-tokens", "40", "--json")
    guessed = json.loads(run("generate", "hello there", *models, "--depth", "3").stdout)
    plain = json.loads(run("generate", "hello there", *models, "--plain").stdout)
    assert guessed["token_ids"] == plain["token_ids"]
    assert guessed["stats"]["proposed"] > 0
    assert guessed["plan"]["target"]["runtime"] == "native"


@pytest.mark.parametrize("command", ["plan", "doctor", "models", "profiles"])
def test_commands_work_without_llama_cpp(run: Run, tiny: TinyModels, command: str) -> None:
    models = ("--target", tiny.target) if command == "plan" else ()
    done = run(command, *models)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_plan_says_what_installing_llama_cpp_adds(run: Run, tiny: TinyModels) -> None:
    done = run("plan", "--explain", "--target", tiny.target)
    (missing,) = (line for line in done.stdout.splitlines() if line.startswith("missing"))
    assert "llama.cpp is not installed: it adds GPUs" in missing
    assert install_command("llama") in missing
    assert "llama.cpp" not in run("plan", "--target", tiny.target).stdout


def test_a_chat_answers_without_llama_cpp(run: Run, tiny: TinyModels) -> None:
    done = run("chat", "--target", tiny.target, "--max-tokens", "4", stdin="hello\nagain\n")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2


def test_a_file_that_only_llama_cpp_runs_names_the_extra(run: Run, tmp_path: Path) -> None:
    path, size = write_tiny_gguf(tmp_path / "odd.gguf"), b"\x05\0\0\0\0\0\0\0"
    data = path.read_bytes().replace(b"llama.", b"mamba.")
    path.write_bytes(data.replace(size + b"llama", size + b"mamba", 1))  # its architecture, not its tokenizer
    done = run("generate", "hi", "--target", path)
    assert done.returncode == 1
    assert "the native runtime does not run odd" in done.stderr
    assert "llama.cpp is not installed" in done.stderr
    assert install_command("llama") in done.stderr
    assert "Traceback" not in done.stderr


def test_a_gpu_by_name_names_the_extra(run: Run, tiny: TinyModels, tmp_path: Path) -> None:
    (tmp_path / "gpu.toml").write_text('device = "Vulkan0"\n', encoding="utf-8")
    done = run("generate", "hi", "--target", tiny.target, "--profile", tmp_path / "gpu.toml")
    assert done.returncode == 1
    assert install_command("llama") in done.stderr
    assert "Traceback" not in done.stderr


def test_a_vocabulary_that_only_llama_cpp_knows_names_the_extra(run: Run, tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", [(letter, 1) for letter in byte_letters()], pre="falcon")
    done = run("generate", "hi", "--target", path)
    assert done.returncode == 1
    assert install_command("llama") in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("to", ["gguf", "onnx"])
def test_exporting_names_the_extra(run: Run, tiny: TinyModels, tmp_path: Path, to: str) -> None:
    done = run(
        "export", tiny.drafter, "--to", to, "--quant", "q4_0" if to == "gguf" else "q4", "-o", tmp_path / "out"
    )
    assert done.returncode == 1
    assert "pip install " in done.stderr
    assert "Traceback" not in done.stderr

"""Programs get objects of their classes: they run as processes, against a server whose model says one object."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.form_clients import EXPECTED, PACKAGES, PROGRAMS, ask
from tests.engine.test_tools import TEMPLATE
from tests.support.http_server import running
from tests.support.scripted_gguf import write_scripted_gguf
from tests.support.tiny_models import TinyModels

# In the blanks that forms on one line have, so that every form of the object leads to it.
SAYS = ('{"name": "', "Maria Keller", '", "age": ', "34", "}", "<|im_end|>")


def test_each_program_is_there() -> None:
    assert {f"with_{name}" for name in PACKAGES} == {path.stem for path in PROGRAMS.glob("with_*.py")}


def test_the_openai_program_gets_its_object_parsed_and_in_a_forced_call(tiny: TinyModels, tmp_path: Path) -> None:
    model = write_scripted_gguf(tmp_path / "model.gguf", SAYS, template=TEMPLATE)
    with running(lambda: tiny.load(model, draft="none")) as server:
        found = ask(sys.executable, PROGRAMS / "with_openai.py", server.url)
    assert found == {"works": True, "right": True, "found": {"parse": EXPECTED, "tool": EXPECTED}}


def test_a_program_that_fails_or_does_not_end_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys; sys.exit('not ' + sys.argv[1])", encoding="utf-8")
    assert ask(sys.executable, program, "u") == {"works": False, "error": "not u/v1\n"}
    program.write_text(f"print({json.dumps(json.dumps({'tool': {'name': 'Jo'}}))})", encoding="utf-8")
    assert ask(sys.executable, program, "u") == {"works": True, "right": False, "found": {"tool": {"name": "Jo"}}}
    monkeypatch.setattr(subprocess, "run", lambda command, **_settings: wait(command))
    assert ask(sys.executable, program, "u") == {"works": False, "error": "it did not end within 180 s"}


def wait(command: list[str]) -> None:
    raise subprocess.TimeoutExpired(command, 180)

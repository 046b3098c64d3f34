"""Long operations: who hears of them and who ends them."""

from __future__ import annotations

import ast
from collections.abc import Generator
from contextlib import nullcontext
from pathlib import Path

import pytest

import edgespec
from edgespec.errors import CancelledError
from edgespec.files.progress import QUIET, Job, Loading, ProgressEvent, follow

# Engine.load, an answer's cancelled tokens, Job.of, and room for public functions to come.
MOST_SIGNATURES = 12


def test_a_job_tells_its_events_and_ends_with_the_message_of_the_check() -> None:
    events: list[ProgressEvent] = []
    job = Job(events.append, lambda: len(events) > 1)
    job.tell("writing", "model.gguf", done_bytes=3, total_bytes=9)
    job.check("the export was cancelled")
    job.tell("chosen", "hub", note="q4_k_m")
    assert events == [
        ProgressEvent(stage="writing", source="model.gguf", done_bytes=3, total_bytes=9),
        ProgressEvent(stage="chosen", source="hub", note="q4_k_m"),
    ]
    with pytest.raises(CancelledError, match="the export was cancelled"):
        job.check("the export was cancelled")


@pytest.mark.parametrize("job", [QUIET, Job(), Job.of(None, None)])
def test_a_quiet_job_shows_nothing_and_continues(job: Job) -> None:
    job.tell("writing", "model.gguf")
    job.check("never")


def test_a_job_of_a_public_functions_arguments_has_them() -> None:
    events: list[ProgressEvent] = []
    with pytest.raises(CancelledError):
        Job.of(events.append, lambda: True).check("stop")
    Job.of(events.append, None).tell("writing", "x")
    assert len(events) == 1


def test_each_step_is_done_inside_the_context_and_told_outside_of_it() -> None:
    told: list[object] = []

    class Around(nullcontext[None]):
        def __enter__(self) -> None:
            told.append("in")

        def __exit__(self, *_exception: object) -> None:
            told.append("out")

    def steps() -> Generator[float, None, str]:
        yield 0.5
        told.append("last")
        return "done"

    assert follow(steps(), "measuring", told.append, Around()) == "done"
    assert told == ["in", "out", Loading("measuring", 0.5), "in", "last", "out"]


def test_progress_and_cancelling_travel_as_a_job() -> None:
    """A pair of callables in every signature between the command line and the loop that reads a file."""
    named = []
    for path in Path(edgespec.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                named += [f"{path}:{node.lineno}" for each in arguments if each.arg == "cancelled"]
    assert len(named) <= MOST_SIGNATURES, named

"""Does the server keep what its OpenAPI document says, whatever is sent to it? Schemathesis asks, from PyPI.

    python -m benchmarks.openapi_checked [--examples N] [--seed N] [--keep FOLDER]

Serves a tiny model, and makes a virtual environment with Schemathesis. It reads the document and sends bodies, paths
and headers that fit it and others that do not to every route. What counts: no failure of the server, only statuses,
types and shapes of replies that the document has, and other methods refused. Prints one JSON object: operations,
requests, and each kind of failure.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

from benchmarks.form_clients import environment
from benchmarks.processes import serving
from tests.engine.test_tools import TEMPLATE
from tests.support.tiny_gguf import FILL_IN, VOCABULARY, write_tiny_gguf

PACKAGES = ("schemathesis==4.32.5",)
# Without `positive_data_acceptance` and `negative_data_rejection`. A schema cannot say which conversations
# a template reads or which names a model has, and fields with a value that changes nothing are let through.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
)
CONTEXT = 512  # a tiny model writes so much in a moment
# Routes that exist only to be refused have 501. So have they in the document.
STATUSES = ["2xx", "4xx", 501]


def served(folder: Path) -> Path:
    """A tiny model that calls tools and fills holes."""
    shape: dict[str, Any] = {"quant": "Q8_0", "heads": 2, "kv_heads": 1}
    vocabulary = (*VOCABULARY, *FILL_IN)
    return write_tiny_gguf(folder / "tiny.gguf", seed=3, vocabulary=vocabulary, chat_template=TEMPLATE, **shape)


def measure(examples: int, seed: int, keep: Path | None) -> dict[str, Any]:
    """What Schemathesis found."""
    with tempfile.TemporaryDirectory(prefix="edgespec openapi ") as place:
        folder = Path(place)
        program = Path(environment(keep or folder / "programs", PACKAGES)).with_name("schemathesis")
        options = ("--context", str(CONTEXT), "--draft", "none")
        with serving(folder, str(served(folder)), *options) as (url, process):
            report, log = folder / "report.json", folder / "checks.log"
            config = folder / "schemathesis.toml"
            config.write_text(
                f"[checks.not_a_server_error]\nexpected-statuses = {json.dumps(STATUSES)}\n", encoding="utf-8"
            )
            command = [
                *(str(program), "--config-file", str(config), "run", f"{url}/openapi.json"),
                *("--checks", ",".join(CHECKS), "--workers", "2", "--continue-on-failure"),
                *("--max-examples", str(examples), "--seed", str(seed)),
                *("--generation-database", "none", "--suppress-health-check", "all", "--request-timeout", "120"),
                *("--report-json-path", str(report), "--no-color", "--warnings", "off"),
            ]
            with log.open("w", encoding="utf-8") as out:
                subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, cwd=folder, check=False)
            if not report.exists():
                raise RuntimeError(log.read_text(encoding="utf-8")[-2000:])
            found = json.loads(report.read_text(encoding="utf-8"))
            if found["failures"] or found["errors"]:
                print(log.read_text(encoding="utf-8"), file=sys.stderr)
            return {
                "program": PACKAGES[0],
                "seed": found["seed"],
                "operations": found["operations"]["total"],
                "tested": found["operations"]["tested"],
                "requests": found["test_cases"]["generated"],
                "seconds": round(found["running_time"], 1),
                "failures": found["failures"],
                "errors": found["errors"],
                "runs_on": process.poll() is None,
            }


def main() -> None:
    """Print one JSON object."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=50, help="random requests for each route and phase")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the environment stays for the next run")
    given = parser.parse_args()
    print(json.dumps(measure(given.examples, given.seed, given.keep)))


if __name__ == "__main__":
    main()

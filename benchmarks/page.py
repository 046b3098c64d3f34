"""Does the server's page do in a real Chromium what its guide says? The tests of `make test-page`.

    python -m benchmarks.page

Prints one JSON object: how many of them passed, failed and were skipped. Needs a Chromium.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

from benchmarks.faults import outcome
from benchmarks.processes import ROOT


def measure() -> dict[str, Any]:
    """The report. Raises RuntimeError with the end of the output if the tests cannot run."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.xml"
        command = ["sh", "scripts/test_page.sh", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"]
        done = subprocess.run(
            command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        print(done.stdout, file=sys.stderr)
        if not report.exists():
            raise RuntimeError(done.stdout[-2000:])
        return outcome(report)


def main() -> None:
    """Print one JSON object."""
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    try:
        report: dict[str, Any] = measure()
    except RuntimeError as error:
        report = {"error": {"message": str(error)}}
    print(json.dumps(report))


if __name__ == "__main__":
    main()

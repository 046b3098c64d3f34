"""Try for real what can go wrong: the tests of every real row of docs/results/faults.md.

    python -m benchmarks.faults

Prints one JSON object: the passed, failed and skipped tests of each row.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.support.faults import ROOT, Fault, faults


def tried(fault: Fault) -> dict[str, Any]:
    """The outcome of a row's tests."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.xml"
        named = [f"tests/{each}" for each in fault.tests]
        quiet = ["-q", "-p", "no:cacheprovider", f"--junit-xml={report}"]
        subprocess.run([sys.executable, "-m", "pytest", *quiet, *named], cwd=ROOT, stdout=sys.stderr, check=False)
        return {**outcome(report), "seconds": round(time.monotonic() - started, 1)}


def outcome(report: Path) -> dict[str, int]:
    """How many tests of pytest's report in JUnit's form passed, failed and were skipped."""
    counts = ElementTree.parse(report).find("testsuite")
    assert counts is not None
    total, failures, errors, skipped = (
        int(counts.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    return {"passed": total - failed - skipped, "failed": failed, "skipped": skipped}


def main() -> None:
    """Print one JSON object."""
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    rows = {str(fault.number): tried(fault) for fault in faults() if fault.real}
    print(json.dumps({"rows": rows, "seconds": round(sum(row["seconds"] for row in rows.values()), 1)}))


if __name__ == "__main__":
    main()

"""docs/json.md explains every key of an answer, and nothing that an answer does not have."""

from __future__ import annotations

import re
from pathlib import Path

from tests.golden.test_snapshot import SNAPSHOTS

PAGE = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
# Names in the page that are values or parts of a sentence, not keys.
VALUES = {
    "stop", "length", "cancelled", "keyed", "rejection", "null", "model", "lookup", "history", "datastore", "plain",
    "serial", "pipelined", "W", "N", "D", "Text.guessed_by", "edgespec generate --json", "edgespec chat --json",
    "--json",
}  # fmt: skip


def test_every_key_of_an_answer_is_explained() -> None:
    paths = (SNAPSHOTS / "json" / "generate.txt").read_text(encoding="utf-8").splitlines()
    keys = {path.rpartition(".")[2] for path in paths} - {"*"}
    explained = set(re.findall(r"`([^`]+)`", PAGE))
    assert keys <= explained, f"docs/json.md lacks {sorted(keys - explained)}"
    assert explained - keys - VALUES == {"error", "type", "message", "hint"}

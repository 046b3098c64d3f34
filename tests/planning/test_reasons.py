"""Reason codes: one list, completely documented and used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import edgespec
from edgespec.interfaces.reasons import CODES, PLAIN_CODES, Reason

PACKAGE = Path(edgespec.__file__).parent
DOCUMENT = PACKAGE.parent / "docs" / "reason-codes.md"


def test_the_document_lists_exactly_the_reason_codes() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == list(CODES.items())


def test_reason_codes_are_identifiers_and_each_is_used() -> None:
    own = PACKAGE / "interfaces" / "reasons.py"
    source = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path != own)
    for code, meaning in CODES.items():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", code)
        assert meaning
        assert not meaning.endswith(".")
        assert f'"{code}"' in source, code
    assert set(CODES) > PLAIN_CODES


def test_an_unknown_reason_code_is_refused() -> None:
    with pytest.raises(ValueError, match="'because' is not a reason code"):
        Reason("because", "it is so")
    assert Reason("no_drafter", "none").as_json() == {"reason": "none", "reason_code": "no_drafter"}

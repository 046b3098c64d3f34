"""The page of faults: every row has tests, and each of them exists."""

from __future__ import annotations

import re

import pytest

from tests.support.faults import ROOT, Fault, faults


def test_the_page_has_all_rows_in_order() -> None:
    assert [fault.number for fault in faults()] == list(range(1, 35))


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: str(fault.number))
def test_every_row_names_tests_that_exist(fault: Fault) -> None:
    assert fault.tests
    for named in fault.tests:
        file, _, name = named.partition("::")
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert re.search(rf"^ *(async )?def {name}\(", text, re.MULTILINE), named

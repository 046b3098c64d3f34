"""Plain words: no regular expression of idioms.txt, one a line, is found in code, tests or pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import ROOT

BEGINS = r"\b"
LIST = Path(__file__).resolve().with_name("idioms.txt")
LINES = LIST.read_text(encoding="utf-8").splitlines()
IDIOMS = [re.compile(line) for line in LINES]
ANY = re.compile(rf"\b(?:{'|'.join(line.removeprefix(BEGINS) for line in LINES)})")  # fast: most texts have none

FOLDERS = ("edgespec", "docs", "tests", "benchmarks", "scripts", "examples")
PLACES = (*FOLDERS, "README.md", "CHANGELOG.md", "CONTRIBUTING.md")
SUFFIXES = {".py", ".c", ".h", ".md", ".toml", ".sh"}
# Exceptions: the list and this file, which quote the expressions, and the words of a published chat template.
SKIPPED = {LIST, Path(__file__).resolve()}
QUOTED = {"tests/text/test_templates.py": "This model only supports single tool-calls at once!"}

NAME_OF_A_TEST = re.compile(r"^\s*(async )?def test_.*$", re.MULTILINE)


def files(place: Path) -> list[Path]:
    """The file ``place``, or the files of ours in that folder."""
    found = [place] if place.is_file() else sorted(place.rglob("*"))
    found = [path for path in found if path.suffix in SUFFIXES and path not in SKIPPED]
    return [path for path in found if {".venv", "build"}.isdisjoint(path.relative_to(ROOT).parts)]


def idioms(text: str) -> list[tuple[int, str]]:
    """The number of each line with an idiom, and the expression that found it. Names of tests are read as words."""
    text = NAME_OF_A_TEST.sub(lambda name: name[0].replace("_", " "), text).lower()
    if not ANY.search(text):
        return []
    lines = enumerate(text.splitlines(), start=1)
    return [(number, idiom.pattern) for number, line in lines for idiom in IDIOMS if idiom.search(line)]


@pytest.mark.parametrize("place", PLACES)
def test_the_words_are_plain(place: str) -> None:
    hits = []
    for path in files(ROOT / place):
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8").replace(QUOTED.get(name, "\0"), "")
        hits += [f"{name}:{number}: {idiom}" for number, idiom in idioms(text)]
    assert not hits, "\n".join(["plainer words are wanted:", *hits])


def test_the_list_is_sorted_lower_case_and_long_enough() -> None:
    assert sorted({line.lower() for line in LINES}) == LINES
    assert len(LINES) >= 40
    assert all(line.startswith((BEGINS, f"(?<!there ){BEGINS}")) for line in LINES), "each begins with a word"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("The answer\ngoes on while the\ndrafter loads.", 2),
        ("# It was tried in vain.", 1),
        ("Both run at once.", 1),
        ("x = 1  # Nobody waits.", 1),
        ("a run of its own", 1),
        ("\n\nAN ANSWER THAT PAYS", 3),
        ("def test_rows_beside_the_chain() -> None:", 1),
        ("    async def test_it_is_left_as_it_was() -> None:", 1),
    ],
)
def test_an_idiom_is_found(text: str, line: int) -> None:
    assert [number for number, _ in idioms(text)] == [line]


def test_plain_words_are_not_hits() -> None:
    assert idioms("def goes_on(): ...\nThe draft goes on to the target. There is no drafter.") == []

"""The picture of the README: drawn from a real answer of tiny models, and the parts that draw it."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from edgespec import Text
from scripts import picture
from tests.support.tiny_models import TinyModels, read_all, require_speculation, shown

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return picture


def shapes(svg: str, kind: str, css_class: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(svg)
    return [shape for shape in root.iter(SVG + kind) if shape.get("class") == css_class]


def test_pieces_name_guessed_tokens_and_keep_every_character(module: ModuleType) -> None:
    events = [Text("ab", (1, 2), (None, "model"), (1, 1)), Text("cde", (3,), ("lookup",), (2,))]
    pieces = [(piece.text, piece.guessed) for piece in module.pieces_of(events)]
    assert pieces == [("a", False), ("b", True), ("cd", True), ("e", False)]


def test_lines_break_at_line_ends_and_at_the_screen_edge(module: ModuleType) -> None:
    lines = module.lines_of([module.Piece("a\nb" + "c" * module.COLUMNS)])
    assert ["".join(piece.text for piece in line.pieces) for line in lines] == [
        "a",
        "b" + "c" * (module.COLUMNS - 1),
        "c",
    ]


def test_shading_covers_runs_of_guessed_characters_without_the_indent(module: ModuleType) -> None:
    pieces = [module.Piece("  ", True), module.Piece("ab", True), module.Piece("c"), module.Piece("d", True)]
    assert module.runs_of(module.Line(tuple(pieces))) == [(2, 2), (5, 1)]


def test_markup_in_an_answer_is_drawn_as_text(module: ModuleType) -> None:
    (line,) = module.lines_of([module.Piece("<b>&</b>", True)])
    drawn = module.draw([line], "a < b")
    texts = [text.text for text in ElementTree.fromstring(drawn).iter(SVG + "text")]
    assert texts == ["<b>&</b>"]
    assert len(shapes(drawn, "rect", "guess")) == 1


def test_an_answer_with_guesses_becomes_a_picture_with_shaded_tokens(module: ModuleType, tiny: TinyModels) -> None:
    with tiny.load_speculating(depth=3) as engine:
        require_speculation(engine)
        with engine.session() as session:
            events, done = read_all(session.generate("a b a b a b", max_tokens=32))
        assert done.stats.guessed_tokens > 0
        drawn = module.picture(engine, "a b a b a b", 32)
    assert shapes(drawn, "rect", "guess")
    texts = [text.text or "" for text in ElementTree.fromstring(drawn).iter(SVG + "text")]
    assert texts[0] == "> a b a b a b"
    written = "".join(texts[1:])
    assert "right" in written
    assert re.sub(r"\s", "", written).startswith(re.sub(r"\s", "", shown(events)))


def test_an_unknown_model_is_one_sentence(
    module: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = tmp_path / "guesses.svg"
    assert module.main(["--target", str(tmp_path / "none.gguf"), "--output", str(output)]) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert not output.exists()


def test_the_picture_of_the_readme_is_small_self_contained_and_shaded(module: ModuleType) -> None:
    svg = (ROOT / "docs" / "guesses.svg").read_text(encoding="utf-8")
    assert len(svg.encode()) <= module.MOST_BYTES
    assert not re.search(r"href|url\(|@import|<image|<script", svg)
    assert "prefers-color-scheme:dark" in svg
    assert len(shapes(svg, "rect", "guess")) >= 10
    (status,) = [text.text for text in ElementTree.fromstring(svg).iter(SVG + "text") if "right" in (text.text or "")]
    assert status is not None
    assert "docs/guesses.svg" in (ROOT / "README.md").read_text(encoding="utf-8")

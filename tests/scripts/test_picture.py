"""The picture of the README: drawn from a real answer of tiny models, and the parts that draw it."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from xml.etree import ElementTree

import pytest

from scripts import picture
from tests.support.tiny_models import TinyModels, read_all, require_speculation, shown

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return picture


def shapes(svg: str, kind: str, css_class: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(svg)
    return [shape for shape in root.iter(SVG + kind) if css_class in shape.get("class", "").split()]


def test_an_answer_with_guesses_becomes_a_picture_with_shaded_tokens(
    module: ModuleType, tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A fast machine writes the whole answer in less than two of the picture's hundredths.
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=itertools.count().__next__))
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
    moments = [float(found) for found in re.findall(r"<text[^>]*animation-delay:([\d.]+)s", drawn)]
    assert moments == sorted(moments)
    assert len(moments) == len(texts) - 1, "the prompt is there at the beginning"
    assert len(set(moments)) > 2


def test_the_picture_of_the_readme_is_small_self_contained_and_shaded(module: ModuleType) -> None:
    svg = (ROOT / "docs" / "guesses.svg").read_text(encoding="utf-8")
    assert len(svg.encode()) <= module.MOST_BYTES
    assert not re.search(r"href|url\(|@import|<image|<script", svg)
    assert "prefers-color-scheme:dark" in svg
    assert len(shapes(svg, "rect", "guess")) >= 10
    (status,) = [text.text for text in ElementTree.fromstring(svg).iter(SVG + "text") if "right" in (text.text or "")]
    assert status is not None
    assert "docs/guesses.svg" in (ROOT / "README.md").read_text(encoding="utf-8")

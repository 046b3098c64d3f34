"""The benchmark of prompts that end inside a token: where lines are cut, and what its figures say."""

from __future__ import annotations

from pathlib import Path

from benchmarks.fill_in import own_sources
from benchmarks.healing import Beginning, Continued, beginnings, figures, own_pages
from edgespec.files.gguf.header import read_header
from edgespec.text.tokenizers.gguf import GgufTokenizer
from tests.support.tiny_gguf import write_tiny_gguf


def test_beginnings_are_those_of_the_texts_the_same_each_time_and_end_as_their_kind_says(tmp_path: Path) -> None:
    tokenizer = GgufTokenizer(read_header(write_tiny_gguf(tmp_path / "tiny.gguf")))
    for texts in (own_sources(), own_pages()):
        found = beginnings(texts, tokenizer, 8)
        assert found == beginnings(texts, tokenizer, 8)
        assert {kind: len(some) for kind, some in found.items()} == {"inside": 8, "at_ends": 8, "blanks": 8}
        for kind, some in found.items():
            for own in some:
                assert any(own.text + own.rest + "\n" in text for text in texts.values())
                assert (own.text[-1].isalpha() and own.rest[0].isalpha()) or kind != "inside"
                assert not own.text.endswith(" ") or kind != "inside"
                whole = tokenizer.encode(own.text + own.rest)
                head = tokenizer.encode(own.text)
                assert whole[: len(head)] != head or kind != "inside"
                assert not own.text.rpartition("\n")[2].strip() or kind != "blanks"


def test_the_figures_count_words_lines_and_characters() -> None:
    beginning = Beginning("    retur", "n kept")
    found = figures(
        [
            Continued(beginning, "n kept", "ing kept"),
            Continued(beginning, "n found", "n found"),
            Continued(beginning, "", "n"),
        ]
    )
    assert (found["beginnings"], found["equal"]) == (3, 1)
    assert found["healed"] == {"words": 2, "lines": 1, "characters": 8 / 3}
    assert found["plain"] == {"words": 2, "lines": 0, "characters": 1}

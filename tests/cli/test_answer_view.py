"""What a terminal is given of an answer: every character, in lines that fit, with colours that end."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings, strategies as st
from rich.cells import cell_len

from edgespec.cli.terminal.answer_view import AnswerView
from edgespec.cli.terminal.code_colours import CodeColours
from edgespec.cli.terminal.markdown import Markdown
from edgespec.cli.terminal.terminal_text import Segment
from edgespec.engine.events import Text, Token
from tests.support.answer_pieces import pieces_of

CODE = re.compile("\x1b\\[[0-9;]*m")

PIECES = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "word ",
                "**",
                "*",
                "`",
                "```",
                "```python\n",
                "\n",
                "\n\n",
                "# ",
                "| a |",
                "def f(x):\n",
                '"""',
                "日本語。",
            ]
        ),
        st.text(st.characters(codec="utf-8", exclude_characters="\x1b\r"), max_size=12),
    ),
    max_size=40,
)


def event(text: str, guessed: bool = False) -> Text:
    return Text(text, tokens_of((text, "model" if guessed else None)))


def tokens_of(*told: tuple[str, str | None]) -> tuple[Token, ...]:
    return tuple(Token(text, 0, drafter) for text, drafter in told)


def shown(
    pieces: list[str], *, columns: int = 40, colours: bool = True, markdown: bool = True, thinking: bool = False
) -> str:
    view = AnswerView(lambda: columns, colours=colours, markdown=markdown)
    events = [event(piece) for piece in pieces]
    if thinking:
        events = [Text(piece.text, reasoning=piece.reasoning) for piece in pieces_of(pieces)]
    return "".join(map(view.feed, events)) + view.flush()


def as_written(text: str) -> str:
    """The text as it can be found again: a line break may have come in, or taken the place of one space."""
    return re.sub(r"[\n \t]", "", text)


@settings(max_examples=300, deadline=None)
@given(PIECES, st.integers(20, 60), st.booleans(), st.booleans())
def test_no_character_is_lost_or_changed(pieces: list[str], columns: int, colours: bool, thinking: bool) -> None:
    text = "".join(pieces)
    written = shown(pieces, columns=columns, colours=colours, thinking=thinking)
    plain = CODE.sub("", written)
    assert colours or plain == written
    assert as_written(plain) == as_written(
        text.translate(
            {
                **{n: 0x2400 + n for n in range(32) if n not in (9, 10)},
                127: 0x2421,
                **dict.fromkeys((*range(128, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 65533),
            }
        )
    )
    assert len(plain) >= len(text), "a break takes the place of a space at most"


def test_a_no_break_space_at_the_edge_is_kept() -> None:
    assert "\u00a0" in shown(["x" * 40 + "\u00a0"], columns=40)


@settings(max_examples=200, deadline=None)
@given(PIECES, st.booleans())
def test_the_shown_answer_is_the_same_however_the_text_is_cut_into_pieces(pieces: list[str], thinking: bool) -> None:
    """Colours depend on the rest of a line, so only their codes may differ."""
    text = "".join(pieces)
    whole, by_character = shown([text], thinking=thinking), shown(list(text), thinking=thinking)
    assert CODE.sub("", whole) == CODE.sub("", by_character)


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_words_wrap_at_the_edge(columns: int) -> None:
    text = "Sorting is efficient when an insertion sort repeatedly takes one element from the unsorted part. " * 3
    lines = shown(list(text), columns=columns).split("\n")
    assert max(map(len, lines)) <= columns
    words = {word for line in lines for word in line.split()}
    assert words == set(text.split()), "no word is cut"
    assert len(lines) > len(text) // columns


def test_wide_characters_count_as_two_cells_when_wrapping() -> None:
    text = "日本語の文章はどこでも改行できます。はい、そうです。" * 3
    lines = shown(list(text), columns=21).split("\n")
    assert max(map(cell_len, lines)) <= 21
    assert "".join(lines) == text
    assert not any(line[0] in "。、" for line in lines)


def test_a_word_longer_than_a_line_is_not_broken_by_edgespec() -> None:
    url = "https://example.com/" + "path/" * 20
    text = f"see {url} for more"
    assert shown(list(text), markdown=False, columns=40).startswith(f"see \n{url}")
    assert CODE.sub("", shown(list(text), columns=40)).replace("\n", " ").split() == text.split()


def test_lines_of_code_and_tables_are_not_wrapped() -> None:
    line = "x = [" + ", ".join(map(str, range(40))) + "]\n"
    table = "| " + "cell | " * 20 + "\n"
    assert CODE.sub("", shown(list(f"```python\n{line}```\n{table}"))) == f"```python\n{line}```\n{table}"


def test_wrapping_follows_a_terminal_whose_size_changes() -> None:
    width = [60]
    view = AnswerView(lambda: width[0], colours=False)
    first = view.feed(event("a word " * 20 + "\n"))
    width[0] = 20
    second = view.feed(event("a word " * 20)) + view.flush()
    assert 40 < max(map(len, first.split("\n"))) <= 60
    assert max(map(len, second.split("\n"))) <= 20


HOSTILE = ["\x1b[2J\x1b[H", "\x1b]0;title\x07", "\x9b31m", "\x08\x7f\x00", "lone\rreturn", "\u202e\u2066"]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_control_characters_in_an_answer_are_shown_as_symbols(hostile: str) -> None:
    for pieces in ([hostile], list(hostile)):
        written = shown(pieces, colours=False)
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", written)
        assert len(written) == len(hostile)
    assert shown(["\x1b"], colours=False) == "\u241b"


def test_windows_line_endings_are_kept() -> None:
    assert shown(list("one\r\ntwo\r"), colours=False) == "one\r\ntwo\u240d"


# -------------------------------------------------------------------------------------------------- colours


def styles(text: str, whole: bool = False) -> list[tuple[str, str]]:
    """Parts of a text with their styles, neighbours of one style as one."""
    markdown = Markdown()
    found: list[tuple[str, str]] = []
    segments: list[Segment] = [each for piece in ([text] if whole else list(text)) for each in markdown.feed(piece)]
    for segment in segments + markdown.flush():
        if found and found[-1][1] == segment.style:
            found[-1] = (found[-1][0] + segment.text, segment.style)
        else:
            found.append((segment.text, segment.style))
    return found


def styled(text: str) -> dict[str, str]:
    return {part: style for part, style in styles(text) if style}


def test_headings_bold_text_and_code_spans_are_styled() -> None:
    assert styled("## A heading") == {"## A heading": "1"}
    assert styled("so **very bold** and `code` or ``a ` b``\n") == {
        "**very bold**": "1",
        "`code`": "36",
        "``a ` b``": "36",
    }


@pytest.mark.parametrize(
    "text",
    ["2 ** 3 ** 4", "#hashtag", "####### seven", "* a list\n* of two", "**kwargs is a dict", "it's `open", "a*b*c"],
)
def test_text_that_only_looks_like_markdown_is_not_styled(text: str) -> None:
    assert styled(text) == {}


def test_a_code_block_is_coloured_by_its_language() -> None:
    text = 'Here:\n```python\ndef f():\n    """Doc\n    string."""\n    return 1  # one\n```\nand **bold**\n'
    found = styled(text)
    assert found["def"] == "35"
    assert found["1"] == "36"
    assert found["# one"] == "2"
    assert found["**bold**"] == "1"
    assert any("string." in part and style == "32" for part, style in styles(text))
    assert "".join(part for part, _ in styles(text)) == text


@pytest.mark.parametrize("language", ["", "no-such-language", "c", "json", "html+jinja", "console"])
def test_colouring_code_loses_no_character_in_any_language(language: str) -> None:
    text = f'```{language}\n/* a\n b */ int x = 1;\n\n<a>{{{{ x }}}}</a>\n\t{{"a": [1, null]}}\n'
    assert "".join(part for part, _ in styles(text)) == text
    assert "".join(part for part, _ in styles(text, whole=True)) == text


def test_a_multi_line_comment_is_coloured_before_it_is_closed() -> None:
    colours = CodeColours("c")
    colours.end("/* begun\n")
    assert colours.line(" still */ int x;\n")[0] == (" still */", "2")
    colours = CodeColours("c")
    assert colours.line("/* begun\n") == [("/* begun\n", "2")]


def test_the_lexer_reads_only_the_last_lines_of_a_long_code_block() -> None:
    colours = CodeColours("python")
    for number in range(300):
        colours.end(f"def f{number}(x):\n")
        colours.end("    return x\n")
    assert len(colours._window) < 4000  # nothing else tells it
    assert ("def", "35") in colours.line("def last(x):\n")


def test_a_slowly_written_line_of_code_is_shown_before_it_is_complete() -> None:
    now = [0.0]
    markdown = Markdown(clock=lambda: now[0])
    markdown.feed("```python\n")
    assert markdown.feed("return value + ") == []
    now[0] = 1.0
    early = markdown.feed("other")
    assert "".join(segment.text for segment in early).startswith("return value")
    late = markdown.feed(" + 1\n")
    assert "".join(segment.text for segment in early + late) == "return value + other + 1\n"


@settings(max_examples=200, deadline=None)
@given(PIECES, st.data())
def test_more_of_an_answer_is_shown_as_if_it_had_not_been_cut(pieces: list[str], data: st.DataObject) -> None:
    """Wherever it was cut: in a block of code, its fence, a docstring, a span or a word."""
    text = "".join(pieces)
    cut = data.draw(st.integers(0, len(text)))
    whole, more = Markdown(clock=lambda: 0.0), Markdown(clock=lambda: 0.0)
    expected = [*whole.feed(text[:cut]), *whole.feed(text[cut:]), *whole.flush()]
    repeated = more.resume(text[:cut])
    found = [*more.feed(text[cut:]), *more.flush()]
    assert by_character(found)[repeated:] == by_character(expected)[cut:]
    view = AnswerView(lambda: 40, colours=True, begun=text[:cut])
    written = CODE.sub("", view.feed(event(text[cut:])) + view.flush())
    assert as_written(written) == as_written(shown([text[cut:]], colours=False))


def by_character(segments: list[Segment]) -> list[tuple[str, str, bool]]:
    return [(each, segment.style, segment.whole) for segment in segments for each in segment.text]


def test_more_of_a_docstring_has_its_colour_and_keeps_its_indentation() -> None:
    begun = 'So:\n```python\ndef f():\n    """Doc that is'
    view = AnswerView(lambda: 40, colours=True, begun=begun)
    written = (
        view.feed(event(' cut.\n\n    # not a heading\n    """\n``')) + view.feed(event("`\n**end**")) + view.flush()
    )
    assert written.startswith("\x1b[32m cut.")
    assert CODE.sub("", written) == ' cut.\n\n    # not a heading\n    """\n```\n**end**'
    assert written.endswith("\x1b[1m**end**\x1b[0m")


def test_every_written_piece_ends_with_a_reset_style() -> None:
    """Whatever is written next, a note or an error, has no colour of the answer's."""
    view = AnswerView(lambda: 40, colours=True)
    for piece in ("# head", "ing\n**bold** text\n```python\n", "def f(): pass\n", "```\n"):
        written = view.feed(event(piece))
        codes = CODE.findall(written)
        assert not codes or codes[-1] == "\x1b[0m"


# ----------------------------------------------------------------------------------------- thinking and guesses


def test_thinking_is_dimmed_and_nothing_in_it_is_coloured() -> None:
    text = "<think>\nSome **thought** here.\n</think>\n\nThe **answer**."
    written = shown(list(text), thinking=True)
    assert CODE.sub("", written) == text
    thought, _, answer = written.partition("</think>")
    assert set(CODE.findall(thought)) == {"\x1b[2m", "\x1b[0m"}
    assert "\x1b[1m**answer**" in answer
    assert shown([text], thinking=True, colours=False) == text


def test_guessed_tokens_stay_shaded_when_their_words_wrap() -> None:
    view = AnswerView(lambda: 20, colours=True, markdown=False, guesses=True)
    text = Text("one two three four five", tokens_of(("one ", None), ("two three", "model"), (" four five", None)))
    written = view.feed(text) + view.flush()
    shaded = re.findall("\x1b\\[38;5;252;48;5;238m([^\x1b]*)", written)
    assert "".join(shaded) == "twothree"
    assert CODE.sub("", written) == "one two three four \nfive"
    assert "48;5;238" not in shown(["one two"]), "only where it is asked for"


def test_shading_stays_aligned_when_a_line_break_replaces_a_space() -> None:
    view = AnswerView(lambda: 20, colours=True, markdown=False, guesses=True)
    written = (
        view.feed(Text("x" * 20 + " yes no", tokens_of(("x" * 20, None), (" yes", "lookup"), (" no", None))))
        + view.flush()
    )
    assert CODE.sub("", written) == "x" * 20 + "\nyes no"
    assert re.findall("48;5;238m([^\x1b]*)", written) == ["yes"]

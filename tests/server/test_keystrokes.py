"""Which request of an editor a newer one replaces, and at which line a suggestion ends."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, strategies as st

from edgespec.server.errors import ApiError
from edgespec.server.keystrokes import Keystrokes, KeyTurn, Lines, is_newer
from edgespec.text.conversation.hole import Hole

TEXT = "".join(f"line {number}\n" for number in range(100))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a", "ab"),
        ("ab", "a"),
        ("", "a"),
        (TEXT + "x", TEXT + "xyz"),
        (TEXT + "xyz", TEXT + "x"),
        (TEXT[100:] + "x", TEXT[101:] + "xy"),  # a window that moved
        (TEXT, TEXT + "a line\n"),
        ("a window" + TEXT[:-20], "another" + TEXT),
        ("x = 'ni", "x = '你"),  # conversions of input methods
        (TEXT + "nihao", TEXT + "你hao"),
        (TEXT[100:] + "かに", TEXT[101:] + "蟹"),
        (TEXT + "하", TEXT + "한"),
        (TEXT + "ㅎ", TEXT + "하"),
        ("a한", "a하나"),
        ("a かに", "a カニ"),
        ("a か", "a が"),
        ("おかねを", "お金を"),
        ("a ㄋㄧ", "a 你"),
        ("a k", "a か"),
    ],
)
def test_what_is_typed_or_deleted_at_one_place_is_newer(old: str, new: str) -> None:
    assert is_newer(Hole(old, "after"), Hole(new, "after"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (Hole("a", "x"), Hole("a", "x")),
        (Hole("a", "x"), Hole("ab", "y")),
        (Hole("a", ""), Hole("b", "")),
        (Hole("a", ""), Hole("xa", "")),
        (Hole(TEXT, ""), Hole(TEXT + "z" * 201, "")),
        (Hole("", ""), Hole(TEXT, "")),
        (Hole(TEXT + "one\n", ""), Hole(TEXT + "two\n", "")),
        (Hole(TEXT + "甲", ""), Hole(TEXT + "乙", "")),
        (Hole(TEXT + "n" * 21, ""), Hole(TEXT + "你", "")),
        (Hole("ni", ""), Hole("你", "")),
        (Hole("name = 'Anna", ""), Hole("name = 'Łukasz", "")),  # one template with other words
        (Hole("return x", ""), Hole("return ×2", "")),
        (Hole("list", ""), Hole("l”", "")),
        (Hole("a가", ""), Hole("a나다", "")),
        (Hole("a cat", ""), Hole("a 고양이", "")),
        (Hole("a りんご", ""), Hole("a みかん", "")),
        (Hole("a cat", ""), Hole("a 猫 is", "")),
        (Hole("one" + TEXT[-100:] + "ni", ""), Hole("two" + TEXT[-100:] + "你", "")),
    ],
)
def test_other_texts_and_places_are_not_newer(old: Hole, new: Hole) -> None:
    assert not is_newer(old, new)


@pytest.mark.anyio
async def test_a_request_that_waits_is_replaced_and_one_that_answers_is_waited_for() -> None:
    places, order = Keystrokes(), list[str]()
    ended = asyncio.Event()

    async def asks(name: str, before: str, holds: bool) -> None:
        async with places.turn("editor", Hole(before, "")) as turn:
            order.append(f"{name} begins")
            if holds:
                turn.holds_session, turn.end_answer = True, ended.set
                await ended.wait()
                turn.left.set()
                turn.check()
            elif name != "third":
                await asyncio.Event().wait()

    first = asyncio.create_task(asks("first", "a", True))
    await asyncio.sleep(0)
    second = asyncio.create_task(asks("second", "ab", False))
    with pytest.raises(ApiError) as raised:
        await first
    assert (raised.value.status, raised.value.code) == (409, "replaced")
    await asyncio.sleep(0)
    await asks("third", "abc", False)
    with pytest.raises(ApiError):
        await second
    assert order == ["first begins", "second begins", "third begins"]


@pytest.mark.anyio
async def test_a_request_replaces_those_for_its_place_also_behind_one_for_another_place() -> None:
    places = Keystrokes()

    async def asks(before: str, after: str) -> None:
        async with places.turn("editor", Hole(before, after)):
            await asyncio.Event().wait()

    first, elsewhere = (asyncio.create_task(asks("a", after)) for after in ("here", "there"))
    await asyncio.sleep(0)
    newest = asyncio.create_task(asks("ab", "here"))
    with pytest.raises(ApiError, match="replaced"):
        await asyncio.wait_for(first, 60)
    assert not elsewhere.done()
    for each in (elsewhere, newest):
        each.cancel()
    await asyncio.wait([elsewhere, newest])


@pytest.mark.anyio
async def test_a_request_without_a_hole_is_nobodys() -> None:
    async with Keystrokes().turn("editor", None) as turn:
        turn.check()
        assert isinstance(turn, KeyTurn)


@pytest.mark.anyio
async def test_a_cancelled_request_is_cancelled_and_not_replaced() -> None:
    places = Keystrokes()

    async def asks() -> None:
        async with places.turn("editor", Hole("a", "")):
            await asyncio.Event().wait()

    task = asyncio.create_task(asks())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


TEXTS = "    one\n    two\n\n    three\n  four\n"


@given(cuts=st.lists(st.integers(1, 8), min_size=len(TEXTS), max_size=len(TEXTS)))
def test_a_line_with_fewer_blanks_ends_the_text_however_it_comes(cuts: list[int]) -> None:
    lines, shown, at = Lines(4), "", 0
    for cut in cuts:
        shown += lines.feed(TEXTS[at : at + cut])
        at += cut
        if lines.ended or at >= len(TEXTS):
            break
    assert shown == "    one\n    two\n\n    three"
    assert lines.ended


def test_without_an_indent_all_is_shown_and_what_is_held_comes_last() -> None:
    assert Lines().feed(TEXTS) == TEXTS
    lines = Lines(4)
    assert lines.feed("a\n  ") + lines.flush() == "a\n  "
    assert not lines.ended


def test_after_its_time_a_text_ends_behind_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    for milliseconds in (500, None, 0, -1):
        now, lines = 0.0, Lines(0, milliseconds)
        assert lines.feed("a") == "a"
        now = 1.0
        assert lines.feed("b") == "b"
        assert not lines.ended, "no line yet"
        lines.feed("c\n")
        assert lines.ended is (milliseconds == 500)
        assert lines.feed("d") == ("" if lines.ended else "d")

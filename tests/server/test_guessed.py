"""Who guessed the tokens of an answer, over HTTP: aligned with what is sent, and only for clients that ask."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.engine.engine import Engine
from edgespec.engine.events import Round, Text, Token
from edgespec.server.guessed import Guessed
from tests.server.test_http import events, failed
from tests.support.http_server import Running

ASKED = {"edgespec": {"tokens": True}, "stream": True, "temperature": 0}


def own(chunks: list[dict[str, Any]], name: str) -> list[Any]:
    """The values of one of edgespec's own members, in order."""
    return [chunk["edgespec"][name] for chunk in chunks if name in chunk.get("edgespec", {})]


def text(said: str, *tokens: tuple[int, str | None], reasoning: str | None = None) -> Text:
    return Text(said, tuple(Token("x" * length, 0, source) for length, source in tokens), reasoning)


# ------------------------------------------------------------------------------------------------- aligning


def test_tokens_have_the_lengths_of_their_text() -> None:
    assert Guessed().of(text("abcd", (1, None), (3, "model"))) == ((1, None), (3, "model"))


def test_a_token_without_a_character_yet_is_kept() -> None:
    assert Guessed().of(text("🙂", (0, "lookup"), (1, None))) == ((0, "lookup"), (1, None))


def test_the_other_characters_of_a_token_are_in_the_next_text() -> None:
    """A token can end the thinking and begin the answer: its texts come one after the other."""
    guessed = Guessed()
    assert guessed.of(text("ab", (1, None), (4, "model"))) == ((1, None), (1, "model"))
    assert guessed.of(Text("cde")) == ((3, "model"),)


def test_text_that_comes_without_tokens_has_no_source() -> None:
    assert Guessed().of(Text("rest")) == ((4, None),)


def test_the_marks_of_thinking_are_left_out() -> None:
    thought = text("<think>\nso it is", (7, None), (1, None), (2, "model"), (6, "lookup"), reasoning="so it is")
    assert Guessed().of(thought) == ((2, "model"), (6, "lookup"))
    assert Guessed().of(text("<think>", (7, None), reasoning="")) == ()
    again = text("<think>so", (7, None), (2, "model"), reasoning="\n\nso")
    assert Guessed().of(again) == ((2, None), (2, "model"))


def test_the_tokens_of_calls_have_no_characters() -> None:
    guessed = Guessed()
    assert guessed.of(text("let", (3, None), (0, "model"))) == ((3, None), (0, "model"))
    assert guessed.of(text("", (0, "forced"), (0, None))) == ((0, "forced"), (0, None))
    assert guessed.of(text(" so", (0, None), (3, "model"))) == ((0, None), (3, "model"))


# ------------------------------------------------------------------------------------------------ over HTTP


def test_a_stream_says_who_guessed_each_token(server: Running, engine: Engine) -> None:
    with engine.session() as session:
        expected = list(session.generate("hello", max_tokens=48))
    sources = [each.guessed_by for event in expected if isinstance(event, Text) for each in event.tokens]
    rounds = [event.record for event in expected if isinstance(event, Round)]
    chunks = events(server.chat("hello", max_tokens=48, **ASKED))
    for chunk in chunks:
        if chunk.get("edgespec", {}).get("tokens"):
            assert sum(length for length, _ in chunk["edgespec"]["tokens"]) == len(
                chunk["choices"][0]["delta"]["content"]
            )
    said = [source for tokens in own(chunks, "tokens") for _, source in tokens]
    assert len(said) >= 48
    assert [source for source in said if source] == [source for source in sources if source]
    assert own(chunks, "round") == [{"proposed": each.proposed, "accepted": each.accepted} for each in rounds]
    timings = chunks[-1]["timings"]
    assert sum(each["accepted"] for each in own(chunks, "round")) == timings["draft_n_accepted"] > 0
    assert sum(each["proposed"] for each in own(chunks, "round")) == timings["draft_n"]


def test_a_stream_says_how_far_the_prompt_is_read(slow: Running) -> None:
    chunks = events(slow.chat("the " * 700, max_tokens=2, **ASKED))
    read = own(chunks, "reading")
    assert [each["tokens"] for each in read] == [0, 256, 512]
    assert {each["of"] for each in read} == {chunks[-1]["timings"]["prompt_n"]}
    assert [chunk["choices"][0]["delta"] for chunk in chunks[1:4]] == [{}] * 3, "the answer begins behind it"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_says_how_far_the_prompt_is_read_as_llama_cpp_does(slow: Running, path: str) -> None:
    def progress(prompt: str) -> list[dict[str, int]]:
        asked = {"messages": [{"role": "user", "content": prompt}]} if "chat" in path else {"prompt": prompt}
        body = {**asked, "max_tokens": 2, "temperature": 0, "stream": True, "return_progress": True}
        chunks = events(slow.post(path, **body))
        assert not any("edgespec" in chunk for chunk in chunks)
        return [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]

    beginning = "of a long list " * 70
    first, again = progress(beginning), progress(beginning + "and more " * 60)
    for found in (first, again):
        times = [each["time_ms"] for each in found]
        assert times[0] == 0
        assert times == sorted(times)
        assert len({each["total"] for each in found}) == len({each["cache"] for each in found}) == 1
        assert [each["processed"] - each["cache"] for each in found] == [256 * part for part in range(len(found))]
        assert found[-1]["processed"] < found[-1]["total"]
    assert again[0]["cache"] > first[0]["cache"] == 0


def test_a_stream_says_at_its_end_why_nothing_was_guessed(slow: Running) -> None:
    last = events(slow.chat("hello", max_tokens=2, **ASKED))[-1]["edgespec"]
    assert last["speculation_off_code"]
    assert last["speculation_off"]
    assert "`" not in last["speculation_off"]  # a command would name a file of this machine


@pytest.mark.parametrize("asked", [{}, {"edgespec": {}}, {"edgespec": {"tokens": False}}, {"edgespec": None}])
def test_other_clients_get_nothing_new(server: Running, asked: dict[str, Any]) -> None:
    chunks = events(server.chat("hello", max_tokens=16, stream=True, temperature=0, **asked))
    assert not any("edgespec" in chunk for chunk in chunks)
    assert all(chunk["choices"][0]["delta"] for chunk in chunks[:-1]), "each event says something"


def test_a_whole_reply_says_nothing_of_tokens(server: Running) -> None:
    reply = server.chat("hello", max_tokens=8, edgespec={"tokens": True}).json()
    assert "edgespec" not in reply


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"tokens": "yes"}, "tokens"), ({"tokens": 1}, "tokens"), ([], "edgespec"), ("x", "edgespec")],
)
def test_a_wrong_value_is_refused_by_name(server: Running, wrong: Any, named: str) -> None:
    assert failed(server.chat("hello", edgespec=wrong), 400)["param"] == named

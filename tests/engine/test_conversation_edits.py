"""Undoing a turn and changing the system message: the next answer equals that of a conversation with these edits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest

from edgespec import Sampling
from edgespec.engine.events import Done
from edgespec.engine.session import Session
from edgespec.errors import InvalidRequestError
from edgespec.files.gguf.header import read_header
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import TinyModels


def ask(session: Session, prompt: str) -> Done:
    return next(event for event in session.generate(prompt, max_tokens=6) if isinstance(event, Done))


def test_after_undo_the_next_answer_is_as_if_the_turn_had_not_been(tiny: TinyModels) -> None:
    with tiny.load(draft="none") as engine, engine.session() as session, engine.session() as other:
        assert session.undo() is None
        first = ask(session, "hello")
        ask(session, "what is water")
        assert session.undo() == "what is water"
        assert [message["content"] for message in session.messages] == ["hello", first.text]
        ask(other, "hello")
        expected = ask(other, "where are they")
        found = ask(session, "where are they")
        assert found.token_ids == expected.token_ids
        assert found.stats.prompt_tokens == expected.stats.prompt_tokens
        assert found.stats.cached_tokens > 0, "the shared tokens are not read again"


def test_a_new_system_message_applies_to_the_whole_conversation(tiny: TinyModels) -> None:
    with (
        tiny.load(draft="none") as engine,
        engine.session() as session,
        engine.session(system="be brief") as other,
    ):
        assert session.system is None
        session.system = "be brief"
        assert session.system == other.system == "be brief"
        assert session.messages == other.messages == ({"role": "system", "content": "be brief"},)
        assert ask(session, "hello").token_ids == ask(other, "hello").token_ids
        session.system = None
        assert [message["role"] for message in session.messages] == ["user", "assistant"]
        with pytest.raises(InvalidRequestError, match="the system message must be text, not int"):
            session.system = 3  # type: ignore[assignment]


def new_system(session: Session) -> None:
    session.system = "be brief"


@pytest.mark.parametrize("change", [Session.clear, Session.undo, new_system, lambda session: ask(session, "more")])
def test_an_answer_prepared_for_another_conversation_is_refused(
    session: Session, change: Callable[[Session], object]
) -> None:
    ask(session, "hello")
    before = session.messages
    stale, raw = session.generate("what is water", max_tokens=6), session.generate("water", raw=True, max_tokens=6)
    whole = session.generate(messages=[*before, {"role": "user", "content": "hello"}], max_tokens=6)
    change(session)
    changed = session.messages
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="has changed since this answer was prepared") as caught:
            stale.result()
        assert caught.value.hint == "call generate again, behind the change"
    assert session.messages == changed
    assert ask(session, "what is water").token_ids
    assert raw.result().token_ids
    assert whole.result().token_ids
    assert session.messages[:2] == before, "a whole conversation replaces the one before"


def test_raw_text_in_between_leaves_a_prepared_answer_as_it_is(session: Session) -> None:
    expected = ask(session, "hello").token_ids
    session.clear()
    prepared = session.generate("hello", max_tokens=6)
    assert session.generate("water", raw=True, max_tokens=6).result().token_ids
    assert prepared.result().token_ids == expected


SAMPLING: Mapping[str, Any] = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1}


def with_sampling(path: Path, values: Mapping[str, Any]) -> Path:
    """A tiny model whose file states sampling values."""
    plain = write_tiny_gguf(path)
    writer = gguf.GGUFWriter(str(path.with_suffix(".new")), "llama")
    reader = gguf.GGUFReader(plain)
    for field in reader.fields.values():
        if field.name.startswith(("GGUF.", "general.architecture")):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    for key, value in values.items():
        kind = gguf.GGUFValueType.INT32 if isinstance(value, int) else gguf.GGUFValueType.FLOAT32
        writer.add_key_value(f"general.sampling.{key}", value, kind)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_suffix(".new")


def test_file_sampling_comes_from_the_model_files_metadata(tmp_path: Path, tiny: TinyModels) -> None:
    path = with_sampling(tmp_path / "drawn.gguf", SAMPLING)
    assert read_header(path).sampling.keys() == {"temperature", "top_k", "top_p", "min_p", "repeat_penalty"}
    with tiny.load(path, draft="none") as engine:
        found = engine.file_sampling
        assert (found.top_k, found.seed) == (20, None)
        drawn = (found.temperature, found.top_p, found.min_p, found.repeat_penalty)
        assert drawn == pytest.approx((0.6, 0.95, 0.05, 1.1))
        assert found.repeat_last_n == 64, "of llama.cpp, where the file does not say"
    stated = with_sampling(tmp_path / "last.gguf", {**SAMPLING, "penalty_last_n": 256})
    with tiny.load(stated, draft="none") as engine:
        assert engine.file_sampling.repeat_last_n == 256
        assert engine.pair.stated_sampling["repeat_last_n"] == 256
    off = with_sampling(tmp_path / "off.gguf", {**SAMPLING, "penalty_repeat": 1.0})
    with tiny.load(off, draft="none") as engine:
        assert engine.file_sampling.repeat_last_n == -1, "a penalty that is off has no window"
        assert "repeat_last_n" not in engine.pair.stated_sampling


@pytest.mark.parametrize("temperature", [0.6, -1.0], ids=["stated", "invalid"])
def test_file_sampling_has_the_rule_of_its_engine(tmp_path: Path, tiny: TinyModels, temperature: float) -> None:
    path = with_sampling(tmp_path / "drawn.gguf", {"temp": temperature})
    with tiny.load(path, draft="none", rule="rejection") as engine:
        assert engine.file_sampling.rule == "rejection"


@pytest.mark.parametrize("values", [{}, {"temp": -1.0}, {"temp": float("nan")}, {"top_p": 0.0}])
def test_missing_or_invalid_sampling_in_a_file_means_greedy(
    tmp_path: Path, tiny: TinyModels, values: Mapping[str, Any]
) -> None:
    path = with_sampling(tmp_path / "odd.gguf", values)
    with tiny.load(path, draft="none") as engine:
        assert engine.file_sampling == Sampling()

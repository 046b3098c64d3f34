"""Both tokenizers: text to ids and back, and tokens that are never shown."""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

from edgespec.errors import ClosedError, EdgespecError, ModelFileError
from edgespec.files.gguf.header import read_header
from edgespec.runtimes.llama.library import load
from edgespec.runtimes.thread import WorkerThread
from edgespec.text.tokenizers.gguf import GgufTokenizer
from edgespec.text.tokenizers.llama_cpp import LlamaTokenizer
from tests.support.tiny_gguf import VOCABULARY, write_tiny_gguf

UNKNOWN, BOS, FIRST_BYTE = 0, 1, 3
START = 3 + 256 + len(VOCABULARY)
END = START + 1


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("vocabulary") / "tiny.gguf", extra_tokens=5)


Opened = GgufTokenizer | LlamaTokenizer
Open = Callable[[Path], Opened]

WAYS: dict[str, Open] = {"gguf": lambda path: GgufTokenizer(read_header(path)), "llama.cpp": LlamaTokenizer}


@pytest.fixture(scope="module", params=WAYS)
def opened(request: pytest.FixtureRequest) -> Open:
    return WAYS[request.param]


@pytest.fixture(scope="module")
def vocabulary(opened: Open, path: Path) -> Iterator[Opened]:
    with closing(opened(path)) as vocabulary:
        yield vocabulary


def byte(value: int) -> int:
    return FIRST_BYTE + value


# ------------------------------------------------------------------------------------------------- round trips

TEXTS = [
    "hello",
    "The quick brown fox.",
    "  leading and   inner spaces ",
    "line one\nline two\r\n\ttab\n\n",
    "naïve café, straße, ångström",
    "Привет мир",
    "你好世界 日本語 한국",
    "👩‍💻🚀🙂",
    "\x00\x01 control \x7f",
    "a\u0301 combining, \u200d joiner, \u202e override",
    "\U0010ffff and \ufffd",
    "<s> is text here, </s> too",
]


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_and_decoding_returns_the_text(vocabulary: Opened, text: str) -> None:
    """After the one space that SentencePiece prepends to every text."""
    ids = vocabulary.encode(text)
    assert vocabulary.detokenize(ids) == " " + text
    assert b"".join(map(vocabulary.token_bytes, ids)).decode() == " " + text


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40).filter(bool).filter(lambda text: "\u2581" not in text))
def test_encoding_and_decoding_returns_any_random_text(vocabulary: Opened, text: str) -> None:
    """But for SentencePiece's own sign for a blank, which comes back as one."""
    ids = vocabulary.encode(text)
    assert vocabulary.detokenize(ids) == " " + text
    assert all(0 <= token < vocabulary.vocabulary_size for token in ids)
    assert len(ids) <= len(text.encode()) + 1


def test_common_words_are_single_tokens(vocabulary: Opened) -> None:
    assert len(vocabulary.encode("the people")) == 2
    assert len(vocabulary.encode("你好")) < len("你好".encode())


def test_empty_text_gives_no_tokens(vocabulary: Opened) -> None:
    assert vocabulary.encode("") == []
    assert vocabulary.encode("", special=True) == []
    assert vocabulary.detokenize([]) == ""


def test_lone_surrogates_are_replaced_and_raise_no_error(vocabulary: Opened) -> None:
    assert vocabulary.detokenize(vocabulary.encode("a\ud800b")) == " a?b"


def test_a_very_long_text_is_tokenised(vocabulary: Opened) -> None:
    words = random.Random(3).choices([word for word in VOCABULARY if word.startswith("▁")], k=60_000)
    text = "".join(words).replace("▁", " ").strip()
    assert len(text) > 200_000
    started = time.process_time()
    ids = vocabulary.encode(text)
    assert vocabulary.detokenize(ids).strip() == text
    assert time.process_time() - started < 20


def test_a_long_text_outside_the_vocabulary_gives_one_token_a_byte(vocabulary: Opened) -> None:
    """One token a byte is the maximum."""
    text = "ൠ" * 30_000
    ids = vocabulary.encode(text)
    assert len(ids) == len(text.encode()) + 1
    assert vocabulary.detokenize(ids) == " " + text


# ---------------------------------------------------------------------------------------------- control tokens


def test_control_token_names_are_text_unless_special_is_set(vocabulary: Opened) -> None:
    text = "<|im_start|>user\nhi<|im_end|>"
    special = vocabulary.encode(text, special=True)
    assert special[0] == START
    assert special[-1] == END
    plain = vocabulary.encode(text)
    assert not {START, END} & set(plain)
    assert vocabulary.detokenize(plain) == " " + text


def test_control_tokens_and_stop_tokens_have_no_text(vocabulary: Opened) -> None:
    for token in (BOS, 2, START, END):
        assert vocabulary.token_bytes(token) == b""
    ids = vocabulary.encode("<|im_start|>hi<|im_end|>", special=True)
    assert vocabulary.detokenize(ids).strip() == "hi"


def test_a_stop_token_that_is_an_ordinary_word_has_no_text(opened: Open, path: Path, tmp_path: Path) -> None:
    word = FIRST_BYTE + 256 + VOCABULARY.index("▁people")
    data = path.read_bytes()
    key = b"tokenizer.ggml.eos_token_id" + (4).to_bytes(4, "little")  # GGUF's uint32
    assert data.count(key + END.to_bytes(4, "little")) == 1
    other = tmp_path / "wordy.gguf"
    other.write_bytes(data.replace(key + END.to_bytes(4, "little"), key + word.to_bytes(4, "little")))
    with closing(opened(other)) as vocabulary:
        assert word in vocabulary.stop_ids
        assert vocabulary.token_bytes(word) == b""
        assert vocabulary.eos_token == "▁people"


def test_a_byte_token_decodes_to_its_byte(vocabulary: Opened) -> None:
    assert [vocabulary.token_bytes(byte(value)) for value in range(256)] == [bytes([value]) for value in range(256)]


def test_a_pieces_bytes_are_its_text(vocabulary: Opened) -> None:
    for index, piece in enumerate(VOCABULARY):
        assert vocabulary.token_bytes(FIRST_BYTE + 256 + index).decode() == piece.replace("▁", " ")


@pytest.mark.parametrize("token", [-1, -(2**31), 10**6, 2**31, 2**40])
def test_ids_outside_the_vocabulary_have_no_bytes_and_are_not_kept(vocabulary: Opened, token: int) -> None:
    assert vocabulary.token_bytes(token) == b""
    assert token not in vocabulary._pieces  # private: what is kept is not seen otherwise


def test_invalid_utf8_is_replaced_when_decoding(vocabulary: Opened) -> None:
    assert vocabulary.detokenize([byte(0xFF)]) == "�"
    assert vocabulary.detokenize([byte(0xE4), byte(0xBD)]) == "�"  # cut in the middle of a character
    assert vocabulary.detokenize([byte(0xE4), byte(0xBD), byte(0xA0)]) == "你"
    assert vocabulary.detokenize([byte(0xC0), byte(0x80), byte(0x41)]).endswith("A")


# --------------------------------------------------------------------------------------------------- the facts


def test_size_and_begin_and_end_tokens_come_from_the_file(vocabulary: Opened, path: Path) -> None:
    assert vocabulary.vocabulary_size == read_header(path).vocabulary_size == END + 1 + 5
    assert (vocabulary.bos_token, vocabulary.eos_token) == ("<s>", "<|im_end|>")
    assert vocabulary.adds_bos


def test_stop_ids_are_the_end_tokens_of_the_file(vocabulary: Opened) -> None:
    assert END in vocabulary.stop_ids
    assert not {UNKNOWN, BOS, START, byte(10)} & vocabulary.stop_ids
    assert all(vocabulary.token_bytes(token) == b"" for token in vocabulary.stop_ids)
    for piece in range(FIRST_BYTE + 256, START):
        assert piece not in vocabulary.stop_ids


def test_the_begin_token_is_added_only_with_add_bos(vocabulary: Opened) -> None:
    plain = vocabulary.encode("hi")
    assert vocabulary.encode("hi", add_bos=True) == [BOS, *plain]
    assert vocabulary.encode("", add_bos=True) == [BOS]
    assert BOS not in plain


def test_no_begin_token_is_added_if_the_file_says_so(
    opened: Open, vocabulary: Opened, path: Path, tmp_path: Path
) -> None:
    data = path.read_bytes()
    key = b"tokenizer.ggml.add_bos_token" + (7).to_bytes(4, "little")  # GGUF's boolean
    assert data.count(key + b"\1") == 1
    other = tmp_path / "no-bos.gguf"
    other.write_bytes(data.replace(key + b"\1", key + b"\0"))
    with closing(opened(other)) as without:
        assert not without.adds_bos
        assert without.encode("hi", add_bos=True) == vocabulary.encode("hi")


def test_loading_a_vocabulary_logs_outside_the_thread_that_ctrl_c_interrupts(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception in a native callback is dropped: one Ctrl-C in five was lost during loading."""
    caplog.set_level(logging.DEBUG, logger="edgespec.native")
    with closing(LlamaTokenizer(path)):
        told = {record.thread for record in caplog.records if record.name == "edgespec.native"}
    assert told
    assert threading.get_ident() not in told


def test_an_interrupted_load_of_a_vocabulary_frees_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[object] = []
    run = WorkerThread.run

    def interrupted(worker: WorkerThread, job: Callable[[], object]) -> object:
        run(worker, job)
        raise KeyboardInterrupt

    class Api:
        llama_model_default_params = SimpleNamespace
        llama_model_load_from_file = staticmethod(lambda *_arguments: "a model")
        llama_model_free = freed.append

    monkeypatch.setattr(WorkerThread, "run", interrupted)
    monkeypatch.setattr("edgespec.text.tokenizers.llama_cpp.load", lambda: SimpleNamespace(api=Api))
    with pytest.raises(KeyboardInterrupt):
        LlamaTokenizer(path)
    assert freed == ["a model"]
    assert not [thread for thread in threading.enumerate() if thread.name == "edgespec-load"]


def test_the_tokenizer_loads_a_model_file_without_its_weights(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api, asked = load().api, list[bool]()
    real = api.llama_model_load_from_file

    def spy(name: bytes, params: object) -> object:
        asked.append(params.vocab_only)  # type: ignore[attr-defined]
        return real(name, params)

    monkeypatch.setattr(api, "llama_model_load_from_file", spy)
    LlamaTokenizer(path).close()
    assert asked == [True]


# ------------------------------------------------------------------------------------------------ broken, closed


@pytest.mark.parametrize("data", [b"", b"GGUF", b"<!doctype html>", b"GGUF" + b"\xff" * 200])
def test_a_broken_file_is_refused_before_native_code_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(load().api, "llama_model_load_from_file", lambda *_: pytest.fail("native code was called"))
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data)
    for file in (bad, tmp_path / "absent.gguf"):
        with pytest.raises(ModelFileError):
            LlamaTokenizer(file)


def test_a_vocabulary_that_llama_cpp_refuses_raises_a_readable_error(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    name = b"tokenizer.ggml.model" + (8).to_bytes(4, "little") + (5).to_bytes(8, "little")
    assert data.count(name + b"llama") == 1
    bad = tmp_path / "odd.gguf"
    bad.write_bytes(data.replace(name + b"llama", name + b"lluma"))
    with pytest.raises(EdgespecError):
        LlamaTokenizer(bad)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="file names are Unicode here")
def test_a_file_name_that_is_not_unicode_works(opened: Open, path: Path, tmp_path: Path) -> None:
    odd = tmp_path / b"\xff.gguf".decode("utf-8", "surrogateescape")
    odd.write_bytes(path.read_bytes())
    with closing(opened(odd)) as vocabulary:
        assert vocabulary.encode("hi")


def test_a_closed_tokenizer_raises_closed_error(opened: Open, path: Path) -> None:
    vocabulary = opened(path)
    vocabulary.close()
    vocabulary.close()
    for use in (
        lambda: vocabulary.encode("hi"),
        lambda: vocabulary.encode("hi", add_bos=True),
        lambda: vocabulary.token_bytes(300),
        lambda: vocabulary.detokenize([300]),
        lambda: vocabulary.control_token(START),
    ):
        with pytest.raises(ClosedError):
            use()


def test_stop_ids_and_texts_raise_closed_error_after_closing(path: Path) -> None:
    vocabulary = LlamaTokenizer(path)
    vocabulary.close()
    for use in (
        lambda: vocabulary.stop_ids,
        lambda: vocabulary.bos_token,
        lambda: vocabulary.eos_token,
        lambda: vocabulary.adds_bos,
    ):
        with pytest.raises(ClosedError):
            use()


# ------------------------------------------------------------------------------------------------------ threads


def test_many_threads_get_the_same_ids_as_one_thread(opened: Open, path: Path) -> None:
    with closing(opened(path)) as vocabulary:
        expected = {text: vocabulary.encode(text, special=True, add_bos=True) for text in TEXTS}
    failures: list[object] = []
    with closing(opened(path)) as fresh:
        barrier = threading.Barrier(6)

        def work(seed: int) -> None:
            order = random.Random(seed)
            barrier.wait()
            for _ in range(40):
                text = order.choice(TEXTS)
                ids = fresh.encode(text, special=True, add_bos=True)
                shown = fresh.detokenize(ids)
                if ids != expected[text] or END not in fresh.stop_ids or not shown.startswith(" "):
                    failures.append((text, ids, shown))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert failures == []


def test_closing_a_tokenizer_while_other_threads_use_it_is_safe(opened: Open, path: Path) -> None:
    for attempt in range(10):
        vocabulary = opened(path)
        outcomes: list[object] = []
        started = threading.Barrier(4)

        def work(vocabulary: Opened = vocabulary, outcomes: list[object] = outcomes) -> None:
            started.wait()  # noqa: B023
            try:
                while True:
                    vocabulary.encode("the people 你好", add_bos=True)
                    vocabulary.__dict__.pop("stop_ids", None)
                    assert END in vocabulary.stop_ids
            except BaseException as error:
                outcomes.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        started.wait()
        time.sleep(0.002 * attempt)
        vocabulary.close()
        for thread in threads:
            thread.join(60)
        assert [type(outcome) for outcome in outcomes] == [ClosedError] * 3

"""Suites: what is read, what is refused and on which line, and what our own suite holds."""

from __future__ import annotations

import gzip
import json
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from edgespec.bench import suite
from edgespec.bench.suite import Prompt, builtin_suite, load_humaneval, load_suite, suite_sha256
from edgespec.errors import InvalidRequestError

OURS = '{"id": "a", "category": "chat", "prompt": "Hello"}\n'
CATEGORIES = {"chat", "code", "code-edit", "math", "summarise", "extract-json", "translate", "qa"}


def write(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "suite.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# ---------------------------------------------------------------------------------------------- reading


def test_our_own_lines_and_those_of_spec_bench_may_stand_in_one_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        OURS + '\n{"question_id": 81, "category": "writing", "turns": ["First", "Second"], "reference": []}\r\n',
    )
    assert load_suite(path) == (
        Prompt(id="a", category="chat", prompt="Hello"),
        Prompt(id="81", category="writing", prompt="First"),
    )


def test_a_byte_order_mark_and_line_separators_inside_a_text_are_no_trouble(tmp_path: Path) -> None:
    path = write(tmp_path, b"\xef\xbb\xbf" + '{"id":"a","category":"qa","prompt":"x\u2028y"}'.encode())
    assert load_suite(path)[0].prompt == "x\u2028y"


def test_a_prompt_cannot_be_changed(tmp_path: Path) -> None:
    prompt = load_suite(write(tmp_path, OURS))[0]
    with pytest.raises(FrozenInstanceError):
        prompt.prompt = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "must be a JSON object"),
        ("9" * 10_000, "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"category": "qa", "prompt": "x"}', '"id" is missing'),
        ('{"id": "b", "prompt": "x"}', '"category" is missing'),
        ('{"id": "b", "category": "qa"}', '"prompt" is missing'),
        ('{"id": "b", "category": 1, "prompt": "x"}', '"category" must be a text'),
        ('{"id": true, "category": "qa", "prompt": "x"}', '"id" must be a text'),
        ('{"id": "b", "category": "qa", "prompt": " "}', '"prompt" must be a text that is not empty'),
        ('{"id": "b", "category": "qa", "prompt": "\\ud800"}', "half of a character pair"),
        ('{"question_id": 1, "category": "qa", "turns": []}', '"turns" must be a list'),
        ('{"question_id": 1, "category": "qa", "turns": [1]}', '"turns" must be a text'),
        ('{"category": "qa", "turns": ["x"]}', '"question_id" is missing'),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: str, says: str) -> None:
    path = write(tmp_path, OURS + "\n" + line + "\n")
    with pytest.raises(InvalidRequestError) as caught:
        load_suite(path)
    assert caught.value.message.startswith(f"{path}, line 3: ")
    assert says in caught.value.message


def test_what_is_no_suite_at_all_is_refused(tmp_path: Path) -> None:
    for content, says in (("", "has no prompts"), (OURS + OURS, "occurs twice"), (b"\xff\n", "line 1: not UTF-8")):
        with pytest.raises(InvalidRequestError, match=says):
            load_suite(write(tmp_path, content))
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        load_suite(tmp_path / "nowhere.jsonl")
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        load_suite(tmp_path)


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, OURS + OURS.replace('"a"', '"b"'))
    monkeypatch.setattr(suite, "MAX_PROMPTS", 1)
    with pytest.raises(InvalidRequestError, match="more than 1 prompts"):
        load_suite(path)
    monkeypatch.setattr(suite, "MAX_PROMPTS", 2)
    assert len(load_suite(path)) == 2
    monkeypatch.setattr(suite, "MAX_PROMPT_CHARACTERS", 4)
    with pytest.raises(InvalidRequestError, match="more than 4 characters"):
        load_suite(path)
    monkeypatch.setattr(suite, "MAX_FILE_BYTES", 60)
    with pytest.raises(InvalidRequestError, match="too much for a suite"):
        load_suite(path)


# ------------------------------------------------------------------------------------------------- hashes


def test_the_hash_is_of_the_prompts_not_of_the_file(tmp_path: Path) -> None:
    plain = load_suite(write(tmp_path, OURS))
    spaced = load_suite(write(tmp_path, '\n{"prompt":"\\u0048ello","category":"chat","id":"a"}'))
    assert suite_sha256(plain) == suite_sha256(spaced)
    assert len(suite_sha256(plain)) == 64


def test_the_hash_depends_on_every_field_and_on_the_order() -> None:
    one, two = Prompt(id="a", category="b", prompt="c"), Prompt(id="ab", category="", prompt="c")
    variants = [(one, two), (two, one), (one,), (Prompt(id="a", category="b", prompt="d"),), (two,)]
    assert len({suite_sha256(v) for v in variants}) == len(variants)


# ------------------------------------------------------------------------------------------ the suite we ship


def test_the_verify_suite_covers_all_categories_and_long_contexts() -> None:
    prompts = builtin_suite("verify")
    assert len(prompts) == 20
    assert {p.category for p in prompts} == CATEGORIES
    # About 750 tokens and more: exactness has to hold where the cache is longer than a kernel's block.
    long = [p for p in prompts if len(p.prompt) >= (3000 if "code" in p.category or "json" in p.category else 3600)]
    assert len(long) >= 9
    assert len({p.category for p in long}) >= 6


def test_the_verify_suite_does_not_fill_its_prompts_with_repetition() -> None:
    for prompt in builtin_suite("verify"):
        paragraphs = [p for p in prompt.prompt.split("\n\n") if len(p) > 80]
        assert len(paragraphs) == len(set(paragraphs)), prompt.id


def test_an_unknown_suite_names_the_known_ones() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        builtin_suite("verfy")
    assert "verify" in str(caught.value.hint)


# ---------------------------------------------------------------------------------------------- HumanEval


def humaneval(tmp_path: Path, count: int = 30) -> Path:
    path = tmp_path / "HumanEval.jsonl.gz"
    lines = [
        json.dumps({"task_id": f"HumanEval/{i}", "prompt": f"def f{i}():\n    ...\n", "test": ""})
        for i in range(count)
    ]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def test_humaneval_gives_the_first_problems_as_requests(tmp_path: Path) -> None:
    path = humaneval(tmp_path)
    prompts = load_humaneval(path)
    assert [p.id for p in prompts] == [f"HumanEval/{i}" for i in range(20)]
    assert {p.category for p in prompts} == {"code"}
    assert prompts[3].prompt.endswith("```python\ndef f3():\n    ...\n```")
    assert load_humaneval(path, n=2) == prompts[:2]


def test_humaneval_errors_are_sentences(tmp_path: Path) -> None:
    path = humaneval(tmp_path, count=3)
    with pytest.raises(InvalidRequestError, match="has 3 problems where 4"):
        load_humaneval(path, n=4)
    with pytest.raises(InvalidRequestError, match="at least 1"):
        load_humaneval(path, n=0)
    whole = path.read_bytes()
    for damaged in (whole[:-9], whole[:20], b"no gzip", whole[:15] + b"\xff\xff\xff" + whole[18:]):
        path.write_bytes(damaged)
        with pytest.raises(InvalidRequestError, match=r"not a whole gzip file"):
            load_humaneval(path, n=3)


def test_a_small_file_that_unpacks_to_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "MAX_FILE_BYTES", 1_000_000)
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(b" " * 50_000_000))
    assert path.stat().st_size < 100_000
    with pytest.raises(InvalidRequestError, match="more than 1 MB"):
        load_humaneval(path)

"""Suites: what is read, what is refused and at which line, and the content of the built-in suites."""

from __future__ import annotations

import ast
import gzip
import io
import json
import re
from collections import Counter
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from edgespec.bench import suite
from edgespec.bench.suite import (
    BUILTIN_SUITES,
    Prompt,
    builtin_suite,
    calibration_prompts,
    first_of_each,
    function_source,
    load_humaneval,
    load_suite,
    missing_prompts,
    read_suite,
    suite_sha256,
)
from edgespec.errors import InvalidRequestError

OURS = '{"id": "a", "category": "chat", "prompt": "Hello"}\n'
CATEGORIES = {"chat", "code", "code-edit", "math", "summarise", "extract-json", "translate", "qa"}


def write(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "suite.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# ---------------------------------------------------------------------------------------------- reading


def test_a_suite_file_may_mix_our_lines_and_spec_bench_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        OURS + '\n{"question_id": 81, "category": "writing", "turns": ["First", "Second"], "reference": []}\r\n',
    )
    assert load_suite(path) == (
        Prompt(id="a", category="chat", prompt="Hello"),
        Prompt(id="81", category="writing", prompt="First"),
    )


def test_a_suite_may_have_a_byte_order_mark_and_unicode_line_separators(tmp_path: Path) -> None:
    path = write(tmp_path, b"\xef\xbb\xbf" + '{"id":"a","category":"qa","prompt":"x\u2028y"}'.encode())
    assert load_suite(path)[0].prompt == "x\u2028y"


def test_a_suite_line_may_limit_the_answers_length(tmp_path: Path) -> None:
    lines = (
        '{"id": "a", "category": "qa", "prompt": "x", "max_tokens": 1}\n'
        '{"question_id": 2, "category": "qa", "turns": ["x"], "max_tokens": 64}\n'
        '{"id": "c", "category": "qa", "prompt": "x", "max_tokens": null}\n'
    )
    one, many, any_number = load_suite(write(tmp_path, lines))
    assert (one.max_tokens, many.max_tokens, any_number.max_tokens) == (1, 64, None)
    assert [each.longest(16) for each in (one, many, any_number)] == [1, 16, 16]


def test_a_prompt_is_immutable(tmp_path: Path) -> None:
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
        ('{"id": "b", "category": "qa"}', '"prompt" is missing'),
        ('{"id": "b", "category": 1, "prompt": "x"}', '"category" must be a text'),
        ('{"id": true, "category": "qa", "prompt": "x"}', '"id" must be a text'),
        ('{"id": "b", "category": "qa", "prompt": " "}', '"prompt" must be a text that is not empty'),
        ('{"id": "b", "category": "qa", "prompt": "\\ud800"}', "half of a surrogate pair"),
        ('{"id": "\\u001b[2J", "category": "qa", "prompt": "x"}', '"id" must be a line'),
        ('{"id": "b", "category": "q\\u009ba", "prompt": "x"}', '"category" must be a line'),
        (f'{{"id": "{"b" * 401}", "category": "qa", "prompt": "x"}}', '"id" must be a line of up to 400'),
        ('{"question_id": 1, "category": "qa", "turns": []}', '"turns" must be a list'),
        ('{"question_id": 1, "category": "qa", "turns": [1]}', '"turns" must be a text'),
        ('{"category": "qa", "turns": ["x"]}', '"question_id" is missing'),
        ('{"id": "b", "category": "qa", "prompt": "x", "max_tokens": 0}', '"max_tokens" must be a whole number'),
        ('{"id": "b", "category": "qa", "prompt": "x", "max_tokens": true}', '"max_tokens" must be a whole number'),
        ('{"id": "b", "category": "qa", "prompt": "x", "max_tokens": 2.5}', '"max_tokens" must be a whole number'),
    ],
)
def test_an_invalid_suite_line_is_reported_with_its_number(tmp_path: Path, line: str, says: str) -> None:
    path = write(tmp_path, OURS + "\n" + line + "\n")
    with pytest.raises(InvalidRequestError) as caught:
        load_suite(path)
    assert caught.value.message.startswith(f"{path}, line 3: ")
    assert says in caught.value.message


def test_own_prompts_are_lines_of_text_or_objects_with_a_prompt_alone(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    for content in ("\ufeffone\n\n two \n", '{"prompt": "one"}\n\n{"prompt": "two"}'):
        path.write_text(content, encoding="utf-8")
        one, two = load_suite(path)
        assert (one.prompt, one.id, one.category) == ("one", "line 1", "own")
        assert (two.prompt, two.id) == ("two", "line 3")
    assert read_suite(io.BytesIO(b"[1]\n"), "stdin")[0].prompt == "[1]"
    with pytest.raises(InvalidRequestError, match="line 1: not UTF-8"):
        read_suite(io.BytesIO(b"\xff"), "stdin")


def test_a_file_that_is_not_a_suite_is_refused(tmp_path: Path) -> None:
    for content, says in (("", "has no prompts"), (OURS + OURS, "occurs twice"), (b"\xff\n", "line 1: not UTF-8")):
        with pytest.raises(InvalidRequestError, match=says):
            load_suite(write(tmp_path, content))
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        load_suite(tmp_path / "nowhere.jsonl")
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        load_suite(tmp_path)


def test_suite_sizes_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_suites_hash_does_not_depend_on_file_formatting(tmp_path: Path) -> None:
    plain = load_suite(write(tmp_path, OURS))
    spaced = load_suite(write(tmp_path, '\n{"prompt":"\\u0048ello","category":"chat","id":"a"}'))
    assert suite_sha256(plain) == suite_sha256(spaced)
    assert len(suite_sha256(plain)) == 64


def test_a_suites_hash_depends_on_every_field_and_on_the_order() -> None:
    one, two = Prompt(id="a", category="b", prompt="c"), Prompt(id="ab", category="", prompt="c")
    longer = Prompt(id="a", category="b", prompt="c", max_tokens=8)
    variants = [(one, two), (two, one), (one,), (Prompt(id="a", category="b", prompt="d"),), (two,), (longer,)]
    assert len({suite_sha256(v) for v in variants}) == len(variants)


# ------------------------------------------------------------------------------------------ the suite we ship


def test_the_verify_suite_covers_all_categories_and_long_contexts() -> None:
    prompts = builtin_suite("verify")
    assert len(prompts) == 20
    assert {p.category for p in prompts} == CATEGORIES
    # About 750 tokens and more: exactness must hold beyond a kernel's block of the cache.
    long = [p for p in prompts if len(p.prompt) >= (3000 if "code" in p.category or "json" in p.category else 3600)]
    assert len(long) >= 9
    assert len({p.category for p in long}) >= 6


def test_the_verify_suites_prompts_are_not_padded_with_repetition() -> None:
    for prompt in builtin_suite("verify"):
        paragraphs = [p for p in prompt.prompt.split("\n\n") if len(p) > 80]
        assert len(paragraphs) == len(set(paragraphs)), prompt.id


SUITES = Path(suite.__file__).parent / "suites"

# Hashes of the files, including the requests of prompts that quote the standard library. Any change makes results
# incomparable with earlier ones, so it must be intended.
FROZEN = {
    "ours": "3df61e00f4b31e86076e8d254bca83dedd5f3db73fa03923b500e70d5e72dcab",
    "long-prompts": "8244db2aa5976e120dae0dce358f04b265f925aea2b17f277c87553bc571ba44",
    "short": "bf732a2d9ef69e7c1ebe9701d6de0e21533645c8791ec67b6d2295b0dfb47686",
    "verify": "5a0d259f8f7d98a7b97215d21bd0439adc88f6e58bd48c4094d0d316a3cf3696",
    "calibration": "4844a48a438a897298dce9f15a278c8e637203195a60ba1d824713321ebd77c5",
}


@pytest.mark.parametrize("name", FROZEN)
def test_the_built_in_suite_files_have_their_frozen_hashes(name: str) -> None:
    assert suite_sha256(load_suite(SUITES / f"{name}.jsonl")) == FROZEN[name]


@pytest.mark.parametrize("name", BUILTIN_SUITES)
def test_a_built_in_suite_is_complete_and_the_same_each_time(name: str) -> None:
    assert builtin_suite(name) == builtin_suite(name)
    assert missing_prompts(name) == ()


def quotes_source(prompt: Prompt) -> bool:
    recipes = [json.loads(line) for file in SUITES.glob("*.jsonl") for line in file.read_bytes().splitlines()]
    return prompt.id in {recipe["id"] for recipe in recipes if "source" in recipe}


def test_suite_ours_has_at_least_four_prompts_in_every_category() -> None:
    prompts = builtin_suite("ours")
    own = Counter(prompt.category for prompt in prompts if not quotes_source(prompt))
    assert set(own) == CATEGORIES
    assert min(own.values()) >= 4
    assert Counter(prompt.category for prompt in prompts if quotes_source(prompt)) == {"code-edit": 4}
    assert all(200 <= len(prompt.prompt) <= 3000 for prompt in prompts)  # about 50 to 750 tokens


def test_suite_short_has_all_prompt_lengths_and_own_answer_limits() -> None:
    prompts = builtin_suite("short")
    counted = Counter(prompt.category for prompt in prompts)
    assert set(counted) == {
        "retrieval", "extraction", "classification", "routing", "tool-call", "summary", "question"
    }  # fmt: skip
    assert len(prompts) >= 36
    assert min(counted.values()) >= 5
    lengths = [len(prompt.prompt) for prompt in prompts]
    # About 4 characters are a token: 30, 300, 1000 and 3000 tokens; each digit of the log is a token.
    for low, high, least in ((40, 400, 12), (900, 1500, 6), (2900, 4300, 6), (6500, 12_000, 3)):
        assert sum(low <= length <= high for length in lengths) >= least, (low, high)
    asked = [prompt.max_tokens for prompt in prompts]
    assert min(asked) == 1  # type: ignore[type-var]
    assert max(asked) == 64  # type: ignore[type-var]
    assert len(set(asked)) >= 8


def test_suite_short_does_not_repeat_texts_within_or_from_other_suites() -> None:
    short = builtin_suite("short")
    others = [prompt for name in ("ours", "long-prompts", "verify") for prompt in builtin_suite(name)]
    seen = {run for prompt in others for run in runs_of_words(prompt.prompt)}
    assert not [prompt.id for prompt in short if seen & runs_of_words(prompt.prompt)]
    for prompt in short:
        lines = [line for line in prompt.prompt.split("\n") if len(line) > 20]
        assert len(lines) == len(set(lines)), prompt.id


def test_suites_ours_and_verify_share_no_prompts() -> None:
    ours, verify = builtin_suite("ours") + builtin_suite("long-prompts"), builtin_suite("verify")
    assert not {prompt.id for prompt in ours} & {prompt.id for prompt in verify}
    paragraphs = {paragraph for prompt in verify for paragraph in prompt.prompt.split("\n\n") if len(paragraph) > 40}
    assert not [prompt.id for prompt in ours if paragraphs & set(prompt.prompt.split("\n\n"))]


def test_calibration_prompts_are_many_short_and_varied_in_both_parts() -> None:
    prompts = calibration_prompts()
    assert len(prompts) >= 48
    assert all(40 <= len(prompt.prompt) <= 700 for prompt in prompts)
    kinds = {"code", "code-other", "extract-json", "chat", "math", "translate", "summarise", "shell-sql"}
    held_out = prompts[2::3]  # as edgespec.export.trim.token_counts splits them
    for part in (held_out, [prompt for prompt in prompts if prompt not in held_out]):
        assert {prompt.category for prompt in part} == kinds


def test_calibration_prompts_are_in_no_measuring_suite() -> None:
    """A head must not be counted on the prompts that compare it."""
    measured = [prompt for name in BUILTIN_SUITES for prompt in builtin_suite(name)]
    assert "calibration" not in BUILTIN_SUITES
    ours = calibration_prompts()
    assert not {prompt.id for prompt in ours} & {prompt.id for prompt in measured}
    # No eight consecutive words in common.
    seen = {run for prompt in measured for run in runs_of_words(prompt.prompt)}
    assert not [prompt.id for prompt in ours if seen & runs_of_words(prompt.prompt)]


def runs_of_words(text: str, length: int = 8) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[start : start + length]) for start in range(len(words) - length + 1)}


def test_suite_quick_is_one_of_ours_per_category_in_the_same_order() -> None:
    ours, quick = builtin_suite("ours"), builtin_suite("quick")
    assert Counter(prompt.category for prompt in quick) == dict.fromkeys(CATEGORIES, 1)
    assert [prompt for prompt in ours if prompt in quick] == list(quick)
    assert all(
        "```" in prompt.prompt and "rint" in prompt.prompt for prompt in quick if prompt.category == "code-edit"
    )


def test_suite_long_prompts_has_550_to_800_tokens_per_prompt() -> None:
    prompts = builtin_suite("long-prompts")
    assert len(prompts) >= 4
    assert all(2200 <= len(prompt.prompt) <= 3200 for prompt in prompts)  # about 550 to 800 tokens


def test_quoted_code_is_a_whole_function_that_matches_the_request() -> None:
    prompts = {prompt.id: prompt.prompt for prompt in builtin_suite("ours") + builtin_suite("long-prompts")}
    quoting = [prompt for prompt in prompts if quotes_source(Prompt(id=prompt, category="", prompt=""))]
    assert len(quoting) == 6
    for prompt in quoting:
        request, code, rest = prompts[prompt].split("```")
        (function,) = ast.parse(code.removeprefix("python\n")).body
        assert isinstance(function, ast.FunctionDef)
        assert rest == ""
        assert all(word in code for word in re.findall(r"`(\w+)`", request) if word not in NEW_NAMES), prompt


NEW_NAMES = {"items", "max_width", "total_width", "low", "high"}  # names that the requests introduce


def test_prompts_without_an_available_source_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = builtin_suite("ours")
    monkeypatch.setattr(suite, "function_source", lambda place: None)
    left = builtin_suite("ours")
    assert set(missing_prompts("ours")) == {prompt.id for prompt in whole} - {prompt.id for prompt in left}
    assert len(missing_prompts("ours")) == 4
    assert len(missing_prompts("quick")) == 1
    assert missing_prompts("verify") == ()
    # A function without the code that the request is about gives no prompt either.
    monkeypatch.setattr(suite, "function_source", lambda place: "def nlargest(n, iterable): ...")
    assert "code-edit-nlargest" not in missing_prompts("ours")
    assert len(missing_prompts("ours")) == 3


def test_a_functions_source_is_read_without_importing_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "raise RuntimeError\n\nclass A:\n    @property\n    def f(self):\n        return 1\n\n    x = 2\n"
    (tmp_path / "explosive_module.py").write_text(code)
    (tmp_path / "broken_module.py").write_text("def f(:")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert function_source("explosive_module:A.f") == "@property\ndef f(self):\n    return 1"
    for place in ("explosive_module:A", "explosive_module:A.x", "explosive_module:g", "explosive_module", "sys:exit"):
        assert function_source(place) is None, place
    for place in ("no_such_module:f", "broken_module:f", "__main__:f", "os.path:join"):
        assert function_source(place) is None, place


def test_an_unknown_suite_is_refused_with_the_known_names() -> None:
    for request in (builtin_suite, missing_prompts):
        with pytest.raises(InvalidRequestError) as caught:
            request("verfy")
        assert all(name in str(caught.value.hint) for name in BUILTIN_SUITES)


# ---------------------------------------------------------------------------------------------- HumanEval


def humaneval(tmp_path: Path, count: int = 30) -> Path:
    path = tmp_path / "HumanEval.jsonl.gz"
    lines = [
        json.dumps({"task_id": f"HumanEval/{i}", "prompt": f"def f{i}():\n    ...\n", "test": ""})
        for i in range(count)
    ]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def test_humaneval_problems_are_loaded_as_chat_requests(tmp_path: Path) -> None:
    path = humaneval(tmp_path)
    prompts = load_humaneval(path)
    assert [p.id for p in prompts] == [f"HumanEval/{i}" for i in range(20)]
    assert {p.category for p in prompts} == {"code"}
    assert prompts[3].prompt.endswith("```python\ndef f3():\n    ...\n```")
    assert load_humaneval(path, n=2) == prompts[:2]


def test_humaneval_errors_are_one_sentence_each(tmp_path: Path) -> None:
    path = humaneval(tmp_path, count=3)
    with pytest.raises(InvalidRequestError, match="has 3 problems, fewer than the requested 4"):
        load_humaneval(path, n=4)
    with pytest.raises(InvalidRequestError, match="at least 1"):
        load_humaneval(path, n=0)
    whole = path.read_bytes()
    for damaged in (whole[:-9], whole[:20], b"no gzip", whole[:15] + b"\xff\xff\xff" + whole[18:]):
        path.write_bytes(damaged)
        with pytest.raises(InvalidRequestError, match=r"not a complete gzip file"):
            load_humaneval(path, n=3)


def test_a_small_gzip_file_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "MAX_FILE_BYTES", 1_000_000)
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(b" " * 50_000_000))
    assert path.stat().st_size < 100_000
    with pytest.raises(InvalidRequestError, match="more than 1 MB"):
        load_humaneval(path)


def test_first_of_each_keeps_the_first_prompts_of_each_category_in_order() -> None:
    names = [("a", "chat"), ("b", "code"), ("c", "chat"), ("d", "chat"), ("e", "code")]
    prompts = [Prompt(id=name, category=category, prompt="x") for name, category in names]
    assert [prompt.id for prompt in first_of_each(prompts, 1)] == ["a", "b"]
    assert [prompt.id for prompt in first_of_each(prompts, 2)] == ["a", "b", "c", "e"]
    assert first_of_each(prompts, 9) == prompts

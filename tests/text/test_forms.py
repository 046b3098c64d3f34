"""Forms compiled for a vocabulary: schemas, regular expressions, grammars and choices, all of them hostile input."""

from __future__ import annotations

import json
import random
import re
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import ConstraintError, InvalidRequestError, RuntimeUnavailableError
from edgespec.files.gguf.header import read_header
from edgespec.interfaces.counted_text import common_prefix
from edgespec.text.conversation.thinking import ThinkingMarks
from edgespec.text.grammar import compiled as module
from edgespec.text.grammar.after_thinking import AfterThinking, BehindMark, tokens_of
from edgespec.text.grammar.compiled import FormCursor, Forms
from edgespec.text.grammar.form import MOST_BYTES, Form, form_of
from edgespec.text.grammar.size import MOST_ALTERNATIVES, MOST_LEVELS, MOST_NAMES, MOST_RULES
from edgespec.text.tokenizers.gguf import GgufTokenizer
from tests.support.scripted_gguf import write_scripted_gguf
from tests.support.vocabularies import CONTROL, NORMAL, write_vocabulary

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def forms(tokenizer: GgufTokenizer) -> Forms:
    return Forms(tokenizer, tokenizer.vocabulary_size + 40)  # a padded vocabulary


def cut(tokenizer: GgufTokenizer, text: str) -> list[int]:
    """Tokens of the text's own bytes: encoding puts a blank before the first word."""
    ids = {tokenizer.token_bytes(token): token for token in reversed(range(tokenizer.vocabulary_size))}
    left, found = text.encode(), list[int]()
    while left:
        piece = next(left[:size] for size in range(len(left), 0, -1) if left[:size] in ids)
        found.append(ids[piece])
        left = left[len(piece) :]
    return found


def made(**given: Any) -> Form:
    form = form_of(**given)
    assert form is not None
    return form


def cursor(forms: Forms, **given: Any) -> FormCursor:
    return forms.compiled(made(**given)).cursor()


def takes(forms: Forms, tokenizer: GgufTokenizer, text: str, **given: Any) -> bool:
    """Whether the form takes the whole text, and the answer may end there."""
    own, ids = cursor(forms, **given), cut(tokenizer, text)
    if own.allows(ids) < len(ids):
        return False
    own.at(ids)
    return bool(own.allows([min(tokenizer.stop_ids)]))


@pytest.mark.parametrize(
    ("spacing", "text"),
    [
        ("line", '{"name": "Jo", "age": 3}'),
        ("compact", '{"name":"Jo","age":3}'),
        ("free", '{\n  "name": "Jo",\n  "age": 3\n}'),
    ],
)
def test_a_schema_takes_its_own_json_in_each_spacing(
    forms: Forms, tokenizer: GgufTokenizer, spacing: str, text: str
) -> None:
    assert takes(forms, tokenizer, text, schema=PERSON, spacing=spacing)
    assert not takes(forms, tokenizer, text.replace("3", '"3"'), schema=PERSON, spacing=spacing)
    assert not takes(forms, tokenizer, text[:-1], schema=PERSON, spacing=spacing)
    assert takes(forms, tokenizer, '{"name": "Jo", "age": 3}', schema=json.dumps(PERSON)), "line is the default"
    assert not takes(forms, tokenizer, '{"name": "Jo",' + "\n" * 50 + '"age": 3}', schema=PERSON, spacing="free")


def test_regular_expressions_grammars_and_choices_take_what_they_say(forms: Forms, tokenizer: GgufTokenizer) -> None:
    assert takes(forms, tokenizer, "2026-11", regex="[0-9]{4}-[0-9]{2}")
    assert not takes(forms, tokenizer, "2026-1", regex="[0-9]{4}-[0-9]{2}")
    assert takes(forms, tokenizer, "yes", grammar='root ::= "yes" | "no"')
    assert takes(forms, tokenizer, "no", grammar='start: "yes" | "no"')
    assert not takes(forms, tokenizer, "maybe", grammar='start: "yes" | "no"')
    assert takes(forms, tokenizer, "c19", choice=[f"c{number}" for number in range(20_000)])
    for text in ("a", "ab"):
        assert takes(forms, tokenizer, text, choice=["a", "ab"])
    choices = ['green " and \\', "red\n", "%x /a/ {b}"]
    for choice in choices:
        assert takes(forms, tokenizer, choice, choice=choices)
    assert not takes(forms, tokenizer, "red", choice=choices)


def test_the_mask_is_that_of_the_tokens_that_are_allowed_one_by_one(forms: Forms, tokenizer: GgufTokenizer) -> None:
    own = cursor(forms, schema=PERSON)
    own.at(cut(tokenizer, '{"name": "J'))
    bits = np.unpackbits(own.mask.view(np.uint8), bitorder="little")
    one_by_one = [own.allows([token]) for token in range(tokenizer.vocabulary_size)]
    assert bits[: tokenizer.vocabulary_size].tolist() == one_by_one
    assert 2 < sum(one_by_one) < tokenizer.vocabulary_size
    assert not bits[tokenizer.vocabulary_size :].any(), "ids of the padding are never allowed"


def test_only_an_end_is_allowed_behind_a_complete_text(forms: Forms, tokenizer: GgufTokenizer) -> None:
    own, ids = cursor(forms, schema=PERSON), cut(tokenizer, '{"name": "Jo", "age": 3}')
    own.at(ids)
    bits = np.flatnonzero(np.unpackbits(own.mask.view(np.uint8), bitorder="little"))
    assert set(bits.tolist()) == set(tokenizer.stop_ids)
    own.at([*ids, min(tokenizer.stop_ids)])
    own.at(ids[:3])
    assert own.allows(ids[3:]) == len(ids) - 3


def test_a_cursor_that_went_back_is_one_that_was_never_there(forms: Forms, tokenizer: GgufTokenizer) -> None:
    """Random ways through random texts: masks, forced tokens and what is allowed."""
    draw = random.Random(5)
    for spacing in ("line", "free"):
        walking = cursor(forms, schema=PERSON, spacing=spacing)
        here: list[int] = []
        for _ in range(400):
            if here and draw.random() < 0.4:
                here = here[: draw.randrange(len(here))]
            walking.at(here)
            fresh = cursor(forms, schema=PERSON, spacing=spacing)
            fresh.at(here)
            assert walking.mask.tobytes() == fresh.mask.tobytes()
            assert list(walking.forced) == list(fresh.forced)
            bits = np.flatnonzero(np.unpackbits(walking.mask.view(np.uint8), bitorder="little")).tolist()
            following = draw.choice(bits)
            here = [] if following in tokenizer.stop_ids else [*here, following]


def test_a_token_that_is_not_allowed_raises_and_the_cursor_is_usable(forms: Forms, tokenizer: GgufTokenizer) -> None:
    own, ids = cursor(forms, schema=PERSON), cut(tokenizer, '{"name": "Jo"')
    with pytest.raises(ConstraintError, match="is not allowed"):
        own.at([*ids, ids[0]])
    own.at(ids)
    assert own.allows(cut(tokenizer, ', "age": 3}')) > 1


def test_a_form_begins_behind_the_thinking_that_the_prompt_or_the_model_begins(
    forms: Forms, tokenizer: GgufTokenizer
) -> None:
    form, marks = forms.compiled(made(choice=["yes", "no"])), ThinkingMarks("<think>", "</think>")
    blank, *opening = tokenizer.encode(marks.opening)
    assert tokenizer.token_bytes(blank) == b" "
    closing = cut(tokenizer, "so it is</think>")
    yes, maybe = cut(tokenizer, "yes"), cut(tokenizer, "maybe")
    for inside in (True, False):
        own = AfterThinking(form, marks, inside, tokenizer).cursor()
        begun = [] if inside else opening
        own.at(begun)
        assert own.allows(maybe) == len(maybe)
        own.at([*begun, *closing[:-1]])
        assert own.allows(maybe) == len(maybe)
        own.at([*begun, *closing])
        assert own.allows(yes) == len(yes)
        assert own.allows(maybe) < len(maybe)
        own.at([*begun, *closing[:2]])
        assert own.allows(maybe) == len(maybe), "it went back into thinking"
    own.at([])
    assert own.allows(opening[:1]) == 1
    assert own.allows(yes) == len(yes), "it need not think"
    assert own.mask is not None
    bits = np.flatnonzero(np.unpackbits(own.mask.view(np.uint8), bitorder="little")).tolist()
    assert opening[0] in bits
    assert yes[0] in bits
    own.at(yes)
    assert own.allows(opening[:1]) == 0
    if len(opening) > 1:
        own.at(opening[:1])
        assert own.mask is not None
        assert np.flatnonzero(np.unpackbits(own.mask.view(np.uint8), bitorder="little")).tolist() == [opening[1]]


def allowed_by(mask: np.typing.NDArray[np.uint32] | None) -> set[int]:
    assert mask is not None
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_an_answer_cannot_end_in_its_thinking(forms: Forms, tokenizer: GgufTokenizer) -> None:
    stop = min(tokenizer.stop_ids)
    form = forms.compiled(made(choice=["yes"]))
    own = AfterThinking(form, ThinkingMarks("<think>", "</think>"), True, tokenizer).cursor()
    own.at(cut(tokenizer, "so it"))
    assert allowed_by(own.mask) == set(range(tokenizer.vocabulary_size)) - tokenizer.stop_ids
    assert own.allows([stop]) == 0
    assert own.allows([*cut(tokenizer, " is"), stop]) == len(cut(tokenizer, " is"))
    own.at(cut(tokenizer, "so it</think>yes"))
    assert own.allows([stop]) == 1


def test_a_form_that_begins_as_the_mark_of_thinking_does_stays_possible(
    forms: Forms, tokenizer: GgufTokenizer
) -> None:
    marks = ThinkingMarks("<think>", "</think>")
    opening = tokens_of(marks.opening, tokenizer)
    assert len(opening) > 1
    own = AfterThinking(forms.compiled(made(choice=["<th1", "<b"])), marks, False, tokenizer).cursor()
    own.at(opening[:1])
    assert own.allows(opening[1:2]) == 1
    assert own.allows(cut(tokenizer, "b")) == 1
    assert {opening[1], *cut(tokenizer, "b")} <= allowed_by(own.mask)
    assert not own.forced
    own = AfterThinking(forms.compiled(made(choice=["no"])), marks, False, tokenizer).cursor()
    own.at(opening[:1])
    assert own.allows(cut(tokenizer, "b")) == 0
    assert allowed_by(own.mask) == {opening[1]}
    assert list(own.forced) == opening[1:]
    assert own.allows([*opening[1:], *opening]) == 2 * len(opening) - 1


def test_behind_thinking_comes_the_beginning_of_the_next_message(forms: Forms, tokenizer: GgufTokenizer) -> None:
    marks = ThinkingMarks("<think>", "<end>", ("<final>",), ("<start>", "<end>"))
    own = AfterThinking(forms.compiled(made(choice=["yes"])), marks, True, tokenizer).cursor()
    own.at(cut(tokenizer, "so<end>"))
    assert own.allows(cut(tokenizer, "yes")) == len(cut(tokenizer, "yes")), "any token may come"
    own.at(cut(tokenizer, "so<end><start>"))
    assert own.allows(cut(tokenizer, "no")) == 0
    assert own.allows(cut(tokenizer, "yes")) == len(cut(tokenizer, "yes"))


def test_where_answers_have_marks_a_form_begins_behind_one_of_them(forms: Forms, tokenizer: GgufTokenizer) -> None:
    yes, marks = cut(tokenizer, "yes"), [cut(tokenizer, "<a>"), cut(tokenizer, "<bc>")]
    own = BehindMark(forms.compiled(made(choice=["yes", "no"])), tuple(map(tuple, marks))).cursor()
    same = common_prefix(*marks)
    assert 0 < same < min(map(len, marks))
    own.at([])
    assert allowed_by(own.mask) == {marks[0][0]}
    assert list(own.forced) == marks[0][:same]
    assert own.allows(yes) == 0
    own.at(marks[0][:same])
    assert allowed_by(own.mask) == {mark[same] for mark in marks}
    assert not own.forced
    for mark in marks:
        assert own.allows(mark[same:]) == len(mark) - same
    for mark in marks:
        own.at(mark)
        assert own.allows(yes) == len(yes)
        assert own.allows(cut(tokenizer, "maybe")) == 0
        assert allowed_by(own.mask) >= {yes[0]}
        own.at([*mark, *yes])
        assert allowed_by(own.mask) == set(tokenizer.stop_ids)
    own.at(marks[1][: same + 1])
    assert list(own.forced) == marks[1][same + 1 :]
    with pytest.raises(ConstraintError, match="not allowed"):
        own.at(yes)


# ------------------------------------------------------------------------------------------------- hostile forms

REFUSED: dict[str, Any] = {
    "an unknown type": {"type": "nonsense"},
    "a schema of itself": {"$ref": "#"},
    "a remote schema": {"$ref": "http://127.0.0.1:9/schema.json"},
    "nothing to choose from": {"enum": []},
    "a keyword that cannot be kept": {"not": {"type": "string"}},
    "no text at all": False,
    "a list": "[]",
    "no JSON": "{",
    "twice as large as allowed": {"enum": ["x" * MOST_BYTES]},
    "half a character": '{"const": "\\ud83d"}',
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_kept_is_refused_in_one_sentence(
    forms: Forms, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "socket", None)  # nothing is fetched
    with pytest.raises(InvalidRequestError) as caught:
        forms.compiled(made(schema=REFUSED[name]))
    assert caught.value.param == "schema"
    assert len(caught.value.message) < 400
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"enum": [str(number) for number in range(20_000)]},
        {"properties": {f"p{i}": {} for i in range(2000)}, "required": [f"p{i}" for i in range(2000)]},
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
        {"type": "string", "pattern": "^(a+)+$"},
        json.loads('{"type": "array", "items": ' * 60 + "{}" + "}" * 60),
    ],
    ids=["any", "many names", "many properties", "long", "bomb", "deep"],
)
def test_a_large_schema_is_compiled(forms: Forms, schema: Any) -> None:
    assert forms.compiled(made(schema=schema)).cursor().mask.any()


def references(count: int) -> dict[str, Any]:
    """A schema whose definitions each refer to the next one."""
    inner = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(count)}
    return {"$defs": {**inner, f"d{count}": {}}, "$ref": "#/$defs/d0"}


def test_a_schema_whose_references_lead_too_deep_is_refused_before_native_code_follows_them(forms: Forms) -> None:
    assert forms.compiled(made(schema=references(300))).cursor().mask.any()
    assert forms.compiled(made(grammar=f"start: %json {json.dumps(references(300))}")).cursor().mask.any()
    escaped = json.dumps(references(1500)).replace("$ref", "\\u0024ref")
    for form in ({"schema": references(400)}, {"schema": references(1500)}, {"grammar": f"start: %json {escaped}"}):
        with pytest.raises(InvalidRequestError, match="may lead too deep"):
            forms.compiled(made(**form))


def test_names_of_one_object_and_rules_of_a_grammar_have_a_limit(forms: Forms) -> None:
    assert (MOST_NAMES, MOST_RULES, MOST_LEVELS) == (2000, 500, 2000)
    with pytest.raises(InvalidRequestError, match="its objects have more names than one of 2000"):
        forms.compiled(made(schema={"properties": {f"p{number}": {} for number in range(2001)}}))
    rules = "".join(f'r{number} ::= "a" r{number + 1}\n' for number in range(498))
    assert forms.compiled(made(grammar=f'root ::= r0\n{rules}r498 ::= "b"\n')).cursor().mask.any()
    with pytest.raises(InvalidRequestError, match="more than 500 rules"):
        forms.compiled(made(grammar=f'root ::= r0\n{rules}r498 ::= "b" r499\nr499 ::= "c"\n'))


def combined(count: int) -> dict[str, Any]:
    return {"type": "string", "allOf": [{"pattern": f"^[a-z]*x{number}"} for number in range(count)]}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"schema": combined(20)}, "it may combine 20 patterns"),
        ({"schema": {"pattern": "a", "anyOf": combined(20)["allOf"]}}, "it may combine 21 patterns"),
        ({"schema": {"$defs": {"a": combined(20)}, "$ref": "#/$defs/a"}}, "it may combine 20 patterns"),
        ({"grammar": f"start: A\nA: {' & '.join(f'/.*a{number}.*/' for number in range(20))}"}, "expressions"),
        ({"schema": {"patternProperties": {f"^a{n:03}": {} for n in range(300)}}}, "more than 100 patternProperties"),
        ({"schema": {"multipleOf": 1000003}}, "too many remainders"),
        ({"grammar": "root ::= " + ' | "a"' * (MOST_ALTERNATIVES + 1)}, "alternatives"),
        ({"schema": {"allOf": [{"multipleOf": prime} for prime in (7, 11, 13, 17, 19, 23)]}}, "too many remainders"),
        ({"schema": {"multipleOf": 1e22}}, "too many remainders"),
        ({"grammar": 'start: %json {"type": "integer", "multipleOf": 1000003}'}, "too many remainders"),
        ({"schema": {"properties": {f"q{i}": {f"p{n}": 1 for n in range(1000)} for i in range(10)}}}, "more names"),
    ],
)
def test_forms_that_would_take_llguidance_seconds_are_refused_before(
    forms: Forms, asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        forms.compiled(made(**asked))
    if "it may combine" in said or ("schema" in asked and "remainders" in said):
        assert said in " ".join(forms.compiled(made(**asked, lenient=True)).warnings)
        return
    with pytest.raises(InvalidRequestError, match=said):
        forms.compiled(made(**asked, lenient=True))


def test_an_object_of_many_optional_names_is_followed_to_its_end(forms: Forms, tokenizer: GgufTokenizer) -> None:
    names = {f"p{number}": {"type": "integer"} for number in range(2000)}
    own = cursor(forms, schema={"type": "object", "properties": names})
    for text in ('{"', '{"p12', '{"p12": 3', '{"p12": 3, "', '{"p12": 3, "p1999": 4}'):
        own.at(cut(tokenizer, text))
        assert own.mask.any()


def test_a_form_of_itself_alone_is_refused_in_plain_words(forms: Forms) -> None:
    for given in ({"schema": {"$ref": "#"}}, {"grammar": "root ::= a\na ::= root"}):
        with pytest.raises(InvalidRequestError) as caught:
            forms.compiled(made(**given))
        assert caught.value.message.endswith("cannot be followed: it refers to itself without an end")


def test_what_schemas_of_programs_hold_is_within_the_limits(forms: Forms) -> None:
    cents = {"type": "number", "multipleOf": 0.01}
    many = {
        "type": "object",
        "properties": {
            **{f"price{number}": cents for number in range(50)},
            **{f"code{number}": {"type": "string", "pattern": f"^[A-Z]{{{number + 1}}}$"} for number in range(50)},
            "minutes": {"type": "integer", "multipleOf": 15},
            "kind": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^x"}]},
        },
    }
    assert forms.compiled(made(schema=many)).cursor().mask.any()
    both = {"type": "string", "allOf": [{"pattern": "^[a-z]+$"}, {"pattern": "^.{2,5}$"}]}
    assert forms.compiled(made(schema=both)).cursor().mask.any()
    assert forms.compiled(made(grammar='start: "a && b" | "&&&&&&&&&&&&&&&&&&"')).cursor().mask.any()


def test_a_lenient_schema_leaves_keywords_out_and_says_which(forms: Forms, tokenizer: GgufTokenizer) -> None:
    form = made(schema={"type": "string", "not": {"const": "a"}}, lenient=True)
    assert any("not" in warning for warning in forms.compiled(form).warnings)
    assert forms.compiled(made(schema=PERSON)).warnings == ()


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"regex": "(("}, "regex"),
        ({"regex": ""}, "regex"),
        ({"regex": 3}, "regex"),
        ({"grammar": "root := x"}, "grammar"),
        ({"grammar": "start: nothing"}, "grammar"),
        ({"grammar": "x\0"}, "grammar"),
        ({"choice": []}, "choice"),
        ({"choice": "yes"}, "choice"),
        ({"choice": ["yes", ""]}, "choice"),
        ({"choice": ["\ud800"]}, "choice"),
        ({"regex": "a", "choice": ["a"]}, "choice"),
        ({"regex": "a", "spacing": "wide"}, "spacing"),
        ({"schema": {"const": {1}}}, "schema"),
    ],
)
def test_other_forms_that_cannot_be_kept_are_refused(forms: Forms, given: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        forms.compiled(made(**given))
    assert caught.value.param == param


def test_a_request_without_a_form_has_none() -> None:
    assert form_of() is None


def test_the_latest_forms_are_kept_and_compiled_once(
    tokenizer: GgufTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = Forms(tokenizer, tokenizer.vocabulary_size)
    first = forms.compiled(made(regex="a"))
    assert forms.compiled(made(regex="a")) is first
    for number in range(module._MOST_KEPT):
        forms.compiled(made(regex=f"b{number}"))
    assert forms.compiled(made(regex="a")) is not first


def test_kept_forms_have_a_limit_of_bytes_and_the_latest_two_are_kept_whatever_their_size(
    tokenizer: GgufTokenizer,
) -> None:
    forms = Forms(tokenizer, tokenizer.vocabulary_size)
    small = forms.compiled(made(regex="a"))
    large = [made(choice=[name * (module._MOST_KEPT_BYTES // 3)]) for name in "xyz"]
    for form in large[:2]:
        forms.compiled(form)
    assert forms.compiled(made(regex="a")) is small
    forms.compiled(large[2])
    assert large[0] not in forms._kept[""]
    assert forms.compiled(made(regex="a")) is small
    whole = [made(choice=[each * 40 + name * (module._MOST_KEPT_BYTES // 4) for name in "abcde"]) for each in "uvw"]
    for form in whole:
        assert forms.compiled(form) is forms.compiled(form)
    assert list(forms._kept[""]) == whole[1:], "a set of tools has two forms"


def test_without_llguidance_the_error_says_how_to_install_it(
    tokenizer: GgufTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RuntimeUnavailableError) as caught:
        Forms(tokenizer, tokenizer.vocabulary_size).prepare()
    assert re.search(r"\[grammar\]", caught.value.hint or "")


@pytest.mark.parametrize("texts", [["a", "b", "ab"], ["b", "c", "bc", "<|im_end|>"]], ids=["end", "letter"])
def test_a_vocabulary_that_can_keep_no_form_is_refused_in_one_sentence(tmp_path: Path, texts: list[str]) -> None:
    tokens = [(text, CONTROL if "|" in text else NORMAL) for text in texts]
    path = write_vocabulary(tmp_path / "few.gguf", tokens, merges=[" ".join(texts[:2])])
    tokenizer = GgufTokenizer(read_header(path))
    with pytest.raises(InvalidRequestError, match="this model cannot keep a form: its vocabulary has no token"):
        Forms(tokenizer, tokenizer.vocabulary_size).compiled(made(regex="b"))


def test_one_owners_forms_do_not_end_those_of_another(tokenizer: GgufTokenizer) -> None:
    forms = Forms(tokenizer, tokenizer.vocabulary_size)
    own, form = forms.compiled(made(regex="a"), "first"), made(regex="a")
    assert forms.compiled(form, "second") is not own, "nor does its time say what the other has asked for"
    for number in range(module._MOST_KEPT):
        forms.compiled(made(regex=f"a{number}"), "second")
    assert forms.compiled(form, "first") is own
    assert form not in forms._kept["second"]
    assert forms.compiled(form) is not own
    assert form in forms._kept[""]


def test_a_vocabulary_without_a_token_for_blanks_follows_forms_that_have_some(tmp_path: Path) -> None:
    tokenizer = GgufTokenizer(read_header(write_scripted_gguf(tmp_path / "model.gguf", ("Yes", "<|im_end|>"))))
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode("a b"))) != b"a b"
    forms = Forms(tokenizer, tokenizer.vocabulary_size)
    own, said = cursor(forms, choice=["a b"]), cut(tokenizer, "a b")
    assert list(own.forced) == said
    own.at(said[:1])
    assert allowed_by(own.mask) == {said[1]}


def test_quotes_without_an_end_are_read_once(forms: Forms) -> None:
    with pytest.raises(InvalidRequestError, match="this grammar cannot be followed"):
        forms.compiled(made(grammar="start: " + '"\\' * 100_000))

"""GBNF as llama.cpp reads it: its escapes, classes and names."""

from __future__ import annotations

import pytest

from edgespec.errors import InvalidRequestError
from edgespec.text.grammar.compiled import Forms
from edgespec.text.grammar.gbnf import is_gbnf
from edgespec.text.tokenizers.gguf import GgufTokenizer
from tests.text.test_forms import made, takes


@pytest.fixture(scope="module")
def forms(tokenizer: GgufTokenizer) -> Forms:
    return Forms(tokenizer, tokenizer.vocabulary_size)


@pytest.mark.parametrize(
    ("rule", "taken", "refused"),
    [
        (r"[\u0430-\u044f]+", "да", "da"),
        (r'"\u0434\u0430"', "да", "da"),
        (r'"\u0041\x42\U0001F600"', "AB😀", "AB"),
        (r'"\[\]\"\\\x22\u005c\n\x0a"', '[]"\\"\\\n\n', "x"),
        (r'"a\x01b"+ "\x1b"', "a\x01ba\x01b\x1b", "a\x01bb"),
        (r"[^\x5d\]\u005b]", "^", "]"),
        (r"[\x5eab]", "^", "c"),
        (r"[a\x2dz/]+", "a-z/", "b"),
        (r"[+--]", ",", "a"),
        (r"[a&&b~~-]+", "a&b~-", "c"),
        (r'[^"\\] "#" # "b"', "a#", '"#'),
        (". .", "\n\r", "a"),
        ('"." .{2}', ".я.", "...."),
    ],
)
def test_escapes_classes_and_dots_are_those_of_llama_cpp(
    forms: Forms, tokenizer: GgufTokenizer, rule: str, taken: str, refused: str
) -> None:
    for grammar in (f"root ::= {rule}\n", f"root ::= a | b\na ::= {rule}\nb ::= a a"):
        assert takes(forms, tokenizer, taken, grammar=grammar), grammar
        assert not takes(forms, tokenizer, refused, grammar=grammar), grammar


@pytest.mark.parametrize("rule", [r'"\q"', r"[\w]", r'"\u12"', r'"\ud83d"', r'"\UFFFFFFFF"', "[]", '"'])
def test_other_escapes_are_refused(forms: Forms, rule: str) -> None:
    with pytest.raises(InvalidRequestError, match="this grammar cannot be followed"):
        forms.compiled(made(grammar=f"root ::= {rule}"))


def test_many_classes_without_an_end_are_refused(forms: Forms) -> None:
    for begin in ("[", '"\\', '["'):
        with pytest.raises(InvalidRequestError, match="has no end"):
            forms.compiled(made(grammar="root ::= " + begin * 100_000))


def test_a_grammar_with_rules_of_gbnf_is_gbnf_and_any_other_is_lark(forms: Forms, tokenizer: GgufTokenizer) -> None:
    select = 'start: select\nselect: "SELECT " name\nname: /[a-z]+/'
    for lark in (f"?{select}", f"%llguidance {{}}\n{select}"):
        assert takes(forms, tokenizer, "SELECT a", grammar=lark)
    assert takes(forms, tokenizer, "a ::= b", grammar='start: "a ::= b"')
    assert not is_gbnf('start: "x"\nx: /\n ::=/ ')
    gbnf = '# start: of it\nroot ::= start end\nStart0 ::= "b"\nstart ::= "a" | start "a"\nend ::= "start" Start0'
    assert takes(forms, tokenizer, "aastartb", grammar=gbnf)

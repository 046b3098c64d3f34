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


@pytest.mark.parametrize(
    ("grammar", "taken", "refused"),
    [
        ('root ::= reason ". Answer: " [0-9]+\nreason ::= [^\\n]+', "So. It is. Answer: 3", "So. It is. Answer: x"),
        ('root ::= reason "."\nreason ::= [a-zA-Z,. ]+', "Yes. No.", "Yes. No"),
        ('root ::= word (" " word)* "."\nword ::= [a-z.]+', "a b.c e.g..", "a b.c e.g"),
        ('root ::= number{1,9} "."\nnumber ::= [0-9]{1,9} "."?', "1.22.", "1.22"),
    ],
)
def test_a_rule_of_letters_leaves_what_may_follow_it(
    forms: Forms, tokenizer: GgufTokenizer, grammar: str, taken: str, refused: str
) -> None:
    assert takes(forms, tokenizer, taken, grammar=grammar)
    assert not takes(forms, tokenizer, refused, grammar=grammar)


NESTED = {
    "a text and groups": (
        'root ::= (text | group)*\ngroup ::= "(" root ")"\ntext ::= [^()]+',
        "ab c(d(e)f)g",
        "a(b",
    ),
    "a text with calls": (
        'root ::= part*\npart ::= text | "{" expr "}"\nexpr ::= name | name "(" expr ")"\nname ::= [a-z]+\n'
        "text ::= [^{}]+",
        "Hello {name} and {f(g(x))}.",
        "Hello {name",
    ),
    "tags": (
        'root ::= "<a>" inner "</a>"\ninner ::= (text | tag)*\ntext ::= [^<]+\n'
        'tag ::= "<" name ">" inner "</" name ">"\nname ::= [a-z] [a-z0-9]*',
        "<a>x<b1>y<c></c></b1>z</a>",
        "<a>x<b1>y</a>",
    ),
    "a list with blanks": (
        'root ::= list\nlist ::= "(" (item ws?)* ")"\nitem ::= atom | list\natom ::= [a-zA-Z0-9+*-]+\nws ::= [ \\n]+',
        "(a (b c)\n  (d))",
        "(a (b c)",
    ),
    "a list between blanks": (
        'root ::= ws list ws\nlist ::= "(" ws (item ws)* ")"\nitem ::= atom | list\natom ::= [a-zA-Z0-9+*-]+\n'
        "ws ::= [ \\n]*",
        " (a (b c)\n  ( d))\n",
        " (a (b c)",
    ),
}
JSON = r"""root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}"""
A_JSON = ('{"a": {"b": [1, 2.5e3, "x\\u00e9 abc"], "c": null},\n  "d":true}', '{"a": 1')
KEPT = {
    **NESTED,
    "JSON": (JSON, *A_JSON),
    "many words": ('root ::= word{1,200} "."\nword ::= [a-z]{1,20} " "?', "the cat " * 60 + "sat.", "the cat "),
    "many parts": (
        'root ::= part{1,10}\npart ::= "## " [^\\n]{1,80} "\\n" (.{1,400} "\\n"){1,5}',
        "## Cats\nThey sat.\nAll day.\n" * 9,
        "## Cats\n",
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_grammar_that_refers_to_itself_or_repeats_much_keeps_its_terminals(
    forms: Forms, tokenizer: GgufTokenizer, name: str
) -> None:
    from edgespec.text.grammar.gbnf_terminals import larks_of_gbnf  # imports llguidance

    grammar, taken, refused = KEPT[name]
    assert len(larks_of_gbnf(grammar)) == 1
    assert takes(forms, tokenizer, taken, grammar=grammar)
    assert not takes(forms, tokenizer, refused, grammar=grammar)


WORDS = " | ".join(f'"word{number}."' for number in range(1000))
CHAIN = "\n".join(f"w{number} ::= w{number + 1}" for number in range(400))


@pytest.mark.parametrize(
    ("rules", "taken"),
    [
        (f'word "."\nword ::= {WORDS}', "word7.."),
        (f'w0\n{CHAIN}\nw400 ::= "a"', "a"),
        (f'x "c"\nx ::= [ab]* "a" {"[ab] " * 16}', "a" + "b" * 16 + "c"),
    ],
    ids=["many texts", "many rules in rules", "many ways"],
)
def test_a_large_grammar_is_read(forms: Forms, tokenizer: GgufTokenizer, rules: str, taken: str) -> None:
    for grammar in (f"root ::= {rules}", f'root ::= ("(" root ")")? {rules}'):
        assert takes(forms, tokenizer, taken, grammar=grammar)
        assert not takes(forms, tokenizer, taken[:-1], grammar=grammar)


def test_names_that_differ_in_case_or_a_dash_are_different_rules(forms: Forms, tokenizer: GgufTokenizer) -> None:
    grammar = 'root ::= Item item a-b a_b aB\nItem ::= "1"\nitem ::= root? "2"\na-b ::= "3"\na_b ::= "4"\naB ::= "5"'
    assert takes(forms, tokenizer, "12345", grammar=grammar)
    assert takes(forms, tokenizer, "1123452345", grammar=grammar)
    assert not takes(forms, tokenizer, "11345", grammar=grammar)
    with pytest.raises(InvalidRequestError, match="'Item' is not defined"):
        forms.compiled(made(grammar="root ::= item Item\nitem ::= root?"))
    with pytest.raises(InvalidRequestError, match="no rule 'root'"):
        forms.compiled(made(grammar='item ::= "1"'))


def test_a_repeated_part_may_repeat_itself(forms: Forms, tokenizer: GgufTokenizer) -> None:
    assert takes(forms, tokenizer, "ab", grammar='root ::= ("a"+)? ("b"{1,2})*')

"""Forms compiled by llguidance, whose masks follow the tokens of an answer.

llguidance never raises for a form or a token: a matcher enters a state of error and stays in it, so every step is
asked for its error.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from edgespec.errors import ConstraintError, InvalidRequestError, RuntimeUnavailableError
from edgespec.files.installation import install_command
from edgespec.interfaces.counted_text import common_prefix
from edgespec.interfaces.drawing import UintArray, are_allowed
from edgespec.text.grammar.form import SPACINGS, Form, lark_text
from edgespec.text.grammar.gbnf import is_gbnf
from edgespec.text.grammar.lenient import opened, readable
from edgespec.text.grammar.size import MOST_ITEMS, MOST_STATES, check_size
from edgespec.text.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

# A server's clients send a handful of schemas again and again. A compiled form has up to 400 times the bytes of its
# text (measured with 1 to 250 kB of schema), so that all of these take at most 64 MB.
_MOST_KEPT, _MOST_KEPT_BYTES = 64, 160 * 1024
_LONGEST_SAID = 300
# What llguidance calls by names in its code.
_PLAINER = {
    "NoExtensionBias": "it refers to itself without an end",
    "<non-verbose/>": "",
    "failed to compile JSON schema: ": "",
    "Unimplemented keys: ": "no form can keep ",
    "Unknown format: ": "no form can keep the format ",
}
# The place in a grammar of calls and the lines around it, which are not the client's.
_OUR_LINES = re.compile(r"^at \d+\(\d+\): |\n +\d+ \|.*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CompiledForm:
    """A form for one vocabulary. ``warnings`` name what of a lenient schema is not kept. For any thread."""

    form: Form
    warnings: tuple[str, ...]
    _matcher: LLMatcher
    _stop_ids: frozenset[int]

    def cursor(self) -> FormCursor:
        """A new cursor, before the first token."""
        return FormCursor(self._matcher.deep_copy(), self._stop_ids)


class FormCursor:
    """A cursor of a compiled form: implements decoding's Cursor."""

    def __init__(self, matcher: LLMatcher, stop_ids: frozenset[int]) -> None:
        self._matcher, self._stop_ids = matcher, stop_ids
        self._tokens: list[int] = []
        self._mask: UintArray | None = None  # of this place, once it was asked for

    def at(self, tokens: Sequence[int]) -> None:
        given = list(tokens)
        shared = common_prefix(self._tokens, given)
        # Nothing follows a stop token, and a matcher whose text is complete takes none.
        following = list(itertools.takewhile(lambda token: token not in self._stop_ids, given[shared:]))
        if shared == len(self._tokens) and not following:
            return
        self._mask = None
        if shared < len(self._tokens):
            self._matcher.rollback(len(self._tokens) - shared)
            del self._tokens[shared:]
        taken = self._matcher.try_consume_tokens(following) if following else 0
        self._tokens += following[:taken]
        self._check()
        if taken < len(following):
            raise ConstraintError(f"token {following[taken]} is not allowed by the form of the answer")

    def allows(self, tokens: Sequence[int]) -> int:
        found = self._matcher.validate_tokens(list(tokens))
        self._check()
        if tokens and not found and tokens[0] in self._stop_ids:
            # A stop token that is a mark of the grammar is in its masks alone.
            return int(self._matcher.is_stopped() or are_allowed(self.mask, np.array(tokens[:1]))[0])
        return found

    @property
    def mask(self) -> UintArray:
        if self._mask is None:
            found = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
            self._check()
            self._mask = found
        return self._mask

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def forced(self) -> Sequence[int]:
        found = self._matcher.compute_ff_tokens()
        self._check()
        return found

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(f"the form of the answer cannot be followed: {_said(self._matcher.get_error())}")


class Forms:
    """Compiles forms for one tokenizer's vocabulary, and keeps the latest ones of each owner. For any thread.

    ``vocabulary_size`` tokens have scores, which may be more than the tokenizer has.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary_size: int) -> None:
        self._tokenizer, self._size = tokenizer, vocabulary_size
        self._vocabulary: Any = None
        self._preparing = threading.Lock()
        self._lock = threading.Lock()
        # By owner, so that no API key's forms end those of another, or show what another has asked for.
        self._kept: defaultdict[str, OrderedDict[Form, CompiledForm]] = defaultdict(OrderedDict)

    def prepare(self) -> None:
        """Read the vocabulary, which takes about a second; later calls do nothing.

        Raises RuntimeUnavailableError if llguidance is not installed, InvalidRequestError for a vocabulary that can
        keep no form.
        """
        with self._preparing:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._tokenizer, self._size)

    def compiled(self, form: Form, owner: str = "") -> CompiledForm:
        """The compiled form, and its first mask: some forms fail only there. ``owner``: whose latest forms it joins.

        Raises InvalidRequestError for a form that cannot be compiled, and as ``prepare``.
        """
        with self._lock:
            kept = self._kept[owner]
            if (known := kept.get(form)) is not None:
                kept.move_to_end(form)
                return known
        self.prepare()
        made = _compile(form, self._vocabulary, self._tokenizer.stop_ids)
        with self._lock:
            kept[form] = made
            most = max(_MOST_KEPT_BYTES, 2 * len(form.text))  # a set of tools has two, with marks and without
            while len(kept) > _MOST_KEPT or sum(len(each.text) for each in kept) > most:
                kept.popitem(last=False)
        return made


class _AsRead:
    """A tokenizer as llguidance reads it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], controls: list[int]) -> None:
        self.eos_token_id = min(tokenizer.stop_ids)
        self.tokens, self.special_token_ids = tokens, controls
        self._encode = tokenizer.encode
        # Such tokenizers put a blank before a text, which the middle of an answer has not. No token spans the mark.
        self._mark = "\x02" if tokens[tokenizer.encode("a")[0]].startswith(b" ") else ""

    def __call__(self, text: str) -> list[int]:
        ids, skipped = self._encode(self._mark + text), 0
        if self._mark:
            skipped = next(place for place, token in enumerate(ids, 1) if self.tokens[token].endswith(b"\x02"))
        own, data = ids[skipped:], text.encode()
        return own if b"".join(self.tokens[token] for token in own) == data else list(self._pieces(data))

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {own: token for token, own in reversed(list(enumerate(self.tokens))) if own}

    def _pieces(self, data: bytes) -> Iterator[int]:
        """The longest tokens of a text that the tokenizer cannot write: it may have no token for a blank."""
        longest = max(map(len, self._ids))
        while data:
            sizes = range(min(longest, len(data)), 0, -1)
            size = next((size for size in sizes if data[:size] in self._ids), None)
            if size is None:
                return
            yield self._ids[data[:size]]
            data = data[size:]


def _vocabulary(tokenizer: Tokenizer, size: int) -> Any:
    try:
        from llguidance import LLTokenizer, TokenizerWrapper  # compiled; loaded by the first form
    except ImportError as error:
        raise RuntimeUnavailableError(
            "answers of a given form need llguidance, which is not installed", hint=install_command("grammar")
        ) from error
    if not tokenizer.stop_ids or not tokenizer.encode("a"):
        raise InvalidRequestError(
            "this model cannot keep a form: its vocabulary has no token that ends an answer, or none for a text"
        )
    controls = {
        token: own.text
        for token in range(tokenizer.vocabulary_size)
        if (own := tokenizer.control_token(token)) is not None
    }
    stops = sorted(tokenizer.stop_ids)

    tokens = [
        controls[token].encode(errors="replace") if token in controls else tokenizer.token_bytes(token)
        for token in range(tokenizer.vocabulary_size)
    ]
    return LLTokenizer(
        TokenizerWrapper(_AsRead(tokenizer, tokens, sorted(controls))),
        n_vocab=max(size, tokenizer.vocabulary_size),
        eos_token=stops,
        slices=LLTokenizer.json_slices(),
    )


def _compile(form: Form, vocabulary: Any, stop_ids: frozenset[int]) -> CompiledForm:
    try:
        matcher, left_out = _lenient(form, vocabulary)
    except Exception as error:  # converters raise what they like for a hostile text
        raise _refused(form, str(error)) from error
    return CompiledForm(form, tuple(map(_said, [*left_out, *matcher.get_grammar_warnings()])), matcher, stop_ids)


def _lenient(form: Form, vocabulary: Any) -> tuple[LLMatcher, list[str]]:
    """The matcher of a form, or of what of it can be kept, and what that leaves out."""
    failed: Exception | None = None
    for own, left_out in _attempts(form, vocabulary):
        try:
            return _matcher(own, vocabulary), left_out
        except Exception as error:
            failed = error
    assert failed is not None
    raise failed


def _attempts(form: Form, vocabulary: Any) -> Iterator[tuple[Form, list[str]]]:
    """The form with less and less of its lenient schemas, each other than the one before, and what it leaves out."""
    own, left_out = readable(form, lambda _pattern: True)
    yield own, left_out
    fewer, left_out = readable(form, _reads)
    if fewer != own:
        yield fewer, left_out
    free, said = opened(fewer, lambda schema: _why_not(schema, vocabulary))
    if said:
        yield free, [*left_out, *said]


def _matcher(form: Form, vocabulary: Any) -> LLMatcher:
    """Raises ValueError for a form that cannot be compiled, and what converters raise."""
    from llguidance import LLMatcher, LLParserLimits

    check_size(form)
    limits = LLParserLimits(verbose_errors=False, max_lexer_states=MOST_STATES, max_items_in_row=MOST_ITEMS)
    why = ""
    for grammar in _grammars(form):
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if not matcher.is_error():
            return matcher
        why = matcher.get_error()
    raise ValueError(why)


def _why_not(schema: str, vocabulary: Any) -> str:
    """Why a lenient schema cannot be compiled; empty for one that can be."""
    try:
        _matcher(Form(kind="schema", text=schema, lenient=True), vocabulary)
    except Exception as error:
        return _said(str(error))
    return ""


def _reads(pattern: str) -> bool:
    from llguidance import LLMatcher

    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema({"type": "string", "pattern": pattern}))


def _grammars(form: Form) -> list[str]:
    """The grammar for llguidance; a later one counts where no earlier one can be compiled."""
    from llguidance import LLMatcher

    if form.kind == "grammar" and is_gbnf(form.text):
        from edgespec.text.grammar.gbnf_terminals import larks_of_gbnf  # imports llguidance

        return [LLMatcher.grammar_from_lark(lark) for lark in larks_of_gbnf(form.text)]
    return [_grammar(form)]


def _grammar(form: Form) -> str:
    from llguidance import LLMatcher

    if form.kind == "schema":
        options: Any = {**SPACINGS[form.spacing], "lenient": form.lenient}
        return LLMatcher.grammar_from_json_schema(form.text, overrides=options)
    if form.kind == "choice":
        # One terminal, as thousands of rules take thousands of items a row.
        return LLMatcher.grammar_from_lark("start: TEXT\nTEXT: " + " | ".join(map(lark_text, json.loads(form.text))))
    if form.kind == "regex":
        return LLMatcher.grammar_from_regex(form.text)
    return LLMatcher.grammar_from_lark(form.text)


def _refused(form: Form, why: str) -> InvalidRequestError:
    if form.kind != "call":
        return InvalidRequestError(f"this {form.kind} cannot be followed: {_said(why)}", param=form.kind)
    why = _said(_OUR_LINES.sub("", why))
    hint = "leave strict out" if '"lenient": false' in form.text else None
    return InvalidRequestError(f"a call of these tools cannot be followed: {why}", hint=hint, param="tools")


def _said(text: str) -> str:
    for own, plain in _PLAINER.items():
        text = text.replace(own, plain)
    return " ".join(text.split())[:_LONGEST_SAID] or "no reason is known"

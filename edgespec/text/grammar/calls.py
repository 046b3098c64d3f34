"""The form of calls: a grammar of the format in which the model writes them.

The grammar is llguidance's Lark. A mark that is a control token of the model is that token, by its number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from edgespec.errors import InvalidRequestError
from edgespec.text.conversation.argument_values import Allowed, Listed, allowed, bound_of_texts, listed
from edgespec.text.conversation.call_formats import CallFormat, Mark
from edgespec.text.conversation.literals import JSON
from edgespec.text.conversation.tool_use import ToolUse
from edgespec.text.grammar.form import MOST_BYTES, SPACINGS, Form, Spacing, lark_text
from edgespec.text.grammar.lenient import binding
from edgespec.text.grammar.literal_calls import LiteralArguments, not_kept, other_names
from edgespec.text.plain import mended

# The blanks that a reader of calls skips, as many as models write.
_BLANKS = "/[ \\t\\r\\n]{0,16}/"
_ANY_BLANKS = "/[ \\t\\r\\n]*/"
_FILLED = {"\n": "blanks", "{id}": "/[A-Za-z0-9_.:-]{1,64}/", "{word}": "/[a-z]{0,16}/"}
# A fence is closed only where there is one before the arguments.
_FENCE = "```"
_COMPOSED = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties")
# Each name is a pattern then, and each pattern is compared with the others.
_MOST_IN_ANY_ORDER = 32
_INSIDE = '"#/properties/'  # the beginning of a reference to another property


def call_form(
    use: ToolUse,
    names: Sequence[str],
    *,
    several: bool,
    otherwise: Form | None = None,
    marks: Sequence[str] = (),
) -> Form:
    """The form of an answer that is a call of one of the tools ``names``, with ``several`` one call or more.

    ``otherwise``: what the answer may be without a call, behind one of the ``marks`` if there are any. Raises
    InvalidRequestError for any other ``otherwise`` than a schema, for strict tools that cannot be kept, and for too
    large schemas. No tool is strict where there is an ``otherwise``: it need not be called.
    """
    if otherwise is not None and otherwise.kind != "schema":
        raise InvalidRequestError(
            f"an answer that may call tools cannot be bound to a {otherwise.kind}",
            hint="give a schema, or use tool_choice none",
            param=otherwise.kind,
        )
    calls = "call (blanks call)*" if several and not use.format.unmarked else "call"
    own = _Calls(use, names, may_be_strict=otherwise is None)
    rules = [f"start: {calls}", f"blanks: {_BLANKS}", *own.rules()]
    if otherwise is not None:
        rules[0] += f" | {own.one_of(marks)} other"
        rules.append(f"other: {_json(json.loads(otherwise.text), otherwise.spacing, lenient=otherwise.lenient)}")
    return _call_of(rules)


def _call_of(rules: Sequence[str]) -> Form:
    text = mended("\n".join(rules))
    if len(text.encode()) > MOST_BYTES:
        raise InvalidRequestError(
            "the schemas of the tools are too large for a call to be bound to them",
            hint=f"at most {MOST_BYTES // 1024} kB",
            param="tools",
        )
    return Form(kind="call", text=text)


def begun_form(use: ToolUse, *, bare: bool = False) -> Form:
    """The form of an answer from the token on in which the model itself begins to call one of the tools.

    Any text may follow the call. ``bare``: a call without marks, as ``bare_beginning`` finds it. Blanks
    are free, and no tool is strict. Raises InvalidRequestError for too large schemas.
    """
    rules = _BegunCalls(use, [tool["function"]["name"] for tool in use.tools], may_be_strict=False)
    begun = rules.bare() if bare else rules.marked()
    return _call_of(["start: begun /(?s:.+)/?", f"blanks: {_BLANKS}", *begun, *rules.functions()])


def bare_beginning(use: ToolUse) -> re.Pattern[str] | None:
    """What begins a call without marks: an object that names a tool, in a fence or not; None: the format has none."""
    if not use.format.bare:
        return None
    names = "|".join(re.escape(tool["function"]["name"]) for tool in use.tools)
    return re.compile(rf"\s*(?:```(?:json)?\s*)?{_named(f'(?:{names})')}")


def _named(name: str) -> str:
    """The beginning of an object with a name, as a regular expression."""
    return rf'\{{{{1,2}}\s{{0,8}}"name"\s{{0,8}}:\s{{0,8}}"{name}"'


class _Calls:
    """The rules of a grammar for the calls of some tools."""

    spacing: Spacing = "line"
    ordered = True  # the schema's order of arguments

    def __init__(self, use: ToolUse, names: Sequence[str], *, may_be_strict: bool) -> None:
        self._may_be_strict = may_be_strict
        self._format: CallFormat = use.format
        self._controls = {name.decode(): token for token, name in use.marks.items()}
        longest_first = sorted(self._controls, key=len, reverse=True)
        self._cuts = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self._functions = [own for tool in use.tools if (own := tool["function"])["name"] in names]

    def rules(self) -> Iterator[str]:
        form = self._format
        opening, closing = ("", "") if form.unmarked else (form.opening, form.closing)
        inside = f"({' | '.join(f'call{number}' for number in range(len(self._functions)))})"
        inside = f'"[" {inside} "]"' if form.is_list and form.syntax.is_python else inside
        yield f"call: {self._joined(self._mark(opening), inside, self._mark(closing))}"
        yield from self.functions()

    def functions(self) -> Iterator[str]:
        """A rule ``call0`` for the call of each function, without the marks of a block."""
        form = self._format
        if form.syntax != JSON:
            yield from self._literal_functions()
            return
        if form.parameters:
            yield from self._texts()
        for number, function in enumerate(self._functions):
            schema = function["parameters"]
            lenient = not self._is_strict(function)
            if form.parameters:
                yield from self._values(number, schema, lenient=lenient)
            else:
                orders = [closed(schema)] if self.ordered else in_each_order(closed(schema))
                names = [f"arguments{number}_{order}" for order in range(len(orders))]
                yield f"arguments{number}: " + " | ".join(names)
                for rule, own in zip(names, orders, strict=True):
                    yield f"{rule}: {_json(own, self.spacing, lenient=lenient)}"
            name = function["name"]
            calls = form.written or form.heads or (form.call,)
            written = [self._call(call, name, f"arguments{number}") for call in calls]
            yield f"call{number}: " + " | ".join(written)

    def _literal_functions(self) -> Iterator[str]:
        literals = LiteralArguments(self._format.syntax, self._mark, ordered=self.ordered)
        yield from literals.shared()
        for number, function in enumerate(self._functions):
            name, heads = function["name"], self._format.heads
            schema = function["parameters"]
            strict = self._is_strict(function)
            if strict and (found := not_kept(schema)) is not None:
                raise self._not_kept(found)
            yield from literals.rules(f"properties{number}", schema, self._listed(schema), strict=strict)
            begin, end = "()" if self._format.syntax.is_python else "{}"
            yield f'arguments{number}: "{begin}" properties{number} "{end}"'
            written = [self._call(head, name, f"arguments{number}") for head in heads]
            yield f"call{number}: " + (" | ".join(written) or f"{lark_text(name)} arguments{number}")

    def _is_strict(self, function: Mapping[str, Any]) -> bool:
        return self._may_be_strict and function.get("strict") is True

    def _not_kept(self, what: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"the calls of {self._format.models} cannot keep {what} in a strict tool",
            hint="leave strict out",
            param="tools",
        )

    def _call(self, call: str, name: str, arguments: str) -> str:
        if self._format.heads:
            return self._joined(self._mark(call.replace("{name}", name)), arguments, *self._ends(call))
        before, after = call.replace("{name}", json.dumps(name)).split("{arguments}")
        return self._joined(self._mark(before), arguments, self._mark(after))

    def _ends(self, head: str) -> Iterator[str]:
        ends = () if self._format.parameters else self._format.ends  # arguments have it
        return (self._mark(end) for end in ends if end != _FENCE or _FENCE in head)

    # ------------------------------------------------------------------------------------- values between marks

    def _listed(self, schema: Mapping[str, Any]) -> Listed:
        """The parameters that the rules name. Raises InvalidRequestError if no call could be written with them."""
        found = listed(schema)
        if found.is_open and self.ordered and not found.properties:
            raise InvalidRequestError(
                f"the calls of {self._format.models} can only be bound to parameters that a tool names",
                hint="list them in the properties of the tool's parameters",
                param="tools",
            )
        return found

    def _values(self, number: int, schema: Mapping[str, Any], *, lenient: bool) -> Iterator[str]:
        """The rule ``arguments0`` of values between marks and the call's end, and those of each value.

        The rule of a value begins behind the ``{key}`` of the first mark; that of any text ends behind this mark.
        """
        begin, end = self._format.parameters[-1]
        _, behind = begin.split("{key}")
        parameters, texts = self._listed(schema), list[str]()
        if parameters.is_open and not self.ordered:  # any other name, with any text
            marks = dict.fromkeys(behind.replace("{kind}", kind) for kind in ("true", "false"))
            yield f"OTHER{number}: {other_names(parameters.properties)}"
            yield f"value{number}: OTHER{number} ({' | '.join(map(self._mark, marks))})"
            texts.append(f"value{number}")
        for place, (key, own) in enumerate(parameters.properties.items()):
            rule = f"value{number}_{place}"
            may, padding = allowed(schema, key), self._format.padding
            is_text = may is None or may.has_strings
            mark = key + behind.replace("{kind}", json.dumps(is_text))
            before, closing = self._mark(mark + padding), self._mark(padding + end)
            if may is not None and may.members and not may.types:
                members = [json.loads(each) for each in sorted(may.members)]
                said = " | ".join(lark_text(each if isinstance(each, str) else _dumps(each)) for each in members)
                yield f"{rule}: {before} ({said}) {closing}"
            elif not is_text:
                shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
                whole = json.dumps({**shared, **own})
                if _INSIDE in whole:  # references to other properties lead to copies of them
                    copies = {f"properties/{name}": each for name, each in parameters.properties.items()}
                    whole = json.dumps({**shared, **own, "$defs": {**(shared.get("$defs") or {}), **copies}})
                    whole = whole.replace(_INSIDE, '"#/$defs/properties~1')
                yield f"{rule}: {before} {rule}_json {closing}"
                yield f"{rule}_json: {_json(json.loads(whole), self.spacing, lenient=lenient)}"
            else:
                if not lenient:
                    self._check_text(schema, key, own, may)
                yield f"{rule}: {self._mark(mark)}"
                texts.append(rule)
        yield from self._in_order(number, parameters, texts)

    def _in_order(self, number: int, parameters: Listed, texts: Collection[str]) -> Iterator[str]:
        """The rules of a call's values in the schema's order, or of required ones in it and the others anywhere.

        ``texts`` are the rules of values that are any text.
        """
        rules = [f"value{number}_{place}" for place in range(len(parameters.properties))]
        named = zip(rules, parameters.properties, strict=True)
        needed = [rule for rule, key in named if key in parameters.required]
        if self.ordered:
            steps = [*({rule: place} for place, rule in enumerate(rules, 1)), {}]
            for place, rule in enumerate(rules[:-1]):
                steps[place] |= {} if rule in needed else {"": place + 1}
            last = max((place for place, rule in enumerate(rules, 1) if rule in needed), default=0)
            yield from self._states(number, steps, last, texts)
            return
        others = [rule for rule in dict.fromkeys((*rules, *texts)) if rule not in needed]
        free = {
            f"texts{number}": [rule for rule in others if rule in texts],
            f"others{number}": [rule for rule in others if rule not in texts],
        }
        free = {group: own for group, own in free.items() if own}
        yield from (f"{group}: {' | '.join(own)}" for group, own in free.items())
        steps = [dict.fromkeys(free, place) | {rule: place + 1} for place, rule in enumerate(needed)]
        steps.append(dict.fromkeys(free, len(needed)))
        yield from self._states(number, steps, len(needed), (*texts, f"texts{number}"))

    def _states(
        self, number: int, steps: Sequence[Mapping[str, int]], last: int, texts: Collection[str]
    ) -> Iterator[str]:
        """The rule ``arguments0`` of the values that may follow in each state, and the call's end from ``last`` on.

        ``steps`` have the state behind each value, and behind no rule that of leaving one out. ``next0_1`` is what
        follows in the state 1, ``open0_1`` what follows a text there: its end holds the beginning of the next mark.
        """
        before, _ = self._format.parameters[-1][0].split("{key}")
        (call_end,) = self._format.ends
        led = f"led_text blanks {self._mark(before)}"  # behind it required values are missing

        def ways(rule: str, state: int) -> Iterator[str]:
            if not rule:
                yield f"open{number}_{state}"
            elif rule not in texts:
                yield f"{rule} blanks next{number}_{state}"
            else:
                ending = "more_text" if state >= last else led
                yield from [f"{rule} {ending} open{number}_{state}"] if steps[state] else []
                yield from [f"{rule} last_text"] if state >= last else []

        for state, own in enumerate(steps):
            following = [self._mark(call_end)] if state >= last else []
            if own:
                yield f"open{number}_{state}: " + " | ".join(way for step in own.items() for way in ways(*step))
                following.append(f"{self._mark(before)} open{number}_{state}")
            yield f"next{number}_{state}: {' | '.join(following)}"
        yield f"arguments{number}: next{number}_0"

    def _texts(self) -> Iterator[str]:
        """The rules of any text with the marks behind it, which show where it ends: a text may hold its end mark.

        Where required values are missing, the first end mark ends it all the same (``led_text``): a model that would
        end the call there is led to the next value, and the text does not hold what it began to write.

        ``more_text`` ends with the beginning of the next value's mark, ``last_text`` with the call's end. A text
        holds none of these marks behind its end mark, as not both may follow everywhere, and no opening or closing: a
        model that forgets the call's end is led to it.
        """
        form, any_text = self._format, "/(?s:.*)/"
        begin, end = form.parameters[-1]
        before, _ = begin.split("{key}")
        ends = {"more_text": before, "last_text": form.ends[0]}
        behind = [(_ANY_BLANKS, mark) for mark in ends.values()]
        behind += [(any_text, mark) for mark in (*form.openings, form.closing) if mark]
        plain, control = self._as_text(end)
        if control:
            yield f"led_text: LED_TEXT {control}"
            yield f"LED_TEXT: {any_text} {plain}"
        else:
            yield f"led_text[suffix={lark_text(end)}]: {any_text}"
        held = [f"{gap} {lark_text(mark)}" for gap, mark in behind if not self._as_text(f"{end}\n{mark}")[1]]
        refused = f"{any_text} {lark_text(end)} ({' | '.join(held)}) {any_text}"
        yield f"TEXT: {any_text}" + (f" & ~({refused})" if held else "")
        for rule, mark in ends.items():
            plain, control = self._as_text(f"{end}\n{mark}")
            if control:
                yield f"{rule}: {rule.upper()} {control}"
                yield f"{rule.upper()}: TEXT {plain}"
            else:
                yield f"{rule}[lazy]: TEXT {plain}"

    def _as_text(self, mark: str) -> tuple[str, str]:
        """What a text may hold of a mark, as a terminal, and the rest of it, from the first control token on."""
        pieces = list(self._pieces(mark))
        first = next((place for place, each in enumerate(pieces) if each in self._controls), len(pieces))
        plain = (_ANY_BLANKS if each == "\n" else lark_text(each) for each in pieces[:first])
        return " ".join(plain), " ".join(map(self._written, pieces[first:]))

    def _check_text(self, schema: Mapping[str, Any], key: str, own: Any, may: Allowed | None) -> None:
        """Raise InvalidRequestError for a strict tool's text that could not be kept: its grammar is any text."""
        bound = bound_of_texts(schema, own)
        if bound is None and may is not None and may.members and "string" not in may.types:
            bound = "enum"  # beside other types
        if bound is not None:
            raise self._not_kept(f"{bound} of {key!r:.60}")

    # ------------------------------------------------------------------------------------------------------ marks

    def one_of(self, marks: Sequence[str]) -> str:
        """Any of the marks; nothing without marks."""
        return f"({' | '.join(map(self._mark, marks))})" if marks else ""

    def _joined(self, *parts: str) -> str:
        return " blanks ".join(filter(None, parts)) or '""'

    def _mark(self, text: str) -> str:
        """A mark in Lark: its control tokens, what stands for other text in it, and the rest as it is."""
        return " ".join(map(self._written, self._pieces(text)))

    def _pieces(self, mark: str) -> Iterator[str]:
        for part in Mark(mark).parts:
            yield from [part] if part in _FILLED or not self._controls else filter(None, self._cuts.split(part))

    def _written(self, piece: str) -> str:
        control = self._controls.get(piece)
        return _FILLED.get(piece) or (lark_text(piece) if control is None else f"<[{control}]>")


class _BegunCalls(_Calls):
    """The rules of calls that a model begins by itself: blanks are free, and a block may hold several calls."""

    spacing: Spacing = "free"
    ordered = False

    def marked(self) -> Iterator[str]:
        """The rule ``begun`` of calls that begin with a mark, whose first token may hold other text before it."""
        form, alternatives, first = self._format, list[str](), dict[str, str]()
        one = f"({' | '.join(f'call{number}' for number in range(len(self._functions)))})"
        if form.opening:
            inside = f"{one} (blanks {one})*" if form.closing and not form.unmarked else one
            if form.is_list:
                inside = f'"[" blanks {one} (blanks "," blanks {one})* blanks "]"'
            closing = "" if form.unmarked else self._mark(form.closing)
            alternatives.append(self._joined(self._begun(form.opening, first), inside, closing))
        for head in form.heads:
            for number, function in enumerate(self._functions):
                begin, behind = self._cut(head.replace("{name}", function["name"]))
                if begin in form.beginnings:
                    begun = f"{self._begun(begin, first)} {self._mark(behind)}"
                    alternatives.append(self._joined(begun, f"arguments{number}", *self._ends(head)))
        yield "begun: " + " | ".join(dict.fromkeys(alternatives))
        for text, rule in first.items():
            yield f"{rule}[suffix={lark_text(text)}]: /(?s:.*)/"

    def _cut(self, head: str) -> tuple[str, str]:
        """The text of a head that begins a call, and the rest of it."""
        for begin in self._format.begins:
            _, behind = head.split(begin[begin.index("to=") :], 1)
            return begin, behind
        parts = Mark(head).parts
        first = next((each for each in self._format.beginnings if parts[0].startswith(each)), "")
        return first, head[len(first) :]

    def _begun(self, mark: str, first: dict[str, str]) -> str:
        """A mark at the beginning of the text: its first part may be a control token or text, behind any text."""
        part, *others = filter(None, self._cuts.split(mark) if self._controls else [mark])
        rule = first.setdefault(part, f"begin{len(first)}")
        control = f"<[{self._controls[part]}]>" if part in self._controls else ""
        return " ".join([f"({control} | {rule})" if control else rule, *(self._mark(each) for each in others)])

    def bare(self) -> Iterator[str]:
        """The rule ``begun`` of calls without marks, in a fence or not."""
        alternatives = []
        for number, function in enumerate(self._functions):
            name = _named(re.escape(function["name"]))
            rest = f'{self._key()} arguments{number} blanks "}}"'
            alternatives.append(f"/\\s*{name}/ {rest}")
            alternatives.append(f'/\\s*```(json)?\\s*{name}/ {rest} "}}"? blanks "{_FENCE}"')
        yield "begun: " + " | ".join(alternatives)

    def _key(self) -> str:
        _, before = self._format.call.split("{name}")
        key = before.partition("{arguments}")[0].strip(", :")
        return f'blanks "," blanks {lark_text(key)} blanks ":" blanks'

    def _call(self, call: str, name: str, arguments: str) -> str:
        if self._format.heads:
            return super()._call(call, name, arguments)
        before, after = call.strip("[]\n ").replace("{name}", json.dumps(name)).split("{arguments}")
        return f"{self._spaced(before)} {arguments} {self._spaced(after)}"

    def _spaced(self, text: str) -> str:
        """JSON with free blanks where it may have them."""
        pieces = re.split(r"( |(?<=[{,])|(?=[}]))", text)
        return " ".join("blanks" if not piece.strip() else lark_text(piece) for piece in pieces if piece is not None)


def _json(schema: Mapping[str, Any], spacing: Spacing = "line", *, lenient: bool) -> str:
    bound = {**binding(schema), "x-guidance": {**SPACINGS[spacing], "lenient": lenient}}
    return f"%json {_dumps(bound)}"


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def in_each_order(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schema of an object, and one whose optional properties come in any order behind the required ones.

    llguidance takes ``properties`` in their order, and names that match a pattern behind them in any. A schema that
    has patterns or is composed, whose parts refer to its properties, or that has too many of them, is alone.
    """
    found, properties = listed(schema), schema.get("properties")
    if (
        any(key in schema for key in _COMPOSED)
        or not isinstance(properties, Mapping)
        or _INSIDE in json.dumps(schema)
    ):
        return [schema]
    free = {key: each for key, each in properties.items() if key not in found.required}
    if not 1 < len(free) <= _MOST_IN_ANY_ORDER:
        return [schema]
    patterns = {f"^{re.escape(key)}$": each for key, each in free.items()}
    kept = {key: each for key, each in properties.items() if key not in free}
    return [schema, {**schema, "properties": kept, "patternProperties": patterns}]


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of arguments: an object, with the named properties only unless it says otherwise."""
    closed = {} if any(key in schema for key in _COMPOSED) else {"additionalProperties": False}
    # Go writes null for what is absent, and the arguments of a call are never null.
    given = {key: each for key, each in schema.items() if each is not None and key != "nullable"}
    return {"type": "object", **closed, **given}

"""The methods of text and mappings that a chat template may call, each counted before it runs.

An allow-list: what is not here does not exist for a template. ``ljust``, ``zfill``, ``expandtabs`` and the like are
left out on purpose, since a few characters of them make gigabytes and no known chat template uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgespec.errors import TemplateError
from edgespec.text.chat_template.budget import HEADER_BYTES, INTEGER_BITS, SLOT_BYTES, Budget, kind, stored_bytes

_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"  # what str.splitlines splits at

Method = Callable[..., Any]


class BoundMethod:
    """A method taken from a value; only the sandbox calls it, through ``METHODS``."""

    __slots__ = ("name", "owner")

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self.name = name


def check_key(key: Any) -> None:
    """Refuse mapping keys that take long to hash: a tuple of tuples is walked anew each time."""
    if not isinstance(key, str | int | float | None):
        raise TemplateError(f"it uses {kind(key)} as the key of a mapping")


def _text(*values: Any) -> None:
    for value in values:
        if type(value) is not str:
            raise TemplateError(f"it uses {kind(value)} where text is needed")


def _bounded_index(value: Any) -> None:
    if value is not None and (type(value) is not int or value.bit_length() > INTEGER_BITS):
        raise TemplateError("it uses something that is not an index as an index")


def trimmed(budget: Budget, text: str, characters: str | None = None, side: str = "strip") -> str:
    """``text.strip(characters)`` or lstrip or rstrip."""
    _text(text, *(() if characters is None else (characters,)))
    # The C code looks each character up in the whole set, so a megabyte of set is a megabyte per character.
    budget.scan(len(text) * (1 if characters is None else len(characters)))
    result = text.strip(characters) if side == "strip" else _one_side(text, characters, side)
    return result if len(result) == len(text) else budget.made(result)


def _one_side(text: str, characters: str | None, side: str) -> str:
    return text.lstrip(characters) if side == "lstrip" else text.rstrip(characters)


def replaced(budget: Budget, text: str, old: str, new: str, count: int = -1) -> str:
    """``text.replace(old, new, count)``, its size known before it is made."""
    _text(text, old, new)
    _bounded_index(count)
    budget.scan(len(text) + len(old))
    times = text.count(old)
    if 0 <= count < times:
        times = count
    length = len(text) + times * (len(new) - len(old))
    budget.make(length if text.isascii() and new.isascii() else 4 * length)
    return text.replace(old, new, times)


def _charged(name: str, charge: Callable[..., None]) -> Method:
    """The method ``name`` of text, run once ``charge`` has counted what it costs with these arguments."""
    method = getattr(str, name)

    def run(budget: Budget, text: str, *arguments: Any) -> Any:
        charge(budget, text, *arguments)
        return method(text, *arguments)

    return run


def _charge_cased(budget: Budget, text: str) -> None:
    # One character becomes up to three in another case.
    budget.make(stored_bytes(text) * (1 if text.isascii() else 3))


def _charge_asked(budget: Budget, text: str) -> None:
    budget.scan(len(text))


def _charge_searched(budget: Budget, text: str, what: str) -> None:
    _text(what)
    budget.scan(len(text) + len(what))


def _charge_searched_backwards(budget: Budget, text: str, what: str) -> None:
    _text(what)
    # CPython searches forwards in linear time; backwards it may compare the whole needle at each character.
    budget.scan(len(text) * max(len(what), 1))


def _charge_removed(budget: Budget, text: str, what: str) -> None:
    _text(what)
    budget.make(stored_bytes(text))


def _charge_partition(budget: Budget, text: str, sep: str) -> None:
    _charge_searched(budget, text, sep)
    _pieces(budget, text, 3)


def _charge_rpartition(budget: Budget, text: str, sep: str) -> None:
    _charge_searched_backwards(budget, text, sep)
    _pieces(budget, text, 3)


def _ends(name: str) -> Method:
    method = getattr(str, name)

    def run(budget: Budget, text: str, what: Any) -> Any:
        for one in what if type(what) in (tuple, list) else (what,):
            _text(one)
            budget.scan(min(len(one), len(text)))
        return method(text, tuple(what) if type(what) is list else what)

    return run


def _strip(side: str) -> Method:
    def run(budget: Budget, text: str, characters: str | None = None) -> str:
        return trimmed(budget, text, characters, side)

    return run


def _pieces(budget: Budget, text: str, count: int) -> None:
    # Non-ASCII text may be cut into pieces of up to 4 bytes a character; stored_bytes allows for that.
    budget.make_slots(count)
    budget.make(stored_bytes(text) + HEADER_BYTES * count)


def _split(name: str) -> Method:
    method = getattr(str, name)

    def run(budget: Budget, text: str, sep: str | None = None, maxsplit: int = -1) -> Any:
        _bounded_index(maxsplit)
        limit = budget.slots_left()
        if sep is None:
            budget.scan(len(text))
            # How many words there are is known only by splitting, so it splits no further than it could afford.
            bound = limit if maxsplit < 0 else min(maxsplit, limit)
            parts = method(text, None, bound)
            if bound == limit and len(parts) > limit:
                raise TemplateError("it splits a text into more pieces than it may make")
            _pieces(budget, text, len(parts))
            return parts
        _text(sep)
        budget.scan(len(text) * max(len(sep), 1) if name == "rsplit" else len(text) + len(sep))
        count = text.count(sep) if sep else 0
        _pieces(budget, text, 1 + (count if maxsplit < 0 else min(count, maxsplit)))
        return method(text, sep, min(maxsplit, count) if maxsplit >= 0 else -1)

    return run


def _splitlines(budget: Budget, text: str, keepends: bool = False) -> list[str]:
    budget.scan(len(text) * len(_LINE_ENDS))
    _pieces(budget, text, 1 + sum(text.count(end) for end in _LINE_ENDS))
    return text.splitlines(keepends is True)


def _join(budget: Budget, text: str, parts: Any) -> str:
    if type(parts) not in (list, tuple):
        raise TemplateError(f"it joins {kind(parts)}; only a list can be joined")
    budget.step(len(parts))
    _text(*parts)
    length = sum(len(part) for part in parts) + len(text) * len(parts)
    wide = not (text.isascii() and all(part.isascii() for part in parts))
    budget.make(length * 4 if wide else length)
    return text.join(parts)


def _format(budget: Budget, text: str, *values: Any) -> str:
    """``text.format(*values)`` with bare ``{}`` alone: any other field can make gigabytes or reach attributes."""
    budget.scan(len(text))
    if text.count("{}") * 2 != text.count("{") + text.count("}"):
        raise TemplateError("it formats text with fields other than {}")
    for value in values:
        if type(value) is not str:
            budget.make(budget.measure(value))
    parts = [str(value) for value in values]
    length = len(text) + sum(len(part) for part in parts)
    budget.make(length if all(part.isascii() for part in (text, *parts)) else length * 4)
    try:
        return text.format(*parts)
    except IndexError:
        raise TemplateError("it formats text with fewer values than fields") from None


def _get(budget: Budget, mapping: dict[Any, Any], key: Any, default: Any = None) -> Any:
    check_key(key)
    return mapping.get(key, default)


def _items(budget: Budget, mapping: dict[Any, Any]) -> list[tuple[Any, Any]]:
    budget.make_slots(len(mapping) * 3)  # the pair is an object too
    return list(mapping.items())


def _keys(budget: Budget, mapping: dict[Any, Any]) -> list[Any]:
    budget.make(SLOT_BYTES * len(mapping))
    return list(mapping)


def _values(budget: Budget, mapping: dict[Any, Any]) -> list[Any]:
    budget.make(SLOT_BYTES * len(mapping))
    return list(mapping.values())


_CHARGES: dict[Callable[..., None], tuple[str, ...]] = {
    _charge_cased: ("upper", "lower", "title", "capitalize"),
    _charge_asked: (
        "isalpha", "isdigit", "isnumeric", "isalnum", "isspace", "isupper", "islower", "isdecimal",
    ),
    _charge_searched: ("find", "count", "index"),
    _charge_searched_backwards: ("rfind", "rindex"),
    _charge_removed: ("removeprefix", "removesuffix"),
    _charge_partition: ("partition",),
    _charge_rpartition: ("rpartition",),
}  # fmt: skip

# By exact type, and called with the budget first. Views are lists here: a template can only walk and measure them.
METHODS: dict[type, dict[str, Method]] = {
    str: {
        **{name: _charged(name, charge) for charge, names in _CHARGES.items() for name in names},
        **{name: _ends(name) for name in ("startswith", "endswith")},
        **{name: _strip(name) for name in ("strip", "lstrip", "rstrip")},
        **{name: _split(name) for name in ("split", "rsplit")},
        "splitlines": _splitlines,
        "replace": replaced,
        "join": _join,
        "format": _format,
    },
    dict: {"get": _get, "items": _items, "keys": _keys, "values": _values},
}

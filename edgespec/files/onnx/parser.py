"""Parses the structure of an ONNX graph as hostile input, before native code sees the file.

The parser decodes the protobuf messages that exported graphs contain and refuses every other field: functions,
subgraphs, sparse or segmented tensors and fields of later formats. No stated size is allocated unchecked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias, TypeVar

from edgespec.errors import ModelFileError
from edgespec.files.checked import shown
from edgespec.files.export_folder import bad_file

# Element types of tensors, in the numbering of onnx.proto, with their bytes.
FLOAT, UINT8, INT8, INT32, INT64, FLOAT16, BFLOAT16 = 1, 2, 3, 6, 7, 10, 16
_ELEMENT_BYTES = {FLOAT: 4, UINT8: 1, INT8: 1, INT32: 4, INT64: 8, FLOAT16: 2, BFLOAT16: 2}

# Keeps parsing a hostile file under a second. A model of 100 layers has about 90 000 fields.
_MOST_FIELDS = 200_000

_MOST_VARINT_BYTES = 10
_MOST_DIMENSIONS = 8  # keeps the product of all dimensions small
_NUMBER = re.compile(r"[0-9]{1,18}")
_EXTERNAL = 1  # TensorProto.DataLocation.EXTERNAL

_KNOWN: Mapping[str, frozenset[int]] = MappingProxyType(
    {
        "model": frozenset({1, 2, 3, 4, 5, 6, 7, 8, 14}),
        "opset": frozenset({1, 2}),
        "graph": frozenset({1, 2, 5, 10, 11, 12, 13}),
        "node": frozenset({1, 2, 3, 4, 5, 6, 7}),
        "attribute": frozenset({1, 2, 3, 4, 7, 8, 9, 13, 20}),
        "tensor": frozenset({1, 2, 8, 9, 12, 13, 14}),
        "entry": frozenset({1, 2}),
        "value": frozenset({1, 2, 3}),
        "type": frozenset({1}),
        "tensor type": frozenset({1, 2}),
        "shape": frozenset({1}),
        "dimension": frozenset({1, 2}),
    }
)

_Span: TypeAlias = tuple[int, int]
_Field: TypeAlias = tuple[int, "int | _Span"]
_T = TypeVar("_T", "Initializer", "ValueInfo")


@dataclass(frozen=True, slots=True)
class Node:
    """One operator of the graph; an omitted input is the empty string."""

    operator: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Initializer:
    """A constant: its ``byte_count``, computed from type and shape, and its position.

    ``location`` is the stated file name, unchecked, or None for a constant inside the graph, whose bytes are
    ``inline``.
    """

    name: str
    kind: int
    shape: tuple[int, ...]
    byte_count: int
    location: str | None
    offset: int
    length: int
    inline: bytes


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """An input or output: ``kind`` is the element type, a symbolic or missing length is None."""

    name: str
    kind: int
    shape: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class OnnxGraph:
    """The structure of a graph. ``domains``: the operator domains that the graph imports."""

    domains: frozenset[str]
    nodes: tuple[Node, ...]
    initializers: Mapping[str, Initializer]
    inputs: Mapping[str, ValueInfo]
    outputs: Mapping[str, ValueInfo]


def walk_model(path: Path, data: bytes) -> OnnxGraph:
    """Parse the graph in ``data``, the content of ``path``. Raises ModelFileError for anything but a plain graph."""
    return _Walk(path, data).model()


class _Walk:
    def __init__(self, path: Path, data: bytes) -> None:
        self._path = path
        self._data = data
        self._fields_left = _MOST_FIELDS

    def model(self) -> OnnxGraph:
        domains: set[str] = set()
        graph: OnnxGraph | None = None
        for number, value in self._fields("model", (0, len(self._data))):
            if number == 8:
                domains.add(self._domain(self._span(value)))
            elif number == 7:
                if graph is not None:
                    raise self._bad("it holds more than one graph")
                graph = self._graph(self._span(value))
        if graph is None:
            raise self._bad("it holds no graph")
        return OnnxGraph(frozenset(domains), graph.nodes, graph.initializers, graph.inputs, graph.outputs)

    def _domain(self, span: _Span) -> str:
        name = ""
        for number, value in self._fields("opset", span):
            if number == 1:
                name = self._text(value)
        return name

    def _graph(self, span: _Span) -> OnnxGraph:
        nodes: list[Node] = []
        initializers: dict[str, Initializer] = {}
        inputs: dict[str, ValueInfo] = {}
        outputs: dict[str, ValueInfo] = {}
        for number, value in self._fields("graph", span):
            if number == 1:
                nodes.append(self._node(self._span(value)))
            elif number == 5:
                self._add(initializers, self._tensor, value)
            elif number == 11:
                self._add(inputs, self._value, value)
            elif number == 12:
                self._add(outputs, self._value, value)
        for name in inputs:
            if name in initializers:
                raise self._bad(f"{shown(name)} is both an input and a constant")
        return OnnxGraph(frozenset(), tuple(nodes), initializers, inputs, outputs)

    def _add(self, found: dict[str, _T], read: Callable[[_Span], _T], value: int | _Span) -> None:
        each = read(self._span(value))
        if not each.name or each.name in found:
            raise self._bad(f"the name {shown(each.name)} is empty or occurs twice")
        found[each.name] = each

    def _node(self, span: _Span) -> Node:
        operator, domain = "", ""
        inputs: list[str] = []
        outputs: list[str] = []
        for number, value in self._fields("node", span):
            if number == 1:
                inputs.append(self._text(value))
            elif number == 2:
                outputs.append(self._text(value))
            elif number == 4:
                operator = self._text(value)
            elif number == 5:
                for _ in self._fields("attribute", self._span(value)):  # _KNOWN refuses graphs and tensors in it
                    pass
            elif number == 7:
                domain = self._text(value)
        return Node(operator, domain, tuple(inputs), tuple(outputs))

    def _tensor(self, span: _Span) -> Initializer:
        name, kind, external, inline = "", 0, False, b""
        shape: list[int] = []
        entries: dict[str, str] = {}
        for number, value in self._fields("tensor", span):
            if number == 1:
                shape.extend(self._integers(value))
            elif number == 2:
                kind = self._integer(value)
            elif number == 8:
                name = self._text(value)
            elif number == 9:
                start, stop = self._span(value)
                inline = self._data[start:stop]
            elif number == 13:
                key, text = self._entry(self._span(value))
                if key in entries or key not in ("location", "offset", "length"):
                    raise self._bad(
                        f"the position of {shown(name)} is stated twice or with an unknown key: {shown(key)}"
                    )
                entries[key] = text
            elif number == 14:
                external = self._integer(value) == _EXTERNAL
        size = _ELEMENT_BYTES.get(kind)
        if size is None:
            raise self._bad(f"{shown(name)} is of the unsupported element type {kind}")
        if len(shape) > _MOST_DIMENSIONS or not all(0 < length < 2**40 for length in shape):
            raise self._bad(f"{shown(name)} has the impossible shape {shown(str(shape))}")
        byte_count = math.prod(shape) * size
        if not external:
            if entries or len(inline) != byte_count:
                raise self._bad(f"{shown(name)} holds {len(inline)} bytes instead of {shown(byte_count)}")
            return Initializer(name, kind, tuple(shape), byte_count, None, 0, 0, inline)
        numbers = {"offset": "0", **entries}
        if inline or not all(_NUMBER.fullmatch(numbers.get(key, "")) for key in ("offset", "length")):
            raise self._bad(f"the position of {shown(name)} is not an offset and a length in a file")
        location = entries.get("location", "")
        position = int(numbers["offset"]), int(numbers["length"])
        return Initializer(name, kind, tuple(shape), byte_count, location, *position, b"")

    def _entry(self, span: _Span) -> tuple[str, str]:
        key, text = "", ""
        for number, value in self._fields("entry", span):
            if number == 1:
                key = self._text(value)
            else:
                text = self._text(value)
        return key, text

    def _value(self, span: _Span) -> ValueInfo:
        name, kind, shape = "", 0, tuple[int | None, ...]()
        for number, value in self._fields("value", span):
            if number == 1:
                name = self._text(value)
            elif number == 2:
                for _, tensor in self._fields("type", self._span(value)):
                    kind, shape = self._tensor_type(self._span(tensor))
        return ValueInfo(name, kind, shape)

    def _tensor_type(self, span: _Span) -> tuple[int, tuple[int | None, ...]]:
        kind = 0
        shape: list[int | None] = []
        for number, value in self._fields("tensor type", span):
            if number == 1:
                kind = self._integer(value)
                continue
            for _, dimension in self._fields("shape", self._span(value)):
                length: int | None = None
                for which, each in self._fields("dimension", self._span(dimension)):
                    length = self._integer(each) if which == 1 else None
                shape.append(length)
        return kind, tuple(shape)

    # ------------------------------------------------------------------------------------ the encoding

    def _fields(self, message: str, span: _Span) -> Iterator[_Field]:
        """(number, value) of each field; the value is an integer, or for bytes their (start, stop)."""
        known, data = _KNOWN[message], self._data
        position, end = span
        while position < end:
            self._fields_left -= 1
            if self._fields_left < 0:
                raise self._bad(f"it has more than {_MOST_FIELDS} fields")
            start = position
            tag, position = data[position], position + 1
            if tag >= 0x80:
                tag, position = self._varint(start, end)
            number, wire = tag >> 3, tag & 7
            if number not in known:
                raise self._bad(f"its {message} has a field that no exported graph has ({number})", start)
            if wire == 0:
                value, position = self._varint(position, end)
                yield number, value
            elif wire == 2:
                if position < end and data[position] < 0x80:
                    length, position = data[position], position + 1
                else:
                    length, position = self._varint(position, end)
                if length > end - position:
                    raise self._bad(f"truncated: {length} bytes are announced and {end - position} remain", start)
                yield number, (position, position + length)
                position += length
            elif wire == 5 and end - position >= 4:  # a float, which only attributes have
                position += 4
            else:
                raise self._bad("it is not an ONNX file, or damaged", start)

    def _varint(self, position: int, end: int) -> tuple[int, int]:
        value, start = 0, position
        for shift in range(_MOST_VARINT_BYTES):
            if position >= end:
                break
            byte = self._data[position]
            position += 1
            value |= (byte & 0x7F) << (7 * shift)
            if byte < 0x80:
                return value, position
        raise self._bad("it is not an ONNX file, or damaged", start)

    def _integers(self, value: int | _Span) -> Iterator[int]:
        """The values of a repeated integer field, packed or not."""
        if isinstance(value, int):
            yield value
            return
        position, end = value
        while position < end:
            self._fields_left -= 1
            if self._fields_left < 0:
                raise self._bad(f"it has more than {_MOST_FIELDS} fields")
            number, position = self._varint(position, end)
            yield number

    def _integer(self, value: int | _Span) -> int:
        if isinstance(value, int):
            return value
        raise self._bad("it holds bytes instead of a number", value[0])

    def _span(self, value: int | _Span) -> _Span:
        if isinstance(value, int):
            raise self._bad("it holds a number instead of bytes")
        return value

    def _text(self, value: int | _Span) -> str:
        start, stop = self._span(value)
        try:
            return self._data[start:stop].decode("utf-8")
        except UnicodeDecodeError:
            raise self._bad("it holds a name that is not valid UTF-8", start) from None

    def _bad(self, reason: str, offset: int | None = None) -> ModelFileError:
        return bad_file(self._path, reason, offset=offset)

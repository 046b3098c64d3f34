"""Other files of a target's model, to be compared with it: another runtime's export, another quantisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, cast

from edgespec.errors import InvalidRequestError
from edgespec.files.gguf.header import compare_vocabularies
from edgespec.files.model_file import LocatedModel
from edgespec.store.locate import Locator


def find_beside(target: str, others: Sequence[str], locator: Locator) -> tuple[LocatedModel, ...]:
    """The files behind MODEL arguments, in order, where each has the vocabulary of ``target``.

    A runtime's name and a colon before one ("llama:FILE") say what is to run it.

    Raises InvalidRequestError for another vocabulary, whose answers could not be compared token by token, and what
    locating raises.
    """
    own = locator.locate(target)
    found = []
    for other in others:
        located = _locate(other, locator)
        difference = compare_vocabularies(own.header, located.header)
        if difference is not None:
            where = "" if difference.token_id is None else f" (they differ at token {difference.token_id})"
            raise InvalidRequestError(
                f"{located.name} has another vocabulary than {own.name}{where}, so they cannot be compared",
                hint="--beside takes files made from the target, such as its export to ONNX",
            )
        found.append(located)
    return tuple(found)


def _locate(text: str, locator: Locator) -> LocatedModel:
    """Raises InvalidRequestError for a runtime that does not run such a file."""
    runtime, colon, model = text.partition(":")
    if not colon or runtime not in ("llama", "native"):
        return locator.locate(text)
    located = locator.locate(model)
    if located.onnx is not None:
        raise InvalidRequestError(f"{located.name} is an ONNX model, which {runtime} does not run")
    return replace(located, runtime=cast("Literal['llama', 'native']", runtime))

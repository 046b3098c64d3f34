"""Other files of a target's model to compare it with: another runtime's export, another quantisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgespec.errors import EdgespecError, InvalidRequestError, ModelFileError, ModelNotFoundError
from edgespec.files.gguf.vocabulary import compare_vocabularies
from edgespec.files.model_file import LocatedModel
from edgespec.runtimes.table import RUNTIMES
from edgespec.store.locate import Locator


def find_comparable(target: str, others: Sequence[str], locator: Locator) -> tuple[LocatedModel, ...]:
    """Find the files of MODEL arguments, in order; each must have the vocabulary of ``target``.

    A runtime's name and a colon before an argument ("llama:FILE") choose its runtime.

    Raises InvalidRequestError for another vocabulary, since those answers cannot be compared token by token, and what
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
                hint="--compare takes files made from the target, such as its export to ONNX",
            )
        found.append(located)
    return tuple(found)


def _locate(text: str, locator: Locator) -> LocatedModel:
    """Find one file. Raises InvalidRequestError for a runtime that does not run such a file, and
    RuntimeUnavailableError for one that is not installed.
    """
    runtime, colon, model = text.partition(":")
    if not colon or runtime not in RUNTIMES:
        try:
            return locator.locate(text)
        except (ModelNotFoundError, ModelFileError):
            if colon and _is_model(model, locator):
                known = ", ".join(RUNTIMES)
                raise InvalidRequestError(
                    f"there is no runtime {runtime!r:.40}", hint=f"the runtimes are {known}"
                ) from None
            raise
    located = locator.locate(model)
    if not RUNTIMES[runtime].runs(located):
        if located.onnx is None:
            return locator.locate(text)  # the prefix is not a runtime of this file: it belongs to the name
        raise InvalidRequestError(f"{located.name} is an ONNX model, which {runtime} does not run")
    RUNTIMES[runtime].list_devices()  # raises before a model is loaded
    return replace(located, runtime=runtime)


def _is_model(text: str, locator: Locator) -> bool:
    try:
        locator.check(text)
    except EdgespecError:
        return False
    return True

"""Errors reach the caller whole, also from another process."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable

import pytest

from edgespec import errors
from edgespec.errors import EdgespecError

VALUES = {
    "message": "it failed",
    "hint": "try again",
    "param": "depth",
    "path": "folder/a.gguf",
    "reason": "it is cut",
    "offset": 17,
    "reasons": (("hub", "no answer"),),
    "needed_bytes": 5,
    "free_bytes": 3,
    "available_bytes": None,
    "code": -3,
    "stderr": "it ended",
}


def over_a_pipe(error: EdgespecError) -> EdgespecError:
    """As a pool of processes hands an error back."""
    found = pickle.loads(pickle.dumps(error))
    assert isinstance(found, EdgespecError)
    return found


@pytest.mark.parametrize("copied", [over_a_pipe, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("name", errors.__all__)
def test_an_error_that_is_copied_or_pickled_keeps_all_that_it_says(
    name: str, copied: Callable[[EdgespecError], EdgespecError]
) -> None:
    kind = getattr(errors, name)
    error = kind(**{each: VALUES[each] for each in inspect.signature(kind).parameters})
    found = copied(error)
    assert type(found) is kind
    assert (str(found), found.args, vars(found)) == (str(error), error.args, vars(error))
    assert found.hint == "try again"

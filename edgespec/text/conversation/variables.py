"""Variables of a model's own template in a request, which may come from anywhere. What is returned is a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec.errors import InvalidRequestError
from edgespec.text.chat_template.template import RESERVED, not_settable
from edgespec.text.conversation.tools import copied

DOCUMENTS = "documents"
# What rendering sets, the functions of templates, and what other servers take under the same name for themselves.
_TAKEN = RESERVED | {
    *("tools", "raise_exception", "strftime_now", "namespace", "range", "dict"),
    *("chat_template", "continue_final_message", "tokenize"),
}


def check_variables(given: object, *, raw: bool = False) -> dict[str, Any]:
    """The variables by name: any JSON values. Raises InvalidRequestError, also for names that cannot be set."""
    try:
        return _checked(given, raw=raw)
    except InvalidRequestError as error:
        error.param = "template_variables"
        raise


def _checked(given: object, *, raw: bool) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"template variables must be a mapping, not {type(given).__name__}")
    own: dict[str, Any] = copied(given, "a template variable")
    if own and raw:
        raise InvalidRequestError("template variables need the model's chat template, which raw text leaves out")
    if taken := _TAKEN.intersection(own):
        raise not_settable(min(taken))
    return own

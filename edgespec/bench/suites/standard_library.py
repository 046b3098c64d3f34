"""Functions of Python's standard library as text, for prompts that quote them: read where they are installed, never
redistributed."""

from __future__ import annotations

import ast
import textwrap
from importlib.util import find_spec


def function_source(place: str) -> str | None:
    """The function at ``module:qualified.name``, decorators included and not indented; the same for the same Python.

    None where it cannot be had: a Python without its sources (embedded and frozen ones), or without that function.
    The module, a top-level one, is not imported.
    """
    module, _, name = place.partition(":")
    try:
        spec = find_spec(module)
        # Optional in a loader; there for files, archives and frozen modules (whose answer is None).
        get_source = getattr(spec.loader if spec is not None else None, "get_source", None)
        source = get_source(module) if get_source is not None else None
        if source is None:
            return None
        body = ast.parse(source).body
    except (ImportError, ValueError, SyntaxError):  # ValueError: a module that hides where it is from
        return None
    found: ast.stmt | None = None
    for part in name.split("."):
        found = next((statement for statement in body if getattr(statement, "name", None) == part), None)
        if not isinstance(found, ast.ClassDef | ast.FunctionDef):
            return None
        body = found.body
    if not isinstance(found, ast.FunctionDef):
        return None
    first = min([found.lineno, *(decorator.lineno for decorator in found.decorator_list)])
    return textwrap.dedent("\n".join(source.split("\n")[first - 1 : found.end_lineno]))

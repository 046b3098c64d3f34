"""Architecture rules that import-linter cannot check: who prints, who depends on a runtime, and names."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "edgespec"
MAX_LINES = 700

RUNTIME_SETTINGS = {"LlamaSettings", "NativeSettings", "OnnxSettings"}
# "llama" is also an architecture and "onnx" a format: each counts as a runtime only if the other side of the
# comparison is one.
ALWAYS_A_RUNTIME, SOMETIMES_A_RUNTIME = {"native"}, {"llama", "onnx"}


@dataclass(frozen=True)
class Source:
    """One module of a package on disk."""

    path: Path
    module: str
    tree: ast.Module
    lines: int

    def at(self, node: ast.AST, text: str) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {text}"


parsed = functools.cache(ast.parse)


def sources(package: Path) -> list[Source]:
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        text = path.read_text(encoding="utf-8")
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Source(path, module, parsed(text, str(path)), text.count("\n")))
    return found


def is_within(module: str, place: str) -> bool:
    return module == place or module.startswith(f"{place}.")


# ------------------------------------------------------------------------------------- printing and sizes


def prints(package: Path) -> list[str]:
    """Uses of ``print`` and ``sys.stdout`` outside ``cli``: a library must not write to its host's terminal."""
    wrong = []
    for source in sources(package):
        if is_within(source.module, "edgespec.cli"):
            continue
        for node in ast.walk(source.tree):
            is_print = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            is_stdout = (
                isinstance(node, ast.Attribute)
                and node.attr in {"stdout", "__stdout__"}
                and isinstance(node.value, ast.Name)
                and node.value.id == "sys"
            )
            is_import = (
                isinstance(node, ast.ImportFrom)
                and node.module == "sys"
                and any(alias.name in {"stdout", "__stdout__"} for alias in node.names)
            )
            if is_print or is_stdout or is_import:
                wrong.append(source.at(node, f"{source.module} writes to stdout; only edgespec.cli may"))
    return wrong


def misshapen(package: Path) -> list[str]:
    wrong = []
    for source in sources(package):
        if source.path.name == "utils.py":
            wrong.append(f"{source.path}:1: a module says what it is about, and utils says nothing")
        if source.lines > MAX_LINES:
            wrong.append(f"{source.path}:{source.lines}: longer than {MAX_LINES} lines")
    return wrong


# -------------------------------------------------------------------------------------- errors stand alone


def imports_of_errors(package: Path) -> list[str]:
    """Imports of ``errors.py`` beyond the standard library, including lazy and type-checking ones."""
    (source,) = [each for each in sources(package) if each.module == "edgespec.errors"]
    wrong = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["edgespec" if node.level else str(node.module)]
        else:
            continue
        wrong += [
            source.at(node, f"{source.module} -> {name} (it may import the standard library only)")
            for name in names
            if name.partition(".")[0] not in sys.stdlib_module_names
        ]
    return wrong


# ------------------------------------------------------------------------------------ who asks for a runtime


def asks_for_a_runtime(package: Path) -> list[str]:
    """Code outside ``runtimes`` that checks the type of settings or compares a runtime's name.

    Differences between runtimes belong in ``Runtime``; otherwise a new runtime needs changes in many places.
    """
    wrong = []
    for source in sources(package):
        if is_within(source.module, "edgespec.runtimes"):
            continue
        for node in ast.walk(source.tree):
            wrong += [source.at(node, reason) for reason in _asked(node)]
    return wrong


def _asked(node: ast.AST) -> Iterator[str]:
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "issubclass")
    ):
        for name in _names(node.args[1]) & RUNTIME_SETTINGS:
            yield f"{node.func.id} of {name}"
    elif isinstance(node, ast.MatchClass):
        for name in _names(node.cls) & RUNTIME_SETTINGS:
            yield f"a case of {name}"
    elif isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        for index, side in enumerate(sides):
            others = [other for other in sides if other is not sides[index]]
            for name in _names(side) & RUNTIME_SETTINGS:
                yield f"a comparison with {name}"
            for text in _constants(side) & _runtime_names(others):
                yield f"a comparison with the runtime's name {text!r}"
    elif isinstance(node, ast.Match):
        patterns = [
            each for case in node.cases for each in ast.walk(case.pattern) if isinstance(each, ast.MatchValue)
        ]
        for text in set().union(*map(_constants, patterns)) & _runtime_names([node.subject]):
            yield f"a case of the runtime's name {text!r}"


def _runtime_names(others: list[ast.expr]) -> set[str]:
    """The constants that name a runtime in a comparison with these."""
    named = any("runtime" in name.lower() for other in others for name in _names(other))
    return ALWAYS_A_RUNTIME | (SOMETIMES_A_RUNTIME if named else set())


def _names(node: ast.AST) -> set[str]:
    """Every name and attribute in an expression."""
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def _constants(node: ast.AST) -> set[str]:
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}


# ------------------------------------------------------------------------------------------------ the tests


def report(wrong: list[str]) -> str:
    return "\n" + "\n".join(wrong)


def test_the_errors_module_imports_only_the_standard_library() -> None:
    wrong = imports_of_errors(PACKAGE)
    assert not wrong, report(wrong)


def test_only_the_command_line_package_prints() -> None:
    wrong = prints(PACKAGE)
    assert not wrong, report(wrong)


def test_source_files_are_short_and_well_named() -> None:
    wrong = misshapen(PACKAGE)
    assert not wrong, report(wrong)


@pytest.mark.parametrize(("folder", "most"), [("engine", 10), ("cli", 20)])
def test_a_folder_with_many_rooms_has_corridors(folder: str, most: int) -> None:
    rooms = [path for path in (PACKAGE / folder).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    assert 1 < len(rooms) - 1 <= most, sorted(path.name for path in rooms)  # but for the folder's own __init__.py


def test_only_runtimes_depend_on_the_kind_of_runtime() -> None:
    wrong = asks_for_a_runtime(PACKAGE)
    assert not wrong, report(wrong)


def test_the_architecture_rules_find_the_package() -> None:
    modules = {source.module for source in sources(PACKAGE)}
    assert {"edgespec", "edgespec.errors", "edgespec.decoding", "edgespec.interfaces.drafting"} <= modules


# The checks themselves, on an invented tree.


@pytest.fixture
def house(tmp_path: Path) -> Path:
    package = tmp_path / "edgespec"
    for name in (
        "__init__",
        "__main__",
        "errors",
        "cli/__init__",
        "engine/engine",
        "runtimes/llama",
        "text/tokenizer",
    ):
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return package


def put(house: Path, name: str, code: str) -> None:
    (house / name).write_text(code, encoding="utf-8")


@pytest.mark.parametrize(
    ("code", "target"),
    [
        ("import numpy", "numpy"),
        ("from edgespec.files import x", "edgespec.files"),
        ("from .files import x", "edgespec"),
        ("from . import files", "edgespec"),
        ("def f():\n    import numpy.typing", "numpy.typing"),
        ("import typing\nif typing.TYPE_CHECKING:\n    import edgespec", "edgespec"),
    ],
)
def test_a_forbidden_import_of_the_errors_module_is_detected_and_named(house: Path, code: str, target: str) -> None:
    put(house, "errors.py", code)
    (wrong,) = imports_of_errors(house)
    line = code.count("\n") + 1
    assert wrong.startswith(f"{house / 'errors.py'}:{line}: ")
    assert f" -> {target} (it may import" in wrong


def test_standard_library_imports_of_the_errors_module_are_allowed(house: Path) -> None:
    put(house, "errors.py", "from pathlib import Path\nimport collections.abc")
    assert imports_of_errors(house) == []


@pytest.mark.parametrize(
    "code",
    ["print('x')", "import sys\nsys.stdout.write('x')", "from sys import stdout", "import sys\nx = sys.__stdout__"],
)
def test_printing_outside_the_command_line_is_detected(house: Path, code: str) -> None:
    put(house, "cli/__init__.py", code)
    put(house, "engine/engine.py", "import sys\nsys.stderr\nlogger = sys\n# print('x')")
    assert prints(house) == []
    put(house, "engine/engine.py", code)
    assert len(prints(house)) == 1


def test_a_long_file_and_a_utils_module_are_detected(house: Path) -> None:
    put(house, "engine/engine.py", "x = 1\n" * MAX_LINES)
    assert misshapen(house) == []
    put(house, "engine/engine.py", "x = 1\n" * (MAX_LINES + 1))
    put(house, "text/utils.py", "")
    assert len(misshapen(house)) == 2


@pytest.mark.parametrize(
    "code",
    [
        "isinstance(settings, LlamaSettings)",
        "isinstance(settings, (int, onnx.OnnxSettings))",
        "isinstance(settings, int | native.NativeSettings)",
        "type(settings) is NativeSettings",
        "match settings:\n    case LlamaSettings(threads=1): pass",
        "device == 'native'",
        "'native' in found",
        "x = name not in ('native', 'other')",
        "facts.runtime == 'llama'",
        "'onnx' != runtime_of(settings)",
        "own.draft_runtime in {'llama', 'onnx'}",
        "match facts.runtime:\n    case 'llama': pass",
        "match name:\n    case 'auto' | 'native': pass",
    ],
)
def test_checks_for_a_runtimes_kind_outside_runtimes_are_detected(house: Path, code: str) -> None:
    put(house, "runtimes/llama.py", code)
    assert asks_for_a_runtime(house) == []
    put(house, "engine/engine.py", code)
    assert asks_for_a_runtime(house)


@pytest.mark.parametrize(
    "code",
    [
        "isinstance(settings, Settings)",
        "header.architecture == 'llama'",
        "to == 'onnx'",
        "RUNTIMES[facts.runtime].name",
        "one.runtime == other.runtime",
        "facts.runtime == 'fake'",
        "Profile(runtime='llama')",
        "match to:\n    case 'onnx': pass",
    ],
)
def test_code_that_does_not_check_a_runtimes_kind_is_allowed(house: Path, code: str) -> None:
    put(house, "engine/engine.py", code)
    assert asks_for_a_runtime(house) == []

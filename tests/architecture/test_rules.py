"""The architecture's rules, enforced: who may import whom, who may print, how large a file may grow.

Imports are read from the syntax tree, so lazy ones inside functions and those for type checkers count too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "edgespec"
MAX_LINES = 500

CONTRACTS = "edgespec.interfaces.drafting"
LLAMA_LIBRARY = "edgespec.runtimes.llama.library"
BELOW_CLI = "everything except cli and bench"

# Each part of the house and the modules it may import, an entry standing for all that lies in it; the longest
# matching key counts. Modules at the top level that are not listed (engine, session, ...) wire the parts.
ARROWS: dict[str, tuple[str, ...] | str] = {
    "edgespec.errors": (),
    "edgespec.kernels": (),
    "edgespec.files": ("edgespec.errors", "edgespec.files"),
    "edgespec.decoding": ("edgespec.errors", "edgespec.decoding"),
    "edgespec.decoding.verify": ("edgespec.errors",),
    "edgespec.drafters": (CONTRACTS, "edgespec.errors", "edgespec.files", "edgespec.drafters"),
    "edgespec.runtimes": (CONTRACTS, "edgespec.errors", "edgespec.files", "edgespec.runtimes"),
    "edgespec.planning": (CONTRACTS, "edgespec.errors", "edgespec.files", "edgespec.planning", "edgespec.runtimes"),
    "edgespec.text": ("edgespec.errors", "edgespec.files", "edgespec.text", LLAMA_LIBRARY),
    "edgespec.export": ("edgespec.errors", "edgespec.files", "edgespec.text", "edgespec.export", LLAMA_LIBRARY),
    "edgespec.profiles": ("edgespec.errors", "edgespec.files", "edgespec.profiles"),
    "edgespec.bench": (
        "edgespec.bench",
        "edgespec.decoding",
        "edgespec.engine.engine",
        "edgespec.errors",
        "edgespec.engine.events",
        "edgespec.files",
        "edgespec.engine.generation",
        "edgespec.planning",
        "edgespec.profiles",
        "edgespec.engine.session",
        "edgespec.text",
    ),
    "edgespec.cli": ("edgespec",),
    "edgespec.__main__": ("edgespec.cli",),
}


@dataclass(frozen=True)
class Source:
    """One module of a package on disk."""

    path: Path
    module: str
    tree: ast.Module
    lines: int

    def at(self, node: ast.AST, text: str) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {text}"


def sources(package: Path) -> list[Source]:
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        text = path.read_text(encoding="utf-8")
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Source(path, module, ast.parse(text, str(path)), text.count("\n")))
    return found


# ------------------------------------------------------------------------------------------------ imports


def imported(source: Source, modules: set[str]) -> Iterator[tuple[ast.AST, str]]:
    """(node, absolute module) for each import; ``from a import b`` means a.b where that is a module, else a."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = absolute(source, node)
            for alias in node.names:
                yield node, f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base
        elif isinstance(node, ast.Call) and name_of(node.func) in {"import_module", "__import__"} and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield node, argument.value


def absolute(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    is_package = source.path.name == "__init__.py"
    parts = source.module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, node.module] if node.module else parts)


def name_of(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_within(module: str, place: str) -> bool:
    return module == place or module.startswith(f"{place}.")


def allowed_for(module: str) -> tuple[str, ...] | str:
    matching = [key for key in ARROWS if is_within(module, key)]
    return ARROWS[max(matching, key=len)] if matching else BELOW_CLI


def is_allowed(module: str, target: str) -> bool:
    allowed = allowed_for(module)
    if isinstance(allowed, str):
        return not is_within(target, "edgespec.cli") and not is_within(target, "edgespec.bench")
    return any(is_within(target, place) for place in allowed)


def forbidden_imports(package: Path) -> list[str]:
    found = sources(package)
    modules = {source.module for source in found}
    wrong = []
    for source in found:
        for node, target in imported(source, modules):
            if is_within(target, "edgespec"):
                if not is_allowed(source.module, target):
                    allowed = allowed_for(source.module)
                    may = allowed if isinstance(allowed, str) else ", ".join(allowed) or "nothing of edgespec"
                    wrong.append(source.at(node, f"{source.module} -> {target} (it may import: {may})"))
            elif source.module == "edgespec.errors" and target.partition(".")[0] not in sys.stdlib_module_names:
                wrong.append(
                    source.at(node, f"{source.module} -> {target} (it may import the standard library only)")
                )
    return wrong


# ------------------------------------------------------------------------------------- printing and sizes


def prints(package: Path) -> list[str]:
    """Uses of ``print`` and ``sys.stdout`` outside ``cli``: a library does not talk on its host's terminal."""
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


# ------------------------------------------------------------------------------------------------ the tests


def report(wrong: list[str]) -> str:
    return "\n" + "\n".join(wrong)


def test_imports_follow_the_arrows() -> None:
    wrong = forbidden_imports(PACKAGE)
    assert not wrong, report(wrong)


def test_only_the_command_line_prints() -> None:
    wrong = prints(PACKAGE)
    assert not wrong, report(wrong)


def test_files_are_small_and_well_named() -> None:
    wrong = misshapen(PACKAGE)
    assert not wrong, report(wrong)


def test_the_package_was_found() -> None:
    modules = {source.module for source in sources(PACKAGE)}
    assert {"edgespec", "edgespec.errors", "edgespec.decoding", CONTRACTS} <= modules


# The checks themselves, on a made-up tree.


@pytest.fixture
def house(tmp_path: Path) -> Path:
    package = tmp_path / "edgespec"
    for name in (
        "__init__",
        "__main__",
        "errors",
        "engine",
        "session",
        "bench/__init__",
        "cli/__init__",
        "decoding/__init__",
        "decoding/contracts",
        "decoding/loop",
        "decoding/verify",
        "drafters/__init__",
        "drafters/model",
        "files/__init__",
        "planning/__init__",
        "profiles/__init__",
        "runtimes/__init__",
        "runtimes/llama",
        "runtimes/llama_library",
        "text/__init__",
        "text/tokenizer",
    ):
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return package


def put(house: Path, name: str, code: str) -> None:
    (house / name).write_text(code, encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "code", "target"),
    [
        ("errors.py", "import numpy", "numpy"),
        ("errors.py", "from edgespec.files import x", "edgespec.files"),
        ("files/__init__.py", "import edgespec.interfaces.drafting", "edgespec.interfaces.drafting"),
        ("decoding/verify.py", "from edgespec.interfaces.drafting import Rows", "edgespec.interfaces.drafting"),
        ("decoding/verify.py", "from .contracts import Rows", "edgespec.interfaces.drafting"),
        ("decoding/verify.py", "from . import contracts", "edgespec.interfaces.drafting"),
        ("decoding/serial.py", "from edgespec.runtimes import llama", "edgespec.runtimes.llama.model"),
        ("decoding/__init__.py", "from ..files import x", "edgespec.files"),
        ("drafters/model.py", "from edgespec.runtimes.llama.model import Model", "edgespec.runtimes.llama.model"),
        ("drafters/model.py", "from edgespec.decoding import loop", "edgespec.decoding.serial"),
        ("drafters/model.py", "from edgespec.decoding import decode", "edgespec.decoding"),
        ("runtimes/llama/model.py", "from edgespec.planning import x", "edgespec.planning"),
        ("planning/__init__.py", "from edgespec.drafters import model", "edgespec.drafters.model"),
        ("text/tokenizer.py", "from edgespec.runtimes import llama", "edgespec.runtimes.llama.model"),
        ("text/tokenizer.py", "from edgespec.runtimes.llama_library_2 import x", "edgespec.runtimes.llama_library_2"),
        ("profiles/__init__.py", "from edgespec.text import x", "edgespec.text"),
        ("bench/__init__.py", "import edgespec.drafters", "edgespec.drafters"),
        ("engine.py", "from edgespec.bench import x", "edgespec.bench"),
        ("session.py", "from edgespec.cli import x", "edgespec.cli"),
        ("__init__.py", "from edgespec import cli", "edgespec.cli"),
        ("decoding/serial.py", "def f():\n    from edgespec import engine", "edgespec.engine.engine"),
        ("decoding/serial.py", "import importlib\nimportlib.import_module('edgespec.cli')", "edgespec.cli"),
        ("decoding/serial.py", "import typing\nif typing.TYPE_CHECKING:\n    import edgespec", "edgespec"),
    ],
)
def test_a_forbidden_import_is_caught_and_named(house: Path, name: str, code: str, target: str) -> None:
    put(house, name, code)
    (wrong,) = forbidden_imports(house)
    line = code.count("\n") + 1
    assert wrong.startswith(f"{house / name}:{line}: ")
    assert f" -> {target} (it may import" in wrong


def test_the_arrows_that_are_meant_to_be_are_allowed(house: Path) -> None:
    put(house, "__init__.py", "from edgespec.engine.engine import Engine")
    put(house, "__main__.py", "from edgespec.cli import main")
    put(
        house,
        "engine.py",
        "from edgespec import drafters, planning, session, text\nimport edgespec.runtimes.llama.model",
    )
    put(house, "decoding/serial.py", "from edgespec.decoding import contracts, verify\nfrom ..errors import x")
    put(
        house,
        "drafters/model.py",
        "from edgespec.decoding import contracts\nfrom edgespec.interfaces.drafting import x",
    )
    put(house, "planning/__init__.py", "from edgespec.runtimes import llama")
    put(house, "text/tokenizer.py", "from edgespec.runtimes import llama_library\nfrom edgespec.files import x")
    put(house, "cli/__init__.py", "import edgespec, edgespec.bench, edgespec.planning, typer")
    put(house, "errors.py", "from pathlib import Path\nimport collections.abc")
    assert forbidden_imports(house) == []


@pytest.mark.parametrize(
    "code",
    ["print('x')", "import sys\nsys.stdout.write('x')", "from sys import stdout", "import sys\nx = sys.__stdout__"],
)
def test_printing_is_caught_except_in_the_command_line(house: Path, code: str) -> None:
    put(house, "cli/__init__.py", code)
    put(house, "engine.py", "import sys\nsys.stderr\nlogger = sys\n# print('x')")
    assert prints(house) == []
    put(house, "engine.py", code)
    assert len(prints(house)) == 1


def test_a_long_file_and_a_utils_module_are_caught(house: Path) -> None:
    put(house, "engine.py", "x = 1\n" * MAX_LINES)
    assert misshapen(house) == []
    put(house, "engine.py", "x = 1\n" * (MAX_LINES + 1))
    put(house, "text/utils.py", "")
    assert len(misshapen(house)) == 2

"""What users and scripts see, held against snapshots: names, help, JSON keys, exit codes, errors, hints, profiles.

A snapshot is a file in ``snapshot/``. EDGESPEC_UPDATE_GOLDEN=1 writes the files instead of comparing: for
changes that are meant. The product is asked through its command line and ``edgespec.__all__`` wherever that is
possible, so that modules can move.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import edgespec
import edgespec.errors
from edgespec.files.home import Home
from edgespec.server.openapi import document
from tests.support.calibrating import fix_plain_ratio, shorten_calibration
from tests.support.command_line import InProcess, Result, run_cli, succeeded
from tests.support.exporting import GGUF
from tests.support.hub_server import HubServer, running
from tests.support.tiny_models import TinyModels, put_into_store

UPDATE_VARIABLE = "EDGESPEC_UPDATE_GOLDEN"
SNAPSHOTS = Path(__file__).parent / "snapshot"
PACKAGE = Path(edgespec.__file__).parent
STORED = "smollm2-135m"


def check(name: str, found: str, *, words_only: bool = False) -> None:
    """Compare ``found`` with the snapshot called ``name``. ``words_only`` ignores where lines are broken."""
    path = SNAPSHOTS / name
    if os.environ.get(UPDATE_VARIABLE) == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found, encoding="utf-8", newline="\n")
        return
    wanted = path.read_text(encoding="utf-8") if path.exists() else ""
    if found == wanted or (words_only and found.split() == wanted.split()):
        return
    difference = difflib.unified_diff(wanted.splitlines(), found.splitlines(), str(path), "now", lineterm="", n=2)
    pytest.fail(
        "\n".join(difference) + f"\n{path} is what users saw. If the change is meant, run\n"
        f"  {UPDATE_VARIABLE}=1 python -m pytest {Path(__file__).parent}\n"
        "and commit the file with the change.",
        pytrace=False,
    )


def check_json(name: str, found: object) -> None:
    check(name, json.dumps(found, indent=1, ensure_ascii=False) + "\n")


@pytest.fixture(scope="module")
def pair(tiny: TinyModels) -> tuple[str, ...]:
    """Options that name the tiny pair, of which everything is known: nothing is calibrated."""
    tiny.load_speculating().close()
    return ("--target", str(tiny.target), "--draft", str(tiny.drafter))


@pytest.fixture
def known(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> InProcess:
    """The program in the home where the tiny pair is known."""
    return InProcess(tiny.home.root, monkeypatch, capsys)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> InProcess:
    """The program with an empty home."""
    return InProcess(tmp_path / "home", monkeypatch, capsys)


# ------------------------------------------------------------------------------------------------ the public API


def public_attributes(name: str) -> list[str]:
    """Methods with their parameters, properties and fields that do not begin with an underscore."""
    kind = getattr(edgespec, name)
    if not inspect.isclass(kind):
        return []
    found = {field.name: field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] != "edgespec":
            continue
        for attribute, value in vars(base).items():
            if not attribute.startswith("_"):
                plain = inspect.unwrap(getattr(value, "__func__", value))
                parameters = list(inspect.signature(plain).parameters.values()) if inspect.isfunction(plain) else None
                found[attribute] = attribute if parameters is None else f"{attribute}({_written(parameters)})"
    return sorted(found.values())


def _written(parameters: list[inspect.Parameter]) -> str:
    words, keyword_only = [], False
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not keyword_only:
            words.append("*")
            keyword_only = True
        star = "**" if each.kind is each.VAR_KEYWORD else "*" if each.kind is each.VAR_POSITIONAL else ""
        words.append(f"{star}{each.name}" + ("" if each.default is each.empty else "=…"))
    return ", ".join(words)


def test_public_names_match_the_snapshot() -> None:
    check_json("names.json", edgespec.__all__)


def test_members_of_public_names_match_the_snapshot() -> None:
    check_json("members.json", {name: found for name in edgespec.__all__ if (found := public_attributes(name))})


# ---------------------------------------------------------------------------------------------------------- help


def help_texts(here: InProcess, *command: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """The help of ``command`` and of all commands below it."""
    text = succeeded(here(*command, "--help")).out
    yield command, text
    listed = r"^(?:Commands|Use|Models|Measure|Advanced):\n((?:  .*\n)+)"
    below = "".join(re.findall(listed, text, re.MULTILINE)) if not command or "\nCommands:\n" in text else ""
    for name in re.findall(r"^  ([a-z]\S*)", below, re.MULTILINE):
        yield from help_texts(here, *command, name)


def test_help_texts_match_the_snapshot(here: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    texts = dict(help_texts(here))
    assert {("generate",), ("models", "rm"), ("profiles", "show")} <= texts.keys()
    assert "\x1b" not in "".join(texts.values())
    shown = (f"=== {' '.join(('edgespec', *command))} --help\n{text.rstrip()}\n" for command, text in texts.items())
    check("help.txt", "\n".join(shown), words_only=True)


# ----------------------------------------------------------------------------------------------- JSON key paths


# Objects whose keys are data (names of arms, of sources, of a runtime's settings), not promises.
MAPS = re.compile(
    r"\.(arms|against|by_category|rounds_by_source|broken_plugins|trim\.forward_s|files|tensors|tools|quantisation|settings"
    r"|memory_bytes|left_out)$"
)


def key_paths(value: object, path: str = "") -> set[str]:
    """``.a.b[].c`` for every key in the object; ``.a.*`` stands for all keys of a map."""
    if isinstance(value, dict):
        found = set()
        for key, item in value.items():
            below = f"{path}.*" if MAPS.search(path) else f"{path}.{key}"
            found |= {below} | key_paths(item, below)
        return found
    if isinstance(value, list):
        return set().union(*(key_paths(item, f"{path}[]") for item in value)) if value else set()
    return set()


def empty_paths(value: object, path: str = "") -> set[str]:
    """Paths whose value holds no keys in this answer: null, or an empty list or object."""
    if isinstance(value, dict) and value:
        below = (f"{path}.*" if MAPS.search(path) else f"{path}.{key}" for key in value)
        return set().union(*(empty_paths(item, each) for each, item in zip(below, value.values(), strict=True)))
    if isinstance(value, list) and value:
        return set().union(*(empty_paths(item, f"{path}[]") for item in value))
    return {path} if value in (None, [], {}) else set()


def check_keys(name: str, found: object) -> None:
    """What is null or empty on this machine is taken as the snapshot has it."""
    path = SNAPSHOTS / "json" / f"{name}.txt"
    paths = key_paths(found)
    if os.environ.get(UPDATE_VARIABLE) != "1" and path.exists():
        empty = tuple(f"{each}{more}" for each in empty_paths(found) for more in (".", "["))
        paths |= {each for each in path.read_text(encoding="utf-8").split() if empty and each.startswith(empty)}
    check(f"json/{name}.txt", "".join(f"{each}\n" for each in sorted(paths)))


def test_the_keys_of_answers(known: InProcess, pair: tuple[str, ...], loaded_drafter: None) -> None:
    options = (*pair, "--max-tokens", "12", "--depth", "2", "--json")
    generated = succeeded(known("generate", "hello", *options)).json
    (line,) = succeeded(known("chat", *options, stdin="hello\n")).out.splitlines()
    for name, found in (("generate", generated), ("chat", json.loads(line))):
        assert found["stats"]["rounds_by_source"], "without a draft its keys would not be seen"
        check_keys(name, found)


def test_the_keys_of_plans(known: InProcess, pair: tuple[str, ...]) -> None:
    found = succeeded(known("plan", *pair, "--json")).json
    found["rejected"] = []  # whether there is one depends on this machine's times; the simulated plan has some
    check_keys("plan", found)
    check_keys("plan-simulate", succeeded(known("plan", "--simulate", "desktop-full-gpu", "--json")).json)


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    lines = [{"id": f"p{n}", "category": "chat", "prompt": text} for n, text in enumerate(("hello", "what is water"))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_the_keys_of_verify(known: InProcess, pair: tuple[str, ...], suite: Path) -> None:
    options = ("--suite", suite, "--depth", "2", "--max-tokens", "8", "--json")
    check_keys("verify", succeeded(known("verify", *pair, *options)).json)


def test_the_keys_of_bench(known: InProcess, pair: tuple[str, ...], suite: Path) -> None:
    options = ("--suite", suite, "--passes", "1", "--max-tokens", "8", "--json")
    check_keys("bench", succeeded(known("bench", *pair, *options)).json)
    cold = succeeded(known("bench", *pair, *options, "--arms", "planned", "--cold"))
    check_keys("bench-cold", cold.json)


def test_the_keys_of_calibrate(tiny: TinyModels, here: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_calibration(monkeypatch)
    fix_plain_ratio(monkeypatch, 1.5)
    options = ("--target", tiny.target, "--draft", tiny.drafter, "--context", "300", "--quick", "--json")
    check_keys("calibrate", succeeded(here("calibrate", *options)).json)


def test_the_keys_of_the_store(tiny: TinyModels, here: InProcess) -> None:
    put_into_store(Home(here.home), STORED, tiny.target.read_bytes())
    check_keys("models", succeeded(here("models", "--json")).json)
    check_keys("models-verify", succeeded(here("models", "verify", STORED, "--json")).json)
    check_keys("models-rm", succeeded(here("models", "rm", STORED, "--json")).json)


def test_the_keys_of_a_pull(tiny: TinyModels, tmp_path: Path) -> None:
    hub = HubServer(files={"model.gguf": tiny.target.read_bytes()})
    with running(hub):
        env = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_XET": "1"}
        result = run_cli("pull", f"hf:{hub.repo}/model.gguf", "--json", home=tmp_path / "home", env=env)
    check_keys("pull", succeeded(result).json)


def test_the_keys_of_the_machine(here: InProcess) -> None:
    check_keys("doctor", here("doctor", "--json").json)


def test_the_keys_of_exports(tiny: TinyModels, here: InProcess, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the water is on the way, they said {number} times.\n" for number in range(60)))
    for name, options in {
        "gguf": GGUF,
        "gguf-quantised": (*GGUF, "--quant", "q4_0"),
        "gguf-trimmed": (*GGUF, "--trim-vocab", "300", "--trim-from", text),
        "onnx": ("--to", "onnx"),
        "onnx-static": ("--to", "onnx", "--static-cache", "256"),
    }.items():
        found = succeeded(here("export", tiny.drafter, *options, "-o", tmp_path / name, "--json")).json
        check_keys(f"export-{name}", found)


# ------------------------------------------------------------------------------------------------------ profiles


def test_built_in_profiles_match_the_snapshot(here: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("EDGESPEC_") and name != "EDGESPEC_HOME"]:
        if variable != UPDATE_VARIABLE:
            monkeypatch.delenv(variable)
    listed = succeeded(here("profiles", "--json")).json
    check_keys("profiles", listed)
    shown = {}
    for name in [row["name"] for row in listed["profiles"]]:
        found = succeeded(here("profiles", "show", name, "--json")).json
        assert found.keys() == {"schema_version", "profile"}
        shown[name] = {
            key: f"{type(each['value']).__name__} {json.dumps(each['value'])} from {each['origin']}"
            for key, each in sorted(found["profile"].items())
        }
    every = shown.pop("default")
    changed = {name: {key: own[key] for key in own if own[key] != every.get(key)} for name, own in shown.items()}
    check_json("profiles.json", {"default": every, **changed})


# ---------------------------------------------------------------------------------------------- exit codes, errors


def outcome(result: Result) -> str:
    """The exit code, and the error's type where ``--json`` told one."""
    lines = result.out.splitlines()
    kind = ""
    if lines and lines[-1].startswith('{"schema_version"') and "error" in json.loads(lines[-1]):
        error = json.loads(lines[-1])["error"]
        assert error.keys() == {"type", "message", "hint"}
        kind = f" {error['type']}"
    return f"{result.code}{kind}"


def test_exit_codes_match_the_snapshot(
    tiny: TinyModels, here: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = ("--target", tiny.target, "--draft", "none")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.target.read_bytes()[:2000])
    (tmp_path / "empty.jsonl").write_text("")
    put_into_store(Home(here.home), STORED, tiny.target.read_bytes())
    (here.home / "profiles").mkdir()
    (here.home / "profiles" / "bad.toml").write_text("contxt = 1\n")
    say, json_ = ("generate", "hi", "--max-tokens", "2"), "--json"
    cases: dict[str, tuple[str | Path, ...]] = {
        "nothing": (),
        "version": ("--version",),
        "help": ("--help",),
        "unknown command": ("speak",),
        "unknown option": ("generate", "hi", "--nonsense", json_),
        "missing argument": ("pull", json_),
        "a value that is not a number": ("generate", "hi", "--depth", "deep", json_),
        "an answer": (*say, *target),
        "an answer as json": (*say, *target, json_),
        "a chat from a pipe": ("chat", *target, "--max-tokens", "2"),
        "an empty prompt": ("generate", "", *target, json_),
        "a prompt beyond the context": ("generate", "water " * 400, *target, "--context", "128", json_),
        "a temperature below zero": (*say, *target, "--temperature", "-1", json_),
        "an unknown model": ("generate", "hi", "--target", "qwen2.5-coder-1b", json_),
        "a model that is not here": ("generate", "hi", "--target", "gemma3-270m", "--offline", json_),
        "a path that is not there": ("generate", "hi", "--target", "missing.gguf", json_),
        "a damaged model": ("generate", "hi", "--target", cut, json_),
        "no chat template": ("generate", "hi", "--target", tiny.without_template, "--draft", "none", json_),
        "an unknown profile": ("generate", "hi", "--profile", "laptob", json_),
        "a profile with a slip": ("profiles", "show", "bad", json_),
        "profiles": ("profiles", json_),
        "models": ("models", json_),
        "models verify": ("models", "verify", STORED, json_),
        "models rm": ("models", "rm", STORED, json_),
        "models rm of what is not here": ("models", "rm", STORED, json_),
        "models verify of what is not here": ("models", "verify", STORED, json_),
        "pull of an unknown name": ("pull", "smollm2", json_),
        "pull of a path": ("pull", "./model.gguf", json_),
        "pull offline": ("pull", STORED, "--offline", json_),
        "plan": ("plan", *target, json_),
        "plan simulated": ("plan", "--simulate", "board-4gb", json_),
        "plan of an unknown machine": ("plan", "--simulate", "board", json_),
        "verify without speculation": ("verify", "--target", tiny.target, "--depth", "0", json_),
        "verify with an empty suite": ("verify", *target, "--suite", tmp_path / "empty.jsonl", json_),
        "bench with an unknown suite": ("bench", *target, "--suite", "nothing", json_),
        "bench with an unknown arm": ("bench", *target, "--arms", "plain,fast", json_),
        "calibrate with a context too short": ("calibrate", "--context", "1", json_),
        "export to an unknown format": ("export", tiny.target, "--to", "zip", "-o", "out", json_),
        "export with an unknown type": ("export", tiny.target, *GGUF, "--quant", "q17", "-o", "out", json_),
        "export of what is not there": ("export", "missing.gguf", *GGUF, "-o", "out", json_),
        "export": ("export", tiny.target, *GGUF, "-o", tmp_path / "out", json_),
        "export to a folder that is full": ("export", tiny.target, *GGUF, "-o", Path(__file__).parent, json_),
    }  # fmt: skip
    found = {name: outcome(here(*arguments, stdin="hi\n")) for name, arguments in cases.items()}

    def press_ctrl_c(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edgespec.Engine, "load", press_ctrl_c)
        found["Ctrl-C"] = outcome(here("generate", "hi", *target, json_))
    check_json("exit_codes.json", found)


# What errors are made of where a class asks for more than a message.
_VALUES: dict[str, Any] = {"message": "it is so", "path": "model.gguf", "reason": "it is so"}


def made(kind: type[edgespec.EdgespecError]) -> edgespec.EdgespecError:
    needed = [
        name
        for name, each in inspect.signature(kind).parameters.items()
        if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    return kind(**{name: _VALUES.get(name, 1) for name in needed})


def test_the_openapi_document_matches_the_snapshot() -> None:
    found = document()
    found["info"]["version"] = "VERSION"
    check("openapi.json", json.dumps(found, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


def test_error_types_match_the_snapshot(here: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for name in sorted(edgespec.errors.__all__):
        error = made(getattr(edgespec, name))
        attributes = sorted(vars(error))

        def fail(*_: object, error: edgespec.EdgespecError = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(edgespec.Engine, "load", fail)
        told = here("generate", "hi", "--json")
        assert told.json["error"]["message"] == str(error)
        found[name] = {
            "base": type(error).__base__.__name__,  # type: ignore[union-attr]
            "parameters": _written(list(inspect.signature(type(error)).parameters.values())),
            "attributes": attributes,
            "exit code": told.code,
            "JSON type": told.json["error"]["type"],
        }
    check_json("errors.json", found)


# --------------------------------------------------------------------------------------------- commands in hints


@cache
def hint_texts() -> frozenset[str]:
    """Every string that can become part of a hint: what ``hint=`` is given, and what the names in there stand for.

    An expression in an f-string is ``{}``.
    """
    modules = [defined(ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(PACKAGE.rglob("*.py"))]
    constants: dict[str, list[ast.AST]] = {}
    for names, _ in modules:
        for name, values in names.items():
            constants.setdefault(name, []).extend(values if name.isupper() else [])
    texts: set[str] = set()
    for names, hints in modules:
        # What is called a hint is one, however it gets there.
        waiting = [*hints, *(value for name in names if "hint" in name.lower() for value in names[name])]
        seen: set[str] = set()
        while waiting:
            value = waiting.pop()
            texts |= set(_strings(value))
            for node in ast.walk(value):
                if isinstance(node, ast.Name) and node.id not in seen:
                    seen.add(node.id)
                    # A constant may come from another module; a variable or a function is this module's own.
                    waiting += (constants if node.id.isupper() else names).get(node.id, [])
    return frozenset(texts)


def defined(tree: ast.Module) -> tuple[dict[str, list[ast.AST]], list[ast.AST]]:
    """What each name of a module is assigned or returns; and what is given as ``hint=``."""
    names: dict[str, list[ast.AST]] = {}
    hints: list[ast.AST] = []
    loops: list[ast.For] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "hint":
            hints.append(node.value)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    names.setdefault(target.id, []).append(node.value)
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Tuple) and isinstance(node.iter, ast.Name):
            loops.append(node)
        elif isinstance(node, ast.FunctionDef):
            returned = (each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value)
            names.setdefault(node.name, []).extend(returned)
    for loop in loops:  # over a table, a column of which is hints
        for place, column in enumerate(loop.target.elts if isinstance(loop.target, ast.Tuple) else []):
            if isinstance(column, ast.Name) and "hint" in column.id and isinstance(loop.iter, ast.Name):
                rows = (row for table in names.get(loop.iter.id, []) for row in ast.iter_child_nodes(table))
                hints += [row.elts[place] for row in rows if isinstance(row, ast.Tuple)]
    return names, hints


def _strings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in node.values)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from _strings(child)


COMMAND = re.compile(
    r"`((?:edgespec|pip|git) [^`]+)`|run: (edgespec [^,;:()`]+)|^(edgespec models)|(pip install [^,;:()`]+)"
)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
VARIABLE = re.compile(r"\b(?:EDGESPEC|HF|PIP)_[A-Z_]+\b")


def test_commands_in_hints_match_the_snapshot() -> None:
    """Each with the number of different hints that name it."""
    found: Counter[str] = Counter()
    for text in hint_texts():
        named = {match for each in (OPTION, VARIABLE) for match in each.findall(text)}
        found.update(named | {"".join(groups).strip() for groups in COMMAND.findall(text)})
    assert {"--draft", "EDGESPEC_HOME", "edgespec pull {}"} <= found.keys()
    check("hints.txt", "".join(f"{found[each]:3} {each}\n" for each in sorted(found)))


def test_hints_name_only_existing_commands_and_options(here: InProcess) -> None:
    texts = dict(help_texts(here))
    options = set(OPTION.findall(" ".join(texts.values())))
    commands = {command[0] for command in texts if command}
    # Of xcode-select and pip.
    elsewhere = {"--install", "--force-reinstall", "--no-binary", "--no-cache-dir", "--no-deps"}
    for text in hint_texts():
        assert set(OPTION.findall(text)) <= options | elsewhere, text
        assert set(re.findall(r"`edgespec ([a-z]+)", text)) <= commands, text


# ------------------------------------------------------------------------------------------- the snapshots' own


@pytest.mark.parametrize("use", [check, check_json])
def test_a_difference_names_the_file_and_how_to_update_it(
    use: Callable[[str, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(UPDATE_VARIABLE, raising=False)
    with pytest.raises(pytest.fail.Exception, match=rf"names\.json[\s\S]*{UPDATE_VARIABLE}=1 python -m pytest"):
        use("names.json", "something else")


def test_empty_values_of_this_machine_do_not_differ_from_the_snapshot() -> None:
    assert key_paths({"a": {"b": [{"c": 1}, {"d": 2}]}, "arms": {"x": {"y": 1}}}) == {
        ".a", ".a.b", ".a.b[].c", ".a.b[].d", ".arms", ".arms.*", ".arms.*.y",
    }  # fmt: skip
    assert empty_paths({"a": None, "b": [], "c": {"d": None, "e": 0}, "f": [{"g": {}}]}) == {
        ".a", ".b", ".c.d", ".f[].g",
    }  # fmt: skip

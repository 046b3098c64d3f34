"""README and the pages under docs/: commands exist, measured figures name their machine, and no page is too long."""

from __future__ import annotations

import ast
import logging
import re
import shlex
import subprocess
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command

import edgespec
from edgespec.cli.app import app, run
from edgespec.profiles.layers import ADVANCED_KEYS, KEYS, from_table
from tests.engine.test_tools import TEMPLATE
from tests.golden.test_snapshot import SNAPSHOTS
from tests.support.pages import PAGES, ROOT, console_commands, fenced, prose, read_page
from tests.support.tiny_models import TinyModels

README = "README.md"
MOST_LINES = 200
MOST_LINES_OF_THE_README = 150
MOST_LINES_OF_THE_KERNELS_RESULTS = 90
MOST_TERMS = 30

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
COMMANDS = [(page, command) for page in [README, *PAGES] for command in console_commands(page)]
SNIPPETS = [
    pytest.param(text, id=f"{page}-{number}")
    for page in PAGES
    for number, text in enumerate(fenced(page, "python"), start=1)
]
RUN = [
    pytest.param(text, id=f"{page}-{number}")
    for page in PAGES
    if page.startswith(("docs/embedding/", "docs/simulation"))
    for number, text in enumerate(fenced(page, "python"), start=1)
]

# A measured figure, and what its page must name: the machine, and how to measure it again.
MEASURED = re.compile(r"\d+\.\d+x\b|\d tok(ens)?/s|\d ms\b|\d times as (fast|long)")
MACHINE = re.compile(r"AMD EPYC|Intel Xeon|x86-64 server|simulated clock")
HOW = re.compile(
    r"[Tt]o reproduce|`python (-m )?benchmarks"
    r"|\]\((\.\./)?results/|\(\.\./start\.md"
)
# Pages whose figures are not measurements, with the reason.
NOT_MEASURED = {
    "docs/json.md": "it explains keys",
    "docs/reason-codes.md": "it explains codes",
    "docs/simulation.md": "its figures are predictions, or published with their source",
    "docs/vulkan.md": "it says that its figures are of function, and names the machine and `make test-vulkan`",
}


# ------------------------------------------------------------------------------------------------------ pages


@pytest.mark.parametrize("page", PAGES)
def test_a_docs_page_is_short_and_begins_with_its_title(page: str) -> None:
    lines = read_page(page).splitlines()
    assert len(lines) <= MOST_LINES
    assert lines[0].startswith("# ")


def test_the_readme_fits_on_a_few_screens_and_shows_the_picture() -> None:
    assert len(read_page(README).splitlines()) <= MOST_LINES_OF_THE_README
    (picture,) = re.findall(r"!\[[^\]]+\]\((\S+)\)", read_page(README))
    assert (ROOT / picture).is_file()


def test_readme_and_docs_say_the_same_of_what_runs() -> None:
    shown = [read_page(page).partition("## What runs")[2].partition("\n## ")[0] for page in (README, "docs/index.md")]
    assert "**Not run**" in shown[1]
    assert shown[0].replace("](docs/", "](").strip() == shown[1].strip()


def test_links_of_the_readme_lead_to_pages_and_headings_that_exist() -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose(README))
    assert len(links) >= 25
    for link in links:
        path, _, anchor = link.partition("#")
        assert (ROOT / path).is_file(), link
        headings = re.findall(r"^#+ (.*)$", read_page(path), re.MULTILINE) if anchor else []
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, link


def test_the_kernels_results_fit_one_short_page() -> None:
    assert len(read_page("docs/results/native.md").splitlines()) <= MOST_LINES_OF_THE_KERNELS_RESULTS


@pytest.mark.parametrize("page", [README, *PAGES])
def test_pages_with_measured_figures_name_machine_and_command(page: str) -> None:
    text = read_page(page)
    if not MEASURED.search(text) or page in NOT_MEASURED:
        return
    assert MACHINE.search(text), f"{page} has {MEASURED.search(text)} but no machine"
    assert HOW.search(text), f"{page} has {MEASURED.search(text)} but not how to measure it again"


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/results/")])
def test_results_pages_have_machine_reproduction_and_limits(page: str) -> None:
    assert MACHINE.search(read_page(page))
    if page != "docs/results/index.md":
        assert re.search(r"[Tt]o\s+reproduce", read_page(page))
        assert re.search(r"^## Limits$|not measured", read_page(page), re.MULTILINE)
    assert re.search(r"make (acceptance|test-\w+)|python (-m benchmarks|scripts/|benchmarks/)", read_page(page))


def test_every_note_has_a_date() -> None:
    for page in PAGES:
        if page.startswith("docs/notes/") and page != "docs/notes/index.md":
            assert re.search(r"2026-\d\d-\d\d", "\n".join(read_page(page).splitlines()[:6])), page
            assert page.removeprefix("docs/notes/") in read_page("docs/notes/index.md"), page


def test_docs_have_no_page_about_a_missing_command() -> None:
    commands = (SNAPSHOTS / "help.txt").read_text(encoding="utf-8")
    if not re.search(r"^  serve ", commands, re.MULTILINE):
        assert not [page for page in PAGES if "serv" in page]


# --------------------------------------------------------------------------------------------------- glossary


def test_glossary_terms_have_a_literature_name_and_a_source() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in read_page("docs/glossary.md").splitlines()
        if line.startswith("| ")
    ][1:]
    assert 20 <= len(rows) <= MOST_TERMS
    for word, literature, meaning, source in rows:
        assert word
        assert literature
        assert meaning
        assert re.search(r"\b(19|20)\d\d\b", source), f"{word} names no paper with its year"
    assert len({row[0] for row in rows}) == len(rows)


# --------------------------------------------------------------------------------------------------- commands


def test_the_docs_contain_commands() -> None:
    assert len(COMMANDS) >= 40
    shown = {name for _, command in COMMANDS for name in re.findall(r"(?:^|[ |])edgespec ([a-z]+)", command)}
    assert {"chat", "generate", "pull", "models", "memory", "calibrate", "plan", "bench", "export", "verify"} <= shown
    assert {"profiles", "doctor"} <= shown


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_every_documented_command_and_its_options_exist(
    page: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in _programs(command):
        _check_program(words, page, capsys)


def _programs(command: str) -> Iterator[list[str]]:
    """The programs of a pipe, each with its arguments, without environment assignments."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, "|"]:
        if word == "|":
            assert words, command
            yield words
            words = []
        elif words or not re.fullmatch(r"[A-Z_]+=.*", word, re.DOTALL):
            words.append(word)


def _check_program(words: list[str], page: str, capsys: pytest.CaptureFixture[str]) -> None:
    match words:
        case ["edgespec", *arguments]:
            # The parser reads every option before --help exits.
            assert run([*arguments, "--help"]) == 0, capsys.readouterr().err
            assert "Usage: edgespec" in capsys.readouterr().out
        case ["make", target, *_]:
            found = subprocess.run(["make", "-n", target], capture_output=True, text=True, cwd=ROOT, check=False)
            assert found.returncode == 0, found.stderr
        case ["python", "-m", module, *_]:
            ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
        case ["python" | "pyinstaller", file, *_]:
            ast.parse((ROOT / file).read_text(encoding="utf-8"))
        case ["pip", "install", *arguments]:
            packages = [word for word in arguments if not word.startswith("-")]
            assert packages
            for extras in re.findall(r"\[(.*)\]", " ".join(packages)):
                assert set(extras.split(",")) <= set(EXTRAS)
        case ["printf" | "echo", *_] | ["apt-get", "install", *_]:
            pass
        case _:
            pytest.fail(f"{page} shows a program that this test does not know: {words}")


def proposed(source: str) -> Iterator[str]:
    """The commands between backquotes that the texts of a module name, without its docstrings."""
    tree = ast.parse(source)
    left_out = {each.value for each in ast.walk(tree) if isinstance(each, ast.Expr)}
    for whole in (each for each in ast.walk(tree) if isinstance(each, ast.JoinedStr)):
        left_out |= {part for part in whole.values if isinstance(part, ast.Constant)}
    for node in ast.walk(tree):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        if node in left_out or not all(isinstance(part, ast.Constant | ast.FormattedValue) for part in parts):
            continue
        said = [str(part.value) if isinstance(part, ast.Constant) else "MODEL" for part in parts]
        yield from re.findall("`edgespec ([^`]+)`", "".join(said).replace("{}", "MODEL"))


def test_every_command_that_the_program_proposes_is_complete() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), command)
        for path in (ROOT / "edgespec").rglob("*.py")
        for command in proposed(path.read_text(encoding="utf-8"))
    }
    assert len(found) > 40
    wrong = [f"{path}: {command}: {error}" for path, command in sorted(found) if (error := _incomplete(command))]
    assert not wrong, "\n".join(wrong)


def _incomplete(command: str) -> str | None:
    """Why the parser refuses a command; None too for a command alone, which only names it."""
    name: Any = "edgespec"
    current: Any = get_command(app)
    arguments, context = shlex.split(command), None
    try:
        while isinstance(current, TyperGroup) and arguments:
            context = current.make_context(name, arguments, parent=context)
            name, current, arguments = current.resolve_command(context, [*context._protected_args, *context.args])
        if arguments:
            current.make_context(name, arguments, parent=context)
    except Exception as error:
        return str(error)
    return None


@pytest.mark.parametrize("page", [README, *PAGES])
def test_every_documented_command_is_valid_shell(page: str) -> None:
    for block in [*fenced(page, "sh"), *console_commands(page)]:
        done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [README, *(page for page in PAGES if not page.startswith("docs/notes/"))])
def test_every_option_mentioned_in_the_docs_exists(page: str) -> None:
    known = set(re.findall(r"--[a-z][a-z-]+", (SNAPSHOTS / "help.txt").read_text(encoding="utf-8")))
    known |= {"--exclude-module", "--install", "--force"}  # options of PyInstaller, xcode-select and uv
    for script in [*(ROOT / "scripts").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]:
        known |= set(re.findall(r"--[a-z][a-z-]+", script.read_text(encoding="utf-8")))
    mentioned = {option for code in re.findall(r"`([^`\n]+)`", prose(page)) for option in _options(code)}
    assert mentioned <= known, f"{page}: {sorted(mentioned - known)}"


def _options(code: str) -> list[str]:
    return re.findall(r"(?<![\w-])--[a-z][a-z-]+", code)


# ---------------------------------------------------------------------------------------------------- snippets


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_every_python_snippet_in_the_docs_compiles(snippet: str) -> None:
    compile(snippet, "snippet", "exec")


@pytest.mark.slow
@pytest.mark.parametrize("snippet", RUN)
def test_every_embedding_snippet_in_the_docs_runs(
    snippet: str,
    tiny: TinyModels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """On a tiny model under the default model's name."""
    with_tools = tiny.with_template("tools", TEMPLATE)
    model = tiny.filling if "suffix=" in snippet else with_tools if "tools" in snippet else tiny.target
    on_tiny = snippet.replace('"qwen2.5-coder-1.5b"', repr(str(model)))
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    before = set(threading.enumerate())
    try:
        exec(compile(on_tiny, "snippet", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        assert not ended.code  # noqa: PT017 - a program may end in either way
    for thread in set(threading.enumerate()) - before:  # a timer's error would come after the test
        if not thread.daemon:
            thread.join(10.0)
    logging.getLogger("edgespec.native").setLevel(logging.NOTSET)
    shown = capfd.readouterr()
    assert not shown.err
    if "print(" in snippet:
        assert shown.out.strip()


@pytest.mark.parametrize("page", PAGES)
def test_every_profile_in_the_docs_is_valid(page: str) -> None:
    for block in fenced(page, "toml"):
        assert from_table(tomllib.loads(block), page, folder=None).values


# ---------------------------------------------------------------------------------------- complete references


def test_every_profile_key_is_documented() -> None:
    page = read_page("docs/guide/profiles.md")
    common, _, advanced = page.partition("## Advanced keys")
    first = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| ([^|]*) \|", common, re.MULTILINE))))
    second = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| ([^|]*) \|", advanced, re.MULTILINE))))
    assert set(ADVANCED_KEYS) == second
    assert set(KEYS) - set(ADVANCED_KEYS) <= first


def test_every_command_is_in_the_command_table() -> None:
    overview = (SNAPSHOTS / "help.txt").read_text(encoding="utf-8").split("=== ")[1]
    commands = re.findall(r"^  (\w+)  ", overview.partition("\nUse:")[2], re.MULTILINE)
    assert len(commands) >= 11
    page = read_page("docs/guide/commands.md")
    assert [name for name in commands if f"| `edgespec {name}` |" not in page] == []


def test_every_documented_bench_json_key_exists() -> None:
    paths = (SNAPSHOTS / "json" / "bench.txt").read_text(encoding="utf-8").replace("[]", "")
    known = {part for path in paths.splitlines() for part in path.split(".")} | {"NAME"}
    table = read_page("docs/guide/benchmarks.md").partition("## The JSON")[2]
    names = re.findall(r"`([\w.]+)`", table)
    assert len(names) >= 20
    assert [name for name in names if not set(name.split(".")) <= known | {"null", "again", "plain", "plot"}] == []


def test_every_error_class_named_in_the_docs_exists() -> None:
    named = set(re.findall(r"`(\w+Error)`", read_page("docs/embedding/errors.md")))
    assert len(named) >= 15
    assert named <= set(edgespec.__all__)

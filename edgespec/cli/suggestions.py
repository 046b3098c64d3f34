"""Completions for the chat's prompt and for the shell.

Completing loads no model and uses no network. An error yields no suggestions.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import lru_cache
from pathlib import Path

import typer

# A value, and its description in a few words.
Suggestion = tuple[str, str]

# Called with the words before the cursor's word, and that word; returns its completions.
Suggest = Callable[[tuple[str, ...], str], Iterable[Suggestion]]


@contextmanager
def names_with_colons() -> Iterator[None]:
    """Within the block bash, which takes each colon for a word, gets completions of names that have some."""
    if os.environ.get("_EDGESPEC_COMPLETE") != "complete_bash":
        yield
        return
    number = os.environ.get("COMP_CWORD", "")
    at = int(number) if number.isdecimal() else 0  # without bash's variables no word was typed
    words = os.environ.get("COMP_WORDS", "").split("\n")[: at + 1]
    joined, colons = [""], True
    for word in words:
        before, colons = colons, word.startswith(":") and not word.strip(":")
        if word and (before or colons):
            joined[-1] += word
        else:
            joined.append(word)
    has_them = joined[-1].removesuffix("" if colons else words[-1])
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = "\n".join(joined), str(at + len(joined) - len(words))
    with redirect_stdout(io.StringIO()) as found:
        yield
    sys.stdout.writelines(line.removeprefix(has_them) for line in found.getvalue().splitlines(keepends=True))


@lru_cache(maxsize=1)
def models_to_name() -> tuple[Suggestion, ...]:
    """Names of models: first those on this machine, then those to download. Searched once per process."""
    from edgespec.errors import EdgespecError
    from edgespec.files.home import home
    from edgespec.store.catalogue import catalogue
    from edgespec.store.found import ModelFolders, find_models
    from edgespec.store.store import Store

    try:
        stored = {model.name for model in Store(home()).list() if model.kind == "model"}
        specs = {name: spec for name, spec in catalogue().items() if spec.kind == "model"}
        others = [(each.name, each.program) for each in find_models(ModelFolders.here()).models]
    except (EdgespecError, OSError):
        return ()
    own = [(name, specs[name].description if name in specs else "on disk") for name in sorted(stored)]
    absent = [(name, f"{spec.description} (to fetch)") for name, spec in specs.items() if name not in stored]
    return (*own, *others, *absent)


def for_model(incomplete: str) -> Iterator[Suggestion]:
    """Completes MODEL: names, or paths after ``.``, ``/`` or ``~``."""
    yield from _path_or(incomplete, ".gguf", models_to_name)


def for_drafter(incomplete: str) -> Iterator[Suggestion]:
    """Completes ``--draft``: as MODEL, and "auto" and "none"."""
    yield from _beginning(incomplete, [("auto", "the drafter that fits the target"), ("none", "no drafter")])
    yield from for_model(incomplete)


def for_stored_model(incomplete: str) -> Iterator[Suggestion]:
    """Completes the name of a model in the store."""
    from edgespec.errors import EdgespecError
    from edgespec.files.home import home
    from edgespec.store.store import Store

    try:
        yield from _beginning(incomplete, [(model.name, model.source) for model in Store(home()).list()])
    except (EdgespecError, OSError):
        return


def for_profile(incomplete: str) -> Iterator[Suggestion]:
    """Completes ``--profile``: built-in profiles, the user's profiles, or files."""
    from edgespec.errors import EdgespecError
    from edgespec.files.home import home
    from edgespec.profiles.profile import list_profiles

    def profiles() -> list[Suggestion]:
        return [(each.name, each.description) for each in list_profiles(home().root)]

    try:
        yield from _path_or(incomplete, ".toml", profiles)
    except (EdgespecError, OSError):
        return


def for_setting(incomplete: str) -> Iterator[Suggestion]:
    """Completes ``--set``: keys of profiles."""
    from edgespec.profiles.layers import KEYS

    yield from _beginning(incomplete, [(f"{key}=", kind.wanted) for key, kind in KEYS.items()])


def for_machine(incomplete: str) -> Iterator[Suggestion]:
    """Completes ``--simulate``: names of described machines, or files."""
    from edgespec.profiles.machines import machine_names

    yield from _path_or(incomplete, ".toml", lambda: [(name, "") for name in machine_names()])


def for_suite(incomplete: str) -> Iterator[Suggestion]:
    """Completes ``--suite``: names of built-in suites, or files."""
    from edgespec.bench.suite import BUILTIN_SUITES

    yield from _path_or(incomplete, ".jsonl", lambda: [(name, "") for name in BUILTIN_SUITES])


def for_category(context: typer.Context, incomplete: str) -> Iterator[Suggestion]:
    """Completes ``--category`` for the suite named earlier on the line."""
    from edgespec.bench.suite import BUILTIN_SUITES, builtin_suite, load_suite
    from edgespec.errors import EdgespecError

    suite = context.params.get("suite") or "quick"
    try:
        prompts = builtin_suite(suite) if suite in BUILTIN_SUITES else load_suite(Path(suite))
    except (EdgespecError, OSError):
        return
    yield from _beginning(incomplete, [(name, "") for name in sorted({prompt.category for prompt in prompts})])


def one_of(*values: str) -> Callable[[str], list[Suggestion]]:
    """A completion function for an option that takes one of ``values``."""

    def complete(incomplete: str) -> list[Suggestion]:
        return list(_beginning(incomplete, [(value, "") for value in values]))

    return complete


def _beginning(incomplete: str, values: Iterable[Suggestion]) -> Iterator[Suggestion]:
    return (each for each in values if each[0].startswith(incomplete))


def _path_or(incomplete: str, suffix: str, values: Callable[[], Iterable[Suggestion]]) -> Iterator[Suggestion]:
    """Paths after ``.``, ``/`` or ``~``, else values, which are read only then."""
    if incomplete.startswith((".", "/", "~")):
        return _paths(incomplete, suffix)
    return _beginning(incomplete, values())


def for_file(incomplete: str) -> Iterator[Suggestion]:
    """Completes a path."""
    return _paths(incomplete, None)


def _paths(incomplete: str, suffix: str | None) -> Iterator[Suggestion]:
    """Folders, and files of that kind (None: all), as they are spelled."""
    from edgespec.files.disk import expanded, is_folder

    folder, _, name = incomplete.rpartition("/")
    begun = f"{folder}/" if "/" in incomplete else ""
    try:
        entries = sorted(expanded(begun or ".").iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(name) and (is_folder(entry) or suffix in (None, entry.suffix.lower())):
            yield f"{begun}{entry.name}{'/' if is_folder(entry) else ''}", ""

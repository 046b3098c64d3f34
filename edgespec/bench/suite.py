"""Suites: named sets of prompts, built-in or the user's, read with every size bounded.

A file is text with a prompt on each line, or JSON Lines: ``{"prompt"}``, perhaps with ``"id"`` and ``"category"``, or
Spec-Bench's ``{"question_id", "category", "turns"}``, whose first turn is the prompt. ``"max_tokens"`` may limit the
answer. Other keys are ignored, except in the built-in suites: ``"source": "module:function"`` appends that function
of Python's standard library to the prompt, ``"mentions"`` lists words that the function must contain for the request
to make sense, and ``"quick": true`` puts the prompt into the suite "quick" as well.
"""

from __future__ import annotations

import ast
import difflib
import gzip
import hashlib
import json
import textwrap
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, cast

from edgespec.errors import InvalidRequestError, reason_of
from edgespec.files.checked import is_line
from edgespec.files.disk import in_utf_8

# Eight categories of user requests; one prompt of each; prompts of about 600 tokens; answers of 1 to 64 tokens;
# the prompts of `verify`.
BUILTIN_SUITES = ("ours", "quick", "long-prompts", "short", "verify")

# Far above any known suite (Spec-Bench: 480 prompts, 1 MB; HumanEval: 164 and 0.2 MB), far below what would hurt. The
# last limit also keeps a gzip file of a few kilobytes from unpacking to gigabytes.
MAX_PROMPTS = 10_000
MAX_PROMPT_CHARACTERS = 1_000_000
MAX_FILE_BYTES = 64_000_000
MAX_LABEL_CHARACTERS = 400

# Of prompts that name none.
OWN_CATEGORY = "own"

HUMANEVAL_REQUEST = "Complete this Python function. Answer with the whole function in one code block.\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request to a model. ``id`` is unique in its suite and pairs results; ``category`` groups them.

    The answer has at most ``max_tokens``; None leaves the limit to the caller.
    """

    id: str
    category: str
    prompt: str
    max_tokens: int | None = None

    def longest(self, max_tokens: int) -> int:
        """The limit of the answer's tokens, at most ``max_tokens``."""
        return max_tokens if self.max_tokens is None else min(max_tokens, self.max_tokens)


def load_suite(path: Path) -> tuple[Prompt, ...]:
    """The prompts of a file, in its order. Raises InvalidRequestError, with the line."""
    with _opened(path) as file:
        return read_suite(file, str(path))


def read_suite(file: BinaryIO, name: str) -> tuple[Prompt, ...]:
    """The prompts in a file of this name, in its order. Raises InvalidRequestError, with the line."""
    content = _bounded(file, name)
    is_json = name.endswith(".jsonl") or content.lstrip().startswith(b"{")
    return _parse(_records(content, name) if is_json else _lines(content, name), name)


def builtin_suite(name: str) -> tuple[Prompt, ...]:
    """A built-in suite, always in the same order.

    Prompts that quote the standard library are left out if its source cannot be read (``missing_prompts`` names them)
    and differ between versions of Python, as the quoted function does: a result belongs to the suite's hash, not to
    its name. Raises InvalidRequestError for an unknown name.
    """
    return _builtin(name)[0]


def missing_prompts(name: str) -> tuple[str, ...]:
    """The ids that ``builtin_suite(name)`` leaves out on this Python: none on 3.11 to 3.13 with its source files."""
    return _builtin(name)[1]


def calibration_prompts() -> tuple[Prompt, ...]:
    """Prompts whose answers show which tokens a target uses; no measuring suite contains them."""
    content = resources.files("edgespec.bench").joinpath("suites", "calibration.jsonl").read_bytes()
    return _parse(_records(content, name := "the calibration prompts"), name)


def load_humaneval(path: Path, n: int = 20) -> tuple[Prompt, ...]:
    """The first ``n`` problems of HumanEval's ``HumanEval.jsonl.gz``, worded as requests to a chat model.

    Raises InvalidRequestError if the file has another format, unpacks to too much, or has fewer problems.
    """
    if n < 1:
        raise InvalidRequestError(f"the number of HumanEval problems must be at least 1, got {n}")
    with _opened(path) as file:
        try:
            with gzip.open(file) as unpacked:
                content = _bounded(cast("BinaryIO", unpacked), str(path))
        except (OSError, EOFError, zlib.error) as error:  # gzip raises all three for a damaged file
            raise InvalidRequestError(f"{path} is not a complete gzip file: {error}") from error
    prompts = []
    for where, record in _records(content, str(path)):
        code = _text(record, "prompt", where)
        prompts.append(
            Prompt(
                id=_label(record, "task_id", where),
                category="code",
                prompt=f"{HUMANEVAL_REQUEST}```python\n{code.rstrip()}\n```",
            )
        )
        if len(prompts) == n:
            return _unique(prompts, str(path))
    raise InvalidRequestError(f"{path} has {len(prompts)} problems, fewer than the requested {n}")


def first_of_each(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """The first ``limit`` prompts of each category, in their order."""
    taken: Counter[str] = Counter()
    kept = []
    for prompt in prompts:
        taken[prompt.category] += 1
        if taken[prompt.category] <= limit:
            kept.append(prompt)
    return kept


def suite_sha256(prompts: Sequence[Prompt]) -> str:
    """A hash of the prompts' content, in order: the same suite has the same hash however its file was written."""
    digest = hashlib.sha256()
    for prompt in prompts:
        own = [prompt.id, prompt.category, prompt.prompt, *([] if prompt.max_tokens is None else [prompt.max_tokens])]
        line = json.dumps(own, ensure_ascii=True, separators=(",", ":"))
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()


# -------------------------------------------------------------------------------- the suites that come with edgespec


def _builtin(name: str) -> tuple[tuple[Prompt, ...], tuple[str, ...]]:
    """(the prompts, the ids of prompts whose source cannot be read)."""
    if name not in BUILTIN_SUITES:
        near = "".join(f"did you mean {each}? " for each in difflib.get_close_matches(name, BUILTIN_SUITES, n=1))
        raise InvalidRequestError(
            f"there is no suite {name!r:.80}",
            hint=f"{near}built-in suites: {', '.join(BUILTIN_SUITES)}; give a file by its path",
        )
    file = "ours.jsonl" if name == "quick" else f"{name}.jsonl"
    content = resources.files("edgespec.bench").joinpath("suites", file).read_bytes()
    prompts: list[Prompt] = []
    missing: list[str] = []
    for where, record in _records(content, f"built-in suite {name}"):
        if name == "quick" and record.get("quick") is not True:
            continue
        prompt = _prompt(record, where)
        if "source" in record:
            source = function_source(_text(record, "source", where))
            if source is None or not all(word in source for word in cast("list[str]", record["mentions"])):
                missing.append(prompt.id)
                continue
            prompt = replace(prompt, prompt=f"{prompt.prompt}\n\n```python\n{source}\n```")
        prompts.append(prompt)
    return _unique(prompts, f"built-in suite {name}"), tuple(missing)


# ------------------------------------------------------------------------------------------------ reading


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise InvalidRequestError(
            f"the suite {path} cannot be read: {reason_of(error)}",
            hint="give the path of a file with a prompt a line, or JSON Lines",
        ) from error


def _bounded(file: BinaryIO, name: str) -> bytes:
    content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise InvalidRequestError(f"{name} has more than {MAX_FILE_BYTES // 1_000_000} MB, too much for a suite")
    return in_utf_8(content)


def _texts(content: bytes, name: str) -> Iterable[tuple[str, str]]:
    """(where, text) for every line that is not blank."""
    # Split at b"\n" only: JSON strings may contain other characters that str.splitlines treats as line ends.
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            where = f"{name}, line {number}"
            try:
                yield where, line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise InvalidRequestError(f"{where}: not UTF-8 text") from error


def _lines(content: bytes, name: str) -> Iterable[tuple[str, dict[str, object]]]:
    """(where, object) for every line of a text: each is a prompt."""
    return ((where, {"prompt": line.strip()}) for where, line in _texts(content, name))


def _records(content: bytes, name: str) -> Iterable[tuple[str, dict[str, object]]]:
    """(where, object) for every line that is not blank; lazily, so that an error stops the reading."""
    for where, line in _texts(content, name):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidRequestError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits; unlimited nesting
            raise InvalidRequestError(f"{where}: not JSON of a suite") from error
        if not isinstance(record, dict):
            raise InvalidRequestError(f"{where}: must be a JSON object")
        yield where, record


def _parse(records: Iterable[tuple[str, dict[str, object]]], name: str) -> tuple[Prompt, ...]:
    prompts: list[Prompt] = []
    for where, record in records:
        if len(prompts) == MAX_PROMPTS:
            raise InvalidRequestError(f"{name} has more than {MAX_PROMPTS} prompts")
        prompts.append(_prompt(record, where))
    if not prompts:
        raise InvalidRequestError(f"{name} has no prompts")
    return _unique(prompts, name)


def _prompt(record: dict[str, object], where: str) -> Prompt:
    if "turns" in record:
        turns = record["turns"]
        if not isinstance(turns, list) or not turns:
            raise InvalidRequestError(f'{where}: "turns" must be a list whose first item is a text')
        name, prompt = _id(record, "question_id", where), _text({"turns": turns[0]}, "turns", where)
    else:
        prompt = _text(record, "prompt", where)
        name = _id(record, "id", where) if "id" in record else where.rpartition(", ")[2]
    max_tokens = record.get("max_tokens")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise InvalidRequestError(f'{where}: "max_tokens" must be a whole number of at least 1')
    category = _label(record, "category", where) if "category" in record else OWN_CATEGORY
    return Prompt(id=name, category=category, prompt=prompt, max_tokens=max_tokens)


def _id(record: dict[str, object], key: str, where: str) -> str:
    value = record.get(key)
    if isinstance(value, int) and not isinstance(value, bool):  # Spec-Bench numbers its questions
        return str(value)
    return _label(record, key, where)


def _label(record: dict[str, object], key: str, where: str) -> str:
    """A text that is printed next to figures, without control characters, which a terminal would obey."""
    value = _text(record, key, where)
    if not is_line(value) or len(value) > MAX_LABEL_CHARACTERS:
        raise InvalidRequestError(f'{where}: "{key}" must be a line of up to {MAX_LABEL_CHARACTERS} characters')
    return value


def _text(record: dict[str, object], key: str, where: str) -> str:
    if key not in record:
        raise InvalidRequestError(
            f'{where}: "{key}" is missing',
            hint='A line is {"prompt"} or, as in Spec-Bench, {"question_id", "category", "turns"}.',
        )
    value = record[key]
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequestError(f'{where}: "{key}" must be a text that is not empty')
    if len(value) > MAX_PROMPT_CHARACTERS:
        raise InvalidRequestError(f'{where}: "{key}" has more than {MAX_PROMPT_CHARACTERS} characters')
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can contain half of a surrogate pair, which no tokenizer accepts
        raise InvalidRequestError(f'{where}: "{key}" contains half of a surrogate pair') from error
    return value


def _unique(prompts: Sequence[Prompt], name: str) -> tuple[Prompt, ...]:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise InvalidRequestError(f'{name}: the id "{prompt.id}" occurs twice, and results are paired by id')
        seen.add(prompt.id)
    return tuple(prompts)


def function_source(reference: str) -> str | None:
    """The function at ``module:qualified.name``, decorators included and not indented; the same for the same Python.

    For prompts that quote the standard library: the source is read from its installation, never redistributed.

    None if the source is not available: a Python without sources (embedded, frozen), or without that function. The
    module, a top-level one, is not imported.
    """
    module, _, name = reference.partition(":")
    try:
        spec = find_spec(module)
        # Optional in a loader; available for files, archives and frozen modules (which return None).
        get_source = getattr(spec.loader if spec is not None else None, "get_source", None)
        source = get_source(module) if get_source is not None else None
        if source is None:
            return None
        body = ast.parse(source).body
    except (ImportError, ValueError, SyntaxError):  # ValueError: a module without a spec
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

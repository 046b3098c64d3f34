"""Do answers bound to random schemas, and forced calls of random tools, pass an independent validator?

    python -m benchmarks.forms_checked [--schemas N] [--lenient N] [--tools N] [--steps N] [--max-tokens N]

A tiny model of random weights answers at temperature 1, bound to each schema of random_schemas.py, and calls one of
each set of tools. What is written is checked by the jsonschema package. Cursors also take tokens and give them back,
and their masks are held against those of fresh ones. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from benchmarks.random_schemas import lenient_schema, schema, tools
from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done, Notice
from edgespec.errors import InvalidRequestError
from edgespec.files.home import Home
from edgespec.text.grammar.calls import closed
from edgespec.text.grammar.form import form_of
from tests.engine.test_tools import TEMPLATE
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import TinyModels
from tests.support.wandering import wander

# The prompt of four tools takes about 4000 tokens of a tiny model.
CONTEXT = 8192
# Of one schema's cursor.
STEPS = 500


def wrong(own: Mapping[str, Any], text: str) -> str | None:
    """What the validator says of a text; None if the schema allows it."""
    try:
        validator = Draft202012Validator(own, format_checker=Draft202012Validator.FORMAT_CHECKER)
        validator.validate(json.loads(text))
    except (ValueError, ValidationError) as error:
        return str(error).partition("\n")[0][:200]
    return None


def answer(engine: Engine, seed: int, max_tokens: int, **form: Any) -> tuple[Done, list[str]]:
    """The answer, and the notices that came with it."""
    with engine.session() as session:
        sampling = Sampling(temperature=1.0, seed=seed)
        events = list(session.generate("hello", max_tokens=max_tokens, sampling=sampling, **form))
    return next(each for each in events if isinstance(each, Done)), [
        each.text for each in events if isinstance(each, Notice)
    ]


def check_schemas(engine: Engine, count: int, max_tokens: int) -> dict[str, Any]:
    """Answers bound to strict schemas."""
    refused, finished, invalid, tokens = list[str](), 0, list[str](), 0
    for number in range(count):
        try:
            done, _ = answer(engine, number, max_tokens, schema=schema(number))
        except InvalidRequestError as error:
            refused.append(f"{number}: {error.message}")
            continue
        tokens += len(done.token_ids)
        if done.finish_reason == "stop":
            finished += 1
            if (said := wrong(schema(number), done.text)) is not None:
                invalid.append(f"{number}: {said}")
    return {
        "schemas": count,
        "refused": refused[:20],
        "finished": finished,
        "finished_share": finished / count,
        "invalid": invalid[:20],
        "tokens": tokens,
    }


def check_lenient(engine: Engine, count: int, max_tokens: int) -> dict[str, Any]:
    """Answers bound to schemas that cannot be kept whole: refused if strict, else with a warning."""
    accepted, silent, invalid = 0, list[int](), 0
    for number in range(count):
        try:
            answer(engine, number, 1, schema=lenient_schema(number))
            accepted += 1
        except InvalidRequestError:
            pass
        done, notices = answer(engine, number, max_tokens, schema=lenient_schema(number), strict=False)
        if not notices:
            silent.append(number)
        invalid += done.finish_reason == "stop" and wrong(lenient_schema(number), done.text) is not None
    return {"schemas": count, "accepted_strictly": accepted, "without_warning": silent, "invalid": invalid}


def check_tools(engine: Engine, count: int, max_tokens: int) -> dict[str, Any]:
    """A forced call of one tool of each set."""
    finished, invalid = 0, list[str]()
    for number in range(count):
        own = tools(number)
        function = own[number % len(own)]["function"]
        choice = {"type": "function", "function": {"name": function["name"]}}
        done, _ = answer(engine, number, max_tokens, tools=own, tool_choice="required" if len(own) == 1 else choice)
        if done.finish_reason != "stop":
            continue
        finished += 1
        said = [
            f"another tool, {call.name}"
            if call.name != function["name"]
            else wrong(closed(function["parameters"]), call.arguments)
            for call in done.tool_calls
        ]
        if len(said) != 1 or said[0] is not None or done.content:
            invalid.append(f"{number}: {said}")
    return {"sets": count, "finished": finished, "finished_share": finished / count, "invalid": invalid[:20]}


def check_cursors(engine: Engine, steps: int) -> dict[str, Any]:
    """Steps and steps back in the texts of schemas."""
    taken, different = 0, list[str]()
    for number in range(-(-steps // STEPS)):
        form = form_of(schema(number))
        assert form is not None
        compiled, draw = engine.pair.forms.compiled(form), random.Random(number)
        size, stops = engine.tokenizer.vocabulary_size, engine.tokenizer.stop_ids
        own = min(STEPS, steps - taken)
        different += [f"{number}: {tokens}" for tokens in wander(compiled.cursor, draw, own, size, stops)]
        taken += own
    return {"steps": taken, "different": different[:20]}


def measure(schemas: int, lenient: int, sets: int, steps: int, max_tokens: int) -> dict[str, Any]:
    """The figures of all checks."""
    with tempfile.TemporaryDirectory(prefix="edgespec forms ") as place:
        models = TinyModels(Path(place), Home(Path(place) / "home"))
        model = write_tiny_gguf(Path(place) / "model.gguf", chat_template=TEMPLATE, context_length=CONTEXT)
        with models.load(model, draft="none", context=CONTEXT) as engine:
            return {
                "strict": check_schemas(engine, schemas, max_tokens),
                "lenient": check_lenient(engine, lenient, max_tokens),
                "tools": check_tools(engine, sets, max_tokens),
                "cursors": check_cursors(engine, steps),
            }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, count in (("schemas", 300), ("lenient", 30), ("tools", 100), ("steps", 100_000)):
        parser.add_argument(f"--{name}", type=int, default=count, metavar="N", help=f"how many; default {count}")
    parser.add_argument("--max-tokens", type=int, default=2000, metavar="N", help="longest answer")
    given = parser.parse_args()
    print(json.dumps(measure(given.schemas, given.lenient, given.tools, given.steps, given.max_tokens)))
    sys.stdout.flush()


if __name__ == "__main__":
    main()

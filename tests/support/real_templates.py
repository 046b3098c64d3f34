"""The chat templates of about seventy real models, and jinja configured as other programs render them.

The templates are llama.cpp's test data, from the source package of llama-cpp-python.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgespec.files.atomic import write_json
from tests.support.llama_sources import PACKAGE, VERSION, read_models

# Templates that append to lists at calls, which plain jinja's sandbox refuses too.
CHANGES_LISTS = frozenset({"Kimi-K2-Instruct", "Kimi-K2-Thinking"})
NAME = f"chat-templates-{PACKAGE}-{VERSION}.json"


def real_templates(folder: Path) -> dict[str, str]:
    """Each template's source by name, fetched into one file in ``folder`` on first use."""
    kept = folder / NAME
    if not kept.exists():
        found = read_models(folder, ".jinja")
        names = {Path(name).stem: text.decode("utf-8") for name, text in found.items()}
        write_json(kept, names)
    templates: dict[str, str] = json.loads(kept.read_text(encoding="utf-8"))
    return templates


class _Generation(Extension):
    """``{% generation %}``: its content unchanged."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def reference(now: datetime) -> ImmutableSandboxedEnvironment:
    """Jinja configured as in transformers, at the time ``now``."""

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = now.strftime
    return environment

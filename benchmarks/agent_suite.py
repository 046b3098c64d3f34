"""Write a suite of eight agent-like requests: conversations that send files and tool results again.

    python -m benchmarks.agent_suite OUT.jsonl

Four requests hold files of Python's standard library, four hold made-up files, a log and tables. Each holds an
earlier turn, a tool's result and a task whose answer repeats most of a file. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path

# Lines of a file of the standard library: long enough for an agent's file, short enough for two cores.
LIBRARY_LINES = 70

INVENTORY = '''class Inventory:
    """Counts of items in one warehouse."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.items: dict[str, int] = {}

    def add(self, item: str, count: int = 1) -> None:
        self.items[item] = self.items.get(item, 0) + count

    def remove(self, item: str, count: int = 1) -> None:
        if self.items.get(item, 0) < count:
            raise ValueError(f"only {self.items.get(item, 0)} of {item} left")
        self.items[item] -= count

    def total(self) -> int:
        return sum(self.items.values())
'''
SETTINGS = """[server]
host = "127.0.0.1"
port = 8080
workers = 4
timeout_s = 30

[database]
url = "postgresql://localhost/shop"
pool_size = 10
timeout_s = 5

[logging]
level = "INFO"
file = "/var/log/shop.log"
"""
LOG = "\n".join(
    f"2026-03-0{1 + n // 6} 1{n % 6}:0{n % 7}:1{n % 9} {'ERROR' if n % 5 == 3 else 'INFO'} worker-{n % 4} "
    f"{'timeout after 30 s on /orders/' if n % 5 == 3 else 'served /orders/'}{1000 + 37 * n}"
    for n in range(18)
)
TABLE = "id,name,city,orders\n" + "\n".join(
    f"{100 + n},{name},{city},{3 * n + 1}"
    for n, (name, city) in enumerate(
        zip(
            ("Ada", "Boris", "Chen", "Dalia", "Emil", "Farah", "Goran", "Hana"),
            ("Oslo", "Graz", "Lyon", "Bern", "Kiel", "Riga", "Brno", "Turku"),
            strict=True,
        )
    )
)


def library(name: str, first: int = 1) -> str:
    """Lines of a module of the standard library."""
    path = Path(sysconfig.get_paths()["stdlib"]) / name
    text = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(text[first - 1 : first - 1 + LIBRARY_LINES])


def conversation(file: str, text: str, result: str, task: str) -> str:
    """An agent's transcript: the file was read, a tool ran, and the task follows."""
    return (
        f"You are a coding agent. Earlier in this conversation you called read_file and run.\n\n"
        f"read_file({file!r}) returned:\n```\n{text}\n```\n\nrun returned:\n```\n{result}\n```\n\n"
        f"Task: {task}"
    )


def requests() -> list[tuple[str, str, str]]:
    """(id, category, prompt) of each request."""
    whole = "Reply with the whole changed file and nothing else."
    failed = "FAILED tests/test_it.py::test_it - AssertionError: expected a docstring"
    return [
        ("bisect-types", "library", conversation("bisect.py", library("bisect.py"), failed,
         f"add type hints to the signatures of bisect.py. {whole}")),
        ("colorsys-rename", "library", conversation("colorsys.py", library("colorsys.py", 20), failed,
         f"rename the function rgb_to_yiq to yiq_from_rgb everywhere in colorsys.py. {whole}")),
        ("textwrap-comment", "library", conversation("textwrap.py", library("textwrap.py"), failed,
         f"remove all comments from this part of textwrap.py. {whole}")),
        ("shlex-guard", "library", conversation("shlex.py", library("shlex.py"), failed,
         f"make the constructor in shlex.py raise TypeError if instream is bytes. {whole}")),
        ("inventory-method", "made-up", conversation("inventory.py", INVENTORY, failed,
         f"add a method `move` that moves items to another Inventory. {whole}")),
        ("settings-timeouts", "made-up", conversation("settings.toml", SETTINGS, LOG,
         f"double every timeout in settings.toml. {whole}")),
        ("log-errors", "made-up", conversation("shop.log", LOG, "18 lines",
         "list the ERROR lines of the log, unchanged, then say which worker had most of them.")),
        ("table-json", "made-up", conversation("customers.csv", TABLE, "8 rows",
         "convert customers.csv to a JSON list of objects. Reply with the JSON only.")),
    ]  # fmt: skip


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.jsonl")
    out: Path = parser.parse_args().out
    lines = [json.dumps({"id": name, "category": kind, "prompt": prompt}) for name, kind, prompt in requests()]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(json.dumps({"suite": str(out), "prompts": len(lines)}))


if __name__ == "__main__":
    main()

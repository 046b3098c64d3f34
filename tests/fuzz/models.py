"""Damaged model files, of every kind that the kernels run: refused in one line, or its forwards run and draft."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.fuzz.findings import Findings
from tests.support.hostile_models import KINDS, DamagedModels


def fuzz(chance: random.Random, rounds: Iterable[int], findings: Findings) -> None:
    with tempfile.TemporaryDirectory() as place:  # a crash of the process leaves it, with bad.gguf
        files = dict[str, DamagedModels]()
        for number in rounds:
            kind = tuple(KINDS)[number % len(KINDS)]
            if kind not in files:
                folder = Path(place) / kind
                folder.mkdir()
                files[kind] = DamagedModels(kind, folder, chance)
            try:
                findings.counts[f"{files[kind].damaged()} ({kind})"] += 1
            except Exception as error:  # a refusal is none
                findings.unless(False, f"{kind}: {type(error).__name__}: {error}")

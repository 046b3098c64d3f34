"""Measurements kept between runs: versioned, filed under what they depend on, thrown away when that changes."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.decoding.contracts import ModelFacts
from edgespec.errors import EdgespecError
from edgespec.files.atomic import write_json
from edgespec.planning.widths import ContextProbe, WidthProbe

SCHEMA_VERSION = 2

# A probe is a few kilobytes; anything larger is not one of ours.
_LARGEST_FILE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Measurements:
    """The folder that measurements of this machine are kept in. It need not exist."""

    folder: Path
    machine_fingerprint: str

    def load_widths(self, facts: ModelFacts) -> WidthProbe | None:
        """The width probe of this model, build and setting on this machine, or None if there is none to trust."""
        key = self._key(facts)
        try:
            path = self._path(key)
            if path.stat().st_size > _LARGEST_FILE_BYTES:
                return None
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored["schema_version"] != SCHEMA_VERSION or stored["key"] != key:
                return None
            return _widths_from_json(stored["widths"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
            return None  # missing, of another version, or damaged: measured again

    def save_widths(self, facts: ModelFacts, probe: WidthProbe) -> None:
        """Keep a probe. A folder that cannot be written costs a new probe next time, not an error now."""
        key = self._key(facts)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(
                self._path(key), {"schema_version": SCHEMA_VERSION, "key": key, "widths": _widths_to_json(probe)}
            )
        except (OSError, EdgespecError):
            return

    def _key(self, facts: ModelFacts) -> dict[str, Any]:
        return {
            "machine": self.machine_fingerprint,
            "model_sha256": facts.sha256,
            "model_bytes": facts.weight_bytes,
            "model_name": facts.name,
            "runtime": facts.runtime,
            "build": facts.build,
            "device": facts.device,
            "threads": facts.threads,
            "kv_type": facts.kv_type,
            "settings": dict(facts.settings),
        }

    def _path(self, key: Mapping[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
        return self.folder / f"widths-{digest}.json"


def _widths_to_json(probe: WidthProbe) -> dict[str, Any]:
    return {
        "widths": list(probe.widths),
        "complete": probe.complete,
        "plain_forward_s": probe.plain_forward_s,
        "contexts": [
            {
                "start": context.start,
                "positions": context.positions,
                # JSON has no infinity: null stands for a difference without a bound.
                "max_abs_diff": {
                    str(width): diff if math.isfinite(diff) else None for width, diff in context.max_abs_diff.items()
                },
            }
            for context in probe.contexts
        ],
    }


def _widths_from_json(stored: Mapping[str, Any]) -> WidthProbe:
    widths = tuple(int(width) for width in stored["widths"])
    if widths[:1] != (1,) or any(left >= right for left, right in itertools.pairwise(widths)):
        raise ValueError("a width class starts with 1 and ascends")
    contexts = tuple(
        ContextProbe(
            start=int(context["start"]),
            positions=int(context["positions"]),
            max_abs_diff={int(width): _difference_from_json(diff) for width, diff in context["max_abs_diff"].items()},
        )
        for context in stored["contexts"]
    )
    if len(widths) > 1 and any(width in context.max_abs_diff for context in contexts for width in widths):
        raise ValueError("a width cannot be bit-equal and differ")
    seconds = stored["plain_forward_s"]
    if seconds is not None and not 0 < float(seconds) < math.inf:
        raise ValueError("a forward takes some time")
    return WidthProbe(
        widths=widths,
        complete=bool(stored["complete"]),
        contexts=contexts,
        plain_forward_s=None if seconds is None else float(seconds),
    )


def _difference_from_json(stored: float | None) -> float:
    difference = math.inf if stored is None else float(stored)
    if not difference > 0:
        raise ValueError("a difference is positive")
    return difference

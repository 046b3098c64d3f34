"""Asking a gate about a draft that was made in one go, where only the drafter's own confidences are known."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.decoding.contracts import ChainGate


def admitted(gate: ChainGate, confidences: Sequence[float]) -> int:
    """How many leading tokens ``gate`` lets through; past the first one it stops it is not asked.

    ``confidences`` are those of the drafted tokens, from 0 to 1. There is no distribution, so never an entropy.
    """
    return next((index for index, own in enumerate(confidences) if not gate.admits(own, None)), len(confidences))

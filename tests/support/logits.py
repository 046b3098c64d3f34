"""Small rows of scores, and their probabilities by a plain loop."""

from __future__ import annotations

import math

import numpy as np


def logits(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float32)


def probabilities(row: list[float]) -> list[float]:
    total = math.fsum(math.exp(each) for each in row)
    return [math.exp(each) / total for each in row]

"""Gated delta layers (Yang et al., 2025): their sizes, and which layers of a model they are."""

from __future__ import annotations

from dataclasses import dataclass

# The kernels' (edgespec_kernels.h, delta.c): lengths that their buffers and vectors fit.
MOST_LENGTH, LENGTHS, MOST_KERNEL = 256, 16, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Deltas:
    """Such a layer convolves ``kernel`` rows of queries, keys and values, and has a state for each of its ``heads``:
    a matrix of ``length`` x ``length``. ``key_heads`` queries and keys serve all heads. ``layers``: True for each
    layer that is one; the others have attention.
    """

    heads: int
    key_heads: int
    length: int
    kernel: int
    layers: tuple[bool, ...]

    @property
    def mixed(self) -> int:
        """Elements of a row that are convolved: queries, keys and values."""
        return (2 * self.key_heads + self.heads) * self.length

    @property
    def scanned(self) -> int:
        """Elements of what the heads give."""
        return self.heads * self.length

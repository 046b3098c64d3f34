"""Our own processor kernels as a runtime: verification nearly free, and the same bits at every width.

A row is computed by the same operations in the same order whatever is computed beside it, on however many threads and
by whichever instruction set, so plain decoding, verification, prefill and the paths of a tree belong to one numeric
class.
"""

from __future__ import annotations

from edgespec.runtimes.native.layout import unsupported_reason
from edgespec.runtimes.native.model import KV_BITS, NativeModel, NativeSettings, describe_native, load_native
from edgespec.runtimes.native.requantized import bytes_spared
from edgespec.runtimes.native.sequence import NativeSequence

__all__ = [
    "KV_BITS",
    "NativeModel",
    "NativeSequence",
    "NativeSettings",
    "bytes_spared",
    "describe_native",
    "load_native",
    "unsupported_reason",
]

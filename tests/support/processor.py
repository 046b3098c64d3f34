"""The runtimes that this machine's processor has for a GGUF file that both run, such as a tiny model."""

from __future__ import annotations

from edgespec.errors import RuntimeUnavailableError
from edgespec.runtimes.native.library import load

__all__ = ["first_runtime", "processor_runtimes"]


def processor_runtimes() -> tuple[str, ...]:
    """The runtimes, the preferred one first."""
    try:
        levels = load().levels
    except RuntimeUnavailableError:
        return ("llama",)
    return ("native", "llama") if levels[-1] != "portable" else ("llama", "native")


def first_runtime() -> str:
    return processor_runtimes()[0]

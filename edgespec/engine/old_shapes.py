"""Names of the version before: each works for one more version, with a DeprecationWarning that says what to use."""

from __future__ import annotations

import warnings


def warn_old(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn the caller's caller that ``old`` goes in the next version. ``new`` is what to use in its place."""
    warnings.warn(f"{old} goes in the next version of edgespec: use {new}", DeprecationWarning, stacklevel=stacklevel)

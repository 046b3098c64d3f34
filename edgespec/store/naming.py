"""Folder names for models: safe, and different for different models, on every file system."""

from __future__ import annotations

import hashlib
import re

_PLAIN_KEY = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}[a-z0-9]")
# Names that Windows keeps for devices, with any ending.
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?")


def folder_key(name: str) -> str:
    """A folder name for a model's name that is safe, and different for different names, on every file system."""
    if _PLAIN_KEY.fullmatch(name) and not _RESERVED.fullmatch(name):
        return name
    readable = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:48]
    # Case, length and punctuation are lost above; the hash keeps names apart.
    return f"m-{readable}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:10]}"

"""A saved session's file in pieces, to be changed and written again."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from typing import Any

from edgespec.files.home import Home
from edgespec.files.provenance import NO_MAC, mac_in

FIRST = struct.Struct("<8sII32s")


@dataclass
class Parts:
    """A saved file, to be changed and written again: as an attacker would, or as the home would."""

    header: dict[str, Any]
    tokens: bytes
    cache: bytes
    magic: bytes = b"edgesess"
    version: int = 2

    @staticmethod
    def of(content: bytes) -> Parts:
        magic, version, length, _ = FIRST.unpack_from(content)
        header = json.loads(content[FIRST.size : FIRST.size + length])
        tokens = FIRST.size + length + 4 * header["token_count"]
        return Parts(header, content[FIRST.size + length : tokens], content[tokens:-64], magic, version)

    def written(self, header: bytes | None = None, *, home: Home | None = None) -> bytes:
        """With correct checksums; with a correct code if it is written in ``home``."""
        text = json.dumps(self.header).encode() if header is None else header
        first = FIRST.pack(self.magic, self.version, len(text), hashlib.sha256(text).digest())
        body = first + text + self.tokens + self.cache
        digest = hashlib.sha256(body).digest()
        return body + digest + (NO_MAC if home is None else mac_in(home, digest))[: 32 * (self.version > 1)]

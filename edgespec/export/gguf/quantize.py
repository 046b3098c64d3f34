"""Requantises a GGUF with llama.cpp's quantizer."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from edgespec.errors import DiskSpaceError, InvalidRequestError, ModelFileError
from edgespec.files.disk import SLACK_BYTES, free_bytes
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import PLAIN_TYPES, GgufHeader
from edgespec.files.progress import QUIET, Job
from edgespec.runtimes.llama.library import load

# Bytes of a tensor's rows in memory, as llama.cpp counts them. llama.cpp's default of 8 GiB is a whole tensor.
_BUFFER_BYTES = 64 << 20

# How often cancellation is checked while native code runs: prompt for a user who pressed Ctrl-C.
_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Quant:
    """A format that llama.cpp writes: its name, its constant in llama.h, and the most bits per weight of a matrix."""

    name: str
    constant: str
    most_bits: float


def _quants() -> Mapping[str, Quant]:
    # Not listed: formats that need an importance matrix of calibration text (IQ1 to IQ3, Q2_K_S), and formats that
    # are accurate only for models trained in them (TQ, MXFP4, NVFP4).
    mixed = "q4_0 q4_1 q5_0 q5_1 q8_0 q2_k q3_k_s q3_k_m q3_k_l q4_k_s q4_k_m q5_k_s q5_k_m q6_k iq4_nl iq4_xs"
    # 8.5 bits: mixtures store the head, and rows that do not divide into blocks of 256, in up to Q8_0.
    most_bits = {**dict.fromkeys(mixed.split(), 8.5), "f16": 16, "bf16": 16}
    found = {
        name: Quant(name=name, constant=f"LLAMA_FTYPE_MOSTLY_{name.upper()}", most_bits=bits)
        for name, bits in most_bits.items()
    }
    return MappingProxyType({**found, "f32": Quant(name="f32", constant="LLAMA_FTYPE_ALL_F32", most_bits=32)})


QUANTS: Mapping[str, Quant] = _quants()

# "q4" is the usual 4-bit format: the mixture that llama.cpp's documentation recommends.
_ALIASES = {"q4": "q4_k_m", "q5": "q5_k_m", "q6": "q6_k", "q8": "q8_0"}


def find_quant(name: str) -> Quant:
    """The format called ``name``, in upper or lower case. Raises InvalidRequestError for an unknown name."""
    key = name.lower()
    quant = QUANTS.get(_ALIASES.get(key, key))
    if quant is None:
        hint = f"one of {', '.join(['keep', *QUANTS, *_ALIASES])}"
        raise InvalidRequestError(f"unknown quantisation {name!r}", hint=hint)
    return quant


def most_bytes(header: GgufHeader, quant: Quant) -> int:
    """An upper bound of the model's bytes as ``quant``, for the check of disk space."""
    bits = sum(tensor.elements * (quant.most_bits if len(tensor.shape) > 1 else 32) for tensor in header.tensors)
    padding = header.alignment * (len(header.tensors) + 1)
    return int(bits / 8) + header.data_offset + padding


def requantize(source: Path, destination: Path, quant: str, threads: int, job: Job = QUIET) -> GgufHeader:
    """Write ``source`` with its matrices as ``quant`` to ``destination``; returns the checked header of the result.

    ``destination`` is a temporary of the caller, who renames the file; an error removes the file. A quantised source
    is dequantised first, so rounding errors add up. The job hears the bytes written so far.

    llama.cpp's quantizer cannot be stopped: after a cancellation it finishes in the background, into a deleted
    file. Raises InvalidRequestError, ModelFileError, DiskSpaceError, CancelledError, RuntimeUnavailableError.
    """
    chosen = find_quant(quant)
    if threads < 1:
        raise InvalidRequestError(f"threads must be at least 1, not {threads}")
    header = read_header(source)
    if not header.tensors:
        raise ModelFileError(source, "it holds no tensors to quantise")
    written = _name_for_writing(destination)
    api: Any = load().api
    params = api.llama_model_quantize_default_params()
    params.nthread = threads
    params.ftype = getattr(api, chosen.constant)
    params.allow_requantize = any(tensor.type_name not in PLAIN_TYPES for tensor in header.tensors)
    if hasattr(params, "max_buf_size"):
        params.max_buf_size = _BUFFER_BYTES
    codes: list[int] = []
    abandoned = threading.Event()

    def work() -> None:
        codes.append(int(api.llama_model_quantize(os.fsencode(source), written, ctypes.byref(params))))
        if abandoned.is_set():
            _remove(destination)  # llama.cpp opened the file after the cancellation

    # Native code would delay Ctrl-C on the caller's thread. A daemon thread does not delay the end of the process.
    worker = threading.Thread(target=work, name="edgespec-quantize", daemon=True)
    try:
        worker.start()
        while worker.is_alive():
            worker.join(_POLL_S)
            job.check("the quantisation was cancelled; nothing was written")
            _report(source, destination, job)
        if codes != [0]:
            raise _failure(source, destination, chosen, codes)
        with destination.open("rb+") as file:
            os.fsync(file.fileno())
        _report(source, destination, job)
        return read_header(destination)
    except BaseException:
        abandoned.set()
        _remove(destination)
        raise


def _name_for_writing(path: Path) -> bytes:
    """The path as llama.cpp's quantizer opens its output: on Windows in the system's code page, not in UTF-8."""
    if sys.platform != "win32":
        return os.fsencode(path)
    try:
        return str(path).encode("mbcs")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"llama.cpp cannot write to {path}: Windows' code page lacks some of its letters",
            hint="choose a folder with plain letters with -o",
        ) from error


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _report(source: Path, destination: Path, job: Job) -> None:
    written = destination.stat().st_size if destination.exists() else 0
    job.tell("quantising", str(source), done_bytes=written)


def _failure(source: Path, destination: Path, quant: Quant, codes: list[int]) -> Exception:
    free = free_bytes(destination)
    if free < SLACK_BYTES:
        return DiskSpaceError(
            f"the disk filled up while {source.name} was being quantised; existing files are unchanged",
            needed_bytes=SLACK_BYTES,
            free_bytes=free,
            hint="free some space, or give a folder on a larger disk",
        )
    code = f"code {codes[0]}" if codes else "an exception"
    return ModelFileError(
        source,
        f"llama.cpp could not quantise the model to {quant.name} ({code})",
        hint="run with --debug to see llama.cpp's log",
    )

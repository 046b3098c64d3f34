"""How long does the native runtime take to load a model, and what is its peak memory?

Three processes, one after the other, load the file, which is in the page cache by then, and decode 512 tokens in a KV
cache for 2048: half as a prompt, half one by one. The first process keeps no sidecar, the second writes one, the
third maps it. This process samples each child's private memory (USS) every few milliseconds from its start.

The limit is 1.05 times the bytes of the tensors that every token reads, plus the touched pages of the embedding
table, keys and values for the whole context, and 150 MB for everything else: the interpreter, the tokenizer's tables,
buffers.

    python benchmarks/native_memory.py MODEL.gguf [--threads N] [--folder FOLDER]

Prints one JSON object. The sidecar is written to a new folder in FOLDER, which should be on the models' disk, and
removed.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufHeader
from edgespec.files.model_file import read_model_file
from edgespec.runtimes.native.layout import read_layout
from edgespec.runtimes.native.model import NativeSettings, load_native
from edgespec.runtimes.native.weights import SidecarFile

CONTEXT = 2048
TOKENS = 512
EVERYTHING_ELSE_BYTES = 150_000_000
FACTOR = 1.05
SAMPLE_S = 0.01
PAGE_BYTES = 4096


def some_tokens(header: GgufHeader) -> list[int]:
    return random.Random(1).choices(range(header.vocabulary_size), k=TOKENS)


def embedding_bytes(header: GgufHeader) -> int:
    """Bytes of the embedding table's pages that the tokens touch."""
    tensor = read_layout(header).embedding_rows.tensor
    row_bytes = tensor.byte_count // header.vocabulary_size
    pages: set[int] = set()
    for token in some_tokens(header):
        first = tensor.offset + token * row_bytes
        pages.update(range(first // PAGE_BYTES, (first + row_bytes - 1) // PAGE_BYTES + 1))
    return len(pages) * PAGE_BYTES


def decode(path: Path, sidecar: Path | None, threads: int) -> None:
    """The child's work; prints the seconds of loading."""
    file = read_model_file(path)
    tokens, half = some_tokens(file.header), TOKENS // 2
    started = time.perf_counter()
    kept = None if sidecar is None else SidecarFile(path=sidecar, sha256=file.identity)
    model = load_native(file, NativeSettings(threads=threads), sidecar=kept)
    load_s = time.perf_counter() - started
    with model, model.open(CONTEXT) as sequence:
        sequence.forward(tokens[:half], 1)
        for token in tokens[half:]:
            sequence.forward([token], 1)
        print(
            json.dumps({"load_s": round(load_s, 3), "total_s": round(time.perf_counter() - started, 3)}), flush=True
        )
        time.sleep(5 * SAMPLE_S)


def watch(path: Path, sidecar: Path | None, threads: int) -> dict[str, float]:
    """Run a child and sample its memory until it ends."""
    command = [sys.executable, __file__, str(path), "--threads", str(threads), "--child"]
    if sidecar is not None:
        command += ["--sidecar", str(sidecar)]
    peak = looks = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        process = psutil.Process(child.pid)
        while child.poll() is None:
            try:
                peak = max(peak, process.memory_full_info().uss)
            except psutil.Error:
                break
            looks += 1
            time.sleep(SAMPLE_S)
        said = child.communicate()[0]
    if child.returncode:
        raise SystemExit(f"the child ended with code {child.returncode}")
    return {**json.loads(said), "peak_uss_bytes": peak, "looks": looks}


def measure(path: Path, threads: int, folder: Path) -> dict[str, object]:
    """Peak memory and load times, with the limit."""
    header = read_header(path)
    with path.open("rb") as file:  # into the page cache
        while file.read(1 << 24):
            pass
    parts = {
        "tensors_per_token_bytes": header.bytes_per_forward,
        "embedding_pages_bytes": embedding_bytes(header),
        "kv_bytes": header.kv_bytes_per_token(16) * CONTEXT,
        "everything_else_bytes": EVERYTHING_ELSE_BYTES,
    }
    limit = round(FACTOR * header.bytes_per_forward) + sum(list(parts.values())[1:])
    with tempfile.TemporaryDirectory(dir=folder) as name:
        sidecar = Path(name) / "tiles"
        runs = {
            "without_sidecar": watch(path, None, threads),
            "sidecar_written": watch(path, sidecar, threads),
            "sidecar_mapped": watch(path, sidecar, threads),
        }
        kept = sidecar.stat().st_size if sidecar.exists() else None
    peak = max(run["peak_uss_bytes"] for run in runs.values())
    return {
        "model": path.name,
        "threads": threads,
        "context": CONTEXT,
        "tokens": TOKENS,
        **parts,
        "limit_bytes": limit,
        "peak_over_limit": round(peak / limit, 3),
        "sidecar_bytes": kept,
        "runs": runs,
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sidecar", type=Path, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        decode(arguments.model, arguments.sidecar, arguments.threads)
        return
    json.dump(measure(arguments.model, arguments.threads, arguments.folder), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()

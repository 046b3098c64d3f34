"""Compare our tokenizer with llama.cpp's on drawn texts: the number of different results, and the time.

    python -m benchmarks.tokenizer_ids [FILE.gguf ...] [--texts 100000] [--seed 0]

Without files: the vocabularies of llama.cpp's tests. Texts with a character that llama.cpp is known to treat
otherwise are counted separately: those of Unicode 16, and marks and capitals where it approximates the split. Exit
status 1 if any other text differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import islice
from pathlib import Path

from edgespec.files.gguf.header import read_header
from edgespec.files.home import home
from edgespec.text.tokenizers.gguf import GgufTokenizer
from edgespec.text.tokenizers.llama_cpp import LlamaTokenizer
from edgespec.text.tokenizers.tokenizer import Tokenizer
from edgespec.text.tokenizers.vocabulary import unsupported
from tests.support.token_texts import is_cut_otherwise, is_of_unicode_16, special_texts, token_texts
from tests.support.vocabularies import real_vocabularies


def compare(path: Path, texts: int, seed: int) -> int:
    """Print a row of the table; returns the number of texts that differ and should not."""
    header = read_header(path)
    started = time.perf_counter()
    ours = GgufTokenizer(header)
    own_s = time.perf_counter() - started
    LlamaTokenizer(path, header).close()  # loads the library, which must not be timed
    started = time.perf_counter()
    reference = LlamaTokenizer(path, header)
    reference_s = time.perf_counter() - started
    pieces = [ours.token_bytes(token).decode("utf-8", "replace") for token in range(ours.vocabulary_size)]
    tokenizers: tuple[Tokenizer, Tokenizer] = (ours, reference)
    different = known = 0
    pre = str(header.metadata.get("tokenizer.ggml.pre"))
    spent = [0.0, 0.0]
    for number, text in enumerate(islice(token_texts(seed, pieces, special_texts(path)), texts)):
        found = []
        for place, tokenizer in enumerate(tokenizers):
            started = time.perf_counter()
            found.append(tokenizer.encode(text, special=number % 2 == 0, add_bos=number % 3 == 0))
            spent[place] += time.perf_counter() - started
        if found[0] != found[1]:
            if any(is_of_unicode_16(each) or is_cut_otherwise(each, pre) for each in text):
                known += 1
            else:
                different += 1
                print(f"differs: {text!r}: {found}", file=sys.stderr)
    own_us, reference_us = (1e6 * each / texts for each in spent)
    print(
        f"| {path.stem.removeprefix('ggml-vocab-')} | {texts} | {different} | {known} "
        f"| {own_s:.2f}, {reference_s:.2f} | {own_us:.0f}, {reference_us:.0f} |",
        flush=True,
    )
    return different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    place = home()
    files = arguments.files or real_vocabularies(place.create(place.root / "test-data")).values()
    print("| vocabulary | texts | different | known to differ | built in s, llama.cpp | us a text, llama.cpp |")
    print("|---|---|---|---|---|---|")
    known = [path for path in files if unsupported(read_header(path)) is None]
    return 1 if sum(compare(path, arguments.texts, arguments.seed) for path in known) else 0


if __name__ == "__main__":
    sys.exit(main())

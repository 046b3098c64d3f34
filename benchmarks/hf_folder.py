"""Write a model of the store as a Hugging Face folder of safetensors, as transformers would save it.

    python -m benchmarks.hf_folder MODEL OUT

MODEL has the Llama architecture. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from edgespec.files.home import home
from edgespec.store.catalogue import lookup
from edgespec.store.store import Store
from tests.support.hf_folder import write_hf_folder


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    folder = write_hf_folder(Store(home()).fetch(lookup(given.model)).path, given.out)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "llama"}))
    print(json.dumps({"folder": str(folder)}))


if __name__ == "__main__":
    main()

"""Random operations on a cache, each compared with a run from the beginning. `make fuzz` does more of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.runtimes.native.model import NativeSettings
from tests.runtimes.contract import logits
from tests.runtimes.tree_contract import path_to, random_tree
from tests.support.kernel_calls import require_native
from tests.support.loading import load_native
from tests.support.tiny_gguf import write_tiny_gguf

require_native()

CONTEXT, STEPS = 330, 250  # across a border of attention's blocks of 256
WINDOWS: dict[Any, int] = {"llama": 0, "gemma3": 50}


@pytest.mark.slow
@pytest.mark.parametrize("kind", WINDOWS)
def test_random_forks_rewinds_trees_and_kept_paths_score_like_a_fresh_run(tmp_path: Path, kind: Any) -> None:
    source = random.Random(17)
    path = write_tiny_gguf(tmp_path / "tiny.gguf", architecture=kind, quant="Q4_0", window=WINDOWS[kind])
    tokens: list[int] = []  # what the cache should hold
    tree: list[int] = []
    parents: list[int] = []
    checked = {"forward": 0, "tree": 0, "grow": 0}
    with (
        load_native(path, NativeSettings(threads=2 if kind == "gemma3" else 1)) as model,
        model.open(CONTEXT) as fresh,
    ):
        vocabulary = range(model.facts.vocabulary_size)

        def check(expected: list[int], row: np.ndarray, step: int, action: str) -> None:
            fresh.rewind(0)
            assert np.array_equal(fresh.forward(expected, 1).logits(0), row), (step, action, parents)
            checked[action] += 1

        sequence = model.open(CONTEXT)
        for step in range(STEPS):
            room = CONTEXT - len(tokens)
            action = source.choice(["forward", "forward", "tree", "tree", "grow", "keep", "keep", "rewind", "fork"])
            if room < 40 or (len(tokens) > 40 and action == "rewind"):
                tokens = tokens[: source.choice([source.randrange(len(tokens)), len(tokens) - source.randrange(9)])]
                sequence.rewind(len(tokens))
            elif action == "fork":
                tree, parents = [], []
                other = sequence.fork()
                sequence.close()
                sequence = other
            elif action == "forward":
                more = source.choices(vocabulary, k=source.randint(1, 40))
                rows = sequence.forward(more, 1)
                tokens += more
                check(tokens, rows.logits(0), step, action)
            elif action in ("tree", "grow") and len(tree) < 30:
                if action == "tree" or not tree:
                    sequence.rewind(len(tokens))  # drops the previous tree
                    tree, parents = [], []
                more = source.choices(vocabulary, k=source.randint(1, 10))
                every = random_tree(source, len(tree) + len(more))
                rows = sequence.forward_tree(more, every[len(tree) :])
                tree, parents = tree + more, parents + every[len(tree) :]
                found = logits(rows)
                for index in source.sample(range(len(more)), min(2, len(more))):
                    way = path_to(parents, len(tree) - len(more) + index)
                    check(tokens + [tree[node] for node in way], found[index], step, action)
                continue
            elif action == "keep" and tree:
                way = path_to(parents, source.randrange(len(tree)))
                sequence.keep(way)
                tokens += [tree[node] for node in way]
            tree, parents = ([], []) if action != "grow" else (tree, parents)
            assert sequence.length == len(tokens)
        sequence.close()
    assert min(checked.values()) > 20, checked

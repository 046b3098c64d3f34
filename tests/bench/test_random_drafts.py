"""A text with random drafts, in caches that are saved, branched and rewound, against plain decoding's."""

from __future__ import annotations

import pytest

import benchmarks.random_drafts as module
from tests.support.kernel_calls import require_native

require_native()


@pytest.mark.parametrize("kind", module.MODELS)
def test_random_drafts_leave_a_text_unchanged_whatever_happens_to_its_cache(kind: str) -> None:
    found = module.measure(kind, module.TEXT)
    assert found["different_texts"] == 0
    assert found["compared"] >= module.TEXT
    assert found["proposed"] > found["accepted"] > module.TEXT // 4
    assert min(found[what] for what in ("kept", "saved", "branched", "rewound")) > 0
    assert (found["experts"] > 0) == (module.MODELS[kind].get("experts", (0, 0)) > (0, 0))

"""The whole engine on the native runtime: deep drafts, and the text that plain decoding gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.decoding.sampling import Sampling
from edgespec.errors import RuntimeUnavailableError
from edgespec.planning.widths import WIDEST
from tests.support.kernel_calls import require_native
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import TinyModels, answer

PROMPTS = ("hello world", "one two three one two three one", "the people of the world")


@pytest.fixture(autouse=True)
def _library() -> None:
    require_native()


def answers(tiny: TinyModels, **settings: object) -> list[tuple[int, ...]]:
    with tiny.load_speculating(device="native", **settings) as engine:
        assert engine.plan.target.runtime == "native"
        assert engine.plan.numeric_class.widths == tuple(range(1, WIDEST + 1))
        with engine.session() as session:
            found = []
            for prompt in PROMPTS:
                for sampling in (None, Sampling(temperature=1.0, seed=7)):
                    for depth in (0, 8):
                        done = answer(session.generate(prompt, max_tokens=60, depth=depth, sampling=sampling))
                        assert (done.stats.accepted > 0) == (depth > 0)
                        found.append(done.token_ids)
                        session.clear()
            return found


def test_speculation_eight_deep_writes_what_plain_decoding_writes(tiny: TinyModels) -> None:
    found = answers(tiny)
    assert found[0::2] == found[1::2]
    assert len(set(found)) == len(found) // 2
    assert answers(tiny, threads=3) == found


def test_a_model_it_does_not_run_says_so(tiny: TinyModels, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "narrow.gguf", quant="Q8_0", heads=4, kv_heads=4)  # heads of 16, each alone
    with pytest.raises(RuntimeUnavailableError, match="does not run"):
        tiny.load(path, device="native", draft="none")

"""A model drafter with a short head, which becomes whole on the same cache while the text needs other tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from edgespec.decoding.sampling import Chooser, Sampling
from edgespec.drafters.head_coverage import (
    SHORT_ESCAPE_MISSED as ESCAPE_MISSED,
    SHORT_RETURN_MISSED as RETURN_MISSED,
    WINDOW_TOKENS,
)
from edgespec.drafters.model import ModelDrafter
from edgespec.errors import MemoryLimitError
from edgespec.files.token_map import TokenMap
from edgespec.interfaces.counted_text import Context
from edgespec.interfaces.drafting import DraftRequest, DraftState
from edgespec.interfaces.model import Model
from edgespec.runtimes.native.model import NativeModel, NativeSettings
from edgespec.runtimes.native.sequence import NativeSequence
from edgespec.runtimes.translated import TranslatedModel
from tests.support.kernel_calls import require_native
from tests.support.loading import load_native
from tests.support.tiny_gguf import write_tiny_gguf

require_native()

KEPT = np.arange(3, 120)
SAID, UNSAID = 5, range(200, 300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeModel]:
    with load_native(write_tiny_gguf(tmp_path_factory.mktemp("head") / "tiny.gguf"), NativeSettings()) as model:
        yield model


def start(model: Model) -> DraftState:
    size = model.facts.vocabulary_size
    request = DraftRequest(chooser=Chooser(Sampling()), vocabulary_size=size, context_length=400)
    return ModelDrafter(lambda: model).start(request)


def text(missed: int, more: int = 0) -> Context:
    """A text whose last window lacks ``missed`` different tokens, after ``more`` known ones."""
    return Context([SAID] * (more + WINDOW_TOKENS - missed) + [*UNSAID[:missed]])


def written(model: NativeModel, context: Context, few: bool) -> tuple[int, ...]:
    """Three greedy tokens; if ``few``, only from KEPT and the text's tokens."""
    tokens = list(context.tokens)
    said = np.union1d(KEPT, tokens)
    with model.open(400) as sequence:
        for _ in range(3):
            sequence.rewind(0)
            row = sequence.forward(tokens, 1).logits(0)
            tokens.append(int(said[row[said].argmax()] if few else row.argmax()))
    return tuple(tokens[-3:])


def test_a_short_head_becomes_whole_while_the_text_needs_other_tokens(model: NativeModel) -> None:
    with model.with_head_rows(KEPT) as short:
        state = start(short)
        said, rare = [SAID] * WINDOW_TOKENS, [*UNSAID[:ESCAPE_MISSED]]
        for tokens, few in (
            (said, True),
            ([*said, *rare[:-1]], True),
            ([*said, *rare], False),
            ([*said, *rare, *said[RETURN_MISSED + 1 :]], False),
            ([*said, *rare, *said[RETURN_MISSED:]], True),
        ):
            context = Context(tokens)
            assert state.propose(context, 3).tokens == written(model, context, few), len(tokens)
        state.close()


def test_the_short_head_of_a_drafter_with_another_vocabulary_becomes_whole_too(model: NativeModel) -> None:
    last = model.facts.vocabulary_size - 1
    turned = np.arange(last, -1, -1)  # the drafter's token for each of the target's, and back
    numbers = {"starts": np.arange(last + 2, dtype=np.int32), "pieces": turned, "firsts": turned}
    tokens = TokenMap(tokens=np.arange(last + 1), rows=turned, coverage=1.0, **numbers)  # type: ignore[arg-type]
    with model.with_head_rows(KEPT) as short:
        for missed, few in ((ESCAPE_MISSED - 1, True), (ESCAPE_MISSED, False)):
            state, own = start(TranslatedModel(short, tokens)), text(missed)
            context = Context([last - token for token in own.tokens])
            assert state.propose(context, 3).tokens == tuple(last - token for token in written(model, own, few))
            state.close()
        with closing(TranslatedModel(short, tokens).open(8)) as sequence:
            assert sequence.frequent_ids == {last - token for token in KEPT.tolist()}


def test_switching_the_head_reads_no_token_again(model: NativeModel) -> None:
    with model.with_head_rows(KEPT) as short:
        state = start(short)
        context = text(0)
        state.propose(context, 1)
        for token in UNSAID[:ESCAPE_MISSED]:
            context = Context([*context.tokens, token])
            assert state.lag(context) <= 1
            proposal = state.propose(context, 1)
        assert proposal.tokens == written(model, context, few=False)[:1]
        state.close()


def test_a_short_head_proposes_rare_tokens_that_the_text_has_had(model: NativeModel) -> None:
    with model.with_head_rows(KEPT) as short:
        state = start(short)
        likely = int(written(model, text(1), few=False)[0])
        assert likely not in KEPT
        context = Context([likely, *text(0).tokens])
        assert state.propose(context, 3).tokens == written(model, context, few=True)
        again = Context([*context.tokens, *[UNSAID[0]] * ESCAPE_MISSED])
        assert state.propose(again, 3).tokens == written(model, again, few=True), "missed once"
        assert set(again.tokens) - set(KEPT) == {likely, UNSAID[0]}
        state.close()


def test_without_memory_for_another_head_the_current_head_stays(
    model: NativeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_sequence: NativeSequence, _also: object) -> None:
        raise MemoryLimitError("no room", needed_bytes=None, available_bytes=None)

    with model.with_head_rows(KEPT) as short:
        state = start(short)
        monkeypatch.setattr(NativeSequence, "score_frequent", refuse)
        proposed = state.propose(text(2), 3).tokens
        assert len(proposed) == 3
        assert set(proposed) <= set(KEPT.tolist())
        state.close()


def test_a_model_without_a_short_head_never_switches_heads(model: NativeModel) -> None:
    state = start(model)
    for context in (text(0), text(30, more=10)):
        assert state.propose(context, 3).tokens == written(model, context, few=False)
    state.close()

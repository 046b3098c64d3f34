"""Gated delta layers: every row has plain decoding's bits, whatever was rewound, saved, branched or batched."""

from __future__ import annotations

import mmap
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from edgespec.architectures.deltas import Deltas
from edgespec.engine.events import Done, Notice
from edgespec.errors import CancelledError, InvalidRequestError, ModelFileError
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufHeader
from edgespec.interfaces.rows import LogitsArray
from edgespec.runtimes.native import rewinds
from edgespec.runtimes.native.cache import NativeCache
from edgespec.runtimes.native.layout import read_layout, unsupported_reason
from edgespec.runtimes.native.library import BAD_REQUEST, OK, Threads, load
from edgespec.runtimes.native.model import NativeModel, NativeSettings
from edgespec.runtimes.native.rewinds import Checkpoints, held_bytes
from edgespec.runtimes.native.sequence import NativeSequence
from tests.runtimes.contract import equal, logits
from tests.support.kernel_calls import require_native
from tests.support.loading import load_native
from tests.support.native_batches import Work, batch_of, part_of
from tests.support.native_models import restored, some_tokens
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import TinyModels

require_native()

LENGTH = 300
# One key head for several heads, whole and half blocks of 32, groups of columns and single ones. The last layer of
# one has a state.
KINDS: dict[str, dict[str, Any]] = {
    "Q8_0": {"quant": "Q8_0", "layers": 4, "interval": 4},
    "F32": {"layers": 3, "deltas": (6, 3, 16, 2), "head_length": 32, "rope_length": 16},
    "Q4_0": {"quant": "Q4_0", "deltas": (2, 1, 80, 4)},
    "mixture": {"quant": "Q8_0", "architecture": "qwen35moe", "experts": (6, 2), "shared": 96},
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("deltas")
    return {
        name: write_tiny_gguf(folder / f"{name}.gguf", **{"architecture": "qwen35"} | kind)
        for name, kind in KINDS.items()
    }


@pytest.fixture(scope="module")
def plain(paths: dict[str, Path]) -> dict[str, list[LogitsArray]]:
    """The scores after each token, decoded one by one."""
    found: dict[str, list[LogitsArray]] = {}
    for name, path in paths.items():
        tokens = some_tokens(path, LENGTH)
        with load_native(path, NativeSettings()) as model, model.open(LENGTH) as sequence:
            found[name] = [sequence.forward([token], 1).logits(0) for token in tokens]
    return found


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(paths: dict[str, Path], kind: str) -> Iterator[NativeModel]:
    with load_native(paths[kind], NativeSettings(threads=3)) as model:
        yield model


# ------------------------------------------------------------------------------------------------- bits


class Walk:
    """Random operations on a cache of one text; each row is compared with plain decoding's."""

    def __init__(self, model: NativeModel, tokens: list[int], expected: list[LogitsArray], seed: int) -> None:
        self.model, self.tokens, self.expected = model, tokens, expected
        self.sequence = model.open(len(tokens))
        self.source = random.Random(seed)
        self.done: dict[str, int] = {}

    def step(self) -> None:
        kinds = ("read", "score", "score", "score", "back", "back", "far", "fork", "save", "cancel")
        kind = self.source.choice(kinds) if self.sequence.length else "read"
        if len(self.tokens) - self.sequence.length < 64:
            kind = "far"
        getattr(self, kind)()
        self.done[kind] = self.done.get(kind, 0) + 1

    def read(self) -> None:
        start = self.sequence.length
        more = self.tokens[start : start + self.source.randint(1, 150)]
        scored = self.source.randint(0, min(8, len(more)))
        self.compare(start + len(more) - scored, logits(self.sequence.forward(more, scored)))

    def score(self) -> None:
        start = self.sequence.length
        more = self.tokens[start : start + self.source.choice((1, 2, 8, 32))]
        self.compare(start, logits(self.sequence.forward(more, len(more))))
        self.sequence.rewind(start + self.source.randint(0, len(more)))

    def compare(self, start: int, found: list[LogitsArray]) -> None:
        for index, row in enumerate(found):
            assert np.array_equal(row, self.expected[start + index]), (start, index, self.done)

    def back(self) -> None:
        asked = max(0, self.sequence.length - self.source.randint(0, 24))
        kept = self.sequence._checkpoints
        assert kept is not None
        known = kept.known_from <= asked
        self.sequence.rewind(asked)
        assert self.sequence.length == asked or not known, "what can always be dropped, or is read again"

    def far(self) -> None:
        asked = self.source.randrange(self.sequence.length)
        self.sequence.rewind(asked)
        assert self.sequence.length <= asked

    def fork(self) -> None:
        other = self.sequence.fork()
        self.sequence.close()
        self.sequence = other

    def save(self) -> None:
        length = self.sequence.length
        if not self.sequence.holds(length):
            return
        self.sequence = restored(self.model, self.sequence, length, len(self.tokens))

    def cancel(self) -> None:
        """A forward that was cancelled between layers leaves the cache usable."""
        start = self.sequence.length
        more = self.tokens[start : start + self.source.choice((4, 150))]

        def late(cache: NativeCache, ids: Any, position: int, rows: int, **named: Any) -> None:
            decode(cache, ids, position, rows, **named)
            raise CancelledError("late")

        decode = NativeCache.decode
        with patch.object(NativeCache, "decode", late), pytest.raises(CancelledError):
            self.sequence.forward(more, min(4, len(more)))
        assert self.sequence.length <= start


def test_every_row_has_the_bits_of_plain_decoding(
    model: NativeModel, kind: str, paths: dict[str, Path], plain: dict[str, list[LogitsArray]]
) -> None:
    walk = Walk(model, some_tokens(paths[kind], LENGTH), plain[kind], seed=3)
    with patch.object(rewinds, "_LEAST_APART", 16), patch.object(rewinds, "_APART", 48):
        for _ in range(60):
            walk.step()
    assert min(walk.done.values()) > 1, walk.done
    walk.sequence.close()


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("level", load().levels)
def test_threads_and_levels_give_the_same_bits(
    kind: str, paths: dict[str, Path], plain: dict[str, list[LogitsArray]], level: str, threads: int
) -> None:
    tokens = some_tokens(paths[kind], 200)
    settings = NativeSettings(threads=threads, level=level)
    with load_native(paths[kind], settings) as model, model.open(LENGTH) as sequence:
        sequence.forward(tokens[:150], 0)
        for width in (1, 3, 17, 29):
            start = sequence.length
            rows = logits(sequence.forward(tokens[start : start + width], width))
            assert equal(rows, plain[kind][start : start + width])
            sequence.rewind(start + width // 2)


def test_sequences_that_share_a_forward_do_not_change_each_others_rows(
    model: NativeModel, kind: str, paths: dict[str, Path], plain: dict[str, list[LogitsArray]]
) -> None:
    tokens, chance = some_tokens(paths[kind], LENGTH), random.Random(4)
    with batch_of(model, 3, load().levels[-1]) as batch:
        caches, lengths = [batch.open(LENGTH) for _ in range(3)], [0, 0, 0]
        for _ in range(25):
            counts = [chance.choice((1, 5, 70)) for _ in caches]
            scored = [min(count, 5) for count in counts]
            work = [
                Work(cache, tokens[length : length + count], length, rows)
                for cache, length, count, rows in zip(caches, lengths, counts, scored, strict=True)
            ]
            assert batch.forward(work) == [OK] * 3
            for own, (cache, length) in enumerate(zip(caches, lengths, strict=True)):
                first = length + counts[own] - scored[own]
                for index, row in enumerate(cache.scores(scored[own])):
                    assert np.array_equal(row, plain[kind][first + index])
                lengths[own] = first + chance.randint(1, scored[own])
            lengths = [length if length < LENGTH - 80 else LENGTH - 80 for length in lengths]
            if LENGTH - 80 in lengths:
                break
        tree = Work(caches[0], tokens[:2], lengths[0], 2, parents=[-1, 0])
        assert batch.forward([tree]) == [BAD_REQUEST]


# ------------------------------------------------------------------------------------------------- positions


def test_a_rewind_reads_a_little_again_and_leaves_more_to_the_caller(paths: dict[str, Path]) -> None:
    tokens = some_tokens(paths["Q8_0"], LENGTH)
    with load_native(paths["Q8_0"], NativeSettings()) as model, model.open(LENGTH) as sequence:
        sequence.forward(tokens[:130], 1)
        sequence.forward(tokens[130:300], 1)
        kept = sequence._checkpoints
        assert kept is not None
        assert sorted(kept.states) == [130], "where the second prompt begins"
        sequence.rewind(150)
        assert (sequence.length, kept.tokens) == (150, tokens[:150])
        sequence.rewind(120)
        assert (sequence.length, sorted(kept.states)) == (120, [])
        with sequence.fork() as other:
            other.rewind(10)
            assert other.length == 10
        with patch.object(rewinds, "MOST_READ_AGAIN", 9):
            sequence.rewind(10)
        assert (sequence.length, kept.tokens) == (0, [])


def test_a_prompt_in_slices_is_kept_where_it_begins_and_ends(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", architecture="qwen35", **KINDS["Q8_0"])

    def read(sequence: NativeSequence, tokens: list[int]) -> None:
        """As the engine reads a prompt: its last token alone."""
        for start in range(0, len(tokens) - 1, 256):
            sequence.forward(tokens[start : min(start + 256, len(tokens) - 1)], 0)
        sequence.forward(tokens[-1:], 1)

    tokens = some_tokens(path, 3000)
    with load_native(path, NativeSettings()) as model, model.open(3000) as sequence:
        assert sequence._checkpoints is not None
        read(sequence, tokens[:700])
        assert sorted(sequence._checkpoints.states) == [699], "not at each slice"
        for token in tokens[700:900]:
            sequence.forward([token], 1)
        read(sequence, tokens[900:1700])
        assert sorted(sequence._checkpoints.states) == [699, 900, 1699]
        with sequence.fork() as other:
            assert other._checkpoints is not None
            read(other, tokens[1700:2400])
            assert sorted(other._checkpoints.states) == [699, 900, 1699, 2399], "1700 is near to 1699"
        sequence.rewind(900)
        assert sequence.length == 900, "nothing is read again"
        read(sequence, tokens[900:1700])
        assert sorted(sequence._checkpoints.states) == [699, 900, 1699]


def test_layers_with_a_state_have_no_keys_to_read_or_write(paths: dict[str, Path]) -> None:
    """Their parts are numbered all the same: those of the keys, then those of the values, two of each layer."""
    with load_native(paths["Q8_0"], NativeSettings()) as model, model.open(LENGTH) as sequence:
        api, handle, length = load().api, sequence._native._open(), 16
        sequence.forward(some_tokens(paths["Q8_0"], length), 0)
        for number in range(16):
            size = api.es_part_bytes(handle, number, 0, length)
            part = np.zeros(size, np.uint8)
            status = OK if number % 8 in (6, 7) else BAD_REQUEST
            for call in (api.es_read_part, api.es_write_part):
                assert call(handle, number, 0, length, part.ctypes.data, size) == status, number
            assert size == 2 * 16 * length
            assert part.any() == (status == OK)
        assert not api.es_part_bytes(handle, 16, 0, length)


def test_a_model_without_attention_has_no_cache(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", architecture="qwen35", quant="Q8_0", layers=2, interval=3)
    tokens = some_tokens(path, 60)
    with load_native(path, NativeSettings(threads=2)) as model, model.open(LENGTH) as sequence:
        assert model.facts.kv_bytes_per_token == 0
        rows = [sequence.forward([token], 1).logits(0) for token in tokens]
        with sequence.fork() as other:
            other.rewind(50)
            assert equal(logits(other.forward(tokens[50:], 10)), rows[50:])
        with restored(model, sequence, 50, LENGTH) as other:
            assert equal(logits(other.forward(tokens[50:], 10)), rows[50:])


def test_the_library_refuses_a_layer_that_shares_the_cache_of_one_with_a_state(paths: dict[str, Path]) -> None:
    with load_native(paths["Q8_0"], NativeSettings()) as model:
        part = part_of(model)
        part.struct.layer[3].cache_layer = 0
        assert not part.library.api.es_batch_open(part.struct, Threads(count=1), 0)


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say what is mapped")
def test_a_cache_maps_as_much_as_it_says(paths: dict[str, Path]) -> None:
    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE

    context = 2**22
    with load_native(paths["Q8_0"], NativeSettings()) as model:
        before, cache_bytes = mapped(), model.facts.cache_bytes(context)
        with model.open(context):
            assert 0.9 < (mapped() - before) / cache_bytes < 1.5


def test_a_tree_is_refused(paths: dict[str, Path]) -> None:
    with load_native(paths["Q8_0"], NativeSettings()) as model, model.open(LENGTH) as sequence:
        assert not model.facts.can_branch
        assert model.facts.can_rewind
        with pytest.raises(InvalidRequestError, match="must be a chain"):
            sequence.forward_tree([1, 2], [-1, -1])


def test_checkpoints_far_from_each_other_stay() -> None:
    kept, state = Checkpoints(), np.zeros(1, np.uint8)
    assert [kept.wants(each, turn=True) for each in (127, 128)] == [False, True]
    assert [kept.wants(each, turn=False) for each in (2047, 2048)] == [False, True]
    for position in (1000, 2000, 2100, 3000, 3010):
        kept.keep(position, state)
    assert sorted(kept.states) == [1000, 2000, 3000, 3010], "the one nearest to the one before it goes"
    assert [kept.nearest(length) for length in (999, 1000, 2999, 9000)] == [0, 1000, 2000, 3010]
    other = kept.copy()
    kept.cut(2000)
    assert sorted(kept.states) == [1000, 2000]
    assert len(other.states) == 4
    kept.begin(700)
    kept.fed([5, 6, 7], 700)
    assert kept.again(700, 702) == [5, 6]
    assert kept.again(699, 702) is None
    assert not kept.states


# ------------------------------------------------------------------------------------------------- files


def test_facts_count_states_rows_and_checkpoints(paths: dict[str, Path]) -> None:
    path = paths["Q8_0"]  # one layer of attention of four
    with load_native(path, NativeSettings()) as model, model.open(LENGTH) as sequence:
        facts, native = model.facts, sequence._native
        assert facts.kv_bytes_per_token == 2 * 2 * 16 * 2
        assert facts.cache_bytes(100) - facts.cache_bytes(0) == 100 * facts.kv_bytes_per_token
        state, row = 4 * 32 * 32, 4 * 64 + 2 * 4
        assert native._state_bytes == 3 * 4 * (state + 3 * row)
        assert facts.windowed.state_bytes == 3 * 4 * (2 * state + 96 * row) + 4 * native._state_bytes
    assert held_bytes(None, 3) == 0


def with_keys(header: GgufHeader, **changes: Any) -> GgufHeader:
    keys = {f"qwen35.{key.replace('__', '.')}": value for key, value in changes.items()}
    return replace(header, metadata={k: v for k, v in (dict(header.metadata) | keys).items() if v is not None})


WRONG: dict[str, dict[str, Any]] = {
    "its ssm.group_count is 0: a whole number of at least 1": {"ssm__group_count": 0},
    "does not state qwen35.ssm.state_size": {"ssm__state_size": None},
    "4 heads of its delta layers cannot share 3 key heads": {"ssm__group_count": 3},
    "its ssm.inner_size is 64, not 4 heads of 32": {"ssm__inner_size": 64},
    "its full_attention_interval is 0": {"full_attention_interval": 0},
    "its attention.recurrent_layers is (True,)": {"attention__recurrent_layers": (True,)},
    "its rope.dimension_sections is None": {"rope__dimension_sections": None},
    "5 of its 4 layers draft": {"nextn_predict_layers": 5},
    "tensor blk.3.attn_qkv.weight is missing": {"full_attention_interval": 5},
    "tensor blk.0.attn_qkv.weight has shape (64, 256), not (64, 384)": {
        "ssm__group_count": 4,
    },
}
UNSUPPORTED: dict[str, dict[str, Any]] = {
    "its delta layers have 1 heads of 272": {
        "ssm__state_size": 272,
        "ssm__time_step_rank": 1,
        "ssm__group_count": 1,
        "ssm__inner_size": 272,
    },
    "convolve 9 rows": {"ssm__conv_kernel": 9},
    "its rope.dimension_sections is (2, 2, 2, 2)": {"rope__dimension_sections": (2, 2, 2, 2)},
    "its rope.dimension_sections is (8, 0, 0, 0)": {"rope__dimension_sections": (8, 0, 0, 0)},
}


@pytest.mark.parametrize("words", [*WRONG, *UNSUPPORTED])
def test_a_file_that_the_kernels_could_not_compute_is_refused_in_one_sentence(
    paths: dict[str, Path], words: str
) -> None:
    header = with_keys(read_header(paths["Q8_0"]), **(WRONG | UNSUPPORTED)[words])
    try:
        found = unsupported_reason(header)
    except ModelFileError as error:
        found = error.message
        assert words in WRONG
    assert words in str(found)


def test_of_a_model_whose_layers_all_have_attention_nothing_about_states_is_used(tmp_path: Path) -> None:
    """Also what no tensor bears out; and its cache holds more rows than a state's log."""
    path = write_tiny_gguf(tmp_path / "attention.gguf", architecture="qwen35", quant="Q8_0", interval=1)
    huge = {"ssm__time_step_rank": 2**59, "ssm__group_count": 1, "ssm__state_size": 16, "ssm__inner_size": 2**63}
    assert read_layout(with_keys(read_header(path), **huge)).deltas is None
    tokens = some_tokens(path, 120)
    with load_native(path, NativeSettings()) as model, model.open(128) as sequence:
        rows = logits(sequence.forward(tokens, 4))
        sequence.rewind(0)
        assert equal([logits(sequence.forward([token], 1))[0] for token in tokens][-4:], rows)


def test_the_expert_that_every_row_uses_has_a_length_that_the_kernels_take(paths: dict[str, Path]) -> None:
    def refused(**keys: Any) -> str | None:
        header = read_header(paths["mixture"])
        return unsupported_reason(
            replace(header, metadata=dict(header.metadata) | {f"qwen35moe.{key}": keys[key] for key in keys})
        )

    assert refused() is None
    with pytest.raises(ModelFileError, match=r"ffn_gate_shexp\.weight has shape \(64, 96\), not \(64, 48\)"):
        refused(expert_shared_feed_forward_length=48)
    assert refused(expert_weights_scale=2.0) == "its expert_weights_scale is 2.0"


def test_a_drafting_layer_of_another_form_is_left_out_with_a_notice_and_drafts_keep_the_text(
    tiny: TinyModels, tmp_path: Path
) -> None:
    """The third layer drafts."""
    settings = {"nextn_predict_layers": 1}
    path = write_tiny_gguf(tmp_path / "drafts.gguf", architecture="qwen35", layers=3, settings=settings)
    header = read_header(path)
    assert (header.attention_layers, header.drafting_layers) == (1, 1)
    with_one_more = with_keys(header, nextn_predict_layers=None)
    assert unsupported_reason(with_one_more) is None
    assert unsupported_reason(with_keys(header, block_count=2, nextn_predict_layers=None)) == (
        "it has a tensor blk.2.attn_qkv.weight"
    )
    with tiny.load_speculating(path, runtime="native", draft_runtime="native", threads=2) as engine:
        left_out = sum(each.byte_count for each in header.tensors if each.name.startswith("blk.2."))
        facts = engine.pair.target.facts
        assert (facts.can_rewind, facts.weight_bytes) == (True, header.tensor_bytes - left_out)
        found = []
        for depth in (0, 8):
            with engine.session() as session:
                events = list(session.generate("the people", max_tokens=120, depth=depth))
            done = events[-1]
            assert isinstance(done, Done)
            assert (done.stats.proposed > 0) == (depth > 0)
            found.append(done.token_ids)
            told = [event.text for event in events if isinstance(event, Notice)]
            why = "tensor blk.2.nextn.enorm.weight is missing"
            assert (f"drafts has a layer that drafts, which is not used: {why}" in told) == (depth == 0)
        assert found[0] == found[1]
        assert len(found[0]) == 120


@pytest.mark.parametrize(
    ("keys", "count"),
    [
        ({}, 1),
        ({"full_attention_interval": None}, 1),
        ({"full_attention_interval": 2}, 2),
        ({"attention__recurrent_layers": (False, True, False, True)}, 2),
        ({"ssm__state_size": None}, 4),
    ],
)
def test_a_header_counts_the_layers_with_keys_and_values(
    paths: dict[str, Path], keys: dict[str, Any], count: int
) -> None:
    assert with_keys(read_header(paths["Q8_0"]), **keys).attention_layers == count


def test_sizes_of_a_layer() -> None:
    deltas = Deltas(heads=32, key_heads=16, length=128, kernel=4, layers=(True, False))
    assert (deltas.mixed, deltas.scanned) == (8192, 4096)

"""What a runtime implements: weights (Model), one cache (Sequence), and the facts and numeric class of both."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from edgespec.interfaces.rows import Rows

T = TypeVar("T")

# Prompt tokens per native call. Larger chunks gain under 3 % on CPUs (the weights are already read once per 256
# tokens) and delay a cancel in native code that does not check for it.
PREFILL_CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The experts of a model, those of all layers together: a row uses ``used`` of ``count``.

    ``share`` of the bytes that a forward of one row reads are theirs.
    """

    used: int
    count: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedLayers:
    """What a model's layers with a window take of its cache, if they keep only the last ``positions``, and those with
    a recurrent state, which take ``state_bytes`` of a cache of any length."""

    bytes_per_token: int = 0
    positions: int = 0
    state_bytes: int = 0

    def spared_bytes(self, tokens: int) -> int:
        """What a cache of ``tokens`` takes less than one that keeps all positions."""
        return self.bytes_per_token * max(0, tokens - self.positions) - self.state_bytes


ALL_KEPT = WindowedLayers()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about loaded weights. ``settings`` are the runtime's own, as they enter the numeric class.

    ``kv_bytes_per_token`` are those of all layers, of which the ``windowed`` ones keep only the last positions.
    ``can_branch``: its Sequences are TreeSequences, and a tree's rows are bit-equal to those of its paths as chains.
    ``bit_equal_by_construction``: a row's bits do not depend on the other rows of its forward, so widths compared at
    some context lengths are bit-equal at any. ``mask_id``: as a drafter it drafts all tokens in one forward, in which
    this token stands for each draft token not yet known; None for other models. ``follows``: it drafts by a target's
    hidden rows, and its Sequences are FollowingSequences. ``borrows``: they read its cache as well, and need the
    hidden rows of scored tokens alone. ``mixture``: None without experts.
    """

    name: str
    sha256: str | None
    architecture: str
    runtime: str
    build: str
    device: str
    threads: int
    vocabulary_size: int
    trained_context_length: int
    weight_bytes: int
    bytes_per_forward: int
    kv_bytes_per_token: int
    kv_type: str
    can_rewind: bool = True
    can_fork: bool = False
    can_branch: bool = False
    bit_equal_by_construction: bool = False
    mask_id: int | None = None
    follows: bool = False
    borrows: bool = False
    mixture: Mixture | None = None
    windowed: WindowedLayers = ALL_KEPT
    settings: Mapping[str, str | int | bool] = field(default_factory=dict)

    @property
    def place(self) -> tuple[str, str, object]:
        """The runtime, the device, and how many layers are on it."""
        return self.runtime, self.device, self.settings.get("gpu_layers")

    @property
    def setting(self) -> tuple[object, ...]:
        """All that the same weights may run in otherwise."""
        return self.runtime, self.device, self.threads, self.kv_type, dict(self.settings)

    def cache_bytes(self, tokens: int) -> int:
        """What a cache of that many tokens takes."""
        return self.kv_bytes_per_token * tokens - self.windowed.spared_bytes(tokens)

    @property
    def cache_class(self) -> dict[str, Any]:
        """What a cache's bits depend on, besides the weights; not the threads, whatever runtime can save a cache."""
        return {
            "runtime": self.runtime,
            "build": self.build,
            "device": self.device,
            "kv_type": self.kv_type,
            "settings": dict(self.settings),
        }


@runtime_checkable
class Sequence(Protocol):
    """One KV cache. Owned by one Session; only ``cancel`` may be called from any thread."""

    @property
    def length(self) -> int:
        """Tokens in the cache."""

    @property
    def context_length(self) -> int:
        """Tokens the cache can hold."""

    def forward(self, tokens: abc.Sequence[int], rows: int) -> Rows:
        """Append ``tokens`` and score the last ``rows`` of them (0 <= rows <= len(tokens)).

        On any exception the cache is back at its former length, as by ``rewind``. Raises ContextFullError,
        CancelledError, ForwardError, ClosedError.
        """

    def rewind(self, length: int) -> None:
        """Drop everything from ``length`` on. Raises RewindError if the cache cannot.

        Layers with a window may have given back what the tokens after a far rewind see. Then all tokens are dropped,
        to be read again: see ``length``. What the last forwards appended, up to 2048 tokens, can always be dropped.
        """

    def fork(self) -> Sequence:
        """A second Sequence with the same content. Raises RuntimeUnavailableError where unsupported."""

    def run(self, job: Callable[[], T]) -> T:
        """Run ``job`` on this Sequence's worker thread and wait: forwards inside it cost no thread switch."""

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Hand ``job`` to the worker thread without waiting for it."""

    def cancel(self) -> None:
        """Make the forward in flight, and every later one until ``reset_cancel``, raise CancelledError."""

    def reset_cancel(self) -> None:
        """Forget an earlier ``cancel``."""

    def close(self) -> None:
        """Free the cache and the thread. Idempotent."""


@runtime_checkable
class TreeSequence(Sequence, Protocol):
    """A Sequence that scores several continuations in one forward, as a tree of tokens.

    The tree is not part of the cache: ``length`` does not count it, and ``forward``, ``rewind`` and ``fork`` drop it.
    """

    def forward_tree(self, tokens: abc.Sequence[int], parents: abc.Sequence[int]) -> Rows:
        """Add ``tokens`` to the tree and score every one of them.

        Token i follows the tree token with index ``parents[i]``, counted from the tree's first token and smaller than
        its own index; -1 stands for the cache's last token. Row i equals the row that ``forward`` gives at the end of
        token i's path. On any exception the tree is dropped. Raises what ``forward`` raises.
        """

    def keep(self, path: abc.Sequence[int]) -> None:
        """Append the tokens with these indices, a path down from the cache's end, and drop the rest of the tree.

        Raises InvalidRequestError if ``path`` does not lead down from the cache's end.
        """


@dataclass(frozen=True, slots=True)
class Company:
    """Other answers that one forward computed together with this one: how many, and their rows.

    ``reading``: whether the forward also read a prompt.
    """

    answers: int = 0
    rows: int = 0
    reading: bool = False


ALONE = Company()


@runtime_checkable
class BatchedSequence(Sequence, Protocol):
    """A Sequence whose forwards may be computed together with those of other Sequences."""

    @property
    def company(self) -> Company:
        """The other answers in the last forward, and whether it also read a prompt."""

    @property
    def waited_s(self) -> float:
        """Seconds that the last forward waited before it began, for forwards of other Sequences."""


@runtime_checkable
class MixtureSequence(Sequence, Protocol):
    """A Sequence that counts which experts its forwards read."""

    @property
    def experts_read(self) -> int:
        """Experts that the last forward read, of all layers together; 0 in a model without any."""


@runtime_checkable
class FrequentHeadSequence(Sequence, Protocol):
    """A Sequence that can score a part of the vocabulary, to read fewer rows of its model's output head."""

    @property
    def frequent_ids(self) -> abc.Set[int] | None:
        """The tokens that are scored at first; None if all are scored and none can be left out."""

    def score_all(self) -> None:
        """Score all tokens from the next forward on. The cache stays; earlier Rows are stale. Raises ClosedError."""

    def score_frequent(self, also: abc.Collection[int] = ()) -> None:
        """Score only ``frequent_ids`` and ``also``; other tokens get -infinity. Else as ``score_all``.

        Raises InvalidRequestError for an id outside the vocabulary, MemoryLimitError.
        """


@runtime_checkable
class MappedSequence(Sequence, Protocol):
    """A Sequence that reads some of its model's weights where they lie in the file."""

    def check_file(self) -> None:
        """Raise ModelFileError if the file was written to since the model was loaded: its rows would be nonsense."""


@runtime_checkable
class SavableSequence(Sequence, Protocol):
    """A Sequence whose cache can be kept in a file, and continues from it bit for bit in the same numeric class."""

    @property
    def angles(self) -> str:
        """Which of the model's rotary angles the cache has, for a model that has others in long contexts; else empty.

        A cache continues only with the same angles.
        """

    def part_sizes(self, length: int) -> tuple[int, int]:
        """In how many parts the first ``length`` tokens of a cache are kept, and how many bytes each part has."""

    def holds(self, length: int) -> bool:
        """Whether the cache still has all that is kept of its first ``length`` tokens."""

    def read_part(self, part: int, length: int) -> bytes:
        """One part of the cache's first ``length`` tokens. Raises InvalidRequestError, ClosedError."""

    def restore(self, parts: abc.Iterable[bytes], length: int) -> None:
        """Fill an empty cache with ``length`` tokens from ``parts``, all of them in order.

        On any exception the cache stays empty. Raises InvalidRequestError for other parts or a number that is not
        finite, CancelledError, ClosedError, and what the iteration raises.
        """


@runtime_checkable
class Model(Protocol):
    """Weights on one device. Owned by the Engine; opens any number of Sequences."""

    @property
    def facts(self) -> ModelFacts: ...

    def open(self, context_length: int) -> Sequence:
        """A fresh, empty Sequence. Raises MemoryLimitError, ForwardError, ClosedError."""

    def close(self) -> None:
        """Free the weights, after closing every Sequence still open. Idempotent."""


@runtime_checkable
class LoadsInBackground(Protocol):
    """A Model that loads in the background. A worker process may hold it, be lost, and be started again."""

    @property
    def waits_because(self) -> str | None:
        """Why ``open`` would raise WorkerLostError now but not later; None if there is nothing to wait for."""

    def load(self) -> None:
        """Begin to load if loading has not begun. Returns immediately."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Load, and wait at most ``timeout_s`` seconds (None: no limit). Returns whether loading has finished.

        Raises the loading error if the model was given up.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericClass:
    """The setting within which rows are bit-equal: two runs in one class emit the same text.

    ``widths`` are the forward widths whose rows were probed to be bit-equal; empty means not probed.
    """

    runtime: str
    build: str
    device: str
    threads: int
    kv_type: str
    settings: Mapping[str, str | int | bool]
    widths: tuple[int, ...]

    @staticmethod
    def of(facts: ModelFacts, widths: tuple[int, ...]) -> NumericClass:
        """The class of a model whose ``widths`` were found bit-equal."""
        return NumericClass(
            runtime=facts.runtime,
            build=facts.build,
            device=facts.device,
            threads=facts.threads,
            kv_type=facts.kv_type,
            settings=dict(facts.settings),
            widths=widths,
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "runtime": self.runtime,
            "build": self.build,
            "device": self.device,
            "threads": self.threads,
            "kv_type": self.kv_type,
            "settings": dict(self.settings),
            "widths": list(self.widths),
        }


# The device whose memory is the machine's own.
HOST = "cpu"

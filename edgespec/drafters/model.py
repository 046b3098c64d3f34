"""A smaller model as drafter: it writes a chain with the session's token chooser, one token or all in a forward."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError as CancelledFuture, Future
from dataclasses import dataclass, field, replace

from edgespec.drafters.head_coverage import HeadCoverage, short_head_watch
from edgespec.drafters.one_pass import MOST_TOKENS, RowsWithout, mask_of
from edgespec.drafters.text_index import TextIndex
from edgespec.errors import ClosedError, ContextFullError, MemoryLimitError, WorkerLostError
from edgespec.files.stored_text import LONGEST_MATCH_TOKENS
from edgespec.interfaces.counted_text import Context, CountedText, common_prefix
from edgespec.interfaces.drafting import MODEL, NOTHING, ChainGate, DraftRequest, DraftState, Proposal, values_trees
from edgespec.interfaces.features import Features, FeatureSequence, FollowingSequence
from edgespec.interfaces.model import BatchedSequence, FrequentHeadSequence, LoadsInBackground, Model, Sequence
from edgespec.interfaces.rows import Distribution, Rows

# Limits of the tokens read between two checks of the clock, a sixteenth of the unread text: such a forward takes two
# steps of the target at most, and longer texts use longer forwards, which read the weights less often.
_LEAST_SLICE, _MOST_SLICE = 16, 64

# The longest wait for reading ahead to stop: many times a slice's duration on any machine where a drafter is useful.
_LONGEST_SLICE_S = 5.0

# Tokens of lag that an ordinary round leaves: the last draft token and the token that followed it. Feeding more
# than this is catching up, which is timed separately so that it does not count as the price of a round.
_ORDINARY_LAG_TOKENS = 2


# Alternatives at each position: the second choice is the target's in 10.5 % of positions, the third in 4.2 %, the
# fourth in 1.8 % (the positions of planning/cost/acceptance.py), and all other tokens together in 4 %.
MOST_ALTERNATIVES = 3

# The drafter's own next tokens are guessed from the text. With 3 guesses a drafter that drafts four tokens a round
# needs 0.79 forwards a token, with 5 or 7 as many (docs/results/drafting.md). A forward of 4 rows takes 1.05 to 1.2
# times as long as one of 1 row. A row's attention takes longer in a longer text, so there only a surer guess pays.
_MOST_GUESSES = 3
_LONG_TEXT_TOKENS, _SURE_MATCH_TOKENS = 2048, 3


class ModelDrafter:
    """Drafts with the model that ``model`` returns, loading it if needed. One Sequence for each session."""

    def __init__(self, model: Callable[[], Model], kind: str = MODEL) -> None:
        self._model = model
        self.kind = kind

    def start(self, request: DraftRequest) -> ModelDraftState:
        return ModelDraftState(self._model(), request, self.kind)

    def close(self) -> None:
        """Do nothing: the caller owns the model."""


@dataclass(slots=True)
class _Cache:
    """A Sequence that holds the tokens ``known``, which are the text's from ``start`` on."""

    sequence: Sequence
    start: int = 0
    known: list[int] = field(default_factory=list)
    waited_s: float = 0.0  # of the proposal's forwards, for those of other answers
    companions: int = 0  # other answers in the proposal's drafting forwards
    batched: BatchedSequence | None = field(init=False)  # the sequence, if its forwards may hold others

    def __post_init__(self) -> None:
        self.batched = self.sequence if isinstance(self.sequence, BatchedSequence) else None

    def forward(self, tokens: list[int], rows: int) -> Rows:
        scores = self.sequence.forward(tokens, rows)
        if self.batched is not None:
            self.waited_s += self.batched.waited_s
            if rows:
                self.companions += self.batched.company.answers
        return scores

    def reaches(self, context: Context) -> int:
        """The position in the text up to which the cache agrees; 0 if it agrees nowhere."""
        if self.start >= len(context):
            return 0
        tokens = context.tokens if not self.start else context.tokens[self.start :]
        shared = common_prefix(self.known, tokens)
        return self.start + shared if shared else 0

    def begin(self, position: int) -> None:
        """Hold nothing; the next token is the text's at ``position``."""
        self.start = position
        self.known.clear()
        if isinstance(self.sequence, FollowingSequence):
            self.sequence.begin(position)
        else:
            self.sequence.rewind(0)

    def feed(self, tokens: list[int], count: int) -> list[int]:
        """Read the first ``count`` tokens that follow; returns the remaining ones."""
        self.forward(tokens[:count], 0)
        self.known.extend(tokens[:count])
        return tokens[count:]


class ModelDraftState(DraftState):
    """One session's cache of the drafter.

    Before the model is loaded, and between the loss of its process and the restart, the state proposes nothing, and
    ``silent_because`` says why. Once the model is given up, ``propose`` raises the loading error.

    The state reads the last ``window`` tokens of the text, or continues where it stopped. Reading that takes longer
    than the context's patience stops, and continues at the next proposal.

    A forward of the drafter also takes guesses of the tokens that it will draft: those that the answer's form forces,
    or copies of the text. Each right guess saves a forward (Cascade Speculative Drafting, Chen et al., 2023). The
    chain stays the same, since a row's result does not depend on which rows are computed with it. Models without that
    property get no guesses.

    A one-pass drafter (one_pass.py) gets masks instead of guesses, and its chain takes one forward.

    A drafter that follows the target (features.py) reads the text from where the target's hidden rows are held, and
    reads what was accepted of its chains again with the target's rows. Without a target that keeps them it is silent.
    """

    def __init__(self, model: Model, request: DraftRequest, kind: str = MODEL) -> None:
        self._model = model
        self._kind = kind
        self._request = request
        self._cache: _Cache | None = None
        self._text = CountedText()  # the latest context and its drafted continuation
        self._padded = False  # whether the model has more ids than the target
        self._watch: HeadCoverage | None = None  # None: the model has no short head
        self._cancelled = False
        self._closed = False
        self._lost: str | None = None  # message of the model's loss
        self._full: str | None = None  # why the latest text did not fit
        self._waiting = False  # whether the latest proposal was empty because the model was loading
        self._stop = threading.Event()  # tells ``_reading`` to end
        self._reading: Future[None] | None = None
        self._index: TextIndex | None = None  # of the text; None: the model gets no guesses
        self._mask: int | None = None  # the mask token of a one-pass drafter
        self._usual_lag = _ORDINARY_LAG_TOKENS
        self._features: Features | None = None
        if model.facts.follows and isinstance(request.target, FeatureSequence):
            self._features = request.target.keep_features(scored=model.facts.borrows)

    def read_ahead(self, context: Context) -> list[Future[None]]:
        if self._reading is not None and not self._reading.done():
            return [self._reading]
        if self._closed or not self.ready or not self._lacks(context):
            return []
        if self._cache is None and "process" in self._model.facts.settings:
            return []  # opening one waits for that process: the next round that drafts does it
        cache = self._cache or self._open()
        if cache is None or len(context) > cache.sequence.context_length:
            return []
        context.window = len(context) if cache.start else None
        stop = self._stop = threading.Event()
        self._reading = cache.sequence.submit(lambda: self._read_on(cache, context, stop))
        return [self._reading]

    def _lacks(self, context: Context) -> bool:
        return self.lag(context) + self.unread(context) >= _LEAST_SLICE

    def _read_on(self, cache: _Cache, context: Context, stop: threading.Event) -> None:
        """Read on the cache's thread, in slices so short that the next request hardly waits."""
        lag = self._align(cache, context)
        while lag and not stop.is_set():
            lag = cache.feed(lag, _LEAST_SLICE)

    def stop_reading(self) -> None:
        self._stop.set()

    def _settle_reading(self) -> None:
        """Wait until reading ahead has stopped. If it failed, drafting fails again and reports it."""
        reading, self._reading = self._reading, None
        if reading is not None:
            self.stop_reading()
            with contextlib.suppress(CancelledFuture, TimeoutError):  # closed by now, or begun before a fork
                reading.exception(_LONGEST_SLICE_S)

    def lag(self, context: Context) -> int:
        self._settle_reading()
        reached = 0 if self._cache is None else self._cache.reaches(context)
        return max(0, len(context) - 1 - max(reached, self._begins(reached)))

    def unread(self, context: Context) -> int:
        self._settle_reading()
        cache = self._cache
        if cache is None or not cache.reaches(context):
            return 0
        return max(0, cache.start - (0 if self._features is None else self._features.begins))

    def _begins(self, reached: int) -> int:
        """Where the text must be read from, at least, by a cache that agrees with it up to ``reached``."""
        features = self._features
        return 0 if features is None or features.first <= reached else features.begins

    @property
    def ready(self) -> bool:
        return self._cache is not None or self._waits_because is None

    def load(self) -> None:
        if isinstance(self._model, LoadsInBackground):
            self._model.load()
        self._waiting = True

    @property
    def silent_because(self) -> str | None:
        return self._lost or self._full or (self._waits_because if self._waiting else None)

    @property
    def _waits_because(self) -> str | None:
        return self._model.waits_because if isinstance(self._model, LoadsInBackground) else None

    def propose(self, context: Context, depth: int, gate: ChainGate | None = None) -> Proposal:
        if self._closed:
            raise ClosedError("this drafter's state is closed")
        self._settle_reading()
        if depth < 1 or not len(context):
            return NOTHING
        if self._model.facts.follows and self._features is None:
            self._full = "the target does not keep what it reads"
            return NOTHING
        cache = self._cache or self._open()
        return NOTHING if cache is None else self._run(cache, context, depth, gate)

    def _run(self, cache: _Cache, context: Context, depth: int, gate: ChainGate | None) -> Proposal:
        try:
            # The whole chain is one job on the drafter's thread: one thread switch instead of one for each token.
            return cache.sequence.run(lambda: self._chain(cache, context, depth, gate))
        except WorkerLostError as error:
            self._cache = None
            cache.sequence.close()
            self._lost = error.message
            return NOTHING

    def _open(self) -> _Cache | None:
        """An empty cache; None while the model is loading. Raises what opening raises."""
        model = self._model
        self._mask = mask_of(model.facts)
        self._lost, self._waiting = None, self._waits_because is not None
        if self._waiting:
            return None
        try:
            length, own = self._request.context_length, model.facts.trained_context_length
            # A drafter with a shorter context is used until the text outgrows it; one that borrows has none.
            sequence = model.open(length if model.facts.borrows else min(length, own))
        except WorkerLostError:
            self._waiting = self._waits_because is not None
            if not self._waiting:
                raise
            return None
        target = self._request.target
        if self._features is not None and target is not None and isinstance(sequence, FollowingSequence):
            sequence.follow(self._features, target)
        self._padded = model.facts.vocabulary_size > self._request.vocabulary_size
        if self._index is None and self._mask is None and model.facts.bit_equal_by_construction:
            self._index = TextIndex()
        if self._watch is None and isinstance(sequence, FrequentHeadSequence) and sequence.frequent_ids is not None:
            self._watch = short_head_watch(sequence.frequent_ids)
        self._cache = cache = _Cache(sequence)
        if self._cancelled:
            sequence.cancel()
        return cache

    def _chain(self, cache: _Cache, context: Context, depth: int, gate: ChainGate | None) -> Proposal:
        self._full, started, cache.waited_s, cache.companions = None, time.perf_counter(), 0.0, 0
        try:
            lag = self._align(cache, context)
            if not lag:  # nothing to be read yet
                return NOTHING
            depth = min(depth, cache.sequence.context_length - (len(context) - cache.start) + 1)
            if depth < 1:
                return NOTHING
            self._choose_head(cache.sequence, context)
            hindsight = min(context.hindsight, len(lag) - 1)
            if self._index is not None:
                self._index.follow(context.tokens)
            if self._mask is None:
                guesses = self._guesses(context.tokens, depth - 1)
            else:
                depth = min(depth, MOST_TOKENS)
                guesses = [self._mask] * (depth - 1)
            rows = self._read(cache, lag, guesses, started, context.patience_s, hindsight)
            hits = () if rows is None or hindsight < 1 else tuple(self._would_guess(context, rows, hindsight))
            read_s = time.perf_counter() - started - cache.waited_s
            sync_s = read_s if len(lag) > self._usual_lag else 0.0
            if rows is None:
                return Proposal(drafted_by=self._kind, sync_s=sync_s, waited_s=cache.waited_s)
            chain = self._draft(cache, context, rows, hindsight, guesses, depth, gate)
            return replace(chain, sync_s=sync_s, waited_s=cache.waited_s, hindsight=hits)
        except ContextFullError:  # a text may take more of a translated drafter's tokens than of the target's
            self._full = f"the text is longer than the context of {self._model.facts.name}"
            sync_s = time.perf_counter() - started - cache.waited_s
            return Proposal(drafted_by=self._kind, sync_s=sync_s, waited_s=cache.waited_s)
        finally:
            del cache.known[cache.sequence.length :]

    def _align(self, cache: _Cache, context: Context) -> list[int]:
        """Rewind the cache to what it shares with the context, or clear it; returns the tokens to feed.

        The last token is always fed, for its scores; none are if it is not read yet.
        """
        last, reached = len(context) - 1, cache.reaches(context)
        window, least = context.window, self._begins(reached)
        begins = max(least, 0 if window is None else last - window)
        if not reached or least > reached or (window is not None and not cache.start <= begins <= reached):
            cache.begin(begins)
            reached = begins
        if begins > last:
            return []
        shared = min(reached, last) - cache.start
        cache.sequence.rewind(shared)
        shared = cache.sequence.length
        del cache.known[shared:]
        return context.tokens[cache.start + shared :]

    def _guesses(self, tokens: list[int], most: int) -> list[int]:
        """What the answer's form or the text suggests to follow ``tokens``: at most ``most`` tokens.

        ``tokens`` are the indexed text, possibly with drafted tokens.
        """
        most, chooser = min(most, _MOST_GUESSES), self._request.chooser
        if self._index is None or most < 1:
            return []
        if chooser.is_bound and (forced := chooser.forced(tokens)):
            return list(forced[:most])
        found = self._index.matches(tokens[-LONGEST_MATCH_TOKENS:])
        position, matched = max(found, key=lambda match: match[1], default=(0, 0))
        least = _SURE_MATCH_TOKENS if len(tokens) > _LONG_TEXT_TOKENS else 1
        return self._index.copy(position, most) if matched >= least else []

    def _read(
        self, cache: _Cache, lag: list[int], guesses: list[int], started: float, patience_s: float, before: int
    ) -> Rows | None:
        """Feed ``lag`` and ``guesses``. Returns None if patience ended before all of ``lag`` was read.

        Otherwise the scores of the last token of ``lag``, of ``before`` tokens before it, and of each guess.
        """
        size = len(lag) if patience_s == math.inf else min(_MOST_SLICE, max(_LEAST_SLICE, len(lag) // 16))
        size = max(size, before + 1)
        while len(lag) > size:
            lag = cache.feed(lag, min(size, len(lag) - before - 1))
            if time.perf_counter() - started > patience_s:
                return None
        rows = self._known_ids(cache.forward([*lag, *guesses], before + 1 + len(guesses)))
        cache.known += [*lag, *guesses]
        return rows

    def _would_guess(self, context: Context, rows: Rows, count: int) -> Iterator[bool]:
        """Whether the drafter would have guessed each of the last ``count`` tokens from the tokens before it."""
        self._text.follow(context.tokens[: len(context) - count])
        for index, token in enumerate(context.tokens[len(context) - count :]):
            draft = self._request.chooser.draft(rows, index, self._text, None)
            yield draft is not None and draft.token == token
            self._text.extend([token])

    def _choose_head(self, sequence: Sequence, context: Context) -> None:
        if self._watch is None or not isinstance(sequence, FrequentHeadSequence):
            return
        if self._watch.look(context):
            sequence.score_all()
        else:
            with contextlib.suppress(MemoryLimitError):  # the head in use still works
                sequence.score_frequent(self._watch.more)

    def _draft(
        self,
        cache: _Cache,
        context: Context,
        rows: Rows,
        row: int,
        guesses: list[int],
        depth: int,
        gate: ChainGate | None,
    ) -> Proposal:
        """A chain whose first token is drawn from that ``row``. The rows after it are those of ``guesses``."""
        tokens: list[int] = []
        probs: list[Distribution | None] = []
        confidences: list[float] = []
        alternatives: list[tuple[tuple[int, float], ...]] = []
        most = MOST_ALTERNATIVES if context.wants_tree and depth > 1 and values_trees(gate) else 0
        text, chooser = self._text, self._request.chooser
        text.follow(context.tokens)
        forwards = 1
        while True:
            draft = chooser.draft(rows, row, text, gate, alternatives=most, committed=context.committed_length)
            if draft is None:
                break
            tokens.append(draft.token)
            probs.append(draft.distribution)
            if draft.confidence is not None:
                confidences.append(draft.confidence)
            # Nothing can follow a stop token, and the target's own choice covers it.
            stop_ids = self._request.stop_ids
            alternatives.append(tuple(other for other in draft.alternatives if other[0] not in stop_ids))
            text.extend((draft.token,))
            ended = len(tokens) == depth or draft.token in self._request.stop_ids
            if ended:
                break
            if self._mask is not None:
                row += 1
                continue
            if guesses and guesses[0] == draft.token:
                guesses, row = guesses[1:], row + 1
                continue
            if gate is not None and not gate.goes_on():
                break
            self._take_back(cache, len(guesses))
            guesses = self._guesses(text.tokens, depth - len(tokens) - 1)
            rows, row = self._known_ids(cache.forward([draft.token, *guesses], 1 + len(guesses))), 0
            cache.known += [draft.token, *guesses]
            forwards += 1
        self._take_back(cache, len(guesses))
        if self._features is not None:
            cache.sequence.rewind(cache.sequence.length)  # which drops what the target's rows will replace
        if self._mask is not None or self._features is not None:  # the next round feeds what it accepted
            self._usual_lag = max(_ORDINARY_LAG_TOKENS, 1 + len(tokens))
        drawn = any(own is not None for own in probs)
        return Proposal(
            tokens=tuple(tokens),
            sources=(self._kind,) * len(tokens),
            draft_probs=tuple(probs) if drawn else None,
            drafted_by=self._kind,
            forwards=forwards,
            companions=cache.companions / forwards,
            confidences=tuple(confidences),
            alternatives=tuple(alternatives) if most else (),
        )

    def _take_back(self, cache: _Cache, count: int) -> None:
        """Drop the last ``count`` tokens of the cache: guesses that were wrong or not reached."""
        if count:
            length = cache.sequence.length - count
            cache.sequence.rewind(length)
            del cache.known[length:]

    def _known_ids(self, rows: Rows) -> Rows:
        """Scores of the target's ids only, without a mask: a drafter's vocabulary may be padded at its end."""
        own = rows.first(self._request.vocabulary_size) if self._padded else rows
        return own if self._mask is None else RowsWithout(own, self._mask)

    def cancel(self) -> None:
        self._cancelled = True
        for sequence in self._open_sequences():
            sequence.cancel()

    def reset_cancel(self) -> None:
        self._cancelled = False
        for sequence in self._open_sequences():
            sequence.reset_cancel()

    def close(self) -> None:
        self._closed = True
        self.stop_reading()
        for sequence in self._open_sequences():
            sequence.close()

    def _open_sequences(self) -> list[Sequence]:
        cache = self._cache  # read once: a concurrent ``propose`` that loses its process sets it to None
        return [] if cache is None else [cache.sequence]

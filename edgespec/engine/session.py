"""Session: one conversation, its caches and its answers."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Unpack

from edgespec.decoding.pipelined.loop import PipelinedLoop
from edgespec.decoding.round_base import LoopLimits, Rounds
from edgespec.decoding.sampling import Chooser, Sampling, SamplingFields, seeded
from edgespec.decoding.serial import DecodeLoop
from edgespec.drafters.combination import Combination, CombinationState
from edgespec.engine.answer import AnswerTask, Generation, done_with
from edgespec.engine.events import Done
from edgespec.engine.functions import MOST_ROUNDS, Function, OnEvent, ToolRounds, tools_of
from edgespec.engine.pair.loaded_pair import LoadedPair, Speculation, neighbours_of
from edgespec.engine.pair.why_no_drafts import why_no_drafts
from edgespec.engine.request_checks import (
    busy,
    check_ends,
    check_hole,
    check_number,
    check_path,
    check_request,
    check_sampling,
    check_tokens,
)
from edgespec.engine.saved_session import write_session
from edgespec.errors import CancelledError, ClosedError, EdgespecError, InvalidRequestError, RewindError
from edgespec.files.progress import Cancelled
from edgespec.interfaces.counted_text import Context, common_prefix
from edgespec.interfaces.drafting import DraftRequest
from edgespec.interfaces.model import Model, SavableSequence, Sequence as TokenSequence
from edgespec.interfaces.policy import AnswerPolicy
from edgespec.interfaces.reasons import Reason
from edgespec.placement.cache_rooms import CacheRoom
from edgespec.planning.choice.plan import Plan, plain_version
from edgespec.planning.depth.base import FixedDepth
from edgespec.runtimes.thread import OwnProcess, WorkerThread, awaited
from edgespec.text.conversation.conversation import Conversation, Turn
from edgespec.text.conversation.ends import Ends, ends_of
from edgespec.text.conversation.messages import check_conversation, check_system
from edgespec.text.conversation.tools import check_tools, choose_tools
from edgespec.text.conversation.variables import check_variables
from edgespec.text.grammar.compiled import CompiledForm
from edgespec.text.grammar.form import form_of
from edgespec.text.request_budget import RequestBudget

T = TypeVar("T")


class Session:
    """One conversation: its messages, the caches of target and drafters, its answers.

    ``generate`` one answer at a time; ``cancel`` from any thread; ``close`` when done. Created by
    ``Engine.session``.
    """

    def __init__(
        self,
        pair: LoadedPair,
        conversation: Conversation,
        room: CacheRoom,
        *,
        speculation: Speculation | None = None,
        target: TokenSequence | None = None,
        notices: tuple[str, ...] = (),
        owner: str = "",
    ) -> None:
        """``room`` says what the caches may hold. ``target`` holds the history's beginning; None opens an empty one.

        ``notices`` are for the reader of the first answer. ``owner`` is that of ``Engine.session``.
        """
        self._pair = pair
        self._speculation = speculation
        self._conversation = conversation
        self._room = room
        self._notices = notices
        self._owner = owner
        # Re-entrant: a Generation's destructor may call ``cancel`` inside a locked block of the same thread.
        self._lock = threading.RLock()
        self._closing = threading.RLock()
        self._closed = False
        self._unbegun = weakref.WeakSet[RequestBudget]()  # of answers that are prepared or have not begun
        self._process = OwnProcess()
        self._active: AnswerTask | None = None  # begun, and its history and cache are not cut yet
        # Policy and plan of the latest answer: the engine may plan again during an answer.
        self._depth: AnswerPolicy = self._speculating.policy.answer(prompt_tokens=0)
        self._plan: Plan = pair.plan
        self._can_branch = self._target_model.facts.can_branch
        self._target: TokenSequence = self._open_target() if target is None else target
        self._chooser = Chooser(Sampling())  # shared with the drafters; each answer sets its sampling
        self._drafts: CombinationState = self._start_drafts()  # kept between answers to keep their caches
        self._draft_thread: WorkerThread | None = None

    @property
    def messages(self) -> tuple[dict[str, Any], ...]:
        """The conversation so far, beginning with the system message if there is one."""
        return self._conversation.messages

    @property
    def tokens(self) -> int:
        """Tokens of ``messages`` in the model's template; 0 without a message. Raises TemplateError."""
        return self._conversation.token_count

    @property
    def context_length(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self._target.context_length

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def answering(self) -> bool:
        """Whether an answer has begun and not ended, for a reader that has not left."""
        return (answer := self._active) is not None and not answer.abandoned and not self._closed

    @property
    def _speculating(self) -> Speculation:
        """This session's own Speculation, else the pair's current plan."""
        return self._pair.speculation() if self._speculation is None else self._speculation

    def clear(self, *, keep_cache: bool = True) -> None:
        """Forget the conversation but for the system message; ``keep_cache``: a later prompt may reuse its tokens."""
        self._settle_forgotten()
        with contextlib.ExitStack() as after:
            if not keep_cache:
                with self._lock:
                    self._reopen_if_broken()
                    self._conversation.history, drafts = [], self._drafts
                    emptied = self._target.submit(partial(self._target.rewind, 0))  # before a later answer
                    after.callback(lambda: awaited(emptied).result())
                    self._drafts = self._start_drafts()
                after.callback(drafts.close)
            self._conversation.clear()

    def undo(self) -> str | None:
        """Remove the last turn. Returns its prompt, for another ``generate``; None without a turn."""
        self._settle_forgotten()
        return self._conversation.undo()

    def branch(self, *, spare_tokens: int | None = None) -> Session:
        """A second session with the same conversation: each continues separately.

        The cache is copied where the runtime can (the native kernels); elsewhere the branch reads the conversation
        again. With ``spare_tokens`` it has room for that many, and memory must also hold one that fills the context,
        with none given up for it. Raises ClosedError, MemoryLimitError, InvalidRequestError during an answer.
        """
        check_number("spare_tokens", spare_tokens, 0)
        held = self._target.length if self._target_model.facts.can_fork else 0
        return self._pair.admit(self._copy, max(held, spare_tokens or 0), spare=spare_tokens is not None)

    def _copy(self, room: CacheRoom) -> Session:
        self._settle_forgotten()
        self._reopen_if_broken()
        fork = self._target.fork if self._target_model.facts.can_fork else lambda: None
        copied, target = self._when_free(lambda _stopped: (self._conversation.copy(), fork()))
        return Session(self._pair, copied, room, speculation=self._speculation, target=target, owner=self._owner)

    def save(self, path: Path | str) -> int:
        """Write the conversation and its cache to a file, for ``Engine.restore``. Returns the file's size in bytes.

        The file is readable by its owner alone, and replaces an earlier saved session, nothing else. Only the native
        kernels save the cache, at most ``kv_bytes_per_token`` (ModelFacts) for each token. Raises SessionFileError,
        DiskSpaceError, ClosedError, InvalidRequestError during an answer.
        """
        file = check_path(path)

        def write(stopped: Cancelled) -> int:
            facts, state = self._target_model.facts, self._conversation.state_to_save
            return write_session(file, self._pair, facts, state, self._target, stopped)

        return self._when_free(write)

    def cache_sizes(self, owner: str, tokens: Sequence[int]) -> tuple[int, int] | None:
        """See CacheHolder."""

        def sizes(_stopped: Cancelled) -> tuple[int, int] | None:
            savable = self._savable
            held = savable is not None and self._holds(tokens) and savable.holds(len(tokens))
            return savable.part_sizes(len(tokens)) if savable is not None and held else None

        return self._when_free(sizes, cancelled=False) if owner == self._owner else None

    def cache_part(self, tokens: Sequence[int], part: int) -> bytes:
        """See CacheHolder."""

        def read(_stopped: Cancelled) -> bytes:
            savable = self._savable
            if savable is None or not self._holds(tokens):
                raise InvalidRequestError("the cache holds other tokens now")
            return savable.read_part(part, len(tokens))

        return self._when_free(read, cancelled=False)

    def _holds(self, tokens: Sequence[int]) -> bool:
        return self._target.length >= len(tokens) and self._conversation.history[: len(tokens)] == tokens

    @property
    def _savable(self) -> SavableSequence | None:
        """The target's cache, if it is the engine's own target's and may be kept on disk."""
        return self._target if self._speculation is None and isinstance(self._target, SavableSequence) else None

    def _when_free(self, job: Callable[[Cancelled], T], *, cancelled: bool = True) -> T:
        """The result of ``job``, run on the target's worker thread between two answers.

        ``job`` hears whether the wait was interrupted, or the session closed, and is waited for.
        """
        self._settle_forgotten(cancelled=cancelled)
        stop = threading.Event()
        with self._lock:
            if self._closed:
                raise ClosedError("this session is closed")
            if self._active is not None:
                raise busy()
            future = self._target.submit(partial(job, lambda: self._closed or stop.is_set()))
        try:
            return awaited(future).result()
        except BaseException as error:
            stop.set()
            awaited(future).exception()
            if self._closed and isinstance(error, CancelledError):
                raise ClosedError("this session is closed") from None
            raise

    @property
    def system(self) -> str | None:
        """The system message. A new one takes effect with the next answer, for the whole conversation."""
        return self._conversation.system

    @system.setter
    def system(self, text: str | None) -> None:
        check_system(text)
        self._settle_forgotten()
        self._conversation.system = text

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        suffix: str | None = None,
        files: Sequence[tuple[str, str]] = (),
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        min_tokens: int | None = None,
        ignore_eos: bool = False,
        schema: Mapping[str, Any] | str | bool | None = None,
        regex: str | None = None,
        grammar: str | None = None,
        choice: Sequence[str] | None = None,
        spacing: str = "line",
        strict: bool = True,
        raw: bool = False,
        heal: bool = False,
        depth: int | None = None,
        keep_all: bool = False,
        logprobs: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        budget: RequestBudget | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Generation:
        """Answer ``prompt`` as the next turn, or continue it as plain text with ``raw`` (outside the conversation).
        With ``raw`` it may also be its tokens. With ``heal`` the end of raw text that may begin a longer token is
        spelled again, so that ``retur`` continues as ``return`` does; not before an answer that has a form.

        With ``suffix`` the answer is what stands between the raw prompt and the suffix (fill in the middle), as code
        editors ask for it; the prompt may be empty. ``files`` are names and texts of other files, the most important
        last. If all of it outgrows the context, the first files are left out, and the beginning of the prompt and the
        end of the suffix are cut: 2048 tokens at most, of which the suffix has a sixteenth.

        ``messages`` instead of ``prompt`` are a whole conversation as the caller keeps it: mappings with a role and
        a content, in any order that an agent replays, the user's last or a result. They replace this session's
        conversation; the caches keep what both share. If the assistant's is the last, the answer continues it: events
        and forms have the new text alone, the message has both. An assistant's message may hold ``tool_calls`` and
        ``reasoning_content``, its thinking, and messages in the role ``tool`` with a ``tool_call_id`` hold results. A
        conversation that outgrows the context loses its oldest turns; with ``keep_all`` it raises PromptTooLongError
        if the prompt alone is too long.

        With ``max_tokens`` 0 the prompt is read into the caches, for later answers and branches; the answer is empty.
        The answer ends before the first text of ``stop`` and at the first of ``stop_token_ids``, which is not shown.
        A stop text that is one hidden token of the model, such as ``<|im_start|>``, also ends it at that token.
        Nothing ends it among its first ``min_tokens`` tokens: tokens that would are banned, and stop texts are text.
        With ``ignore_eos`` the model's own ends are banned throughout.

        At most one of these binds the answer, behind its thinking, to a form: a JSON ``schema`` (a mapping or its
        text), a ``regex``, a ``grammar`` (GBNF or Lark), or a ``choice`` of texts. The text is the same with and
        without guesses. An answer that ``max_tokens`` or a stop text ends is cut. ``spacing`` is that of JSON:
        ``line`` writes one line with ", " and ": ", ``compact`` no blanks, ``free`` lets the model choose. A schema
        with keywords that cannot be kept is refused; with ``strict`` False they are left out, and a notice says so.

        ``depth`` None follows the plan; a number is the depth of chains, capped by the plan's numeric class; 0 is
        plain decoding. ``sampling`` None is greedy; ``fields`` are fields of Sampling by name (``temperature=0.7``),
        and replace those of ``sampling``. With ``logprobs`` the tokens of Text events have their log-probability and
        this many of the likeliest tokens, at most 20.

        ``tools`` are functions as in OpenAI's API, which the template shows to the model. Calls in the answer are
        ToolCall events, and their text is in no Text event. ``tool_choice`` is ``auto``, the default, ``none``,
        ``required``, or ``{"type": "function", "function": {"name": ...}}``: the answer is then a call. With tools
        and a schema it is a call or JSON. ``template_variables`` are variables of the model's own template by name,
        such as ``{"enable_thinking": False}``; ``documents`` are refused unless the template reads them.

        ``budget`` bounds the work before the first token, as a server does it for requests from anywhere.

        Raises InvalidRequestError, PromptTooLongError, TemplateError and ClosedError here, MemoryLimitError if the
        prompt does not fit beside other sessions, RuntimeUnavailableError for a form without llguidance, and
        everything else from the iteration: InvalidRequestError if the conversation has changed in between,
        MemoryLimitError if the answer outgrows the memory, ConstraintError if it can no longer keep its form. The
        turn joins the conversation when its answer ends for any reason, unless its reader got no token.
        """
        started, budget = time.perf_counter(), budget or RequestBudget()
        with self._lock:
            self._unbegun.add(budget)
        earlier, after = None, list[dict[str, Any]]()
        if messages is not None:
            prompt, earlier, after = check_conversation(prompt, messages, raw=raw or suffix is not None)
        hole = check_hole(prompt, suffix, files)
        raw = raw or hole is not None
        usable, must = choose_tools(check_tools(tools, raw=raw), tool_choice)
        variables = check_variables(template_variables, raw=raw)
        free = raw or messages is not None  # the prompt may be empty: in a list of messages the template adds text
        prompt = check_request(prompt, max_tokens=max_tokens, stop=stop, depth=depth, raw=free, logprobs=logprobs)
        sampling = check_sampling(sampling, fields, Sampling(rule=self._pair.profile.rule))
        check_ends(stop_token_ids, min_tokens, max_tokens)
        self._settle_forgotten()
        stops = (*self._pair.kept.stop, *stop)
        ends = ends_of(self._pair.tokenizer, stops, stop_token_ids, min_tokens or 0, ignore_eos=ignore_eos)
        check_tokens(prompt, sampling, stop_token_ids, ends, self._pair.vocabulary_size)
        form = form_of(schema, regex, grammar, choice, spacing=spacing, lenient=not strict)
        compiled = self._pair.compiled_form(form, usable, must, self._owner)
        self._pair.begin_answer()
        own: dict[str, Any] = {"raw": raw, "earlier": earlier, "after": after, "tools": usable, "keep_all": keep_all}
        heals = self._pair.spellings if heal and raw and compiled is None else None
        own |= {"variables": variables, "hole": hole, "budget": budget, "heals": heals}
        own["banned"] = sampling.banned.union(ends.not_before)
        try:
            most = budget.answer_tokens if max_tokens == 0 else max_tokens
            turn = self._conversation.turn(prompt, most, self._target.context_length, **own)
        except CancelledError:
            budget.cancel()  # also where its time is over: the answer ends without a token
            turn = Turn(message=None, text="", tokens=[])
        self._reopen_if_broken()
        self._pair.grow(self._room, turn.most_tokens)
        task = self._make_answer(turn, max_tokens, sampling, ends, compiled, depth, logprobs, started)
        start, cancel = partial(self._start, task, budget), partial(self._cancel, task)
        return Generation(task, start=start, cancel=cancel, settle=partial(self._settle, task))

    def run_tools(
        self,
        functions: Sequence[Function],
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        rounds: int = MOST_ROUNDS,
        on_event: OnEvent | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        schema: Mapping[str, Any] | str | bool | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        sampling: Sampling | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Done:
        """Let the model call functions and show it the results, until it answers. Returns the last Done.

        A function's name, docstring and annotated parameters are what the model is shown. Arguments that do not fit
        are not passed on; the model reads what is wrong with them, and the message of an exception. Functions run on
        the calling thread; results other than text are written as JSON. After ``rounds`` answers with calls, or the
        same calls with the same results, the next answer has no tools. ``tool_choice`` is that of the first answer.
        The other arguments are those of ``generate``, for each answer. ``on_event`` gets the events of all answers
        and a ToolResult for each call. ``cancel`` ends the answer in progress, or what follows the running function.
        Raises what ``generate`` and its events raise, and InvalidRequestError for a function that no model can call.
        """
        check_number("rounds", rounds, 1)

        def begin() -> RequestBudget:
            with self._lock:
                self._unbegun.add(budget := RequestBudget())
            return budget

        return ToolRounds(
            generate=self.generate,
            messages=lambda: self.messages,
            whole=begin(),
            begin=begin,
            tools=tools_of(functions),
            on_event=on_event or (lambda _event: None),
            settings={"max_tokens": max_tokens, "stop": stop, "schema": schema, "sampling": sampling, **fields},
        ).run(prompt, messages, tool_choice, rounds)

    # -------------------------------------------------------------------------------- start of an answer

    def _make_answer(
        self,
        turn: Turn,
        max_tokens: int | None,
        asked: Sampling,
        ends: Ends,
        form: CompiledForm | None,
        depth: int | None,
        logprobs: int | None,
        started: float,
    ) -> AnswerTask:
        pair, speculating, drafts = self._pair, self._speculating, self._drafts
        sampling, history = seeded(asked), list(turn.tokens)
        budget = None if depth == 0 or speculating.budget is None else speculating.budget()
        cap = speculating.depth_cap if depth is None else min(depth, speculating.depth_cap)
        # A pipelined chain has one more token: a window's forward also scores the next window's first token.
        policy = speculating.policy if depth is None else FixedDepth(cap + (budget is not None))
        plain = isinstance(policy, FixedDepth) and policy.depth == 0
        room = self._target.context_length - len(turn.tokens)
        most, sampled = room if max_tokens is None else min(max_tokens, room), not sampling.greedy
        tells = not sampling.uses_rejection  # under that rule a drafter draws its own noise
        own = policy.answer(prompt_tokens=len(turn.tokens), most=most, sampled=sampled, hindsight=tells)
        limits = LoopLimits(
            max_tokens=max_tokens,
            depth_cap=cap,
            vocabulary_size=pair.vocabulary_size,
            stop_ids=ends.ids,
            exact_length=pair.exact_length,
            logprobs=logprobs,
            healing=turn.healing,
        )
        parts = (self._target, drafts, own, self._chooser, history, limits)
        loop: Rounds = (
            DecodeLoop(*parts, trees=speculating.trees and self._can_branch)
            if budget is None
            else PipelinedLoop(*parts, submit=self._own_draft_thread().submit, budget=budget)
        )
        return AnswerTask(
            turn=turn,
            ends=ends,
            bound=pair.bound(self._conversation, turn, form, self._owner),
            sampling=sampling,
            seed_is_fresh=asked.seed is None,
            depth=own,
            plan=plain_version(pair.plan) if plain else pair.plan,
            drafts=drafts,
            loop=loop,
            history=history,
            parts=self._conversation.parts(turn, ends),
            notices=[
                *pair.take_notices(),
                *self._take_notices(),
                *([] if turn.notice is None else [turn.notice]),
                *([] if form is None else form.warnings),
            ],
            started=started,
            neighbours=neighbours_of(pair.measurements.drafter),
            grow=partial(pair.grow, self._room),
        )

    def _own_draft_thread(self) -> WorkerThread:
        if self._draft_thread is None:
            self._draft_thread = WorkerThread("edgespec-draft", lambda: None)  # no caller waits on this thread
        return self._draft_thread

    def _start(self, answer: AnswerTask, budget: RequestBudget) -> None:
        """Submit the answer to the target's worker thread. Raises ClosedError, InvalidRequestError.

        Without a token it ends here if the request was cancelled: conversation and cache stay as they are.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("this session is closed")
            if budget.cancelled:
                answer.skip()
                return
            if self._active is not None:
                raise busy()
            self._conversation.check(answer.turn)
            self._drafts.stop_reading()
            try:
                self._active = answer  # first: a Ctrl-C may come when the job is queued already
                answer.decoded = self._target.submit(partial(answer.run, partial(self._take_over, answer)))
            except BaseException:  # the next use ends it
                answer.abandon()
                raise
            self._unbegun.discard(budget)
            if budget.cancelled:  # by a signal handler, since the look above
                self._cancel(answer)

    def _take_over(self, answer: AnswerTask) -> None:
        """On the worker thread: keep the cache of the tokens that old and new history share."""
        turn, conversation = answer.turn, self._conversation
        shared = min(common_prefix(conversation.history[: self._target.length], turn.tokens), len(turn.tokens) - 1)
        if shared < self._target.length and not self._pair.can_rewind:
            shared = 0  # a recurrent state cannot be rewound, only reset
        self._target.rewind(shared)
        shared = self._target.length
        if (kept := self._pair.prefixes) is not None and (savable := self._savable) is not None:
            shared = kept.fill(self._owner, turn.tokens, savable)
        answer.stats.cached_tokens = shared
        conversation.begin(turn, answer.history)
        answer.began = True
        self._chooser.sampling, self._chooser.seed_is_fresh = answer.sampling, answer.seed_is_fresh
        self._chooser.not_before = answer.ends.not_before
        self._chooser.begins, self._chooser.bound = len(turn.tokens), answer.bound
        answer.drafts.depth = self._depth = answer.depth
        self._plan = answer.plan

    def _take_notices(self) -> tuple[str, ...]:
        notices, self._notices = self._notices, ()
        return notices

    def _reopen_if_broken(self) -> None:
        """Open an empty cache if the old one cannot be rewound. Raises InvalidRequestError during an answer."""
        with self._lock:
            if self._active is not None:
                raise busy()
            try:
                self._target.rewind(self._target.length)
            except RewindError:
                self._target.close()  # first: there may be no memory for both
                self._target = self._open_target()
                drafts, self._drafts = self._drafts, self._start_drafts()  # they may read what the target computes
                drafts.close()

    @property
    def _target_model(self) -> Model:
        own = None if self._speculation is None else self._speculation.target
        return self._pair.target if own is None else own

    def _open_target(self) -> TokenSequence:
        return self._target_model.open(self._pair.plan.context_length)

    def _start_drafts(self) -> CombinationState:
        return Combination(self._speculating.drafters, self._depth).start(
            DraftRequest(
                chooser=self._chooser,
                vocabulary_size=self._pair.vocabulary_size,
                context_length=self._target.context_length,
                stop_ids=self._pair.tokenizer.stop_ids,
                target=self._target,
            )
        )

    # -------------------------------------------------------------------------------------- end of turn

    def cancel(self) -> None:
        """End the answer in progress within one forward. Any thread may call it, and use the session then.

        An answer that ``generate`` prepares or has prepared, and that has not begun, ends without a token. Otherwise
        the call does nothing.
        """
        if self._process.left:
            return
        with self._lock:
            for each in self._unbegun:
                each.cancel()
            if self._active is not None:
                self._cancel(self._active)

    def _cancel(self, answer: AnswerTask, *, wait: bool = True) -> None:
        """End that answer within one forward; does nothing to another one.

        Without ``wait``, and if another thread holds the lock, the answer ends after its round.
        """
        if self._process.left or not self._lock.acquire(blocking=wait):
            return
        try:
            if self._active is answer and not answer.ending:
                answer.cancelled = True
                self._target.cancel()
                self._drafts.cancel()
        finally:
            self._lock.release()

    def _settle(self, answer: AnswerTask) -> Future[Done]:
        """End the turn at the last token that the reader got: a job on its thread before any later answer begins.

        Its result is the answer's Done; it is there if the answer never began. Any thread, more than once.
        """
        answer.abandon()  # the reader has left, also if the wait for the end is interrupted
        if not self._process.left:
            with self._lock:
                if answer.ended is None and self._active is answer:
                    try:  # a Ctrl-C may come when the job is queued already: the next use queues it again
                        answer.ended = self._target.submit(partial(self._end_turn, answer))
                    except ClosedError:  # the thread has done its last job
                        answer.ended = done_with(self._end_turn(answer))
                if answer.ended is not None:
                    return answer.ended
        return done_with(answer.done(None, None))

    def _end_turn(self, answer: AnswerTask) -> Done:
        with self._lock:
            if self._active is not answer:  # it was queued twice
                return answer.done(None, None)
            answer.ending = True
            self._target.reset_cancel()
            self._drafts.reset_cancel()
        try:
            return self._cut(answer)
        finally:
            # A grammar's states take memory. Last of all: now the session can be used again.
            self._chooser.bound = self._active = None

    def _cut(self, answer: AnswerTask) -> Done:
        """End the conversation and the cache at the last token that the reader got."""
        answer.depth.end()
        if self._speculation is None:
            self._pair.answered(answer.depth, beside_others=answer.neighbours.busy)
        conversation = self._conversation
        if answer.began:  # else the conversation is the one before it
            conversation.end(answer.turn, answer.said, answer.said_ids)
        if self._pair.answers is not None:
            self._pair.answers.add(answer.said_ids)
        kept, savable = self._pair.prefixes, self._savable
        # Raw text is left out: an editor's prompts share a beginning that changes with every key.
        if kept is not None and savable is not None and answer.said_ids and answer.turn.message is not None:
            kept.answered(self._owner, answer.turn.tokens, savable)
        # A round may have scored more than was delivered. Plain decoding would not have, and the next answer must
        # start from the same cache.
        if self._pair.can_rewind:
            with contextlib.suppress(EdgespecError):  # closed or broken: the next use raises the error
                self._target.rewind(min(self._target.length, max(0, len(conversation.history) - 1)))
        if self._drafts.may_read_ahead and not self._closed:
            self._pair.read_ahead.when_idle(self)
        return answer.done(self._speculation_off, answer.depth.plain_tokens_per_s)

    def read_ahead(self) -> list[Future[None]]:
        """Let the drafter read the rest of the conversation, so that the next answer drafts from its first token on.
        Call it while no answer is generated; the next answer ends the reading."""
        with self._lock:
            if self._closed or self._active is not None:
                return []
            return self._drafts.read_ahead(Context(list(self._conversation.history)))

    def stop_reading(self) -> None:
        """Stop reading ahead soon."""
        self._drafts.stop_reading()

    @property
    def speculation_off(self) -> str | None:
        """Why a drafter was not used in the latest answer, or is off now; None if every drafter is on."""
        off = self._speculation_off
        return None if off is None else off.text

    @property
    def _speculation_off(self) -> Reason | None:
        return why_no_drafts(self._pair, self._plan, self._depth, self._drafts, len(self._conversation.history))

    def _settle_forgotten(self, *, cancelled: bool = True) -> None:
        """End a forgotten or ``cancelled`` answer where it was read. Raises ClosedError, also after a fork."""
        self._process.check()
        with self._lock:
            if self._closed:
                raise ClosedError("this session is closed")
            answer = self._active
        if answer is None:
            return
        if not (answer.abandoned or (cancelled and answer.cut_off())):
            raise busy()
        self._settle(answer).result()
        self._conversation.forget_text()

    def close(self) -> None:
        """End the answer or ``save`` in progress and free the caches. Idempotent; callable from any thread.

        A forked process frees nothing: all of it is its parent's.
        """
        if self._process.left:
            self._closed = True
            return
        self.cancel()
        with self._closing:  # a second caller waits until the first has freed the caches
            with self._lock:
                if self._closed:
                    return
                self._closed = True
                answer = self._active
                self.cancel()  # again: an answer may have begun in between
            with contextlib.ExitStack() as parts:  # in reverse order; a Ctrl-C in one close skips no other
                parts.callback(self._room.close)
                parts.callback(self._target.close)
                parts.callback(self._drafts.close)
                if self._draft_thread is not None:
                    parts.callback(self._draft_thread.close)
                if answer is not None and answer.decoded is not None:
                    answer.abandon()
                    answer.decoded.result()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

"""Chooses which rows of a drafter's output head an export keeps, from counted tokens and measured times."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.calibration.head_times import CONTEXT_TOKENS, measure_heads, right_of_lost
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
from edgespec.errors import EdgespecError, InvalidRequestError, TemplateError
from edgespec.export.gguf.files import export_trimmed, export_whole
from edgespec.export.gguf.parts import embedding_table
from edgespec.export.measuring import Measuring
from edgespec.export.provenance import KEEP, Provenance
from edgespec.export.trim import vocabtrim
from edgespec.export.trim.token_counts import (
    TOKENS_PER_PROMPT,
    CountedAnswer,
    CountedAnswersKey,
    TokenCounts,
    load_answers,
    pieces,
    read_text,
    save_answers,
    split,
)
from edgespec.files.atomic import temporary_name
from edgespec.files.gguf import token_rows
from edgespec.files.gguf.vocabulary import compare_vocabularies
from edgespec.files.model_file import LocatedModel
from edgespec.files.progress import Loading, follow
from edgespec.hardware.machine import describe_machine
from edgespec.placement.memory import require_memory
from edgespec.placement.prepared import Preparation, choose_threads
from edgespec.profiles.profile import Profile
from edgespec.runtimes.llama.library import load
from edgespec.text.chat_template.template import ChatTemplate
from edgespec.text.tokenizers.choice import open_tokenizer
from edgespec.text.tokenizers.tokenizer import Tokenizer

TokenIds = npt.NDArray[np.int32]

# Context length: several times the longest built-in prompt (160 tokens) and its answer.
_CONTEXT_TOKENS = 1024

# Rows of the trimmed head that is timed along with the whole head. The cost of other sizes lies on the line through
# both: the middle of the sizes compared, far enough from whole vocabularies (32 000 to 262 144 rows).
TIMED_ROWS = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class Trimming:
    """The rows to keep, int32 ascending (None: all rows), and why. Values that were not measured are None.

    ``forward_s``: seconds of a draft token by rows of the head. ``coverage``: the share of held-out tokens in the
    rows, if only the other tokens choose the rows. ``right_of_lost``: the share of tokens missing from the trimmed
    head that the whole head would have guessed.
    """

    kept: TokenIds | None
    vocabulary_size: int
    reasons: tuple[str, ...]
    ranked_by: str | None = None
    coverage: float | None = None
    forward_s: dict[int, float] | None = None
    right_of_lost: float | None = None

    @property
    def rows(self) -> int:
        return self.vocabulary_size if self.kept is None else len(self.kept)

    def as_json(self) -> dict[str, Any]:
        """The manifest's object ``trim``."""
        times = None if self.forward_s is None else {str(rows): s for rows, s in self.forward_s.items()}
        return {
            "ranked_by": self.ranked_by,
            "coverage_held_out": self.coverage,
            "size_reasons": list(self.reasons),
            "forward_s": times,
            "right_of_lost": self.right_of_lost,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimRequest:
    """``rows`` None: measure the best number. ``texts`` rank the rows; without texts, ``target``'s answers do."""

    rows: int | None
    texts: tuple[Path, ...]
    target: str | None


def choose_rows(
    source: LocatedModel, wanted: TrimRequest, *, quant: str, folder: Path, measuring: Measuring
) -> Trimming:
    """Count and rank tokens, and measure what rows cost if the request has no number of rows.

    ``quant`` is the drafter's type after the export. Temporary copies for timing are made next to ``folder``. Wrong
    requests fail before the slow parts. Raises EdgespecError.
    """
    header = source.header
    size = header.vocabulary_size
    embedding_table(header)
    always = token_rows.always_kept(header)
    texts = [(path, read_text(path)) for path in wanted.texts]
    if wanted.rows is None:
        if not any(len(always) <= each < size for each in vocabtrim.CANDIDATE_SIZES):
            reason = f"a trimmed head is not faster for a vocabulary of only {size} tokens: all rows are kept"
            return Trimming(kept=None, vocabulary_size=size, reasons=(reason,))
        load()  # heads are timed in llama.cpp
    elif wanted.rows >= size:
        reason = f"{wanted.rows} rows were requested and the vocabulary has {size}: all rows are kept"
        return Trimming(kept=None, vocabulary_size=size, reasons=(reason,))
    else:
        token_rows.kept_ids({}, wanted.rows, always, vocabulary_size=size)  # raises early if the rows are too few
    counted = _count(source, texts, wanted.target, measuring)
    if wanted.rows is None:
        return _best_size(source, counted, always, quant=quant, folder=folder, measuring=measuring)
    counts = counted.counts
    judged = token_rows.kept_ids(counts.ranking, wanted.rows, always, vocabulary_size=size)
    return Trimming(
        kept=token_rows.kept_ids(counts.all, wanted.rows, always, vocabulary_size=size),
        vocabulary_size=size,
        reasons=(f"{wanted.rows} rows were requested",),
        ranked_by=counted.what,
        coverage=vocabtrim.coverage(counts.held_out, judged) if counts.held_out else None,
    )


def _best_size(
    source: LocatedModel,
    counted: _Counted,
    always: TokenIds,
    *,
    quant: str,
    folder: Path,
    measuring: Measuring,
) -> Trimming:
    size, counts = source.header.vocabulary_size, counted.counts
    if not counts.held_out:
        raise InvalidRequestError(
            "the text is too short to hold out a third of it for choosing the size of the head",
            hint="give more text to --trim-from, or a number of rows to --trim-vocab",
        )
    timed_rows = max(len(always), min(TIMED_ROWS, size // 2))
    timed = token_rows.kept_ids(counts.ranking, timed_rows, always, vocabulary_size=size)
    trimmed_s, whole_s, right = _measure(
        source, timed, counted.held_out, quant=quant, folder=folder, measuring=measuring
    )
    decision = vocabtrim.choose_size(
        counts.ranking,
        counts.held_out,
        always,
        vocabtrim.CANDIDATE_SIZES,
        vocabulary_size=size,
        cost=vocabtrim.HeadCost.through((timed_rows, trimmed_s), (size, whole_s)),
        lost_allowed=vocabtrim.lost_allowed(right),
        right_of_lost=1.0 if right is None else right,
    )
    kept = token_rows.kept_ids(counts.all, decision.size, always, vocabulary_size=size)
    return Trimming(
        kept=kept if decision.trims else None,
        vocabulary_size=size,
        reasons=decision.reasons,
        ranked_by=counted.what,
        coverage=decision.chosen.coverage,
        forward_s={timed_rows: trimmed_s, size: whole_s},
        right_of_lost=right,
    )


# --------------------------------------------------------------------------------------------- counting


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """Counts in the source's vocabulary, a description of their origin, and held-out texts: (context, text)."""

    counts: TokenCounts
    what: str
    held_out: tuple[tuple[Sequence[int], Sequence[int]], ...]


def _count(
    source: LocatedModel, texts: Sequence[tuple[Path, str]], target: str | None, measuring: Measuring
) -> _Counted:
    size = source.header.vocabulary_size
    counts, counted = TokenCounts(ranking=Counter(), held_out=Counter()), []
    held_out: list[tuple[Sequence[int], Sequence[int]]] = []
    if texts:
        with closing(open_tokenizer(source.path)) as tokenizer:
            cut = [tokenizer.encode(piece) for _, text in texts for piece in pieces(text)]
        counts += TokenCounts.of(cut, size)
        held_out += [((), piece) for piece in split(cut)[1]]
        counted.append(f"the text of {', '.join(path.name for path, _ in texts)}")
    if target is not None or not texts:
        answers, name = _answers(source, target, measuring)
        counts += TokenCounts.of(answers, size)
        with closing(open_tokenizer(source.path)) as tokenizer:
            asked = _requests(source, tokenizer, split([*measuring.prompts.values()])[1])
        held_out += zip(asked, split(answers)[1], strict=True)
        counted.append(f"{name}'s answers to {len(answers)} prompts")
    if not counts.ranking:
        raise InvalidRequestError(
            f"{' and '.join(counted)} hold too few tokens to rank", hint="give more text to --trim-from"
        )
    return _Counted(counts=counts, what=" and ".join(counted), held_out=tuple(held_out))


def _requests(source: LocatedModel, tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Tokens of each prompt in the source's chat template; without a working template, of the bare prompt."""
    texts, template = list(prompts), source.header.chat_template
    bos = tokenizer.bos_token
    if template is not None:
        with contextlib.suppress(TemplateError):
            compiled = ChatTemplate(template, tokens=tokenizer.template_tokens)
            texts = [compiled.render([{"role": "user", "content": text}]) for text in texts]
    return [tokenizer.encode(text, special=True, add_bos=not (bos and text.startswith(bos))) for text in texts]


def _answers(source: LocatedModel, target: str | None, measuring: Measuring) -> tuple[list[Sequence[int]], str]:
    """The target's answers, in ids of the source's vocabulary, and the target's name."""
    own = measuring.profile
    # Plain decoding without a drafter needs no calibration, and the text is the same.
    profile = replace(own, target=target or own.target, draft="none", depth=0, context=_CONTEXT_TOKENS)
    located = measuring.locator.locate(profile.target)
    key = CountedAnswersKey(
        target=located.identity,
        prompts_sha256=measuring.prompts_sha256,
        prompt_ids=tuple(measuring.prompts),
        tokens_per_prompt=TOKENS_PER_PROMPT,
    )
    folder = measuring.home.counted_answers
    answers = list(load_answers(folder, key))
    if len(answers) < len(measuring.prompts):  # the first export, or the last one was interrupted
        kept = True
        for answer in _let_answer(profile, len(answers), located.name, measuring):
            answers.append(answer)
            try:
                if kept:
                    save_answers(measuring.home.create(folder), key, answers)
            except (EdgespecError, OSError) as error:  # the next export generates the answers again
                kept = False
                note = f"its answers could not be stored for the next export: {error}"
                measuring.job.tell("counting", located.name, note=note)
    if compare_vocabularies(located.header, source.header) is None:
        return [each.token_ids for each in answers], located.name
    with closing(open_tokenizer(source.path)) as tokenizer:
        return [tokenizer.encode(each.text) for each in answers], located.name


def _let_answer(profile: Profile, first: int, name: str, measuring: Measuring) -> Iterator[CountedAnswer]:
    """Generate answers to the prompts, starting with number ``first``."""
    prompts, progress = list(measuring.prompts.items()), measuring.progress
    with (
        Engine.load(
            profile=profile,
            download=measuring.download,
            progress=progress,
            cancelled=measuring.cancelled,
            store_home=measuring.home,
        ) as engine,
        engine.session() as session,
    ):
        raw = not engine.has_chat_template
        for number, (prompt_id, prompt) in enumerate(prompts[first:], start=first):
            step = Loading(f"counting what {name} writes", number / len(prompts))
            progress(step)
            session.clear(keep_cache=False)
            for event in session.generate(prompt, max_tokens=TOKENS_PER_PROMPT, raw=raw):
                progress(step)
                if isinstance(event, Done):
                    yield CountedAnswer(prompt_id=prompt_id, token_ids=event.token_ids, text=event.text)


# ---------------------------------------------------------------------------------------------- timing


def _measure(
    source: LocatedModel,
    kept: TokenIds,
    held_out: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    quant: str,
    folder: Path,
    measuring: Measuring,
) -> tuple[float, float, float | None]:
    """Seconds of a draft token with the rows ``kept`` and with all rows, and ``right_of_lost``.

    ``right_of_lost``: of the held-out tokens that ``kept`` lacks, the share that the whole head guesses. Measured
    with llama.cpp on this machine.
    """
    profile, machine = replace(measuring.profile, draft_runtime="llama"), describe_machine()
    threads = choose_threads(profile, machine, None)
    with _temporary_folder(folder) as temporary:
        locator, whole = measuring.locator, source
        if quant != KEEP:
            provenance = Provenance(name=source.name, quant=quant)
            export_whole(source.path, temporary / "whole", provenance, threads=threads, job=measuring.job)
            whole = locator.locate(str(temporary / "whole"))
        provenance = Provenance(name=source.name)
        export_trimmed(whole.path, temporary / "trimmed", provenance, kept=kept, job=measuring.job)
        trimmed = locator.locate(str(temporary / "trimmed"))
        allowed = int(machine.available_memory_bytes * profile.max_memory_fraction)
        prepare = Preparation(profile, threads, CONTEXT_TOKENS + 1)
        models = [prepare.drafter(each) for each in (trimmed, whole)]
        for model in models:
            require_memory(source.name, model.memory, allowed)
            allowed -= model.memory.total_bytes
        with models[0].load(measuring.job) as few, models[1].load(measuring.job) as many:
            label = f"timing {source.name} with {len(kept)} and with all rows"
            trimmed_s, whole_s = follow(measure_heads([few, many]), label, measuring.progress)
            label = f"asking {source.name} for what {len(kept)} rows lack"
            lost = right_of_lost(many, held_out, kept.tolist())
            return trimmed_s, whole_s, follow(lost, label, measuring.progress)


@contextmanager
def _temporary_folder(folder: Path) -> Iterator[Path]:
    """A temporary path on the disk of ``folder``, not created yet. The next export removes it after a crash."""
    final = Path(os.path.realpath(folder))
    temporary = final.parent / temporary_name(final.name)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)

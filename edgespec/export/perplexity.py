"""What rounding weights costs: the perplexity of an export and of its source, on a fixed text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.decoding import scores
from edgespec.errors import EdgespecError, InvalidRequestError, NonFiniteLogitsError
from edgespec.export.gguf.files import MODEL
from edgespec.export.measuring import Measuring
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import PLAIN_TYPES, GgufHeader
from edgespec.files.model_file import LocatedModel
from edgespec.files.progress import Loading
from edgespec.files.trimmed_drafter import DRAFTER_NAME
from edgespec.hardware.machine import describe_machine
from edgespec.placement.memory import memory_needed, require_memory
from edgespec.placement.prepared import Preparation, PreparedModel, choose_threads, prepare_model
from edgespec.runtimes.table import runtime_of
from edgespec.text.tokenizers.choice import open_tokenizer

# Both models read the same tokens, so most of the uncertainty cancels: 512 tokens distinguish 4 bits from 8.
TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PerplexityCost:
    """Perplexity of the source (``before``) and its export (``after``), over the same ``tokens`` predictions."""

    before: float
    after: float
    tokens: int

    @property
    def rise(self) -> float:
        """Relative rise of the perplexity: 0.01 is 1 %; negative if it fell."""
        return self.after / self.before - 1

    def __str__(self) -> str:
        return f"{self.before:.2f} before, {self.after:.2f} after ({self.rise:+.1%}), on {self.tokens} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """``rounded``: the source's types of changed weights. ``reason``: why the perplexity was not measured."""

    rounded: tuple[str, ...]
    measured: PerplexityCost | None
    reason: str | None = None

    def as_json(self) -> dict[str, float | int] | None:
        return None if self.measured is None else asdict(self.measured)

    def lines(self) -> Iterator[tuple[str, str]]:
        """Lines of the report: (label, text)."""
        if not PLAIN_TYPES.issuperset(self.rounded):
            yield "requantised", f"weights stored as {', '.join(self.rounded)} were rounded a second time"
        yield "perplexity", str(self.measured) if self.measured else f"not measured: {self.reason}"


def rounded_types(source: GgufHeader, folder: Path, manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """The source's types, sorted, of weights that the export to ``folder`` changed; empty if it changed none."""
    name = next((name for name in (MODEL, DRAFTER_NAME) if name in manifest["files"]), None)
    if name is None:  # ONNX: the manifest lists weights by role, with the words "rounded to"
        parts = [part for text in manifest.get("tensors", {}).values() for part in text.split(", ")]
        return tuple(sorted({part.split()[0] for part in parts if " rounded " in part}))
    types = {tensor.name: tensor.type_name for tensor in source.tensors}
    changes = {(types.get(each.name), each.type_name) for each in read_header(folder / name).tensors}
    # F32 holds the values of every type.
    return tuple(sorted({old for old, new in changes if old and old != new and new != "F32"}))


def cost_of_rounding(
    source: LocatedModel, folder: Path, manifest: Mapping[str, Any], *, trimmed: bool, measuring: Measuring
) -> Cost | None:
    """What the export of ``source`` to ``folder`` costs in perplexity; None if no weight was rounded.

    A trimmed head gives most tokens no probability, so it has no meaningful perplexity.
    """
    rounded = rounded_types(source.header, folder, manifest)
    if not rounded:
        return None
    if trimmed:
        return Cost(rounded=rounded, measured=None, reason="a trimmed head lacks tokens of the text")
    try:
        return Cost(rounded=rounded, measured=measure(source, folder, measuring))
    except EdgespecError as error:  # the export itself is complete, so this failure is only reported
        return Cost(rounded=rounded, measured=None, reason=error.message)


def measure(source: LocatedModel, folder: Path, measuring: Measuring) -> PerplexityCost:
    """Measure ``source``, then the export in ``folder``; one model is loaded at a time.

    Raises MemoryLimitError, RuntimeUnavailableError and other EdgespecErrors of loading and forwards.
    """
    # The same runtime for both GGUF files, because each runtime rounds activations in its own way.
    profile, machine = replace(measuring.profile, runtime="llama"), describe_machine()
    threads = choose_threads(profile, machine, None)
    allowed_bytes = int(machine.available_memory_bytes * profile.max_memory_fraction)
    models = (source, measuring.locator.locate(str(folder)))
    prepared = [_prepared(Preparation(profile, threads, TOKENS + 1), model) for model in models]
    tokens = _tokens(
        source, measuring.prompts.values(), min(TOKENS, *(each.facts.trained_context_length for each in prepared))
    )
    found = []
    for model, when in zip(prepared, ("before", "after"), strict=True):
        step = Loading(f"measuring the perplexity {when}")
        measuring.progress(step)
        found.append(_perplexity(model, tokens, allowed_bytes, measuring, step))
    return PerplexityCost(before=found[0], after=found[1], tokens=len(tokens) - 1)


def _prepared(prepare: Preparation, file: LocatedModel) -> PreparedModel:
    """Prepare a model so that only weights are rounded: llama.cpp's usual KV cache costs some models more than
    8-bit weights do.
    """
    settings = prepare.target(file).settings
    return prepare_model(file, runtime_of(settings).comparable_settings(settings), prepare.context_length)


def _tokens(source: LocatedModel, prompts: Iterable[str], count: int) -> Sequence[int]:
    """``count`` tokens of the prompts to predict, and one before them."""
    text = "\n\n".join(prompts)
    with closing(open_tokenizer(source.tokenizer_path)) as vocabulary:
        tokens = vocabulary.encode(text, add_bos=True)[: count + 1]
    if len(tokens) < 2:
        raise InvalidRequestError(f"{source.name} has no tokens to predict")
    return tokens


def _perplexity(
    model: PreparedModel, tokens: Sequence[int], allowed_bytes: int, measuring: Measuring, step: Loading
) -> float:
    require_memory(model.file.name, memory_needed(model.file, model.settings, len(tokens)), allowed_bytes)
    losses: list[float] = []
    with model.load(measuring.job) as loaded, closing(loaded.open(len(tokens) - 1)) as sequence:
        for rows in scores.teacher_forced_rows(sequence, tokens[:-1]):
            following = tokens[len(losses) + 1 : len(losses) + 1 + len(rows)]
            if not np.isfinite(rows).all():
                raise NonFiniteLogitsError(f"{model.file.name} computes scores that are not finite numbers")
            losses += scores.token_losses(rows, following).tolist()
            measuring.progress(replace(step, fraction=len(losses) / (len(tokens) - 1)))
    return scores.perplexity(losses)

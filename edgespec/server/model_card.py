"""What clients may ask about the served model, also while it is not loaded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.files.gguf.names import quantisation_name
from edgespec.files.gguf.records import CHAT_TEMPLATE, GgufHeader, Scalar
from edgespec.files.model_file import LocatedModel
from edgespec.text.conversation.model_template import ModelTemplate
from edgespec.text.conversation.thinking import thinking_marks
from edgespec.text.tokenizers.vocabulary import Vocabulary, unsupported


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A model that is served. ``modified``: seconds since 1970. ``context_length``: tokens that a request may have.

    ``parameters`` is 0 if the file does not tell. ``digest`` identifies its content. ``metadata`` are the single
    values that it states. ``sampling`` is that of an answer that asks for none; None before the model is loaded.
    """

    format: str
    architecture: str
    quantisation: str
    parameters: int
    weight_bytes: int
    digest: str
    modified: float
    context_length: int
    template: str | None
    licence: str | None
    metadata: Mapping[str, Scalar]
    uses_tools: bool
    thinks: bool
    fills_in: bool
    sampling: Sampling | None = None


def card_of(engine: Engine) -> ModelCard:
    """The card of a loaded model."""
    own = _card(engine.pair.pool.target, engine.plan.context_length, engine.tokenizer.fill_in is not None)
    return replace(own, sampling=engine.file_sampling)


def card_before_loading(locate: Callable[[], LocatedModel], longest: int) -> ModelCard:
    """The card of a model that may be loaded with up to ``longest`` tokens, by its file alone."""
    file = locate()
    fills_in = unsupported(file.header) is None and Vocabulary(file.header).fill_in is not None
    return _card(file, min(longest, file.header.context_length), fills_in)


def _card(file: LocatedModel, context_length: int, fills_in: bool) -> ModelCard:
    single, template = _single_values(file.header), file.header.chat_template
    licence = file.licence or single.get("general.license")
    templates = [*([template] if template else []), *file.header.named_templates.values()]
    return ModelCard(
        format="gguf" if file.onnx is None else "onnx",
        architecture=file.header.architecture,
        quantisation=quantisation_name(file.path.name) or _commonest_type(file.header),
        parameters=file.header.parameter_count,
        weight_bytes=file.weight_bytes,
        digest=file.identity,
        modified=_modified(file.path),
        context_length=context_length,
        template=template,
        licence=licence if isinstance(licence, str) else None,
        metadata={key: value for key, value in single.items() if not key.startswith(CHAT_TEMPLATE)},
        uses_tools=any(ModelTemplate(each, dict).takes_tools for each in templates),
        thinks=thinking_marks(template) is not None,
        fills_in=fills_in,
    )


def _single_values(header: GgufHeader) -> dict[str, Scalar]:
    """The values in the file that are neither lists nor infinite, which JSON cannot say."""
    return {
        key: value
        for key, value in header.metadata.items()
        if isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
    }


def _commonest_type(header: GgufHeader) -> str:
    """The type of most of the file's bytes; "unknown" without tensors."""
    size = Counter[str]()
    for tensor in header.tensors:
        size[tensor.type_name] += tensor.byte_count
    return size.most_common(1)[0][0] if size else "unknown"


def _modified(path: Path) -> float:
    with suppress(OSError):  # the file may be gone: its weights stay mapped
        return path.stat().st_mtime
    return 0.0

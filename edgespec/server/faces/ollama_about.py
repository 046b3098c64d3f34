"""What Ollama's API says about the served model. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgespec import __version__
from edgespec.server.errors import ApiError
from edgespec.server.faces.ollama import moment
from edgespec.server.model_card import ModelCard

# The version of Ollama whose API this is; clients refuse older ones (GitHub Copilot those before 0.6.4).
API_VERSION = "0.40.0"
# Ollama's word for a name without a tag.
_TAG = "latest"
# When a model is freed that stays loaded, 1 January 2318: Ollama's longest time of 292 years has such an end.
_ALWAYS = 10_981_785_600.0
_SIZES = (("B", 10**9), ("M", 10**6), ("K", 10**3))


def read_show(body: Mapping[str, Any]) -> str:
    """The name in a body of /api/show. Raises ApiError."""
    name = body.get("model") or body.get("name")  # the older name of the field
    if not isinstance(name, str):
        raise ApiError("model must be the name of a model", param="model")
    return name


def read_pull(body: Mapping[str, Any]) -> tuple[str, bool]:
    """The name in a body of /api/pull, and whether the reply is lines. Raises ApiError."""
    return read_show(body), body.get("stream") is not False


def version() -> dict[str, Any]:
    return {"version": API_VERSION, "edgespec": {"version": __version__}}


def tagged(name: str) -> str:
    """The name as Ollama lists it, with a tag: clients look for it with and without ``:latest``."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:{_TAG}"


def listed(name: str, card: ModelCard) -> dict[str, Any]:
    """The model in a list."""
    return {**_named(name, card), "modified_at": moment(card.modified)}


def running(
    name: str, card: ModelCard, *, memory_bytes: int, gpu_bytes: int, expires_at: float | None
) -> dict[str, Any]:
    """The loaded model in a list. ``expires_at`` is in seconds since 1970; None: it stays."""
    return {
        **_named(name, card),
        "size": memory_bytes,
        "size_vram": gpu_bytes,
        "expires_at": moment(_ALWAYS if expires_at is None else min(expires_at, _ALWAYS)),
        "context_length": card.context_length,
    }


def shown(name: str, card: ModelCard) -> dict[str, Any]:
    """All that is known of the model. ``model_info`` has the context length that requests may use."""
    own = {
        "general.architecture": card.architecture,
        f"{card.architecture}.context_length": card.context_length,
        **({"general.parameter_count": card.parameters} if card.parameters else {}),
    }
    return {
        "modelfile": f"FROM {name}\n",
        "parameters": "\n".join(f"{key:<30} {value}" for key, value in _parameters(card).items()),
        **({} if card.template is None else {"template": card.template}),
        **({} if card.licence is None else {"license": card.licence}),
        "details": _details(card),
        "model_info": {**card.metadata, **own},
        "capabilities": capabilities(card),
        "modified_at": moment(card.modified),
    }


def capabilities(card: ModelCard) -> list[str]:
    """What the model can do, in Ollama's words."""
    able = {"completion": True, "insert": card.fills_in, "tools": card.uses_tools, "thinking": card.thinks}
    return [word for word, holds in able.items() if holds]


def _named(name: str, card: ModelCard) -> dict[str, Any]:
    own = tagged(name)
    return {"name": own, "model": own, "size": card.weight_bytes, "digest": card.digest, "details": _details(card)}


def _details(card: ModelCard) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": card.format,
        "family": card.architecture,
        "families": [card.architecture],
        "parameter_size": _size(card.parameters),
        "quantization_level": card.quantisation,
    }


def _size(parameters: int) -> str:
    """A number of weights in Ollama's form, such as 1.5B. Empty if it is not known."""
    for letter, unit in _SIZES:
        if parameters >= unit:
            return f"{parameters / unit:.1f}{letter}"
    return str(parameters) if parameters else ""


def _parameters(card: ModelCard) -> dict[str, Any]:
    """The settings of an answer that asks for none, by Ollama's names."""
    penalties = ("repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty")
    names = ("temperature", "top_k", "top_p", "min_p", *penalties)
    drawing = {} if card.sampling is None else {name: getattr(card.sampling, name) for name in names}
    return {"num_ctx": card.context_length, **drawing}

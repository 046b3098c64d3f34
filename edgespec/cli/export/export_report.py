"""The report of ``edgespec export``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.cli.terminal.output import State, print_json
from edgespec.files.disk import readable_bytes
from edgespec.files.gguf.records import TensorInfo

if TYPE_CHECKING:
    from edgespec.export.perplexity import Cost
    from edgespec.export.trim.choose_rows import Trimming

# Parts of a model, and the text in the names of their matrices. The first match is used.
_CLASSES = (
    ("embedding", "token_embd"),
    ("head", "output.weight"),
    ("attention", "attn"),
    ("feed-forward", "ffn"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A finished export, with everything that its report needs.

    ``bytes_before``: bytes of weights that a token reads in the source; None if unknown.
    """

    folder: Path
    source_name: str
    bytes_before: int | None
    manifest: Mapping[str, Any]
    trimming: Trimming | None
    cost: Cost | None

    @property
    def bytes_per_token(self) -> int | None:
        """Bytes of weights that a token reads in the export; None if the format does not say."""
        from edgespec.files.onnx.folder import is_onnx_folder, read_onnx_folder

        if is_onnx_folder(self.folder):
            return read_onnx_folder(self.folder).bytes_per_forward
        weights = self._gguf()
        return None if weights is None else weights.bytes_per_forward

    @property
    def quantisation(self) -> Mapping[str, str]:
        """Types of the export's weights, by part of the model."""
        weights = self._gguf()
        return self.manifest.get("tensors", {}) if weights is None else quantisation_by_class(weights.tensors)

    def _gguf(self) -> Any:
        from edgespec.export.gguf.files import MODEL
        from edgespec.files.gguf.header import read_header
        from edgespec.files.trimmed_drafter import DRAFTER_NAME

        name = next((name for name in (MODEL, DRAFTER_NAME) if name in self.manifest["files"]), None)
        return None if name is None else read_header(self.folder / name)

    def as_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "manifest": dict(self.manifest),
            "bytes_per_token": {"before": self.bytes_before, "after": self.bytes_per_token},
            "quantisation": dict(self.quantisation),
            "perplexity": None if self.cost is None else self.cost.as_json(),
            "trim": None
            if self.trimming is None
            else {"kept": self.trimming.rows, "of": self.trimming.vocabulary_size, **self.trimming.as_json()},
        }

    def tell(self, state: State, *, as_json: bool) -> None:
        """Print the report as text or JSON."""
        if as_json:
            print_json(self.as_json())
            state.answered = True
        else:
            self._show()

    def _show(self) -> None:
        files: Mapping[str, Any] = self.manifest["files"]
        _line("written", f"{self.folder}, {readable_bytes(sum(record['bytes'] for record in files.values()))}")
        for name, record in files.items():
            _line("", f"{name:<16} {readable_bytes(record['bytes']):>10}")
        after = self.bytes_per_token
        now = "not measured" if after is None else f"{readable_bytes(after)} of weights"
        before = "" if self.bytes_before is None else f"{readable_bytes(self.bytes_before)} of weights in "
        _line("a token", f"reads {before}{self.source_name}; here: {now}" if before else f"reads {now}")
        _line("weights", "; ".join(f"{part} {types}" for part, types in self.quantisation.items()))
        mask = self.manifest.get("mask_token_id")
        if mask is not None:
            _line("as a drafter", f"drafts all tokens in one forward, with token {mask} as the mask")
        for label, text in () if self.cost is None else self.cost.lines():
            _line(label, text)
        if self.trimming is not None:
            self._show_trimming(self.trimming)
        _line("licence", self.manifest.get("licence") or "not stated")

    @staticmethod
    def _show_trimming(trimming: Trimming) -> None:
        known = "" if trimming.coverage is None else f": {trimming.coverage:.1%} of the held-out tokens"
        _line("head", f"{trimming.rows} of {trimming.vocabulary_size} rows{known}")
        if trimming.ranked_by is not None:
            _line("ranked by", trimming.ranked_by)
        for rows, seconds in (trimming.forward_s or {}).items():
            _line("measured", f"{1000 * seconds:.2f} ms a draft token with {rows} rows in llama.cpp")
        for reason in trimming.reasons:
            _line("because", reason)


def _line(label: str, text: str) -> None:
    print(f"{label:<12} {text}")


def quantisation_by_class(tensors: Iterable[TensorInfo]) -> Mapping[str, str]:
    """Types of the matrices of each part of the model, most bytes first: {"head": "Q6_K", ...}.

    Parts are ``embedding`` (also used as the head if there is no ``head``), ``head``, ``attention``,
    ``feed-forward``, ``other``, and ``vectors`` for norms and biases. Parts that the model lacks are left out.
    """
    found: dict[str, Counter[str]] = {}
    for tensor in tensors:
        found.setdefault(_class_of(tensor), Counter())[tensor.type_name] += tensor.byte_count
    order = [*(name for name, _ in _CLASSES), "other", "vectors"]
    return {name: ", ".join(kind for kind, _ in found[name].most_common()) for name in order if name in found}


def _class_of(tensor: TensorInfo) -> str:
    if len(tensor.shape) < 2:
        return "vectors"
    if tensor.name == "output.weight":
        return "head"
    for name, mark in _CLASSES:
        if name != "head" and mark in tensor.name:
            return name
    return "other"

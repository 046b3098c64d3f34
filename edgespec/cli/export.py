"""``edgespec export``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli.opening import JsonOption, TargetOption, resolve_profile, state_of
from edgespec.cli.output import ProgressPrinter, State, print_json
from edgespec.errors import InvalidRequestError, ModelFileError, RuntimeUnavailableError
from edgespec.files.atomic import sha256_file
from edgespec.files.disk import readable_bytes
from edgespec.files.locations import home
from edgespec.files.progress import ProgressCallback
from edgespec.files.store import Store
from edgespec.locate import LocatedModel, Locator

if TYPE_CHECKING:
    from edgespec.cli.trimming import Trimming, TrimRequest

FORMATS = ("gguf", "onnx")
ONNX_QUANTS = ("keep", "q4")  # those export_onnx knows


def export(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Catalogue name, path, or hf:ORG/REPO[@REV][/FILE].")],
    to: Annotated[str, typer.Option("--to", metavar="gguf|onnx", help="What to write.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where to; an earlier export there is replaced.")
    ],
    quant: Annotated[
        str, typer.Option("--quant", metavar="NAME", help="keep, or q4, q4_0, q8_0, ...: re-quantise all matrices.")
    ] = "keep",
    trim_vocab: Annotated[
        str | None,
        typer.Option(
            "--trim-vocab", metavar="N|auto", help="Only draft: keep the N most used rows of the output head."
        ),
    ] = None,
    trim_from: Annotated[
        list[Path] | None,
        typer.Option("--trim-from", metavar="FILE", help="Text that tells which rows; may be given again."),
    ] = None,
    target: TargetOption = None,
    json: JsonOption = False,
) -> None:
    """Write a model as GGUF or ONNX: copied, re-quantised, or as a drafter with a trimmed output head.

    The rows kept are those of the tokens that the target (--target, else the profile's) writes when it answers
    prompts of ours, or of the texts given; `auto` measures how many pay. Such a drafter is used with --draft DIR.
    """
    state = state_of(context)
    wish = _checked(to, quant, trim_vocab, tuple(trim_from or ()), target)
    source = _located(model, output, state)
    trimming: Trimming | None = None
    if wish.trim is not None:
        from edgespec.cli.trimming import choose_rows

        # What ONNX makes of the weights is not timed: llama.cpp's times of the source stand for both.
        timed_quant = wish.quant if to == "gguf" else "keep"
        trimming = choose_rows(source, wish.trim, quant=timed_quant, folder=output, state=state)
    with ProgressPrinter(quiet=state.json and not state.debug).shown() as progress:
        provenance = {
            "name": source.name,
            "sha256": _sha256(source, progress),
            "licence": _licence(source),
        }
        if to == "onnx":
            manifest = _write_onnx(source, output, wish.quant, trimming, provenance, progress)
        else:
            manifest = _write_gguf(source, output, wish.quant, trimming, provenance, progress)
    written = _Written(folder=output, source=source, manifest=manifest, trimming=trimming)
    if json:
        print_json(written.as_json())
        state.answered = True
    else:
        written.show()


# ------------------------------------------------------------------------------------------ what is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    quant: str
    trim: TrimRequest | None


def _checked(to: str, quant: str, trim_vocab: str | None, texts: tuple[Path, ...], target: str | None) -> _Wish:
    """The options, as far as they can be wrong by themselves. Raises InvalidRequestError."""
    if to not in FORMATS:
        raise InvalidRequestError(f"unknown format {to!r}", hint=f"--to takes {' or '.join(FORMATS)}")
    quant = quant.lower()
    if to == "onnx" and quant not in ONNX_QUANTS:
        raise InvalidRequestError(
            f"an ONNX model cannot be quantised to {quant!r}",
            hint=f"with --to onnx, --quant takes {' or '.join(ONNX_QUANTS)}",
        )
    if to == "gguf" and quant != "keep":
        from edgespec.export.quantize import find_quant

        find_quant(quant)
    if trim_vocab is None:
        for option, given in (("--trim-from", bool(texts)), ("--target", target is not None)):
            if given:
                raise InvalidRequestError(
                    f"{option} tells which rows of the vocabulary are kept, and all of them are",
                    hint="add --trim-vocab N or --trim-vocab auto",
                )
        return _Wish(quant=quant, trim=None)
    from edgespec.cli.trimming import TrimRequest

    return _Wish(quant=quant, trim=TrimRequest(rows=_rows(trim_vocab), texts=texts, target=target))


def _rows(text: str) -> int | None:
    """A number of rows; None for ``auto``."""
    if text == "auto":
        return None
    # Ten digits are more than any vocabulary has, and fewer than Python minds.
    if not (text.isascii() and text.isdigit() and len(text) <= 10) or int(text) < 1:
        raise InvalidRequestError(
            f"--trim-vocab takes a number of rows or auto, not {text!r}", hint="for example --trim-vocab 16384"
        )
    return int(text)


def _located(model: str, output: Path, state: State) -> LocatedModel:
    """The model to export, fetched if need be, where it can be exported to ``output`` at all."""
    from edgespec.export.gguf_files import check_destination
    from edgespec.export.staging import check_replaceable

    check_replaceable(Path(os.path.realpath(output)))  # before anything is fetched for it

    with ProgressPrinter(quiet=state.json and not state.debug).shown() as progress:
        source = Locator(store=Store(home()), download=not state.offline, progress=progress).locate(model)
    if source.drafts_only:
        raise InvalidRequestError(
            f"{source.name} is a drafter with a trimmed output head already", hint="export the model it was made from"
        )
    if source.onnx is not None:
        raise InvalidRequestError(
            f"{source.name} is an ONNX model, and only GGUF files can be exported",
            hint="export the model it was made from",
        )
    if not source.header.tensors:
        raise ModelFileError(source.path, "it holds no weights", hint="export a GGUF file with weights")
    check_destination(source.path, output)
    return source


def _sha256(source: LocatedModel, progress: ProgressCallback) -> str:
    """Of the source's content: by it the whole model is found again when a trimmed drafter is not enough."""
    from edgespec.files.progress import ProgressEvent

    if source.identity.startswith("sha256:"):
        return source.identity.removeprefix("sha256:")

    def tell(done: int, total: int) -> None:
        progress(ProgressEvent(stage="hashing", source=source.name, done_bytes=done, total_bytes=total))

    try:
        return sha256_file(source.path, tell)
    except OSError as error:
        raise ModelFileError(source.path, f"the file cannot be read: {error.strerror or error}") from error


def _licence(source: LocatedModel) -> str | None:
    """What the catalogue, the store or the file itself says."""
    if source.spec is not None:
        stored = Store(home()).find(source.spec.name)
        known = source.spec.licence or (None if stored is None else stored.licence)
        if known:
            return known
    stated = source.header.metadata.get("general.license")
    return stated if isinstance(stated, str) else None


# ----------------------------------------------------------------------------------------------- writing


def _write_gguf(
    source: LocatedModel,
    folder: Path,
    quant: str,
    trimming: Trimming | None,
    provenance: Mapping[str, Any],
    progress: ProgressCallback,
) -> Mapping[str, Any]:
    from edgespec.export.gguf_files import KEEP, export_trimmed, export_whole

    more: dict[str, Any] = {
        **provenance,
        "quant": quant,
        "threads": 1 if quant == KEEP else _threads(),
        "notes": None if trimming is None else trimming.as_json(),
        "progress": progress,
    }
    if trimming is None or trimming.kept is None:
        return export_whole(source.path, folder, **more)
    return export_trimmed(source.path, folder, kept=trimming.kept, **more)


def _threads() -> int:
    from edgespec.opening import choose_threads
    from edgespec.planning.machine import describe_machine

    return choose_threads(resolve_profile(None), describe_machine(), None)


def _write_onnx(
    source: LocatedModel,
    folder: Path,
    quant: str,
    trimming: Trimming | None,
    provenance: Mapping[str, Any],
    progress: ProgressCallback,
) -> Mapping[str, Any]:
    kept = None if trimming is None else trimming.kept
    try:
        from edgespec.export.onnx_export import export_onnx

        manifest: Mapping[str, Any] = export_onnx(
            source.path, folder, quant=quant, kept=kept, progress=progress, **provenance
        )
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "onnx":
            raise
        raise RuntimeUnavailableError(
            "writing ONNX models needs the package onnx, which is not installed",
            hint='pip install "edgespec[onnx]"',
        ) from error
    return manifest


# ----------------------------------------------------------------------------------------------- telling


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """An export that is on disk, as it is told."""

    folder: Path
    source: LocatedModel
    manifest: Mapping[str, Any]
    trimming: Trimming | None

    @property
    def bytes_per_token(self) -> int | None:
        """Bytes of weights that a token reads; None where the format does not say."""
        weights = self._gguf()
        return None if weights is None else weights.bytes_per_forward

    @property
    def quantisation(self) -> Mapping[str, str]:
        """Types of the weights, by part of the model."""
        from edgespec.export.quant_classes import quantisation_by_class

        weights = self._gguf()
        return self.manifest.get("tensors", {}) if weights is None else quantisation_by_class(weights.tensors)

    def _gguf(self) -> Any:
        from edgespec.export.gguf_files import DRAFTER, MODEL
        from edgespec.files.gguf import read_header

        name = next((name for name in (MODEL, DRAFTER) if name in self.manifest["files"]), None)
        return None if name is None else read_header(self.folder / name)

    def as_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "manifest": dict(self.manifest),
            "bytes_per_token": {"before": self.source.header.bytes_per_forward, "after": self.bytes_per_token},
            "quantisation": dict(self.quantisation),
            "trim": None
            if self.trimming is None
            else {"kept": self.trimming.rows, "of": self.trimming.vocabulary_size, **self.trimming.as_json()},
        }

    def show(self) -> None:
        files: Mapping[str, Any] = self.manifest["files"]
        _line("written", f"{self.folder}, {readable_bytes(sum(record['bytes'] for record in files.values()))}")
        for name, record in files.items():
            _line("", f"{name:<16} {readable_bytes(record['bytes']):>10}")
        before, after = self.source.header.bytes_per_forward, self.bytes_per_token
        now = "not measured" if after is None else f"{readable_bytes(after)} of weights"
        _line("a token", f"reads {readable_bytes(before)} of weights in {self.source.name}; here: {now}")
        _line("weights", "; ".join(f"{part} {types}" for part, types in self.quantisation.items()))
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
            _line("measured", f"{1000 * seconds:.2f} ms a draft token with {rows} rows")
        for reason in trimming.reasons:
            _line("because", reason)


def _line(label: str, text: str) -> None:
    print(f"{label:<12} {text}")

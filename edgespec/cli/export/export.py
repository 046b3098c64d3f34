"""``edgespec export``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli import suggestions
from edgespec.cli.export.export_folder import FolderRequest, export_if_folder
from edgespec.cli.export.export_report import Written
from edgespec.cli.options import MODEL_HELP, JsonOption, default_threads, resolve_profile, state_of
from edgespec.cli.parser import rare
from edgespec.cli.terminal.output import State, note
from edgespec.errors import InvalidRequestError, ModelFileError, reason_of
from edgespec.export.packages import require_for
from edgespec.export.provenance import KEEP, Provenance
from edgespec.files.atomic import sha256_file, sha256_of_parts
from edgespec.files.home import home
from edgespec.files.progress import Job

if TYPE_CHECKING:
    from edgespec.export.measuring import Measuring
    from edgespec.export.trim.choose_rows import Trimming, TrimRequest
    from edgespec.files.gguf.token_rows import TokenIds
    from edgespec.files.model_file import LocatedModel

FORMATS = ("gguf", "onnx")


def export(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=MODEL_HELP,
            autocompletion=suggestions.for_model,
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="gguf|onnx", help="What to write.", autocompletion=suggestions.one_of("gguf", "onnx")
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write; replaces an earlier export there.")
    ],
    quant: Annotated[
        str,
        typer.Option(
            "--quant",
            metavar="NAME",
            help="keep, or re-quantise all matrices to q4, q4_0, q8_0, ...",
            autocompletion=suggestions.one_of("keep", "q4", "q4_0", "q5", "q6", "q8", "f16"),
        ),
    ] = "keep",
    trim_vocab: Annotated[
        str | None,
        typer.Option(
            "--trim-vocab", metavar="N|auto", help="Make a drafter with only the N most used rows of the output head."
        ),
    ] = None,
    trim_from: Annotated[
        list[Path] | None,
        typer.Option("--trim-from", metavar="FILE", help="Text whose tokens choose the rows (repeatable)."),
    ] = None,
    trim_for: Annotated[
        str | None,
        typer.Option(
            "--trim-for",
            metavar="MODEL",
            help="The target, whose answers choose the rows if no text does.",
            autocompletion=suggestions.for_model,
        ),
    ] = None,
    static_cache: Annotated[
        int | None,
        rare("--static-cache", metavar="N", help="Fixed shapes for NPUs, with a cache for N tokens."),
    ] = None,
    python: Annotated[
        Path | None,
        rare("--python", metavar="PATH", help="Python with Optimum installed, for Hugging Face folders."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write a model as GGUF or ONNX. It is copied, re-quantised, or made a drafter with a trimmed output head.

    --trim-vocab keeps the rows of the most frequent tokens: in the texts of --trim-from, or in the target's answers
    to built-in prompts. `auto` measures which number of rows is fastest. Use such a drafter with --draft DIR.

    A Hugging Face folder (safetensors) is converted to GGUF directly, and to ONNX with Optimum, which runs in a
    separate environment (created on first use) or in the interpreter of --python.
    """
    state = state_of(context)
    form = _checked(to, quant, trim_vocab, tuple(trim_from or ()), trim_for, static_cache)
    require_for(to, form.quant)  # before anything is downloaded
    request = FolderRequest(
        to=to,
        output=output,
        quant=form.quant,
        python=python,
        trimmed=form.trim is not None,
        static_cache=form.static_cache,
        offline=state.offline,
    )
    if export_if_folder(model, request, state, as_json=json):
        return
    source = _located(model, output, state)
    if form.static_cache is not None:
        from edgespec.export.onnx.export import check_static_cache

        check_static_cache(form.static_cache, source.header.context_length)  # before an hour of counting rows
    trimming: Trimming | None = None
    if form.trim is not None:
        from edgespec.export.trim.choose_rows import choose_rows

        # ONNX models are not timed; llama.cpp's times are used, with Q4_0 for 4 bits.
        timed_quant = "q4_0" if (to, form.quant) == ("onnx", "q4") else form.quant
        with _measuring(state) as measuring:
            trimming = choose_rows(source, form.trim, quant=timed_quant, folder=output, measuring=measuring)
    with state.progress() as progress:
        provenance = Provenance(
            name=source.name,
            sha256=_sha256(source, progress.job),
            licence=_licence(source),
            quant=form.quant,
            notes=None if trimming is None else trimming.as_json(),
        )
        kept = None if trimming is None else trimming.kept
        if to == "onnx":
            manifest = _write_onnx(source, output, provenance, kept, form.static_cache, progress.job)
        else:
            manifest = _write_gguf(source, output, provenance, kept, progress.job)
    from edgespec.export.perplexity import cost_of_rounding

    trimmed = trimming is not None and trimming.kept is not None
    # "keep" rounds to 8 bits at most, which hardly changes the perplexity, and measuring would need memory.
    keeps = form.quant == "keep"
    try:
        with _measuring(state) as measuring:
            cost = None if keeps else cost_of_rounding(source, output, manifest, trimmed=trimmed, measuring=measuring)
        state.interrupts.check()
    except KeyboardInterrupt:
        note(f"{output} is complete; only its perplexity was not measured")
        raise
    Written(
        folder=output,
        source_name=source.name,
        bytes_before=source.header.bytes_per_forward,
        manifest=manifest,
        trimming=trimming,
        cost=cost,
    ).tell(state, as_json=json)


@contextmanager
def _measuring(state: State) -> Iterator[Measuring]:
    """What the export measures with, and its progress on stderr."""
    from edgespec.bench.suite import calibration_prompts, suite_sha256
    from edgespec.export.measuring import Measuring

    prompts = calibration_prompts()
    with state.progress() as progress:
        yield Measuring(
            home=home(),
            profile=resolve_profile(None),
            prompts={each.id: each.prompt for each in prompts},
            prompts_sha256=suite_sha256(prompts),
            progress=progress,
            download=not state.offline,
            cancelled=state.interrupts.pending,
        )


# ------------------------------------------------------------------------------------------ what is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    quant: str
    trim: TrimRequest | None
    static_cache: int | None


def _checked(
    to: str,
    quant: str,
    trim_vocab: str | None,
    texts: tuple[Path, ...],
    target: str | None,
    static_cache: int | None,
) -> _Form:
    """Check the options that need no model. Raises InvalidRequestError."""
    if to not in FORMATS:
        raise InvalidRequestError(f"unknown format {to!r}", hint=f"--to takes {' or '.join(FORMATS)}")
    if static_cache is not None and to != "onnx":
        raise InvalidRequestError("--static-cache is for ONNX models only", hint="add --to onnx, or leave it out")
    quant = quant.lower()
    if to == "onnx":
        from edgespec.export.onnx.tables import QUANTS

        if quant not in QUANTS:
            raise InvalidRequestError(
                f"an ONNX model cannot be quantised to {quant!r}",
                hint=f"with --to onnx, --quant takes {' or '.join(QUANTS)}",
            )
    if to == "gguf" and quant != "keep":
        from edgespec.export.gguf.quantize import find_quant

        find_quant(quant)
    if trim_vocab is None:
        for option, given in (("--trim-from", bool(texts)), ("--trim-for", target is not None)):
            if given:
                raise InvalidRequestError(
                    f"{option} chooses which rows of the vocabulary to keep, and without --trim-vocab all are kept",
                    hint="add --trim-vocab N or --trim-vocab auto",
                )
        return _Form(quant=quant, trim=None, static_cache=static_cache)
    from edgespec.export.trim.choose_rows import TrimRequest

    trim = TrimRequest(rows=_rows(trim_vocab), texts=texts, target=target)
    return _Form(quant=quant, trim=trim, static_cache=static_cache)


def _rows(text: str) -> int | None:
    """A number of rows; None for ``auto``."""
    if text == "auto":
        return None
    # No vocabulary needs more than ten digits, and Python refuses to read very long numbers.
    if not (text.isascii() and text.isdigit() and len(text) <= 10) or int(text) < 1:
        raise InvalidRequestError(
            f"--trim-vocab takes a number of rows or auto, not {text!r}", hint="for example --trim-vocab 16384"
        )
    return int(text)


def _located(model: str, output: Path, state: State) -> LocatedModel:
    """Locate the model, downloading it if missing, and check that it can be exported to ``output``."""
    from edgespec.export.gguf.files import check_destination
    from edgespec.export.staging import check_replaceable
    from edgespec.store.locate import Locator
    from edgespec.store.store import Store

    check_replaceable(Path(os.path.realpath(output)))  # before anything is downloaded

    with state.progress() as progress:
        source = Locator(store=Store(home()), download=not state.offline, job=progress.job).locate(model)
    if source.drafts_only:
        raise InvalidRequestError(
            f"{source.name} already is a drafter with a trimmed output head", hint="export the model it was made from"
        )
    if source.onnx is not None:
        raise InvalidRequestError(
            f"{source.name} is an ONNX model, and only GGUF files can be exported",
            hint="export the model it was made from",
        )
    if not source.header.tensors:
        raise ModelFileError(source.path, "the file holds no weights", hint="export a GGUF file with weights")
    check_destination(source.path, output)
    return source


def _sha256(source: LocatedModel, job: Job) -> str:
    """SHA-256 of the source's content, by which a trimmed drafter's whole model is found later."""
    if source.identity.startswith("sha256:"):
        return source.identity.removeprefix("sha256:")

    try:
        parts = [sha256_file(part.path, job, stage="hashing", source=source.name) for part in source.header.parts]
        return sha256_of_parts(parts)
    except OSError as error:
        raise ModelFileError(source.path, f"the file cannot be read: {reason_of(error)}") from error


def _licence(source: LocatedModel) -> str | None:
    """The licence stated by the catalogue, the store or the file; None if none states it."""
    if source.identity.startswith("sha256:"):
        from edgespec.store.store import Store

        stored = Store(home()).find(source.name)
        known = source.licence or (None if stored is None else stored.licence)
        if known:
            return known
    stated = source.header.metadata.get("general.license")
    return stated if isinstance(stated, str) else None


# ----------------------------------------------------------------------------------------------- writing


def _write_gguf(
    source: LocatedModel, folder: Path, provenance: Provenance, kept: TokenIds | None, job: Job
) -> Mapping[str, Any]:
    from edgespec.export.gguf.files import export_trimmed, export_whole

    threads = 1 if provenance.quant == KEEP else default_threads()
    if kept is None:
        return export_whole(source.path, folder, provenance, threads=threads, job=job)
    return export_trimmed(source.path, folder, provenance, kept=kept, threads=threads, job=job)


def _write_onnx(
    source: LocatedModel,
    folder: Path,
    provenance: Provenance,
    kept: TokenIds | None,
    static_cache: int | None,
    job: Job,
) -> Mapping[str, Any]:
    from edgespec.export.onnx.export import export_onnx

    return export_onnx(source.path, folder, provenance, kept=kept, static_cache=static_cache, job=job)

"""``edgespec pull`` and ``edgespec models``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli import suggestions
from edgespec.cli.options import JsonOption, state_of
from edgespec.cli.parser import SETTINGS, Command, Group
from edgespec.cli.terminal.output import ProgressPrinter, State, cells, note, padded, print_json
from edgespec.errors import ESCAPES, DownloadError, EdgespecError, InvalidRequestError, ModelNotFoundError
from edgespec.files.atomic import sha256_of_parts
from edgespec.files.disk import counted, is_there, megabytes
from edgespec.files.home import home
from edgespec.store.catalogue import catalogue, lookup
from edgespec.store.families import models_by_name
from edgespec.store.references import (
    ONLINE,
    CatalogueName,
    HubFile,
    HubReference,
    LocalPath,
    ModelSpec,
    Network,
    named_on_hub,
    parse_reference,
    spec_of_hub_reference,
)

if TYPE_CHECKING:
    from edgespec.store.hub.quantisations import Quantisation, QuantisationChoice
    from edgespec.store.scan import FoundModel
    from edgespec.store.store import Store, StoredModel

app = typer.Typer(
    cls=Group,
    help="List known and stored models; remove or verify one.",
    invoke_without_command=True,
    **SETTINGS,
)

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A name from `edgespec models`.", autocompletion=suggestions.for_stored_model
    ),
]


def pull(
    context: typer.Context,
    model: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help="Names, ORG/REPO[:QUANT], or the hub's addresses.",
            autocompletion=suggestions.for_model,
        ),
    ],
    json: JsonOption = False,
) -> None:
    """Download models into the store. Downloads are verified, and resume after an interruption."""
    state = state_of(context)
    references = [_fetchable(text) for text in model]
    store = _store(Network(offline=state.offline))
    rows = []
    for reference in references:
        with state.progress() as progress:
            spec, choice = _wanted(reference, store, progress)
        if choice is not None and not json:
            _show_quantisations(choice)
        with state.progress() as progress:
            stored = store.fetch(spec, progress.job)
        content = _Content.of(stored.path) if stored.kind == "model" else None
        runs = "" if content is None else f", {content.words}"
        licence = stored.licence or "not stated"
        note(f"{stored.name}: {megabytes(stored.bytes)}, licence {licence}{runs}, {stored.path}")
        found = None if choice is None else [_quantisation_json(choice, each) for each in choice.found]
        told = {} if content is None else content.as_json()
        rows.append({**_stored_json(stored), **told, "quantisations": found})
    if json:
        print_json({"models": rows})


def _store(network: Network = ONLINE) -> Store:
    from edgespec.store.store import Store

    return Store(home(), network)


def _fetchable(text: str) -> CatalogueName | HubReference:
    reference = parse_reference(text, catalogue().keys())
    if text.startswith("ollama:"):
        raise InvalidRequestError(
            f"{text} is a model of Ollama, which fetches it", hint=f"`ollama pull {text.removeprefix('ollama:')}`"
        )
    if isinstance(reference, LocalPath):
        meant = None if is_there(reference.path) else named_on_hub(text)
        raise InvalidRequestError(
            f"{text} is a path, so there is nothing to download",
            hint="use the path as MODEL in other commands" if meant is None else f"a file of the hub is {meant}",
        )
    if isinstance(reference, CatalogueName):
        lookup(reference.name, to_fetch=True, others=models_by_name())  # raises before anything is downloaded
    return reference


def _wanted(
    reference: CatalogueName | HubReference, store: Store, progress: ProgressPrinter
) -> tuple[ModelSpec, QuantisationChoice | None]:
    """The model to download, and for a repository its quantisations and the chosen one."""
    if isinstance(reference, CatalogueName):
        return lookup(reference.name, to_fetch=True), None
    spec = spec_of_hub_reference(reference)
    if reference.filename is not None:
        return spec, None
    here = next((stored for stored in store.list() if stored.name == spec.name), None)
    try:
        choice = store.choose_quantisation(reference, progress.job)
    except DownloadError:
        if here is None:
            raise
        return spec, None  # the model is stored, so the hub is not needed
    if here is not None:
        choice = _with_stored(choice, here)
    source = HubFile(reference.repo, choice.chosen.files[0], reference.revision)
    return replace(spec, licence=choice.listing.licence, sources=(source,)), choice


def _with_stored(choice: QuantisationChoice, here: StoredModel) -> QuantisationChoice:
    """The choice where the repository's model is stored already: it stays, whatever the hub has by now."""
    names = [path.name for path in here.paths]
    held = [each for each in choice.found if [file.rpartition("/")[2] for file in each.files] == names]
    chosen = held[0] if held else choice.chosen
    told = {entry.name: entry.sha256 for entry in choice.listing.entries}
    hashes = [told.get(file) for file in chosen.files]
    known = [each for each in hashes if each is not None]
    if held and (len(known) < len(hashes) or sha256_of_parts(known) == here.sha256):
        return replace(choice, chosen=chosen, reason="it is already stored")
    again = f"`edgespec models rm {here.name}`, then `edgespec pull {here.name}`"
    return replace(choice, chosen=chosen, reason=f"another file is stored as {here.name}; to fetch this one: {again}")


def _show_quantisations(choice: QuantisationChoice) -> None:
    """Print a line for each quantisation, and how to choose another."""
    listing, found = choice.listing, choice.found
    where = " in the hub's cache" if listing.cached else ""
    note(f"{listing.reference()} holds {counted(len(found), 'quantisation')}{where}")
    width = max(cells(each.name or "?") for each in found)
    for each in found:
        amount = "" if each.bytes is None else megabytes(each.bytes)
        runs = {True: "runs on our kernels", False: "needs llama.cpp", None: "its header will tell"}[each.native]
        fits = ", too large for this machine" if each.fits is False else ""
        mark = "*" if each is choice.chosen else " "
        note(
            f"{mark} {padded(each.name or '?', width)}  {amount:>9}  {runs}{fits}  {each.files[0].translate(ESCAPES)}"
        )
    note(f"* {choice.words}")
    if len(found) > 1:
        another = HubReference(listing.repo, listing.revision, quant="QUANT")
        note(f"for another one: edgespec pull {another.text}")


def _quantisation_json(choice: QuantisationChoice, each: Quantisation) -> dict[str, Any]:
    return {
        "name": each.name,
        "model": choice.listing.reference(each.files[0]),
        "files": list(each.files),
        "bytes": each.bytes,
        "native": each.native,
        "fits": each.fits,
        "chosen": each is choice.chosen,
        "reason": choice.reason if each is choice.chosen else None,
    }


@app.callback()
def models(context: typer.Context, json: JsonOption = False) -> None:
    """List known and stored models and those of other programs, with sizes."""
    if context.invoked_subcommand is not None:
        return
    from edgespec.store.file_notes import FileNotes
    from edgespec.store.found import ModelFolders, find_models

    store = _store()
    known, here = catalogue(), {stored.name: stored for stored in store.list()}
    found = find_models(ModelFolders.here())
    own = {stored.path.resolve() for stored in here.values()}
    drafters = FileNotes(store.home).drafters()
    others = [_Other.of(model, drafters) for model in found.models if model.path.resolve() not in own]
    if json:
        rows = [_row_json(name, known.get(name), here.get(name), drafters) for name in _names(known, here)]
        print_json({"models": [*rows, *(other.as_json() for other in others)]})
        return
    names = [name for name in _names(known, here) if name in here or known[name].kind == "model"]
    width = max(map(cells, names))
    for name in names:
        stored, spec = here.get(name), known.get(name)
        size = stored.bytes if stored else spec.bytes if spec else None
        amount = "" if size is None else megabytes(size) if size >= 10**6 else "< 1 MB"
        about = _about(spec, stored, drafters)
        print(f"{padded(name, width)}  {'on disk' if stored else 'not here':8}  {amount:>8}  {about}".rstrip())
    for other in others:
        print(f"{other.model.name}\n{'':{width}}  {'on disk':8}  {megabytes(other.model.bytes):>8}  {other.about}")
    for path, reason in {**store.ignored(), **found.ignored}.items():
        note(f"ignored {str(path).translate(ESCAPES)}: {reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """Facts from a model's file: its architecture, and the reason why the native runtime cannot run it, if any.

    ``vision``: whether the model has an image encoder, which is not used. ``runs``: whether any runtime may run it.
    """

    family: str | None
    reason: str | None
    vision: bool = False
    runs: bool = True

    @classmethod
    def of(cls, path: Path, others: Sequence[Path] = ()) -> _Content:
        from edgespec.files.model_file import read_model_file
        from edgespec.interfaces.model import HOST
        from edgespec.runtimes.table import RUNTIMES
        from edgespec.text.tokenizers.vocabulary import unsupported

        family, vision = None, False
        try:
            located = read_model_file(path, others)
            family, vision = located.header.architecture, bool(located.header.vision_tensors)
            RUNTIMES["native"].check(located, HOST)
            reason = unsupported(located.header)
        except EdgespecError as error:
            reason = error.message
        return cls(family=family, reason=reason, vision=vision)

    @property
    def words(self) -> str:
        if self.family is None:
            return self.reason or ""
        if not self.runs:
            runs = f"cannot run: {self.reason}"
        elif self.vision:
            runs = (
                "text runs on our kernels, images are left out"
                if self.reason is None
                else f"cannot run: {self.reason}"
            )
        else:
            runs = "runs on our kernels" if self.reason is None else "needs llama.cpp"
        return f"{self.family}, {runs}"

    def as_json(self) -> dict[str, Any]:
        return {"family": self.family, "native": self.reason is None, "reason": self.reason, "vision": self.vision}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Other:
    """A model of another program, with facts from its file; ``drafter`` is its latest drafter."""

    model: FoundModel
    content: _Content
    drafter: str | None

    @classmethod
    def of(cls, model: FoundModel, drafters: Mapping[Path, str]) -> _Other:
        content = _Content.of(model.path, model.others)
        if model.refused is not None:
            content = replace(content, reason=model.refused, runs=False)
        elif model.vision:
            content = replace(content, vision=True)
        return cls(model=model, content=content, drafter=drafters.get(model.path.resolve()))

    @property
    def about(self) -> str:
        return f"{self.model.program}, {self.content.words}{_drafter_words(self.drafter)}"

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.model.name,
            "kind": "model",
            "on_disk": True,
            "path": str(self.model.path),
            "parts": [str(path) for path in (self.model.path, *self.model.others)],
            "bytes": self.model.bytes,
            "program": self.model.program,
            **self.content.as_json(),
            "drafter": self.drafter,
        }


def _names(known: Mapping[str, ModelSpec], here: Mapping[str, StoredModel]) -> list[str]:
    """Models before prompt sets."""
    return sorted({*known, *here}, key=lambda name: (name in known and known[name].kind != "model", name))


def _about(spec: ModelSpec | None, stored: StoredModel | None, drafters: Mapping[Path, str]) -> str:
    drafter = _drafter_words(None if stored is None else drafters.get(stored.path.resolve()))
    content = _Content.of(stored.path).words if stored is not None and stored.kind == "model" else ""
    licence = (stored.licence if stored else None) or (spec.licence if spec else None)
    description = spec.description if spec else stored.source if stored else ""
    about = f"{description} [{licence}]" if licence else description
    return (f"{about}, {content}" if content else about) + drafter


def _drafter_words(drafter: str | None) -> str:
    return "" if drafter is None else f", drafter {drafter}"


def _row_json(
    name: str, spec: ModelSpec | None, stored: StoredModel | None, drafters: Mapping[Path, str]
) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "kind": "model", "on_disk": stored is not None}
    if spec is not None:
        row |= {"kind": spec.kind, "bytes": spec.bytes, "licence": spec.licence, "drafter": spec.drafter}
    if stored is not None:
        row |= _stored_json(stored) | (_Content.of(stored.path).as_json() if stored.kind == "model" else {})
        row["drafter"] = row.get("drafter") or drafters.get(stored.path.resolve())
    return row


def _stored_json(stored: StoredModel) -> dict[str, Any]:
    return {
        "name": stored.name,
        "kind": stored.kind,
        "path": str(stored.path),
        "parts": [str(path) for path in stored.paths],
        "bytes": stored.bytes,
        "sha256": stored.sha256,
        "source": stored.source,
        "revision": stored.revision,
        "licence": stored.licence,
    }


@app.command("rm", cls=Command)
def remove(
    context: typer.Context,
    model: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL", help="Names from `edgespec models`.", autocompletion=suggestions.for_stored_model
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: JsonOption = False,
) -> None:
    """Delete models from the store. Files in the hub's cache stay there. On a terminal it asks first."""
    from edgespec.store.locate import stored_name

    state = state_of(context)
    json = json or state.json
    if len(model) > 1 and json:
        raise InvalidRequestError("--json removes one model", hint="call it once for each model")
    store = _store()
    names = list(dict.fromkeys(stored_name(each, store) for each in model))
    if not (yes or json) and not _agreed(names, state):
        note("nothing was removed")
        raise typer.Exit(1)
    for name in names:
        _remove(name, state, as_json=json)


def _agreed(names: Sequence[str], state: State) -> bool:
    """Whether a person says yes; True without a terminal."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    here = [stored for stored in _store().list() if stored.name in names]
    size = f" ({megabytes(sum(stored.bytes for stored in here))})" if here else ""
    sys.stderr.write(f"Remove {', '.join(names)}{size}? [y/N] ")
    sys.stderr.flush()
    return state.interrupts.read(sys.stdin.readline).strip().lower() in ("y", "yes")


def _remove(name: str, state: State, *, as_json: bool) -> None:
    from edgespec.engine.prefixes.stored import clear_prefixes

    store = _store()
    stored = next((each for each in store.list() if each.name == name), None)  # find would read a changed file
    with state.progress() as progress:
        removed = store.remove(name, progress.job)
    if stored is not None:
        clear_prefixes(home(), f"sha256:{stored.sha256}")
    if as_json:
        in_use = [str(path) for path in removed.in_use]
        print_json({"removed": name, "freed_bytes": removed.freed_bytes, "in_use": in_use})
        return
    print(f"removed {name}: {megabytes(removed.freed_bytes)} freed")
    if len(removed.kept) > 1:
        note(f"the hub's cache still holds {len(removed.kept)} files in {removed.kept[0].parent}")
    elif removed.kept:
        note(f"the hub's cache still holds {removed.kept[0]}")
    for path in removed.in_use:
        note(f"another program uses {path}: edgespec deletes the file after that program has ended")


@app.command("verify", cls=Command)
def verify(context: typer.Context, model: ModelArgument, json: JsonOption = False) -> None:
    """Read a stored model and compare its sha256 with the recorded one."""
    from edgespec.store.locate import stored_name

    state, store = state_of(context), _store()
    json = json or state.json
    name = stored_name(model, store)
    with state.progress() as progress:
        if store.find(name) is None:
            raise ModelNotFoundError(f"{name} is not on this machine", hint="`edgespec models` lists what is")
        stored = store.verify(name, progress.job)
    if json:
        print_json({"verified": _stored_json(stored)})
    else:
        print(f"{name} is intact: sha256 {stored.sha256}")

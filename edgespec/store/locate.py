"""From a MODEL argument to a file on this machine: catalogue, store, hub reference, or path."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.errors import HashMismatchError, ModelFileError, ModelNotFoundError
from edgespec.files.disk import is_there
from edgespec.files.gguf.header import read_header
from edgespec.files.model_file import LocatedModel, read_model_file
from edgespec.files.progress import QUIET, Job
from edgespec.store.catalogue import catalogue, lookup
from edgespec.store.families import models_by_name
from edgespec.store.found import ModelFolders
from edgespec.store.ollama import OLLAMA_PREFIX, find_ollama, kept_settings, ollama_models
from edgespec.store.prepared import prepared_folder, use_prepared
from edgespec.store.references import (
    CatalogueName,
    HubReference,
    LocalPath,
    ModelSpec,
    named_on_hub,
    parse_reference,
    spec_of_hub_reference,
)
from edgespec.store.store import Store

# NAME[:TAG], as Ollama's library names models.
_SHORT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(:[A-Za-z0-9._-]+)?")

VISION_NOTE = "images are left out: this file's vision part is not used"


@dataclass(frozen=True, slots=True, kw_only=True)
class Locator:
    """Finds models. Without ``download`` nothing touches the network."""

    store: Store
    download: bool = False
    job: Job = QUIET

    def locate(self, text: str) -> LocatedModel:
        """Find the file of a MODEL argument and fetch it if allowed and needed.

        Raises InvalidRequestError, ModelNotFoundError, ModelFileError, DownloadError, DiskSpaceError.
        """
        name = _name_in_ollama(text)
        if name is not None:
            found = find_ollama(ModelFolders.here().ollama, name)
            located = read_model_file(found.path, found.others)
            return replace(located, name=name, kept=kept_settings(found), projector=found.vision)
        reference = parse_reference(text, catalogue().keys())
        if isinstance(reference, LocalPath):
            return _in_path(reference.path, text)
        spec = _spec(reference)
        if spec.kind != "model":
            raise ModelNotFoundError(f"{spec.name} is not a model", hint="see `edgespec models`")
        return self.locate_spec(spec)

    def check(self, text: str) -> None:
        """Raise what ``locate`` raises for a name that no model has, and for a file that is missing or damaged."""
        reference = parse_reference(text, catalogue().keys())
        if _name_in_ollama(text) is not None:
            return
        if isinstance(reference, LocalPath):
            _in_path(reference.path, text)
        else:
            _spec(reference)

    def locate_to_run(self, text: str) -> LocatedModel:
        """As ``locate``, for a model that will be run.

        Prepared data of models outside the store goes to edgespec's home.
        """
        located = self.locate(text)
        if located.vision:
            self.job.tell("located", located.name, note=VISION_NOTE)
        if located.prepared_folder is not None:
            return located
        folder = prepared_folder(self.store.home, located)
        if folder is not None:
            use_prepared(folder)
        return replace(located, prepared_folder=folder)

    def locate_spec(self, spec: ModelSpec) -> LocatedModel:
        """The file of a known model."""
        stored = self.store.find(spec.name)
        if stored is None and not self.download:
            raise ModelNotFoundError(
                f"{spec.name} is not on this machine", hint=f"fetch it with `edgespec pull {spec.name}`"
            )
        if stored is None:
            stored = self.store.fetch(spec, self.job)
        return LocatedModel(
            name=spec.name,
            path=stored.path,
            header=read_header(stored.path),
            identity=f"sha256:{stored.sha256}",
            drafter=spec.drafter,
            licence=spec.licence,
            prepared_folder=stored.folder,
        )

    def find_source(self, exported: LocatedModel) -> LocatedModel | None:
        """The model in the store that ``exported`` was made from; None if it is missing or has changed."""
        sha256 = exported.source_sha256
        for stored in self.store.list():
            if sha256 is not None and stored.sha256 == sha256:
                try:
                    found = self.store.find(stored.name)
                    header = None if found is None else read_header(found.path)
                except (HashMismatchError, ModelFileError):
                    continue
                if found is not None and header is not None:
                    return LocatedModel(
                        name=found.name,
                        path=found.path,
                        header=header,
                        identity=f"sha256:{sha256}",
                        prepared_folder=found.folder,
                    )
        return None


def stored_name(text: str, store: Store) -> str:
    """The name that the store has for the model of a MODEL argument, whether or not the model is there.

    Raises InvalidRequestError for a malformed argument, ModelNotFoundError for a model that is kept elsewhere.
    """
    if any(text == stored.name for stored in store.list()):  # also one that the catalogue had in an earlier version
        return text
    reference = parse_reference(text, catalogue().keys())
    by_ollama = _name_in_ollama(text) is not None
    if by_ollama or isinstance(reference, LocalPath):
        raise ModelNotFoundError(
            f"{text} is not in the store of models: {'Ollama keeps it' if by_ollama else 'it is a path'}",
            hint="the store has the models that `edgespec pull` fetched",
        )
    return reference.name if isinstance(reference, CatalogueName) else reference.text


def _name_in_ollama(text: str) -> str | None:
    """What Ollama calls the model that a MODEL argument names; None if it is not one that Ollama has here.

    A short name, such as llama3.2:3b, is Ollama's if neither the catalogue nor a file has it.
    """
    if text.startswith(OLLAMA_PREFIX):
        return text.removeprefix(OLLAMA_PREFIX)
    if not _SHORT_NAME.fullmatch(text) or text in catalogue() or is_there(text):
        return None
    try:
        find_ollama(ModelFolders.here().ollama, text)
    except ModelNotFoundError:
        return None
    return text


def _in_path(path: Path, text: str) -> LocatedModel:
    """The model in a path, for a MODEL argument ``text``. Raises ModelFileError."""
    try:
        return read_model_file(path)
    except ModelFileError as error:
        meant = None if is_there(path) else named_on_hub(text)
        if meant is None:
            raise
        raise ModelFileError(path, error.reason, hint=f"check the path; a file of the hub is {meant}") from error


def _spec(reference: CatalogueName | HubReference) -> ModelSpec:
    if isinstance(reference, CatalogueName):
        own = [model.name for model in ollama_models(ModelFolders.here().ollama, {})]
        return lookup(reference.name, others=models_by_name(), here=own)
    return spec_of_hub_reference(reference)

"""Paths of edgespec's own state. Looking up a path creates nothing; folders are created when first needed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from edgespec.errors import EdgespecError, reason_of
from edgespec.files.atomic import write_text
from edgespec.files.disk import is_folder, is_there
from edgespec.files.progress import QUIET, Job

HOME_VARIABLE = "EDGESPEC_HOME"

# The format number of the whole home. A home without a number was written by edgespec 0.1.0 and has format 1.
FORMAT = 1

# Another process that writes a file under a lock has done so by then.
_LOCK_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Home:
    """All paths under one root; none need exist.

    ``history``, ``conversation``, ``file_notes``, ``declined_offers``, ``secret`` and ``format_file`` are files, all
    other paths folders.
    """

    root: Path

    @property
    def models(self) -> Path:
        """One folder per model: the file and its manifest."""
        return self.root / "models"

    @property
    def parts(self) -> Path:
        """Partial downloads, one folder per model; safe to delete at any time."""
        return self.root / "parts"

    @property
    def locks(self) -> Path:
        """Lock files, outside of ``models``: removing a model never removes a held lock."""
        return self.root / "locks"

    @property
    def measurements(self) -> Path:
        """Calibration results of this machine."""
        return self.root / "measurements"

    @property
    def prepared(self) -> Path:
        """Repacked weights of models outside of the store; safe to delete at any time."""
        return self.root / "prepared"

    @property
    def counted_answers(self) -> Path:
        """Answers of targets whose tokens were counted; safe to delete at any time."""
        return self.root / "emissions"

    @property
    def tools(self) -> Path:
        """Virtual environments of programs that edgespec runs as subprocesses; safe to delete at any time."""
        return self.root / "tools"

    @property
    def profiles(self) -> Path:
        """The user's own profiles."""
        return self.root / "profiles"

    @property
    def history(self) -> Path:
        """The lines typed into ``edgespec chat``."""
        return self.root / "history"

    @property
    def conversations(self) -> Path:
        """What ``conversation`` is in."""
        return self.root / "conversations"

    @property
    def conversation(self) -> Path:
        """The last conversation of ``edgespec chat``; readable by its owner alone."""
        return self.conversations / "last.json"

    @property
    def answers(self) -> Path:
        """The history: answers of models, one file for each vocabulary."""
        return self.root / "answers"

    @property
    def prefixes(self) -> Path:
        """Caches of beginnings that conversations shared; safe to delete at any time."""
        return self.root / "prefixes"

    @property
    def learned(self) -> Path:
        """Indexes of the user's own text, one file for each vocabulary."""
        return self.root / "learned"

    @property
    def file_notes(self) -> Path:
        """Cached facts about model files; safe to delete at any time."""
        return self.root / "file-notes.json"

    @property
    def declined_offers(self) -> Path:
        """Targets for which the user declined the download of a drafter."""
        return self.root / "declined-offers.json"

    @property
    def secret(self) -> Path:
        """The secret that shows which files were made here; readable by its owner alone."""
        return self.root / "secret"

    @property
    def format_file(self) -> Path:
        """The file with the format number, the first file written in a home."""
        return self.root / "format"

    def read_format(self) -> int | None:
        """The format number, or None if the file does not exist. Creates nothing.

        Raises EdgespecError if the number is newer than FORMAT or not a positive whole number.
        """
        other = f"set {HOME_VARIABLE} to another folder"
        try:
            with self.format_file.open("rb") as file:
                digits = file.read(32).strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise EdgespecError(f"{self.format_file} cannot be read: {reason_of(error)}", hint=other) from error
        number = int(digits) if digits.isdigit() else 0
        if number < 1:
            hint = f"write {FORMAT} into it if no newer edgespec used this folder, or {other}"
            raise EdgespecError(f"{self.format_file} does not hold a format number", hint=hint)
        if number > FORMAT:
            what = f"a newer edgespec wrote {self.root}: its format is {number}, and this edgespec reads {FORMAT}"
            raise EdgespecError(what, hint=f"update edgespec, or {other}")
        return number

    def create(self, folder: Path) -> Path:
        """Create ``folder`` inside the home and return it. A home without a format number gets FORMAT.

        Raises EdgespecError if the folder cannot be created or written, or if a newer edgespec wrote the home.
        """
        unnumbered = self.read_format() is None
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if unnumbered:  # processes that do this in parallel write the same number
                with contextlib.suppress(OSError, EdgespecError):  # a root that cannot be written stays unnumbered
                    write_text(self.format_file, f"{FORMAT}\n")
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EdgespecError(
                f"the folder {folder} cannot be created: {reason_of(error)}",
                hint=f"set {HOME_VARIABLE} to a folder you may write to",
            ) from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise EdgespecError(
                f"the folder {folder} cannot be written to",
                hint=f"set {HOME_VARIABLE} to a folder you may write to",
            )
        return folder

    def locked(
        self, name: str, doing: str, job: Job = QUIET, *, timeout_s: float = _LOCK_WAIT_S
    ) -> contextlib.AbstractContextManager[None]:
        """The lock of this name, with the arguments of ``locks.locked``. Raises EdgespecError, OSError."""
        from edgespec.files.locks import locked  # here: most commands lock nothing

        return locked(self.create(self.locks) / f"{name}.lock", doing, job, timeout_s=timeout_s)


def home(environ: Mapping[str, str] = os.environ) -> Home:
    """The folder in ``EDGESPEC_HOME``, else the platform's folder for a user's data.

    Raises EdgespecError if there is no such folder (no home folder, an invalid path) or a newer edgespec wrote it.
    """
    chosen = environ.get(HOME_VARIABLE, "").strip()
    if "\0" in chosen:
        raise EdgespecError(
            f"{HOME_VARIABLE} holds a NUL character, which a path cannot hold", hint=f"correct {HOME_VARIABLE}"
        )
    try:
        if chosen:
            # Absolute from the start: a later change of the working directory must not move the state.
            root = Path(chosen).expanduser().absolute()
        else:
            root = Path(platformdirs.user_data_dir("edgespec", appauthor=False))
    except (RuntimeError, OSError) as error:
        raise EdgespecError(
            f"the home folder cannot be found: {error}", hint=f"set {HOME_VARIABLE} to an absolute path"
        ) from error
    if not root.is_absolute():  # expanduser returns a relative path for a user without a home
        raise EdgespecError(
            "this user has no home folder to keep models in", hint=f"set {HOME_VARIABLE} to an absolute path"
        )
    if is_there(root) and not is_folder(root):
        raise EdgespecError(f"{root} is a file, not a folder", hint=f"set {HOME_VARIABLE} to a folder")
    opened = Home(root)
    opened.read_format()
    return opened


def as_home(folder: Home | Path | str) -> Home:
    """The home in a folder. Raises EdgespecError for what is none."""
    if isinstance(folder, Home):
        return folder
    if not isinstance(folder, Path | str):
        raise EdgespecError(f"a home must be a folder's path, not {type(folder).__name__}")
    try:
        return Home(Path(folder).expanduser().absolute())
    except (RuntimeError, OSError) as error:
        raise EdgespecError(f"the home folder cannot be found: {error}", hint="give an absolute path") from error

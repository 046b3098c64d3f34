"""Finds a drafter for a target: the one named for it, else a smaller model on this machine.

Reading a header takes 10 to 30 ms, mostly for the vocabulary. The results are noted (store/file_notes.py), so a later
start reads no header again. A found file only drafts: the text stays the target's own. A drafter with another
vocabulary is translated (text/tokenizers/token_map.py) if the vocabularies share enough.
"""

from __future__ import annotations

import hashlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgespec.calibration.measurement_store import Measurements
from edgespec.engine.pair.drafter_gain import MOST_SHARE, Judgement, judge_drafter
from edgespec.engine.pair.drafter_offer import UNIVERSAL
from edgespec.engine.pair.target_setting import PlacedTarget
from edgespec.errors import CancelledError, EdgespecError, InvalidRequestError, ModelFileError
from edgespec.files.checked import to_json
from edgespec.files.gguf.vocabulary import compare_vocabularies
from edgespec.files.model_file import LocatedModel
from edgespec.files.progress import Loading, LoadProgress
from edgespec.files.token_map import NO_MAP
from edgespec.interfaces.model import ModelFacts
from edgespec.interfaces.reasons import Reason
from edgespec.placement.prepared import Preparation
from edgespec.planning.choice.options import Rejected
from edgespec.planning.choice.planner import DraftingModel, PlanRequest
from edgespec.profiles.profile import Profile
from edgespec.runtimes.process.frames import read_facts
from edgespec.runtimes.table import runtime_of
from edgespec.store.catalogue import catalogue
from edgespec.store.families import Family, family_of
from edgespec.store.file_notes import FileNote, FileNotes
from edgespec.store.found import ModelFolders
from edgespec.store.locate import Locator
from edgespec.store.on_disk import FileOnDisk, files_on_disk
from edgespec.text.tokenizers.token_map import LEAST_COVERAGE, shared_coverage, token_map

# How long one start may read headers without a note; the next start continues. A choice: about sixty files.
SEARCH_S = 1.5

_UNREADABLE = "it cannot be read"
_TOO_LARGE = ("cannot_pay", "not_expected_to_pay")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDrafter:
    """The drafter's file, or the reason for none (``off``).

    ``layer``: the file is the target's, and a layer in it drafts. ``program`` is the other program that keeps the
    file, if the search found it there. ``considered`` are the other files on this machine, each with the reason why
    it does not draft.
    """

    file: LocatedModel | None = None
    off: str | None = None
    layer: bool = False
    program: str | None = None
    considered: tuple[Rejected, ...] = ()


def find_drafter(
    profile: Profile,
    target: LocatedModel,
    locator: Locator,
    search: Callable[[], FoundDrafter],
    faster: Callable[[FoundDrafter], FoundDrafter],
    tell: LoadProgress,
) -> FoundDrafter:
    """The drafter that the profile or the catalogue names, else the one that ``search`` finds.

    ``faster`` is asked for a better one than the catalogue's. A missing drafter is an error only if the profile names
    it. Raises what locating raises for such a drafter.
    """
    if profile.draft == "none" or profile.depth == 0:
        return FoundDrafter()
    if profile.draft != "auto":
        located = locator.locate_to_run(profile.draft)
        return _named(target, located, tell)
    if target.drafter is None:
        return search()
    try:
        located = locator.locate_to_run(target.drafter)
    except CancelledError:
        raise
    except EdgespecError as error:
        found, named = search(), error.message + (f"; {error.hint}" if error.hint else "")
        return found if found.file is not None else replace(found, off=named)
    return faster(_named(target, located, tell))


def _named(target: LocatedModel, drafter: LocatedModel, tell: LoadProgress) -> FoundDrafter:
    try:
        return FoundDrafter(file=in_targets_tokens(target, drafter, tell))
    except InvalidRequestError as error:
        return FoundDrafter(off=f"{drafter.name} has {error.message}")


def in_targets_tokens(target: LocatedModel, drafter: LocatedModel, tell: LoadProgress) -> LocatedModel:
    """The drafter, with a map between the vocabularies if its own is another one.

    Raises InvalidRequestError, a message to follow "it has", if the vocabularies share too little of a text, or if
    the drafter cannot be translated.
    """
    difference = compare_vocabularies(target.header, drafter.header)
    if difference is None:
        return drafter
    try:
        _coverage(target, drafter)
        tell(Loading(f"translating the vocabulary of {drafter.name}"))
        tokens = token_map(target.header, drafter.header, drafter.prepared_folder)
    except EdgespecError as error:
        raise InvalidRequestError(f"another vocabulary: {difference.reason}; {error.message}") from error
    return replace(drafter, token_map=tokens)


def _coverage(target: LocatedModel, drafter: LocatedModel) -> float:
    """The share of a sample text's tokens that a drafter with another vocabulary has too.

    Raises InvalidRequestError if it is too small, or if such a drafter cannot be translated.
    """
    if drafter.drafts_only:
        raise InvalidRequestError("a drafter with a trimmed head needs the target's")
    if drafter.header.reads_target:
        raise InvalidRequestError("a drafter that reads its target's cache needs the target's")
    if drafter.header.mask_token_id is not None:
        raise InvalidRequestError("a drafter that drafts all tokens in one forward needs the target's")
    try:
        coverage = shared_coverage(target.header, drafter.header)
    except ModelFileError as error:
        raise InvalidRequestError(error.message) from error
    if coverage < LEAST_COVERAGE:
        needed = f"and can draft from {LEAST_COVERAGE:.0%} on"
        raise InvalidRequestError(f"it has {coverage:.0%} of the tokens of a sample text, {needed}")
    return coverage


def none_known(target: LocatedModel, target_bytes: int) -> str:
    """A sentence that no drafter is known for the target, and which models would do."""
    family = family_of(target.header, target.name)
    said = f"no drafter is known for {target.name}"
    if family is not None and family.why_no_drafter is not None:
        said += f": {family.why_no_drafter}"
    fitting = smaller_drafters(family, target_bytes)
    universal_bytes = catalogue()[UNIVERSAL].bytes
    if not fitting and universal_bytes is not None and universal_bytes <= MOST_SHARE * target_bytes:
        return f"{said}; a small model with another vocabulary works too, mostly for English: --draft {UNIVERSAL}"
    return (
        f"{said}; any small model with the same vocabulary works: --draft {fitting[0] if fitting else 'hf:ORG/REPO'}"
    )


def smaller_drafters(family: Family | None, target_bytes: int) -> list[str]:
    """MODEL arguments of the family's drafters that read clearly fewer bytes a token than ``target_bytes``."""
    drafters = () if family is None else family.drafters
    return [drafter.model for drafter in drafters if drafter.draft_bytes <= MOST_SHARE * target_bytes]


class DrafterSearch:
    """One search for one target: which files on this machine could draft, and which of them gains most.

    ``request`` is the plan's. ``clock`` is in seconds.
    """

    def __init__(
        self,
        target: PlacedTarget,
        locator: Locator,
        measurements: Measurements,
        request: PlanRequest,
        tell: LoadProgress,
        *,
        search_s: float = SEARCH_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target = target.model.file
        self._facts = target.model.facts
        self._runtime = runtime_of(target.model.settings)
        self._prepare = target.prepare
        self._allowed_bytes = target.allowed_bytes
        self._locator = replace(locator, download=False)  # a file that is gone is not fetched again
        self._measurements = measurements
        self._request = request
        self._tell = tell
        self._search_s = search_s
        self._clock = clock
        self._notes = FileNotes(locator.store.home)
        self._until: float | None = None
        self._why_not: dict[FileOnDisk, Reason] = {}
        self._key = _description_key(target.prepare, target.model.facts)

    def run(self) -> FoundDrafter:
        """The drafter with the largest expected gain. Raises CancelledError."""
        files = files_on_disk(self._locator.store, ModelFolders.here())
        own = self._target.path.resolve()
        judged = [(file, judgement) for file in files if file.path != own and (judgement := self._judged(file))]
        judged.sort(key=lambda pair: pair[1].order)
        first = next((each for _, each in judged if each.why_not is None), None)
        if first is not None:  # a translated drafter that is measured to be faster comes before it
            judged.sort(key=lambda pair: not (pair[1].translated and pair[1].beats(first)))
        found = FoundDrafter(off=self._why_none(judged))
        best: FileOnDisk | None = None
        for file, judgement in judged:
            if judgement.why_not is not None:
                self._why_not[file] = judgement.why_not
            elif best is not None:
                self._why_not[file] = Reason("other_drafter", f"{best.name} has at least the same expected gain")
            elif (located := self._locate(file)) is not None:
                best, found = file, FoundDrafter(file=located, program=file.program)
        for file in files:
            if file.path == own:
                self._notes.of(file).drafter = None if best is None else best.name
        self._notes.save(files)
        considered = tuple(_rejected(file, self._why_not[file]) for file in files if file in self._why_not)
        return replace(found, considered=considered)

    def or_faster(self, found: FoundDrafter) -> FoundDrafter:
        """``found``, or the universal drafter of the store where both were measured here and it is faster."""
        if found.file is None or (file := self._universal()) is None or file.path == found.file.path.resolve():
            return found
        other = self._judged(file)
        self._notes.save([file], all_files=False)
        if other is None:
            return replace(found, considered=(_rejected(file, self._why_not[file]),))
        own = DraftingModel(facts=self._prepare.drafter(found.file).facts)
        first = judge_drafter(self._measurements, self._facts, own, self._request, self._allowed_bytes)
        better = self._locate(file) if other.beats(first) else None
        if other.measured and first.measured:
            lost, won = (first, other) if better is not None else (other, first)
            gains = f"{lost.speedup or 0.0:.2f}x plain decoding is expected with it, {won.speedup or 0.0:.2f}x"
            why = f"measured here, {gains} with the other"
            if (lost.speedup or 0.0) > (won.speedup or 0.0):
                why += ", and too few guesses were counted to tell them apart"
        else:
            measure = replace(self._prepare.profile, draft=UNIVERSAL).command("calibrate")
            why = f"whether it is faster is not measured: `{measure}` does that"
        loser = UNIVERSAL if better is None else found.file.name
        considered = (Rejected(what=loser, verdict=Reason("other_drafter", why), target=None),)
        return replace(found, considered=considered, file=better or found.file)

    def _universal(self) -> FileOnDisk | None:
        """The universal drafter's file in the store; None without a sound one."""
        try:
            stored = self._locator.store.find(UNIVERSAL, self._locator.job)
            if stored is None:
                return None
            path, seen = stored.path.resolve(), stored.path.stat()
        except CancelledError:
            raise
        except (EdgespecError, OSError):
            return None
        return FileOnDisk(name=UNIVERSAL, path=path, bytes=stored.bytes, mtime_ns=seen.st_mtime_ns)

    def _why_none(self, judged: Sequence[tuple[FileOnDisk, Judgement]]) -> str:
        """Why there is no drafter: the reason against the best file with the target's vocabulary."""
        for file, judgement in judged[:1]:
            why = judgement.why_not
            if why is not None:
                anyway = f" (--draft {file.name} uses it anyway)" if why.code in _TOO_LARGE else ""
                shares = self._target.identity not in self._notes.of(file).translated
                vocabulary = "the target's vocabulary" if shares else "another vocabulary, which can be translated"
                return f"{file.name} has {vocabulary}: {why.text}{anyway}"
        return none_known(self._target, self._facts.bytes_per_forward)

    def _judged(self, file: FileOnDisk) -> Judgement | None:
        """The file's expected gain; None if it cannot draft, with the reason in ``_why_not``."""
        if file.bytes >= self._target.weight_bytes:
            self._why_not[file] = Reason("not_smaller", "it is as large as the target")
            return None
        note, may_pass = self._notes.of(file), False
        if not _is_known(note, self._target.identity, self._key_of(note)):
            if not self._has_time():
                self._why_not[file] = Reason("not_looked_at", "it was not read yet: the next start continues")
                return None
            may_pass = self._look_at(file, note)
        key = self._key_of(note)
        reason = _refusal(note, self._target.identity, key)
        if reason is not None:
            self._why_not[file] = reason
            if may_pass:
                note.refused = None
            return None
        facts = read_facts(note.described[key]["facts"])
        if facts.follows and (unread := self._unread(file)) is not None:
            self._why_not[file] = Reason("cannot_run", unread)
            return None
        drafting = DraftingModel(facts=facts, translated=note.translated.get(self._target.identity))
        return judge_drafter(self._measurements, self._facts, drafting, self._request, self._allowed_bytes)

    def _unread(self, file: FileOnDisk) -> str | None:
        """Why a drafter that reads its target's cache cannot read this one's. Not noted: there are few such files."""
        try:
            return self._runtime.why_not_read(self._locator.locate(file.name), self._target)
        except CancelledError:
            raise
        except EdgespecError as error:
            return error.message

    def _has_time(self) -> bool:
        now = self._clock()
        if self._until is None:
            self._until = now + self._search_s
            self._tell(Loading("looking for a drafter on this machine"))
        self._locator.job.check("loading was cancelled")
        return now < self._until

    def _look_at(self, file: FileOnDisk, note: FileNote) -> bool:
        """Read the file's header and note the result. Whether it was an error of the disk, which may pass."""
        try:
            located = self._locator.locate(file.name)
            note.refused = _no_drafter(located)
            if note.refused is None:
                self._compare(located, note)
        except CancelledError:
            raise
        except EdgespecError as error:
            note.refused = f"{_UNREADABLE}: {error.message}"
            return isinstance(error.__cause__, OSError)
        if note.refused is not None or note.vocabularies[self._target.identity] is not None:
            return False
        # Prepared apart: what is prepared for use has the map itself, which takes seconds to make.
        own = self._prepare
        prepare = Preparation(own.profile, own.threads, own.context_length)
        if self._target.identity in note.translated:
            located = replace(located, token_map=NO_MAP)
        try:
            note.described[self._key_of(note)] = {"facts": to_json(prepare.drafter(located).facts)}
        except EdgespecError as error:
            note.described[self._key_of(note)] = {"refused": error.message}
        return False

    def _key_of(self, note: FileNote) -> str:
        """The key of the file's description: with another vocabulary its weights are kept in other bits."""
        return self._key + ("-translated" if self._target.identity in note.translated else "")

    def _compare(self, located: LocatedModel, note: FileNote) -> None:
        """Note whether the file's vocabulary is the target's, or can be translated."""
        target, identity = self._target, self._target.identity
        difference = compare_vocabularies(target.header, located.header)
        note.vocabularies[identity] = None if difference is None else difference.reason
        note.translated.pop(identity, None)
        if difference is None:
            return
        try:
            coverage = _coverage(target, located)
        except InvalidRequestError as error:
            note.vocabularies[identity] = f"{difference.reason}; {error.message}"
        else:
            note.vocabularies[identity] = None
            note.translated[identity] = coverage

    def _locate(self, file: FileOnDisk) -> LocatedModel | None:
        """Locate the file again: it may have changed since the note."""
        try:
            return in_targets_tokens(self._target, self._locator.locate_to_run(file.name), self._tell)
        except CancelledError:
            raise
        except InvalidRequestError as error:
            self._why_not[file] = Reason("other_vocabulary", error.message)
        except EdgespecError as error:
            self._why_not[file] = Reason("unreadable", f"{_UNREADABLE}: {error.message}")
        return None


def _description_key(prepare: Preparation, target: ModelFacts) -> str:
    """A hash of everything except the file that a drafter's facts depend on."""
    profile = prepare.profile
    depends = (
        *(target.runtime, target.build, sorted(target.settings.items()), prepare.threads),
        *(profile.draft_runtime, profile.draft_device, profile.draft_head, profile.draft_weights),
        profile.draft_isolation,
        importlib.util.find_spec("llama_cpp") is not None,
    )
    return hashlib.sha256(repr(depends).encode()).hexdigest()[:16]


def _is_known(note: FileNote, identity: str, key: str) -> bool:
    """Whether the note makes reading the header unnecessary."""
    if note.refused is not None:
        return True
    return identity in note.vocabularies and (
        note.vocabularies[identity] is not None or _usable(note.described.get(key))
    )


def _usable(described: Any) -> bool:
    if not isinstance(described, dict):
        return False
    if isinstance(described.get("refused"), str):
        return True
    try:
        read_facts(described.get("facts"))
    except EdgespecError:  # another version's note, or an edited one
        return False
    return True


def _refusal(note: FileNote, identity: str, key: str) -> Reason | None:
    if note.refused is not None:
        return Reason("unreadable" if note.refused.startswith(_UNREADABLE) else "not_a_drafter", note.refused)
    different = note.vocabularies[identity]
    if different is not None:
        return Reason("other_vocabulary", f"another vocabulary: {different}")
    refused = note.described[key].get("refused")
    return None if refused is None else Reason("cannot_run", str(refused))


def _no_drafter(located: LocatedModel) -> str | None:
    """Why a file cannot draft for any target; None if it may."""
    metadata = located.header.metadata
    if located.onnx is None and not located.header.tensors:
        return "it is not a complete model"
    if metadata.get(f"{located.header.architecture}.pooling_type", 0) != 0:
        return "it makes embeddings, not text"
    return None


def _rejected(file: FileOnDisk, reason: Reason) -> Rejected:
    keeper = "" if file.program is None else f" ({file.program})"
    return Rejected(what=f"{file.name}{keeper}", verdict=reason, target=None)

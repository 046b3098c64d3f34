"""A model as it would be loaded: runtime, settings, facts and memory, computed once and passed on.

And in which other settings it could run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from edgespec.errors import (
    EdgespecError,
    InvalidRequestError,
    ModelFileError,
    ProfileError,
    RuntimeUnavailableError,
)
from edgespec.files.disk import counted
from edgespec.files.model_file import LocatedModel
from edgespec.files.progress import QUIET, Job
from edgespec.hardware.machine import Machine
from edgespec.interfaces.features import MOST_ROWS
from edgespec.interfaces.model import ALL_KEPT, HOST, ModelFacts
from edgespec.placement.memory import MemoryEstimate, memory_needed
from edgespec.profiles.profile import Profile
from edgespec.runtimes.background import BackgroundModel, LoadingHere, StartingModel
from edgespec.runtimes.process.frames import LoadRequest
from edgespec.runtimes.process.settings import WorkerSettings, run_in_process
from edgespec.runtimes.runtime import AS_FILED, DraftForm, LoadedModel, Runtime, Settings
from edgespec.runtimes.table import RUNTIMES, runtime_of

# What a worker process holds without its model (interpreter, numpy, runtime): 51 MiB resident with llama.cpp, 68 MiB
# with ONNX Runtime, on Linux with a tiny model, without a device driver's memory.
PROCESS_BYTES = 68 * 2**20

# Bytes of a model's file loaded a second: mapped from an earlier load's result, and prepared from scratch. The slower
# of two 2-core machines: 1.12 GB in 0.3 s, and 0.49 GB in 1.6 s (docs/results/native.md). For other runtimes a guess,
# until the first load.
_MAPPED_BYTES_PER_S, _PREPARED_BYTES_PER_S = 3.7e9, 0.3e9


@dataclass(frozen=True, kw_only=True)
class PreparedModel:
    """A file in one setting, with caches for ``context_length`` tokens. ``facts`` are those of the loaded model.

    ``form`` is what a drafter leaves out of its file. ``in_process``: the model is loaded in a separate process.
    ``first`` is the same model for the context that it was described for, if that is another one.
    """

    file: LocatedModel
    settings: Settings
    facts: ModelFacts
    context_length: int
    form: DraftForm = AS_FILED
    in_process: bool = False
    first: PreparedModel | None = None

    @cached_property
    def memory(self) -> MemoryEstimate:
        """The bytes needed of the machine's own memory."""
        if self.first is not None:
            return self.first.memory.for_context(self.context_length)
        needed = memory_needed(self.file, self.settings, self.context_length)
        if self.facts.follows:
            hidden = 2 * MOST_ROWS * self.file.header.hidden_length * 4
            needed = replace(needed, buffers_bytes=needed.buffers_bytes + hidden)
        return self._own_part(needed)

    def _own_part(self, filed: MemoryEstimate) -> MemoryEstimate:
        """What the model takes of what its file would."""
        process_bytes = PROCESS_BYTES if self.in_process else 0  # once, not for each session
        return replace(filed, weights_bytes=filed.weights_bytes - self.spared_bytes + process_bytes)

    def for_context(self, context_length: int) -> PreparedModel:
        """The same model with caches for another number of tokens."""
        return replace(self, context_length=context_length, first=self.first or self)

    @property
    def is_prepared(self) -> bool:
        """Whether loading in this process only maps an earlier load's result."""
        return not self.in_process and runtime_of(self.settings).is_prepared(self.file, self.settings, self.form)

    @property
    def will_prepare(self) -> bool:
        """Whether loading in this process stores a result that later loads only map."""
        return not self.in_process and runtime_of(self.settings).will_prepare(self.file, self.settings, self.form)

    @property
    def expected_load_s(self) -> float:
        """Expected seconds of a load in this process, by file size."""
        return self.file.weight_bytes / (_MAPPED_BYTES_PER_S if self.is_prepared else _PREPARED_BYTES_PER_S)

    def drafting_in(self, prepare: Preparation) -> PreparedModel:
        """The same drafter as ``prepare`` has it. Raises what describing it raises."""
        return prepare.drafter(self.file)

    @property
    def spared_bytes(self) -> int:
        """How many bytes less than in the file the weights take."""
        return self.file.weight_bytes - self.facts.weight_bytes

    def load(self, job: Job = QUIET) -> LoadedModel:
        """Load the model in this process. The job and the errors are those of ``Runtime.load``."""
        return runtime_of(self.settings).load(self.file, self.settings, self.form, job)

    def load_beside(self, target: LoadedModel | None, job: Job) -> LoadedModel:
        """Load a drafter in this process; ``target`` is what it drafts for, if that is loaded."""
        return self.load(job)

    def in_background(
        self,
        worker: WorkerSettings,
        check: Callable[[], object] = lambda: None,
        target: LoadedModel | None = None,
    ) -> BackgroundModel:
        """The model, loading once its ``load`` is called: on a thread or in a separate process.

        ``check`` is called before loading, and may raise. ``target`` is that of ``load_beside``.
        """
        if not self.in_process:

            def start() -> StartingModel:
                check()
                return LoadingHere(lambda job: self.load_beside(target, job))

            return BackgroundModel(self.facts, start)
        file = self.file
        folder = file.artefact or file.onnx
        request = LoadRequest(
            runtime=self.settings.runtime,
            path=file.path if folder is None else folder.folder,
            others=tuple(part.path for part in file.header.split[1:]),
            settings=asdict(self.settings),  # type: ignore[call-overload]
            name=file.name,
            sha256=file.identity,
        )
        return run_in_process(self.facts, request, worker, check)


class DraftingLayer(PreparedModel):
    """A layer of a target's file that drafts for it: the target has the weights."""

    def _own_part(self, filed: MemoryEstimate) -> MemoryEstimate:
        own = self.facts.cache_bytes(self.context_length)
        return replace(filed, weights_bytes=0, cache_bytes=own, windowed=ALL_KEPT)

    @property
    def is_prepared(self) -> bool:
        return True

    @property
    def will_prepare(self) -> bool:
        return False

    @property
    def expected_load_s(self) -> float:
        return 0.0

    def drafting_in(self, prepare: Preparation) -> PreparedModel:
        return prepare.drafting_layer(prepare.target(self.file))

    def load_beside(self, target: LoadedModel | None, job: Job) -> LoadedModel:
        return self.load(job) if target is None else runtime_of(self.settings).drafting_layer(target, self.form)


def prepare_model(file: LocatedModel, settings: Settings, context_length: int) -> PreparedModel:
    """A model with all that its file holds. Raises what ``Runtime.describe`` raises."""
    facts = runtime_of(settings).describe(file, settings)
    return PreparedModel(file=file, settings=settings, facts=facts, context_length=context_length)


def prepare_drafter(profile: Profile, file: LocatedModel, settings: Settings, context_length: int) -> PreparedModel:
    """A drafter without what ``form`` leaves out of its file, in this or a separate process.

    Raises what ``Runtime.describe`` raises.
    """
    # What reads its target's cache is where that is.
    runtime, apart = (
        runtime_of(settings),
        drafts_in_process(profile, settings.device) and not file.header.reads_target,
    )
    form = AS_FILED
    if not apart:
        whole_head, filed_weights = profile.draft_head == "whole", profile.draft_weights == "file"
        form = runtime.draft_form(file, whole_head=whole_head, filed_weights=filed_weights)
    facts = runtime.describe(file, settings, form)
    if apart:
        facts = replace(facts, can_fork=False, can_branch=False, settings={**facts.settings, "process": True})
    return PreparedModel(
        file=file, settings=settings, facts=facts, context_length=context_length, form=form, in_process=apart
    )


def drafts_in_process(profile: Profile, device: str) -> bool:
    """Whether a drafter on that device runs in a separate process: GPU and NPU do, unless the profile decides.

    A failing or hanging driver takes down the process that uses it.
    """
    if profile.draft_isolation == "auto":
        return device.lower() != HOST
    return profile.draft_isolation == "process"


class Preparation:
    """The models of one load: each setting is chosen, described and sized once, however often it is requested."""

    def __init__(self, profile: Profile, threads: int, context_length: int) -> None:
        self.profile = profile
        self.threads = threads
        self.context_length = context_length
        self._prepared: dict[tuple[Path, str, str, str, int | None, str], Sequence[PreparedModel]] = {}

    def for_context(self, context_length: int) -> Preparation:
        """The same models with caches for another number of tokens."""
        other = Preparation(self.profile, self.threads, context_length)
        for key, models in self._prepared.items():
            other._prepared[key] = [model.for_context(context_length) for model in models]
        return other

    def target(self, file: LocatedModel) -> PreparedModel:
        """The target in its fastest known setting. Raises what ``choose_runtime`` raises."""
        profile = self.profile
        layers = None if profile.gpu_layers == "auto" else profile.gpu_layers
        wanted_device = HOST if layers == 0 and file.onnx is None else profile.device
        wanted = profile.runtime if file.runtime == "auto" else file.runtime
        runtime, device = choose_runtime(wanted, wanted_device, file)
        return self.target_at(file, runtime, device, layers)[0]

    def target_at(
        self, file: LocatedModel, runtime: Runtime, device: str, layers: int | None = None
    ) -> Sequence[PreparedModel]:
        """The target on a device, in the settings worth probing for bit-equal widths, the fastest first."""
        key = (file.path, file.name, runtime.name, device, layers, "target")
        if key not in self._prepared:
            preferred = self._settings(file, runtime, device, layers)
            variants = runtime.stable_settings(preferred)
            self._prepared[key] = [prepare_model(file, each, self.context_length) for each in variants]
        return self._prepared[key]

    def target_in(self, file: LocatedModel, settings: Settings) -> PreparedModel:
        """The target in these settings."""
        known = (
            each for models in self._prepared.values() for each in models if each.file is file and not each.in_process
        )
        found = next((each for each in known if each.settings == settings and each.form == AS_FILED), None)
        return found or prepare_model(file, settings, self.context_length)

    def for_prompts(self, model: PreparedModel) -> PreparedModel | None:
        """The model in the setting that reads prompts fastest; None if unchanged or if the model only drafts."""
        settings = runtime_of(model.settings).prompt_settings(model.settings)
        if settings == model.settings or model.file.drafts_only:
            return None
        return prepare_model(model.file, settings, self.context_length)

    def drafting_layer(self, target: PreparedModel) -> PreparedModel:
        """The layer of the target's file that drafts for it, next to the target. Raises what describing it raises."""
        file, settings = target.file, target.settings
        key = (file.path, file.name, settings.runtime, settings.device, settings.gpu_layers, "layer")
        if key not in self._prepared:
            runtime, whole = runtime_of(settings), self.profile.draft_head == "whole"
            head_rows = runtime.draft_form(file, whole_head=whole, filed_weights=True).head_rows
            form = DraftForm(head_rows=head_rows, layer=True)
            facts = runtime.describe(file, settings, form)
            self._prepared[key] = [
                DraftingLayer(
                    file=file, settings=settings, facts=facts, context_length=self.context_length, form=form
                )
            ]
        return self._prepared[key][0]

    def drafter(self, file: LocatedModel) -> PreparedModel:
        """The drafter in its fastest setting: its rounding affects only its own proposals.

        Raises what ``choose_runtime`` raises.
        """
        return self.drafter_at(file, *choose_runtime(self.profile.draft_runtime, self.profile.draft_device, file))

    def drafting_on(self, device: str, runtime: str | None = None) -> Preparation:
        """The same models, for a profile that names the drafter's device, and its runtime if given."""
        profile = replace(self.profile, draft_device=device, draft_runtime=runtime or self.profile.draft_runtime)
        decided = Preparation(profile, self.threads, self.context_length)
        decided._prepared = self._prepared
        return decided

    def drafter_at(self, file: LocatedModel, runtime: Runtime, device: str) -> PreparedModel:
        """The drafter on a device."""
        use = "drafter" if file.token_map is None else "translated drafter"
        key = (file.path, file.name, runtime.name, device, None, use)
        if key not in self._prepared:
            settings = self._settings(file, runtime, device, None)
            self._prepared[key] = [prepare_drafter(self.profile, file, settings, self.context_length)]
        return self._prepared[key][0]

    def _settings(self, file: LocatedModel, runtime: Runtime, device: str, layers: int | None) -> Settings:
        sidecar = self.profile.native_sidecar
        return runtime.settings(file, threads=self.threads, device=device, gpu_layers=layers, sidecar=sidecar)


# ---------------------------------------------------------------------------- runtimes, threads and other settings


def choose_threads(profile: Profile, machine: Machine, max_threads: int | None) -> int:
    """The profile's threads, or one for each physical core; at most ``max_threads``.

    Raises ProfileError for more threads than processors: they would only wait for each other.
    """
    threads = machine.physical_cores if profile.threads == "auto" else profile.threads
    if profile.threads != "auto" and threads > machine.logical_cores:
        processors = counted(machine.logical_cores, "processor")
        raise ProfileError(
            f"{profile.origins.get('threads', 'threads')}: {threads} threads are more than the {processors} that "
            "this process may use",
            hint="auto takes the number that is fastest",
        )
    return max(1, min(threads, max_threads or threads))


def choose_runtime(wanted: str, wanted_device: str, file: LocatedModel) -> tuple[Runtime, str]:
    """The runtime to start with and its device: one with a device other than the processor, else the preferred one.

    Raises what ``processor_runtimes`` raises.
    """
    possible = _possible(wanted, file)
    able = _able([(runtime, runtime.find_device(wanted_device, file.weight_bytes)) for runtime in possible], file)
    return min(able, key=lambda pair: (pair[1] == HOST, pair[0].preference()))


def _able(found: Sequence[tuple[Runtime, str]], file: LocatedModel) -> Sequence[tuple[Runtime, str]]:
    """The runtimes that may run the file on their device. Raises what ``processor_runtimes`` raises."""
    if len(found) == 1:
        found[0][0].check(file, found[0][1])
        return found
    able = [pair for pair in found if _can(pair[0], file, pair[1])]
    if not able:
        raise _none_can([runtime for runtime, _ in found], file)
    return able


def _possible(wanted: str, file: LocatedModel) -> Sequence[Runtime]:
    """The runtimes for files of this format; only ``wanted`` if it is among them."""
    possible = [runtime for runtime in RUNTIMES.values() if runtime.runs(file)]
    return [runtime for runtime in possible if runtime.name == wanted] or possible


def processor_runtimes(wanted: str, device: str, file: LocatedModel) -> Sequence[Runtime]:
    """The runtimes that may run a file on ``device``, the preferred one first.

    Raises ModelFileError, RuntimeUnavailableError or InvalidRequestError, with the reason, if no runtime can.
    """
    able = _able([(runtime, device) for runtime in _possible(wanted, file)], file)
    return sorted((runtime for runtime, _ in able), key=lambda each: each.preference())


def _can(runtime: Runtime, file: LocatedModel, device: str) -> bool:
    try:
        runtime.check(file, device)
    except (InvalidRequestError, ModelFileError, RuntimeUnavailableError):
        return False
    return True


def _none_can(runtimes: Sequence[Runtime], file: LocatedModel) -> EdgespecError:
    """Why the best of several runtimes cannot run the file, and how to get the next best."""
    errors: list[EdgespecError] = []
    for runtime in runtimes:
        try:
            runtime.check(file, HOST)
        except (InvalidRequestError, ModelFileError, RuntimeUnavailableError) as error:
            errors.append(error)
    first, last = errors[0], errors[-1]
    return RuntimeUnavailableError(f"{first.message}; {last.message}", hint=last.hint)


def other_settings(target: LoadedModel) -> list[Mapping[str, Any]]:
    """Settings in which plain decoding may be faster, as arguments of ``with_settings``."""
    return [*({"threads": threads} for threads in fewer_threads(target)), *other_caches(target)]


def fewer_threads(target: LoadedModel) -> list[int]:
    """Powers of two below the target's number of threads."""
    own = target.settings.threads
    return [2**power for power in range(own.bit_length()) if 2**power < own]


def other_caches(target: LoadedModel) -> list[Mapping[str, Any]]:
    """Caches with which plain decoding may be faster."""
    return list(runtime_of(target.settings).other_caches(target.settings))


def setting_words(facts: ModelFacts) -> str:
    """The distinctive settings of a model, in short words."""
    parts = [counted(facts.threads, "thread"), f"a {facts.kv_type} cache"]
    if not facts.settings.get("flash_attention", True):
        parts.append("no flash attention")
    if not facts.settings.get("repack", True):
        parts.append("weights as in the file")
    return ", ".join(parts)

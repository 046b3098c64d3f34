"""A model as it would be loaded: runtime, settings, facts and memory, computed once and passed on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from edgespec.files.model_file import LocatedModel
from edgespec.files.progress import QUIET, Job
from edgespec.interfaces.features import MOST_ROWS
from edgespec.interfaces.model import ALL_KEPT, HOST, ModelFacts
from edgespec.placement.memory import MemoryEstimate, memory_needed
from edgespec.placement.settings import choose_runtime
from edgespec.profiles.profile import Profile
from edgespec.runtimes.background import BackgroundModel, LoadingHere, StartingModel
from edgespec.runtimes.process.frames import LoadRequest
from edgespec.runtimes.process.settings import WorkerSettings, run_in_process
from edgespec.runtimes.runtime import AS_FILED, DraftForm, LoadedModel, Runtime, Settings
from edgespec.runtimes.table import runtime_of

# What a worker process holds without its model (interpreter, numpy, runtime): 51 MiB resident with llama.cpp, 68 MiB
# with ONNX Runtime, on Linux with a tiny model, without a device driver's memory.
PROCESS_BYTES = 68 * 2**20


@dataclass(frozen=True, kw_only=True)
class PreparedModel:
    """A file in one setting, with caches for ``context_length`` tokens. ``facts`` are those of the loaded model.

    ``form`` is what a drafter leaves out of its file; of one that is a layer of the target's, the target has the
    weights. ``in_process``: the model is loaded in a separate process.
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
        if self.form.layer:
            own = self.facts.cache_bytes(self.context_length)
            return replace(needed, weights_bytes=0, cache_bytes=own, windowed=ALL_KEPT)
        process_bytes = PROCESS_BYTES if self.in_process else 0  # once, not for each session
        return replace(needed, weights_bytes=needed.weights_bytes - self.spared_bytes + process_bytes)

    def for_context(self, context_length: int) -> PreparedModel:
        """The same model with caches for another number of tokens."""
        return replace(self, context_length=context_length, first=self.first or self)

    @property
    def is_prepared(self) -> bool:
        """Whether loading in this process only maps an earlier load's result."""
        if self.form.layer:
            return True
        return not self.in_process and runtime_of(self.settings).is_prepared(self.file, self.settings, self.form)

    @property
    def will_prepare(self) -> bool:
        """Whether loading in this process stores a result that later loads only map."""
        if self.in_process or self.form.layer:
            return False
        return runtime_of(self.settings).will_prepare(self.file, self.settings, self.form)

    @property
    def spared_bytes(self) -> int:
        """How many bytes less than in the file the weights take."""
        return self.file.weight_bytes - self.facts.weight_bytes

    def load(self, job: Job = QUIET) -> LoadedModel:
        """Load the model in this process. The job and the errors are those of ``Runtime.load``."""
        return runtime_of(self.settings).load(self.file, self.settings, self.form, job)

    def in_background(
        self,
        worker: WorkerSettings,
        check: Callable[[], object] = lambda: None,
        target: LoadedModel | None = None,
    ) -> BackgroundModel:
        """The model, loading once its ``load`` is called: on a thread or in a separate process.

        ``check`` is called before loading, and may raise. ``target`` has the weights of a layer that drafts for it.
        """
        if not self.in_process:

            def load(job: Job) -> LoadedModel:
                if target is None or not self.form.layer:
                    return self.load(job)
                return runtime_of(self.settings).drafting_layer(target, self.form)

            def start() -> StartingModel:
                check()
                return LoadingHere(load)

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
        runtime, whole = runtime_of(target.settings), self.profile.draft_head == "whole"
        head_rows = runtime.draft_form(target.file, whole_head=whole, filed_weights=True).head_rows
        form = DraftForm(head_rows=head_rows, layer=True)
        facts = runtime.describe(target.file, target.settings, form)
        return replace(target, facts=facts, form=form, context_length=self.context_length, first=None)

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

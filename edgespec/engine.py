"""Engine: loaded models, a plan, and what is learned across requests. The only place that wires the parts."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.decoding.contracts import DepthPolicy, Drafter
from edgespec.drafters.lookup import LookupDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.errors import CancelledError, ClosedError, EdgespecError, InvalidRequestError, TemplateError
from edgespec.events import Loading, LoadProgress
from edgespec.files.gguf import compare_vocabularies
from edgespec.files.locations import Home, home
from edgespec.files.progress import Cancelled
from edgespec.files.store import Store
from edgespec.locate import LocatedModel, Locator
from edgespec.planning.depth import FixedDepth, TrialPolicy
from edgespec.planning.machine import Machine, describe_machine
from edgespec.planning.measurements import Measurements
from edgespec.planning.memory import MemoryEstimate, estimate_memory, require_memory
from edgespec.planning.plan import Plan
from edgespec.planning.planner import Wish, find_stable_model, make_plan
from edgespec.planning.widths import WidthProbe
from edgespec.profiles.profile import Profile, load_profile
from edgespec.runtimes.llama import (
    KV_TYPES,
    LlamaModel,
    LlamaSequence,
    LlamaSettings,
    load_model,
    usable_settings,
)
from edgespec.runtimes.llama_library import load as load_library
from edgespec.session import Session
from edgespec.text.templates import ChatTemplate
from edgespec.text.tokenizer import LlamaVocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the engine may take of the machine; None leaves it to the profile."""

    max_memory_bytes: int | None = None
    max_threads: int | None = None


class Engine:
    """A target, perhaps a drafter, and the plan for them. Use as a context manager or call ``close``."""

    def __init__(
        self,
        *,
        profile: Profile,
        machine: Machine,
        target: LlamaModel,
        tokenizer: LlamaVocabulary,
        drafter: LocatedModel | None,
        plan: Plan,
        probe: WidthProbe | None,
        memory_allowed_bytes: int,
    ) -> None:
        self.profile = profile
        self.machine = machine
        self.plan = plan
        self.probe = probe
        self.tokenizer = tokenizer
        self._target = target
        self._located_drafter = drafter
        self._memory_allowed_bytes = memory_allowed_bytes  # beyond the target and one session
        self._drafter_lock = threading.Lock()
        self._lock = threading.RLock()
        self._closed = False
        # Not kept alive by the engine: a server opens thousands in its life.
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._drafter_model: LlamaModel | None = None
        self._template: ChatTemplate | None = None
        drafters: list[Drafter] = []
        if plan.mode != "plain":
            if profile.lookup:
                drafters.append(LookupDrafter())
            if drafter is not None:
                # Weakly: an engine that is forgotten must not live on through its own drafter.
                open_drafter = weakref.WeakMethod(self._open_drafter)
                drafters.append(ModelDrafter(lambda: _called(open_drafter)))
        self.drafters: tuple[Drafter, ...] = tuple(drafters)
        self.policy: DepthPolicy = (
            TrialPolicy(plan.depth_cap, [d.kind for d in drafters])
            if profile.depth == "auto"
            else FixedDepth(plan.depth_cap)
        )

    @classmethod
    def load(
        cls,
        target: str | None = None,
        *,
        profile: Profile | str | None = None,
        limits: Limits | None = None,
        download: bool = False,
        progress: LoadProgress | None = None,
        cancelled: Cancelled | None = None,
        store_home: Home | None = None,
        probe: bool = True,
        **overrides: Any,
    ) -> Engine:
        """Load a target and plan for it.

        ``overrides`` are profile values by name (``draft``, ``context``, ``depth``, ``threads``, ``exactness``, ...).
        Without ``download`` nothing touches the network. ``probe`` allows the one-time check, about 20 seconds for
        a 1.5B model, of which widths are bit-equal here; without it and without a stored one the plan is plain.
        ``progress`` is told each step, on the calling thread.

        Raises EdgespecError and its subclasses only.
        """
        load_library()  # before anything is fetched for it
        place = store_home or home()
        limits = limits or Limits()
        chosen = _profile(profile, {"target": target, **overrides}, place)
        locator = Locator(store=Store(place), download=download, progress=progress, cancelled=cancelled)
        machine = describe_machine()
        allowed = int(machine.available_memory_bytes * chosen.max_memory_fraction)
        if limits.max_memory_bytes is not None:
            allowed = min(allowed, limits.max_memory_bytes)

        located = locator.locate(chosen.target)
        settings = usable_settings(_settings(chosen, machine, limits, located.header.tensor_bytes), located.header)
        context_length = min(chosen.context, located.header.context_length or chosen.context)
        estimate = estimate_memory(located.header, context_length, KV_TYPES[settings.kv_type][1])
        require_memory(located.name, estimate, allowed)
        reasons = [f"{located.name} on {settings.device}, {settings.threads} threads"]
        drafter, drafter_off = _find_drafter(chosen, located, locator)
        wish = Wish(
            depth=chosen.depth,
            exactness=chosen.exactness,
            context_length=context_length,
            sources=_sources(chosen, drafter),
            drafter_model=None if drafter is None else drafter.name,
            drafter_device="cpu" if drafter is None else _device(chosen.draft_device, drafter.header.tensor_bytes),
            drafter_off=drafter_off,
        )
        tell = progress or (lambda _event: None)

        def open_model(wanted: LlamaSettings) -> LlamaModel:
            tell(Loading(f"loading {located.name}"))
            return load_model(located.path, wanted, name=located.name, sha256=located.identity, header=located.header)

        if wish.depth == 0 or not wish.sources:
            model, widths = open_model(settings), None
        else:
            model, widths = find_stable_model(
                open_model,
                settings,
                Measurements(place.measurements, machine.fingerprint),
                measure=probe,
                complete=chosen.exactness == "near",
                context_length=context_length,
                progress=lambda done: tell(Loading("checking once which widths are bit-equal here", done)),
            )
        try:
            tokenizer = LlamaVocabulary(located.path)
        except BaseException:
            model.close()
            raise
        plan = make_plan(wish, model.facts, widths, reasons)
        return cls(
            profile=chosen,
            machine=machine,
            target=model,
            tokenizer=tokenizer,
            drafter=drafter,
            plan=plan,
            probe=widths,
            memory_allowed_bytes=allowed - estimate.total_bytes,
        )

    @property
    def vocabulary_size(self) -> int:
        return self._target.facts.vocabulary_size

    @property
    def can_rewind(self) -> bool:
        """Whether the target's cache can drop its last tokens."""
        return self._target.facts.can_rewind

    @property
    def has_chat_template(self) -> bool:
        """Whether the target can be talked to; otherwise only ``raw`` text can be continued."""
        return self._target.header.chat_template is not None

    def session(self, *, system: str | None = None) -> Session:
        """A new conversation. Sessions of one engine interleave freely; each equals running alone."""
        with self._lock:
            if self._closed:
                raise ClosedError("this engine is closed")
            others = sum(not session.closed for session in self._sessions)
            if others:
                estimate = self._target_estimate()
                more = replace(estimate, weights_bytes=0)
                require_memory("another session", more, self._memory_allowed_bytes - (others - 1) * more.total_bytes)
            session = Session(self, system=system)
            self._sessions.add(session)
            return session

    def _target_estimate(self) -> MemoryEstimate:
        return estimate_memory(self._target.header, self.plan.context_length, KV_TYPES[self._target.facts.kv_type][1])

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt text of a conversation, by the model's own template. Raises TemplateError."""
        if self._template is None:
            source = self._target.header.chat_template
            if source is None:
                raise TemplateError(
                    f"{self._target.facts.name} has no chat template",
                    hint="use `--raw` to continue plain text, or an instruction-tuned model",
                )
            self._template = ChatTemplate(
                source, bos_token=self.tokenizer.bos_token, eos_token=self.tokenizer.eos_token
            )
        return self._template.render(messages)

    def encode_prompt(self, text: str) -> list[int]:
        """Tokens of a rendered prompt; the begin-of-sequence token is added unless the text spells it out."""
        bos = self.tokenizer.bos_token
        return self.tokenizer.encode(text, special=True, add_bos=not (bos and text.startswith(bos)))

    def open_target(self) -> LlamaSequence:
        """An empty cache of the target with the plan's context."""
        return self._target.open(self.plan.context_length)

    def _open_drafter(self) -> LlamaModel:
        """The drafter, loaded at its first proposal and shared by all sessions."""
        with self._drafter_lock:
            located = self._located_drafter
            if self._closed or located is None:
                raise ClosedError("this engine is closed")
            if self._drafter_model is None:
                # Repacked whatever the target needs: how a drafter rounds decides nothing but its own proposals.
                device = _device(self.profile.draft_device, located.header.tensor_bytes)
                settings = replace(self._target.settings, device=device, gpu_layers=None, repack=True)
                estimate = estimate_memory(located.header, self.plan.context_length, KV_TYPES[settings.kv_type][1])
                require_memory(located.name, estimate, self._memory_allowed_bytes)
                self._drafter_model = load_model(
                    located.path, settings, name=located.name, sha256=located.identity, header=located.header
                )
            return self._drafter_model

    def close(self) -> None:
        """End every session, then free the models. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            sessions = list(self._sessions)
        for session in sessions:
            session.close()
        for drafter in self.drafters:
            drafter.close()
        with self._drafter_lock:
            if self._drafter_model is not None:
                self._drafter_model.close()
        self._target.close()
        self.tokenizer.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _called(method: weakref.WeakMethod[Callable[[], LlamaModel]]) -> LlamaModel:
    alive = method()
    if alive is None:
        raise ClosedError("this engine is gone")
    return alive()


def _profile(profile: Profile | str | None, overrides: Mapping[str, Any], place: Home) -> Profile:
    """The profile with the overrides on top. Only what the caller names counts: no environment, no project file."""
    given = {name: value for name, value in overrides.items() if value is not None}
    if isinstance(profile, Profile):
        if given:
            raise InvalidRequestError(
                f"{next(iter(given))} was given beside a resolved profile", hint="put it into the profile"
            )
        return profile
    return load_profile(profile, environ={}, cwd=Path.cwd(), user_dir=place.root, flags=given, only_the_named=True)


def _device(wanted: str, weight_bytes: int) -> str:
    """The named device; ``auto`` is the build's first GPU with room for the weights, else the CPU."""
    if wanted != "auto":
        return wanted
    devices = load_library().devices()
    return next((d.name for d in devices if d.kind == "gpu" and d.free_bytes > weight_bytes), "cpu")


def _settings(profile: Profile, machine: Machine, limits: Limits, weight_bytes: int) -> LlamaSettings:
    threads = machine.physical_cores if profile.threads == "auto" else profile.threads
    return LlamaSettings(
        threads=max(1, min(threads, limits.max_threads or threads)),
        device=_device(profile.device, weight_bytes),
        gpu_layers=None if profile.gpu_layers == "auto" else profile.gpu_layers,
    )


def _sources(profile: Profile, drafter: LocatedModel | None) -> tuple[str, ...]:
    """Kinds of drafters, the cheapest first."""
    return (*(("lookup",) if profile.lookup else ()), *(() if drafter is None else ("model",)))


def _find_drafter(profile: Profile, target: LocatedModel, locator: Locator) -> tuple[LocatedModel | None, str | None]:
    """The drafter's file, or why there is none. A drafter nobody named is never an error.

    Raises what locating raises for a drafter that was asked for by name.
    """
    wanted = profile.draft
    if wanted == "none" or profile.depth == 0:
        return None, None
    if wanted == "auto":
        name = None if target.spec is None else target.spec.drafter
        if name is None:
            return None, f"no drafter is known for {target.name}"
        wanted = name
    try:
        located = locator.locate(wanted)
    except CancelledError:
        raise
    except EdgespecError as error:
        if profile.draft == "auto":
            return None, error.message
        raise
    difference = compare_vocabularies(target.header, located.header)
    if difference is not None:
        return None, f"{located.name} has another vocabulary: {difference.reason}"
    return located, None

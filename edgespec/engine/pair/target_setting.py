"""The one setting that a target runs in: its place and threads, as measurements and the profile have it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgespec.calibration.kinds import PLACE, THREADS, TIMES
from edgespec.calibration.measurement_store import Measurements
from edgespec.files.model_file import LocatedModel
from edgespec.interfaces.model import HOST
from edgespec.placement.candidates import Placements, default_settings, require_room, target_places
from edgespec.placement.memory import require_memory
from edgespec.placement.prepared import Preparation, PreparedModel
from edgespec.planning.cost.margins import TAKEOVER_CALIBRATIONS
from edgespec.profiles.profile import Profile
from edgespec.runtimes.runtime import Settings
from edgespec.runtimes.table import runtime_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTarget:
    """A target in its setting.

    ``prepare`` has its threads, ``places`` are all that it could run in. ``left_bytes`` of the machine's own memory
    remain next to it and one session. ``notices`` are for the user.
    """

    model: PreparedModel
    prepare: Preparation
    places: Placements
    allowed_bytes: int
    notices: tuple[str, ...]

    def for_context(self, context_length: int) -> PlacedTarget:
        """The same place, with caches for another number of tokens."""
        more = context_length - self.model.context_length
        return replace(
            self,
            model=self.model.for_context(context_length),
            prepare=self.prepare.for_context(context_length),
            places=self.places.longer(more),
        )

    @property
    def has_drafting_layer(self) -> bool:
        """Whether a layer of the file drafts for the model in this setting."""
        file, runtime = self.model.file, runtime_of(self.model.settings)
        return file.onnx is None and file.header.drafting_layers > 0 and runtime.no_drafting_layer(file) is None

    @property
    def left_bytes(self) -> int:
        return self.allowed_bytes - self.model.memory.total_bytes


def place_target(prepare: Preparation, file: LocatedModel, store: Measurements, allowed_bytes: int) -> PlacedTarget:
    """The target where calibrations agreed to run it, else where it fits best.

    No drafter is considered: the target's setting, and so its text, must not depend on one. Raises MemoryLimitError,
    and what choosing a runtime raises.
    """
    places = target_places(prepare, file, lambda facts: store.load(TIMES, facts) is not None)
    own = prepare.target(file)
    settings = default_settings(own.settings, places, allowed_bytes)
    settings, notices = settled_settings(store, own, prepare.profile, settings, places, allowed_bytes)
    fewer = _settled_threads(store, own, prepare, settings)
    if fewer is not None:  # other facts, and other measurements
        return place_target(Preparation(prepare.profile, fewer, prepare.context_length), file, store, allowed_bytes)
    model = prepare.target_in(file, settings)
    require_room(settings, places)
    require_memory(file.name, model.memory, allowed_bytes)
    if file.onnx is None and (why := runtime_of(settings).no_drafting_layer(file)) is not None:
        notices += (f"{file.name} has a layer that drafts, which is not used: {why}",)
    return PlacedTarget(model=model, prepare=prepare, places=places, allowed_bytes=allowed_bytes, notices=notices)


def settled_settings(
    store: Measurements,
    target: PreparedModel,
    profile: Profile,
    settings: Settings,
    places: Placements,
    allowed_bytes: int,
) -> tuple[Settings, tuple[str, ...]]:
    """The place that calibrations agreed on for the target, and a notice until the user has seen it.

    ``settings`` are the ones before any calibration. They are kept if nothing was agreed, or if the agreed place is
    gone, has no room, or contradicts the profile's runtime and device.
    """
    settled = store.settled(PLACE, target.facts)
    place = next((place for place in places.targets if place.key == settled.chosen), None)
    if place is None or not places.room(place) or place.needed_bytes[HOST] > allowed_bytes:
        if settled.chosen is None or (profile.runtime, profile.device) != ("auto", "auto"):
            return settings, ()
        where = "{} on {}".format(*settled.chosen)
        lost = f"{target.facts.name} runs in {settings.runtime} on {settings.device} this time: {where}"
        return settings, (f"{lost}, which calibrations chose, is missing or has no room; the wording may differ",)
    notices: tuple[str, ...] = ()
    if not settled.announced:
        notices = (
            f"{place.name} from now on, which {TAKEOVER_CALIBRATIONS} calibrations found faster: "
            "the same prompt may get a different text than before",
        )
    return place.put(settings), notices


def _settled_threads(
    store: Measurements, target: PreparedModel, prepare: Preparation, settings: Settings
) -> int | None:
    """The smaller number of threads that calibrations agreed on; None without one, or if the profile sets it."""
    if prepare.profile.threads != "auto":
        return None
    chosen = store.settled(THREADS, target.facts, settings.runtime).chosen
    return chosen if chosen is not None and chosen < prepare.threads else None

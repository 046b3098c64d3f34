"""The places that an engine's target and drafter are not in, and loading them there to be timed."""

from __future__ import annotations

from edgespec.decoding.contracts import Model
from edgespec.errors import ClosedError
from edgespec.loading import Parts
from edgespec.opening import LoadedModel, drafter_memory, memory_needed, open_drafter, open_model
from edgespec.placement import Placement
from edgespec.planning.memory import require_memory


class Elsewhere:
    """Loads what an engine has a second time, somewhere else. ``places`` are all there are, those in use included."""

    def __init__(self, parts: Parts) -> None:
        self.places = parts.places
        self._profile = parts.profile
        self._target, self._drafter = parts.located, parts.drafter
        self._context_length = parts.wish.context_length
        self._left_bytes = parts.memory_left_bytes
        self._worker = parts.worker

    def open_target(self, place: Placement) -> LoadedModel:
        """The target in another place, to be timed there and closed.

        Raises MemoryLimitError if the machine's own memory has no room for it, and what loading raises.
        """
        target, settings = self._target, place.settings
        needed = memory_needed(target.header, target.weight_bytes, self._context_length, settings)
        require_memory(place.name, needed, self._left_bytes)
        return open_model(target, settings)

    def open_drafter(self, place: Placement) -> Model:
        """The drafter in another place, to be timed there and closed; it may still be loading.

        Raises ClosedError if there is none, MemoryLimitError, and what loading raises.
        """
        drafter = self._drafter
        if drafter is None:
            raise ClosedError("there is no drafter to be loaded elsewhere")
        needed = drafter_memory(self._profile, drafter, self._context_length, place.settings)
        require_memory(place.name, needed, self._left_bytes)
        return open_drafter(self._profile, drafter, place.settings, self._worker)

"""What an export measures with: prompts, a profile, and models that are loaded for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgespec.files.home import Home
from edgespec.files.progress import Cancelled, Job, LoadProgress
from edgespec.profiles.profile import Profile
from edgespec.store.locate import Locator
from edgespec.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """``prompts`` by id, the same on every machine, and their hash. Without ``download`` the network is not used.

    ``profile``: that of no model in particular. ``progress`` may raise, and ``cancelled`` may become true, to end it.
    """

    home: Home
    profile: Profile
    prompts: Mapping[str, str]
    prompts_sha256: str
    progress: LoadProgress
    download: bool = False
    cancelled: Cancelled | None = None

    @property
    def job(self) -> Job:
        """A long operation that is followed, and may be ended."""
        return Job.of(self.progress, self.cancelled)

    @property
    def locator(self) -> Locator:
        """Finds the models to measure."""
        return Locator(store=Store(self.home), download=self.download, job=self.job)

"""What an export measures with: prompts, a profile, and models that are loaded for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgespec.files.home import Home
from edgespec.files.progress import Job, LoadProgress
from edgespec.profiles.profile import Profile
from edgespec.store.locate import Locator
from edgespec.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """``prompts`` by id, the same on every machine, and their hash. Without ``download`` the network is not used.

    ``profile``: that of no model in particular.
    """

    home: Home
    profile: Profile
    prompts: Mapping[str, str]
    prompts_sha256: str
    progress: LoadProgress
    download: bool = False

    @property
    def job(self) -> Job:
        """A long operation whose progress is shown."""
        return Job(self.progress)

    @property
    def locator(self) -> Locator:
        """Finds the models to measure."""
        return Locator(store=Store(self.home), download=self.download, job=self.job)

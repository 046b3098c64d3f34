"""edgespec: on-device language models, faster than plain decoding and with exactly the same output.

The public API and nothing else. Importing this module loads the standard library only; each name below loads
what it needs when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from edgespec import errors as _errors

if TYPE_CHECKING:
    from edgespec.decoding.sampling import Sampling as Sampling
    from edgespec.decoding.stats import DecodeStats as DecodeStats
    from edgespec.engine import Engine as Engine
    from edgespec.errors import CancelledError as CancelledError
    from edgespec.errors import ClosedError as ClosedError
    from edgespec.errors import ContextFullError as ContextFullError
    from edgespec.errors import DiskSpaceError as DiskSpaceError
    from edgespec.errors import DownloadError as DownloadError
    from edgespec.errors import EdgespecError as EdgespecError
    from edgespec.errors import ForwardError as ForwardError
    from edgespec.errors import HashMismatchError as HashMismatchError
    from edgespec.errors import InvalidRequestError as InvalidRequestError
    from edgespec.errors import MemoryLimitError as MemoryLimitError
    from edgespec.errors import ModelFileError as ModelFileError
    from edgespec.errors import ModelNotFoundError as ModelNotFoundError
    from edgespec.errors import NonFiniteLogitsError as NonFiniteLogitsError
    from edgespec.errors import ProfileError as ProfileError
    from edgespec.errors import PromptTooLongError as PromptTooLongError
    from edgespec.errors import RewindError as RewindError
    from edgespec.errors import RuntimeUnavailableError as RuntimeUnavailableError
    from edgespec.errors import StaleRowsError as StaleRowsError
    from edgespec.errors import StoreLockedError as StoreLockedError
    from edgespec.errors import TemplateError as TemplateError
    from edgespec.errors import WorkerLostError as WorkerLostError
    from edgespec.events import Done as Done
    from edgespec.events import Event as Event
    from edgespec.events import Loading as Loading
    from edgespec.events import Notice as Notice
    from edgespec.events import Round as Round
    from edgespec.events import Text as Text
    from edgespec.generation import Generation as Generation
    from edgespec.loading import Limits as Limits
    from edgespec.planning.plan import Plan as Plan
    from edgespec.runtimes.restarting import WorkerSettings as WorkerSettings
    from edgespec.session import Session as Session

__version__ = "0.1.0"

_HOMES = {
    "DecodeStats": "decoding.stats",
    "Done": "events",
    "Engine": "engine",
    "Event": "events",
    "Generation": "generation",
    "Limits": "loading",
    "Loading": "events",
    "Notice": "events",
    "Plan": "planning.plan",
    "Round": "events",
    "Sampling": "decoding.sampling",
    "Session": "session",
    "Text": "events",
    "WorkerSettings": "runtimes.restarting",
}

__all__ = ["__version__", *sorted([*_HOMES, *_errors.__all__])]


def __getattr__(name: str) -> object:
    home = "errors" if name in _errors.__all__ else _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return list(__all__)

"""edgespec: on-device language models, faster than plain decoding and with exactly the same output.

Only the public API. Importing this module loads the standard library only; each name below loads its dependencies on
first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from edgespec import errors as _errors

if TYPE_CHECKING:
    from edgespec.decoding.round_base import DecodeStats as DecodeStats
    from edgespec.decoding.sampling import Sampling as Sampling
    from edgespec.engine.answer import Generation as Generation
    from edgespec.engine.engine import Engine as Engine
    from edgespec.engine.events import (
        Done as Done,
        Event as Event,
        Notice as Notice,
        Reading as Reading,
        Round as Round,
        Text as Text,
        Token as Token,
        ToolResult as ToolResult,
    )
    from edgespec.engine.pair.drafter_offer import DrafterOffer as DrafterOffer
    from edgespec.engine.pair.load import Limits as Limits
    from edgespec.engine.session import Session as Session
    from edgespec.errors import (
        CancelledError as CancelledError,
        ClosedError as ClosedError,
        ConstraintError as ConstraintError,
        ContextFullError as ContextFullError,
        DiskSpaceError as DiskSpaceError,
        DownloadError as DownloadError,
        EdgespecError as EdgespecError,
        ForwardError as ForwardError,
        HashMismatchError as HashMismatchError,
        InvalidRequestError as InvalidRequestError,
        MemoryLimitError as MemoryLimitError,
        ModelFileError as ModelFileError,
        ModelNotFoundError as ModelNotFoundError,
        NoneAllowedError as NoneAllowedError,
        NonFiniteLogitsError as NonFiniteLogitsError,
        ProfileError as ProfileError,
        PromptTooLongError as PromptTooLongError,
        RewindError as RewindError,
        RuntimeUnavailableError as RuntimeUnavailableError,
        SessionFileError as SessionFileError,
        StaleRowsError as StaleRowsError,
        StoreLockedError as StoreLockedError,
        TemplateError as TemplateError,
        WorkerLostError as WorkerLostError,
    )
    from edgespec.files.progress import Loading as Loading, ProgressEvent as ProgressEvent
    from edgespec.planning.choice.plan import Plan as Plan
    from edgespec.runtimes.process.settings import WorkerSettings as WorkerSettings
    from edgespec.text.conversation.pieces import ToolCall as ToolCall

__version__ = "0.1.0"

_HOMES = {
    "DecodeStats": "decoding.round_base",
    "Done": "engine.events",
    "DrafterOffer": "engine.pair.drafter_offer",
    "Engine": "engine.engine",
    "Event": "engine.events",
    "Generation": "engine.answer",
    "Limits": "engine.pair.load",
    "Loading": "files.progress",
    "Notice": "engine.events",
    "Plan": "planning.choice.plan",
    "ProgressEvent": "files.progress",
    "Reading": "engine.events",
    "Round": "engine.events",
    "Sampling": "decoding.sampling",
    "Session": "engine.session",
    "Text": "engine.events",
    "Token": "engine.events",
    "ToolCall": "text.conversation.pieces",
    "ToolResult": "engine.events",
    "WorkerSettings": "runtimes.process.settings",
}

# Names that go in the next version, where they are, and what to use in their place.
_OLD = {"TokenLogprob": ("decoding.logprobs", "Token")}

__all__ = ["__version__", *sorted([*_HOMES, *_errors.__all__])]


def __getattr__(name: str) -> object:
    home = "errors" if name in _errors.__all__ else _HOMES.get(name)
    if name in _OLD:
        from edgespec.engine.events import warn_old

        home, new = _OLD[name]
        warn_old(f"edgespec.{name}", new)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return list(__all__)

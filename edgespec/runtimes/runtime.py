"""What a runtime implements: one engine that computes, and the models it has loaded.

Adding a runtime is a folder with a value of this class in it, and a line in ``table.py``. Nobody else asks which
runtime a model runs in; what differs between them is asked of the value.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Protocol, Self

from edgespec.errors import InvalidRequestError
from edgespec.files.gguf.records import GgufHeader
from edgespec.files.model_file import LocatedModel
from edgespec.interfaces.model import HOST, Model, ModelFacts

DeviceKind = Literal["cpu", "gpu", "igpu", "npu", "accel", "other"]

# Metal calls its device a GPU; Apple's processors have one memory for both.
_UNIFIED = ("Metal", "MTL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Something a runtime can compute on. ``name`` is the runtime's own; bytes are None where it does not tell.

    ``igpu`` is a GPU in the processor, ``accel`` a library beside it (a BLAS, say) that holds no models.
    """

    runtime: str
    name: str
    kind: DeviceKind
    description: str
    free_bytes: int | None = None
    total_bytes: int | None = None

    @property
    def memory(self) -> str:
        """The device whose memory it uses: its own, or the machine's ("cpu")."""
        apart = self.kind == "gpu" and not self.name.startswith(_UNIFIED)
        return self.name if apart else HOST

    @property
    def holds_models(self) -> bool:
        """Whether a model can be put there by name."""
        return self.kind in ("gpu", "igpu", "npu")

    def as_json(self) -> dict[str, Any]:
        """Every field as it is, and whose ``memory`` it uses."""
        return {
            "runtime": self.runtime,
            "name": self.name,
            "kind": self.kind,
            "description": self.description,
            "free_bytes": self.free_bytes,
            "total_bytes": self.total_bytes,
            "memory": self.memory,
        }


class Settings(Protocol):
    """How a runtime runs a model: a frozen dataclass of the runtime's own."""

    # The name of the runtime that these settings are for.
    runtime: ClassVar[str]

    @property
    def threads(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def gpu_layers(self) -> int | None:
        """Layers on the device; None for all of them."""


class LoadedModel(Model, Protocol):
    """Weights that a runtime has loaded, which can also say what they would be in other settings."""

    @property
    def header(self) -> GgufHeader:
        """The metadata and the tokenizer they came with."""

    @property
    def settings(self) -> Settings: ...

    # Each runtime has settings of its own, so what these two take is the runtime's affair.
    @property
    def facts_with(self) -> Callable[..., ModelFacts]:
        """The facts ``with_settings`` would have. Raises InvalidRequestError."""

    @property
    def with_settings(self) -> Callable[..., LoadedModel]:
        """The same weights in another setting; to be closed like any other model.

        Raises ClosedError, InvalidRequestError.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *_exception: object) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftForm:
    """What a drafter leaves out of its file to be faster: only its own proposals depend on it.

    ``head_rows`` of the output head are read at first, None for all. ``requantized`` weights are kept in four bits.
    """

    head_rows: int | None = None
    requantized: bool = False


AS_FILED = DraftForm()


class Runtime(ABC):
    """One engine that computes. Stateless; importing it loads no native code."""

    name: ClassVar[str]
    # The class of its settings, which a worker process rebuilds from their fields.
    settings_type: ClassVar[type[Any]]

    @abstractmethod
    def check(self, file: LocatedModel, device: str) -> None:
        """Raise EdgespecError, with the reason, if this runtime cannot run the file on that device."""

    @abstractmethod
    def settings(
        self, file: LocatedModel, *, threads: int, device: str, gpu_layers: int | None = None, sidecar: bool = True
    ) -> Settings:
        """The fastest setting that is known for the file on a device. Raises InvalidRequestError."""

    @abstractmethod
    def describe(self, file: LocatedModel, settings: Any, form: DraftForm = AS_FILED) -> ModelFacts:
        """The facts the model would have if it were loaded. Raises what loading raises for wrong settings."""

    @abstractmethod
    def load(
        self, file: LocatedModel, settings: Any, form: DraftForm = AS_FILED, stop: threading.Event | None = None
    ) -> LoadedModel:
        """Load the weights. Once ``stop`` is set, loading ends early and raises CancelledError.

        Raises ModelFileError, RuntimeUnavailableError, InvalidRequestError, MemoryLimitError, CancelledError.
        """

    @abstractmethod
    def cache_bits(self, settings: Any) -> float:
        """Bits that one element of the cache takes."""

    def is_prepared(self, file: LocatedModel, settings: Any, form: DraftForm = AS_FILED) -> bool:
        """Whether loading only has to map what an earlier load prepared. A look at a file, which may be wrong."""
        return False

    def will_prepare(self, file: LocatedModel, settings: Any, form: DraftForm = AS_FILED) -> bool:
        """Whether the next load lays out weights and keeps them, so that later loads only have to map them."""
        return False

    def runs(self, file: LocatedModel) -> bool:
        """Whether files of this format are for this runtime at all."""
        return file.onnx is None

    def preference(self) -> int:
        """Which runtime a file is begun with on a device that several can use: the lowest number comes first."""
        return 1

    def find_device(self, wanted: str, needed_bytes: int) -> str:
        """The device that ``wanted`` names, as this runtime writes it; "auto" is for it to choose.

        A name that is not here is left as it is, for loading to refuse.
        """
        return HOST if wanted.lower() in ("auto", HOST) else wanted

    def gpus(self) -> Sequence[Device]:
        """The GPUs that a model, or some of its layers, can be put on. Raises RuntimeUnavailableError."""
        return ()

    def list_devices(self) -> Sequence[Device]:
        """Every device there is. Loads native code. Raises RuntimeUnavailableError."""
        return ()

    def has_own_memory(self, device: str) -> bool:
        """Whether what the device holds lies outside the machine's own memory, as far as that is known."""
        return False

    def stable_settings(self, preferred: Any) -> Sequence[Any]:
        """Settings worth probing for widths with equal bits, the preferred (fastest) first."""
        return (preferred,)

    def other_caches(self, settings: Any) -> Sequence[Mapping[str, Any]]:
        """Caches that plain decoding may be faster with, as arguments of ``LoadedModel.with_settings``."""
        return ()

    def comparable_settings(self, settings: Any) -> Any:
        """The settings in which two files of a model are compared: what rounds least, where there is a choice."""
        return settings

    def prompt_settings(self, settings: Any) -> Any:
        """The settings in which a prompt is read fastest, whatever a step then takes."""
        return settings

    def moved(self, settings: Any, other: Any) -> Any:
        """``settings``, on the device and with the layers of ``other``, which are of this runtime too."""
        return other

    def draft_form(self, file: LocatedModel, *, whole_head: bool, filed_weights: bool) -> DraftForm:
        """What a drafter in this process had better leave out; nothing that ``whole_head`` or ``filed_weights`` keep.

        Raises RuntimeUnavailableError, ModelFileError.
        """
        return AS_FILED

    def read_settings(self, given: Mapping[str, Any]) -> Any:
        """Settings from their fields, as a worker process is told them. Raises InvalidRequestError."""
        unknown = sorted(set(given) - {own.name for own in fields(self.settings_type)})
        if unknown:
            raise InvalidRequestError(f"this runtime has no setting {unknown[0]!r}")
        return self.settings_type(**given)

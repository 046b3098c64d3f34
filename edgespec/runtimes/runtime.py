"""What a runtime implements: one engine that computes, and the models it has loaded.

Adding a runtime takes a folder with a value of this class, and a line in ``table.py``. No other code asks which
runtime runs a model; differences between runtimes are methods of the value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Protocol, Self

from edgespec.errors import InvalidRequestError, RuntimeUnavailableError
from edgespec.files.gguf.records import GgufHeader
from edgespec.files.model_file import LocatedModel
from edgespec.files.progress import QUIET, Job
from edgespec.interfaces.model import ALL_KEPT, HOST, Mixture, Model, ModelFacts, WindowedLayers

DeviceKind = Literal["cpu", "gpu", "igpu", "npu", "accel", "other"]

# Metal calls its device a GPU; Apple's processors have one memory for both.
_UNIFIED = ("Metal", "MTL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that a runtime can compute on. ``name`` is the runtime's name for it; unknown bytes are None.

    ``igpu`` is a GPU in the processor; ``accel`` a library that helps the CPU (a BLAS, say) and holds no models.
    ``handle`` is a native runtime's pointer to it.
    """

    runtime: str
    name: str
    kind: DeviceKind
    description: str
    free_bytes: int | None = None
    total_bytes: int | None = None
    handle: int = 0

    @property
    def memory(self) -> str:
        """The device whose memory it uses: itself, or the machine ("cpu")."""
        apart = self.kind == "gpu" and not self.name.startswith(_UNIFIED)
        return self.name if apart else HOST

    @property
    def holds_models(self) -> bool:
        """Whether a model's weights can be put on this device. False for the CPU, which needs no device for that."""
        return self.kind in ("gpu", "igpu", "npu")

    def as_json(self) -> dict[str, Any]:
        """Every field but ``handle``, and ``memory``."""
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
    """How a runtime runs a model: a frozen dataclass that each runtime defines."""

    # The name of the runtime that these settings are for.
    runtime: ClassVar[str]

    @property
    def threads(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def gpu_layers(self) -> int | None:
        """Layers on the device; None for all layers."""


class LoadedModel(Model, Protocol):
    """Weights that a runtime has loaded, and their facts in other settings."""

    @property
    def header(self) -> GgufHeader:
        """The metadata and the tokenizer that came with the weights."""

    @property
    def settings(self) -> Settings: ...

    # Settings differ between runtimes, so each runtime defines the arguments of these two methods.
    @property
    def facts_with(self) -> Callable[..., ModelFacts]:
        """The facts ``with_settings`` would have. Raises InvalidRequestError."""

    @property
    def with_settings(self) -> Callable[..., LoadedModel]:
        """The same weights in another setting. The caller closes the result like any other model.

        Raises ClosedError, InvalidRequestError.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *_exception: object) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftForm:
    """What a drafter leaves out of its file to be faster: only the drafter's proposals depend on it.

    ``head_rows`` of the output head are read at first, None for all. ``requantized`` weights are kept in four bits.
    ``layer``: only the layer of a target's file that drafts for it is used, over the target's weights.
    """

    head_rows: int | None = None
    requantized: bool = False
    layer: bool = False


AS_FILED = DraftForm()


class Runtime(ABC):
    """One engine that computes. Stateless; importing it loads no native code."""

    name: ClassVar[str]
    # The class of its settings, which a worker process rebuilds from their fields.
    settings_type: ClassVar[type[Any]]
    # Whether its caches take memory only where they are filled, not for the whole context when they are opened.
    cache_grows: ClassVar[bool] = False

    @abstractmethod
    def check(self, file: LocatedModel, device: str) -> None:
        """Raise EdgespecError, with the reason, if this runtime cannot run the file on that device."""

    @abstractmethod
    def settings(
        self, file: LocatedModel, *, threads: int, device: str, gpu_layers: int | None = None, sidecar: bool = True
    ) -> Settings:
        """The fastest known setting for the file on a device. Raises InvalidRequestError."""

    @abstractmethod
    def describe(self, file: LocatedModel, settings: Any, form: DraftForm = AS_FILED) -> ModelFacts:
        """The facts the model would have once loaded. Raises what loading raises for wrong settings."""

    @abstractmethod
    def load(self, file: LocatedModel, settings: Any, form: DraftForm = AS_FILED, job: Job = QUIET) -> LoadedModel:
        """Load the weights. A cancelled job ends the loading early, with CancelledError.

        Raises ModelFileError, RuntimeUnavailableError, InvalidRequestError, MemoryLimitError, CancelledError.
        """

    @abstractmethod
    def cache_bits(self, settings: Any) -> float:
        """Bits of one element of the cache."""

    def cache_copies(self, file: LocatedModel) -> int:
        """How many caches there are during a forward."""
        return 1

    def windowed_layers(self, file: LocatedModel) -> WindowedLayers:
        """The layers that keep only the last positions. Raises RuntimeUnavailableError, ModelFileError."""
        return ALL_KEPT

    def is_prepared(self, file: LocatedModel, settings: Any, form: DraftForm = AS_FILED) -> bool:
        """Whether loading only maps what an earlier load prepared. Checks only a header, so may be wrong."""
        return False

    def will_prepare(self, file: LocatedModel, settings: Any, form: DraftForm = AS_FILED) -> bool:
        """Whether the next load lays out weights and keeps them, so that later loads only map them."""
        return False

    def runs(self, file: LocatedModel) -> bool:
        """Whether this runtime runs files of this format."""
        return file.onnx is None

    def preference(self) -> int:
        """Which runtime is tried first for a file on a device that several runtimes can use: the lowest number."""
        return 1

    def find_device(self, wanted: str, needed_bytes: int) -> str:
        """The device that ``wanted`` names, as this runtime writes it; "auto" lets the runtime choose.

        An unknown name is returned unchanged, and refused by loading.
        """
        return HOST if wanted.lower() in ("auto", HOST) else wanted

    def gpus(self) -> Sequence[Device]:
        """The GPUs that a model, or some of its layers, can be put on. Raises RuntimeUnavailableError."""
        return ()

    def list_devices(self) -> Sequence[Device]:
        """Every available device. Loads native code. Raises RuntimeUnavailableError."""
        return ()

    def has_own_memory(self, device: str) -> bool:
        """Whether the device's memory is outside the machine's memory, as far as is known."""
        return False

    def stable_settings(self, preferred: Any) -> Sequence[Any]:
        """Settings worth probing for bit-equal widths, the preferred (fastest) first."""
        return (preferred,)

    def other_caches(self, settings: Any) -> Sequence[Mapping[str, Any]]:
        """Caches that may make plain decoding faster, as arguments of ``LoadedModel.with_settings``."""
        return ()

    def comparable_settings(self, settings: Any) -> Any:
        """The settings for comparing two files of a model: those that round least, where there is a choice."""
        return settings

    def prompt_settings(self, settings: Any) -> Any:
        """The settings that prefill fastest, however long a decoding step takes."""
        return settings

    def moved(self, settings: Any, other: Any) -> Any:
        """``settings`` with the device and the layers of ``other``, which belongs to this runtime too."""
        return other

    def drafting_layer(self, target: Any, form: DraftForm) -> LoadedModel:
        """The layer of a loaded target that drafts for it, over its weights. Raises RuntimeUnavailableError."""
        raise RuntimeUnavailableError(f"{self.name} computes no layers that draft")

    def no_drafting_layer(self, file: LocatedModel) -> str | None:
        """Why the file's layer that drafts is not used; None if it is, or if there is none. Raises ModelFileError."""
        return "this runtime does not compute it" if file.header.drafting_layers else None

    def why_not_read(self, drafter: LocatedModel, target: LocatedModel) -> str | None:
        """Why a drafter that reads its target's cache cannot read this target's here; None if it can. Raises
        ModelFileError, RuntimeUnavailableError."""
        return f"it reads its target's cache, and {self.name} lends none"

    def draft_form(self, file: LocatedModel, *, whole_head: bool, filed_weights: bool) -> DraftForm:
        """What a drafter in this process should leave out; nothing that ``whole_head`` or ``filed_weights`` keep.

        Raises RuntimeUnavailableError, ModelFileError.
        """
        return AS_FILED

    def read_settings(self, given: Mapping[str, Any]) -> Any:
        """Settings from their fields, as a worker process receives them. Raises InvalidRequestError."""
        unknown = sorted(set(given) - {own.name for own in fields(self.settings_type)})
        if unknown:
            raise InvalidRequestError(f"this runtime has no setting {unknown[0]!r}")
        return self.settings_type(**given)


def mixture_of(header: GgufHeader) -> Mixture | None:
    """The experts of the model in a file; None if each row uses all of them, or there are none."""
    (used, count), layers, read = header.experts, header.expert_layers, header.expert_bytes_per_forward
    if not (count and layers and read):
        return None
    return Mixture(used=used * layers, count=count * layers, share=read / header.bytes_per_forward)

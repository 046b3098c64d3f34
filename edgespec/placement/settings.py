"""Which runtime opens which file, and in which settings: the only place that knows more than one runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol, Self, TypeAlias

from edgespec.errors import InvalidRequestError, ModelFileError, RuntimeUnavailableError
from edgespec.files.gguf.header import GgufHeader
from edgespec.files.model_file import LocatedModel
from edgespec.hardware.machine import Machine
from edgespec.interfaces.model import HOST, Model, ModelFacts
from edgespec.interfaces.rows import IdArray
from edgespec.placement.layer_split import layer_bytes
from edgespec.placement.memory import MemoryEstimate, estimate_memory
from edgespec.profiles.profile import Profile
from edgespec.runtimes.devices import llama_devices, llama_gpus
from edgespec.runtimes.llama import model as llama
from edgespec.runtimes.native import native
from edgespec.runtimes.native.frequent_head import short_head_ids, short_head_rows
from edgespec.runtimes.native.library import PORTABLE
from edgespec.runtimes.native.library import load as load_kernels
from edgespec.runtimes.onnx import model as onnx
from edgespec.runtimes.process.frames import LoadRequest
from edgespec.runtimes.process.restarting import WorkerSettings, run_in_process

ModelSettings: TypeAlias = llama.LlamaSettings | native.NativeSettings | onnx.OnnxSettings

# What the native runtime keeps of a model in the store, in the model's own folder: it goes when the model goes.
NATIVE_SIDECAR, COARSE_SIDECAR = "native.tiles", "native-coarse.tiles"

# Small models do not bear to be rounded. Of 1500 tokens of the suite's prompts a model of 270M weights has 31.3 %
# as its first choice in four bits and 34.8 as in its file, one of 135M 37.6 and 39.4, the 0.5B 42.4 and 42.9, the
# 1.5B 49.4 and 49.5 (docs/results/native.md). The limit is below a 0.5B model with a trimmed head.
LEAST_COARSE_PARAMETERS = 380_000_000

# ONNX Runtime's processor kernels keep keys and values as float32.
_ONNX_CACHE_BITS = 32

# What a worker process holds beside its model (the interpreter, numpy, a runtime): 51 MiB resident with llama.cpp,
# 68 MiB with ONNX Runtime, on Linux with a tiny model. What a driver adds for its device is not in it.
PROCESS_BYTES = 68 * 2**20


class LoadedModel(Model, Protocol):
    """Weights that a runtime has loaded, which can also say what they would be in other settings."""

    @property
    def header(self) -> GgufHeader:
        """The metadata and the tokenizer they came with."""

    @property
    def settings(self) -> ModelSettings: ...

    # Each runtime has settings of its own, so what these two take is the runtime's affair.
    @property
    def facts_with(self) -> Callable[..., ModelFacts]:
        """The facts ``with_caches`` would have. Raises InvalidRequestError."""

    @property
    def with_caches(self) -> Callable[..., LoadedModel]:
        """The same weights in another setting; to be closed like any other model.

        Raises ClosedError, InvalidRequestError.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *_exception: object) -> None: ...


def choose_device(wanted: str, needed_bytes: int) -> str:
    """The named device, as llama.cpp writes it; ``auto`` is the first GPU with so many bytes free, else the CPU.

    One in the processor is not taken unasked: both read the same memory, so only measuring tells which is faster. A
    name that is not here is left as it is, for loading to refuse.
    """
    if wanted.lower() == "cpu":
        return "cpu"
    if wanted == "auto":
        gpus = (gpu for gpu in llama_gpus() if gpu.kind == "gpu")
        return next((gpu.name for gpu in gpus if (gpu.free_bytes or 0) > needed_bytes), "cpu")
    names = (device.name for device in llama_devices(with_memory=False))
    return next((name for name in names if name.lower() == wanted.lower()), wanted)


def choose_threads(profile: Profile, machine: Machine, max_threads: int | None) -> int:
    """The profile's threads, or one for each physical core; at most ``max_threads``."""
    threads = machine.physical_cores if profile.threads == "auto" else profile.threads
    return max(1, min(threads, max_threads or threads))


def target_settings(profile: Profile, threads: int, target: LocatedModel) -> ModelSettings:
    """The fastest setting the target is known to run in. Raises InvalidRequestError."""
    if target.onnx is not None:
        return _onnx_settings(profile.device, threads)
    wanted = profile.runtime if target.runtime == "auto" else target.runtime
    device = "cpu" if profile.gpu_layers == 0 else _device(profile.device, wanted, target)
    if processor_runtimes(wanted, device, target)[0] == "native":
        return native.NativeSettings(threads=threads, sidecar=profile.native_sidecar)
    settings = llama.LlamaSettings(
        threads=threads,
        device=device,
        gpu_layers=None if profile.gpu_layers == "auto" else profile.gpu_layers,
        kv_type=cache_type(device),
    )
    return llama.usable_settings(settings, target.header)


def drafter_settings(profile: Profile, threads: int, drafter: LocatedModel) -> ModelSettings:
    """How the drafter is loaded beside a target that runs on so many threads.

    Repacked whatever the target needs: how a drafter rounds decides nothing but its own proposals.
    """
    if drafter.onnx is not None:
        return _onnx_settings(profile.draft_device, threads)
    device = _device(profile.draft_device, profile.draft_runtime, drafter)
    if processor_runtimes(profile.draft_runtime, device, drafter)[0] == "native":
        return native.NativeSettings(threads=threads, sidecar=profile.native_sidecar)
    return llama.LlamaSettings(threads=threads, device=device, kv_type=cache_type(device))


def _device(wanted: str, runtime: str, located: LocatedModel) -> str:
    """The device in which a GGUF file runs in that runtime, or "auto"."""
    return HOST if (wanted, runtime) == ("auto", "native") else choose_device(wanted, located.weight_bytes)


def processor_runtimes(wanted: str, device: str, located: LocatedModel) -> Sequence[str]:
    """The runtimes that may run a GGUF file on ``device``, the one to begin with first.

    Off the processor that is llama.cpp alone. Our own kernels come first where they are built for instructions that
    this processor has; in portable C they are slower than llama.cpp. Raises ModelFileError,
    RuntimeUnavailableError or InvalidRequestError, with the reason, where they alone are wanted and cannot be had.
    """
    if device.lower() != HOST:
        if wanted == "native":
            raise InvalidRequestError(f"the native runtime runs on the processor, not on {device}")
        return ("llama",)
    if wanted == "llama":
        return ("llama",)
    try:
        library = load_kernels()
        reason = native.unsupported_reason(located.header, located.artefact)
    except (RuntimeUnavailableError, ModelFileError):  # what is wrong with the file, llama.cpp tells when it loads it
        if wanted == "native":
            raise
        return ("llama",)
    if wanted == "native":
        if reason is not None:
            raise RuntimeUnavailableError(
                f"the native runtime does not run {located.name}: {reason}", hint="llama.cpp does"
            )
        return ("native",)
    if reason is not None:
        return ("llama",)
    return ("native", "llama") if library.levels[-1] != PORTABLE else ("llama", "native")


def runtime_of(settings: ModelSettings) -> str:
    """The runtime that these settings are for."""
    if isinstance(settings, onnx.OnnxSettings):
        return "onnx"
    return "native" if isinstance(settings, native.NativeSettings) else "llama"


def drafts_in_process(profile: Profile, settings: ModelSettings) -> bool:
    """Whether a drafter in those settings has a process of its own: on a GPU or an NPU, unless the profile says more.

    Their drivers fail and hang, and take the process along that uses them.
    """
    if profile.draft_isolation == "auto":
        return settings.device.lower() != "cpu"
    return profile.draft_isolation == "process"


def stable_settings(preferred: ModelSettings) -> Sequence[ModelSettings]:
    """Settings worth probing for stable widths, the preferred (fastest) first.

    Measured on x86: llama.cpp's repacked weights keep widths 1 to 3, weights as in the file 1 to 7 at 5 to 25 % of
    plain speed. ONNX Runtime's kernels compute all widths from 2 on alike and width 1 otherwise, so that plain
    decoding belongs to them only if it runs at width 2 (about 20 % of plain speed). Our own kernels compute every
    width alike.
    """
    if isinstance(preferred, native.NativeSettings):
        return (preferred,)
    if isinstance(preferred, onnx.OnnxSettings):
        return (preferred, replace(preferred, pad_to=2)) if preferred.pad_to == 1 else (preferred,)
    return (preferred, replace(preferred, repack=False)) if preferred.repack else (preferred,)


def open_model(
    located: LocatedModel, settings: ModelSettings, *, short_head: IdArray | None = None, coarse: bool = False
) -> LoadedModel:
    """Load the weights; in our own kernels with a ``short_head``, the ids of some rows, or ``coarse``, if wanted.

    Raises ModelFileError, RuntimeUnavailableError, InvalidRequestError, MemoryLimitError, CancelledError.
    """
    if isinstance(settings, onnx.OnnxSettings):
        assert located.onnx is not None  # these settings are made for such folders only
        return onnx.load_onnx(located.onnx, settings, name=located.name, sha256=located.identity)
    if isinstance(settings, native.NativeSettings):
        sidecar = COARSE_SIDECAR if coarse else NATIVE_SIDECAR
        return native.load_native(
            located.path,
            settings,
            name=located.name,
            sha256=located.identity,
            header=located.header,
            artefact=located.artefact,
            sidecar=None if located.store_folder is None else located.store_folder / sidecar,
            short_head=short_head,
            coarse=coarse,
        )
    return llama.load_model(
        located.path,
        settings,
        name=located.name,
        sha256=located.identity,
        header=located.header,
        artefact=located.artefact,
    )


def open_drafter(profile: Profile, drafter: LocatedModel, settings: ModelSettings, worker: WorkerSettings) -> Model:
    """The drafter, loaded here, or on its way in a process of its own, which is not waited for (see ``Restarting``).

    Raises what ``open_model`` raises.
    """
    if not drafts_in_process(profile, settings):
        short = None if drafter_head_rows(profile, drafter, settings) is None else short_head_ids(drafter.header)
        coarse = drafter_bytes_spared(profile, drafter, settings) > 0
        return open_model(drafter, settings, short_head=short, coarse=coarse)
    folder = drafter.artefact or drafter.onnx
    request = LoadRequest(
        runtime=runtime_of(settings),
        path=drafter.path if folder is None else folder.folder,
        settings=asdict(settings),
        name=drafter.name,
        sha256=drafter.identity,
    )
    return run_in_process(describe_drafter(profile, drafter, settings), request, worker)


def describe_drafter(profile: Profile, drafter: LocatedModel, settings: ModelSettings) -> ModelFacts:
    """The facts the drafter would have if it were loaded; a process of its own is one of its settings."""
    facts = describe(
        drafter,
        settings,
        head_rows=drafter_head_rows(profile, drafter, settings),
        coarse=drafter_bytes_spared(profile, drafter, settings) > 0,
    )
    if not drafts_in_process(profile, settings):
        return facts
    return replace(facts, can_fork=False, can_branch=False, settings={**facts.settings, "process": True})


def drafter_head_rows(profile: Profile, drafter: LocatedModel, settings: ModelSettings) -> int | None:
    """How many rows the drafter's head has at first, if not all: in our kernels, and in no process of its own."""
    if profile.draft_head == "whole" or not _is_ours(profile, settings) or drafter.artefact is not None:
        return None
    return short_head_rows(drafter.header)


def drafter_bytes_spared(profile: Profile, drafter: LocatedModel, settings: ModelSettings) -> int:
    """How many bytes less than its file's the drafter's weights take, since they are kept in four bits: in our
    kernels and in no process of its own, if it is large enough.

    Raises RuntimeUnavailableError, ModelFileError.
    """
    if profile.draft_weights == "file" or not _is_ours(profile, settings):
        return 0
    if drafter.header.parameter_count < LEAST_COARSE_PARAMETERS:
        return 0
    return native.bytes_spared(drafter.header, drafter.artefact)


def _is_ours(profile: Profile, settings: ModelSettings) -> bool:
    """Whether a drafter in those settings is in our own kernels and in this process."""
    return isinstance(settings, native.NativeSettings) and not drafts_in_process(profile, settings)


def describe(
    located: LocatedModel, settings: ModelSettings, *, head_rows: int | None = None, coarse: bool = False
) -> ModelFacts:
    """The facts the model would have if it were loaded, in our own kernels with a short head of so many rows and
    ``coarse`` weights.
    """
    if isinstance(settings, onnx.OnnxSettings):
        assert located.onnx is not None
        return onnx.describe_onnx(located.onnx, settings, name=located.name, sha256=located.identity)
    if isinstance(settings, native.NativeSettings):
        return native.describe_native(
            located.header,
            settings,
            name=located.name,
            sha256=located.identity,
            head_rows=head_rows,
            coarse=coarse,
            artefact=located.artefact,
        )
    return llama.describe_model(located.header, settings, name=located.name, sha256=located.identity)


def memory_needed(
    header: GgufHeader, weight_bytes: int, context_length: int, settings: ModelSettings
) -> MemoryEstimate:
    """What a model takes of the machine's own memory: weights, cache for ``context_length`` tokens, working buffers.

    What lies in a GPU's memory is not in it, what llama.cpp keeps beside a GPU is.
    """
    bits = cache_bits(settings)
    whole = replace(estimate_memory(header, context_length, bits), weights_bytes=weight_bytes)
    if not isinstance(settings, llama.LlamaSettings) or not has_own_memory(settings.device):
        return whole
    split = layer_bytes(header, bits).split(settings.gpu_layers, context_length)
    return replace(whole, weights_bytes=split.host_weights, cache_bytes=split.host_cache)


def cache_bits(settings: ModelSettings) -> float:
    """Bits that one element of the cache takes."""
    if isinstance(settings, onnx.OnnxSettings):
        return _ONNX_CACHE_BITS
    if isinstance(settings, native.NativeSettings):
        return native.KV_BITS
    return llama.KV_TYPES[settings.kv_type][1]


def has_own_memory(device: str) -> bool:
    """Whether a device of llama.cpp's keeps what it holds outside the machine's own memory."""
    if device == "cpu":
        return False
    found = (one for one in llama_devices(with_memory=False) if one.name.lower() == device.lower())
    return any(one.memory != HOST for one in found)


def drafter_memory(
    profile: Profile, drafter: LocatedModel, context_length: int, settings: ModelSettings
) -> MemoryEstimate:
    """What the drafter takes, in this process or in one of its own."""
    kept = drafter.weight_bytes - drafter_bytes_spared(profile, drafter, settings)
    estimate = memory_needed(drafter.header, kept, context_length, settings)
    more = PROCESS_BYTES if drafts_in_process(profile, settings) else 0
    return replace(estimate, buffers_bytes=estimate.buffers_bytes + more)


def other_settings(target: LoadedModel) -> list[Mapping[str, Any]]:
    """Settings that plain decoding may be faster in, as arguments of ``with_caches``."""
    return [*({"threads": threads} for threads in fewer_threads(target)), *other_caches(target)]


def fewer_threads(target: LoadedModel) -> list[int]:
    """Powers of two below the target's number of threads."""
    own = target.settings.threads
    return [2**power for power in range(own.bit_length()) if 2**power < own]


def other_caches(target: LoadedModel) -> list[Mapping[str, Any]]:
    """Caches that plain decoding may be faster with; ONNX Runtime knows one kind, but may be freed of padding."""
    if isinstance(target.settings, onnx.OnnxSettings):
        return [{"pad_to": 1}] if target.settings.pad_to != 1 else []
    if isinstance(target.settings, native.NativeSettings) or target.settings.kv_type == "f16":
        return []
    return [{"kv_type": "f16"}, {"kv_type": "f16", "flash_attention": False}]


def cache_type(device: str) -> str:
    """The cache whose widths are bit-equal on the CPU. GPU kernels are built for keys and values of one type only."""
    return llama.LlamaSettings().kv_type if device == "cpu" else "q8_0"


def _onnx_settings(device: str, threads: int) -> onnx.OnnxSettings:
    return onnx.OnnxSettings(threads=threads, provider="cpu" if device == "auto" else device)

"""The only module that loads llama.cpp's native library: availability, build identity, log bridge.

The library is process-wide by nature (one backend, one log callback), so this module holds the only process-wide
state of edgespec: the loaded library, and the callback object that native code keeps a pointer to.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import RuntimeUnavailableError
from edgespec.files.installation import install_command
from edgespec.runtimes.llama.devices import list_devices
from edgespec.runtimes.runtime import Device

MINIMUM_VERSION = "0.3.36"

# What runtimes/llama/model.py and text/tokenizers/llama_cpp.py call. A build without one of these functions is too
# old.
_NEEDED = (
    "llama_backend_init",
    "llama_print_system_info",
    "llama_model_default_params",
    "llama_model_load_from_file",
    "llama_model_load_from_splits",
    "llama_model_free",
    "llama_model_n_ctx_train",
    "llama_model_is_recurrent",
    "llama_model_is_hybrid",
    "llama_context_default_params",
    "llama_init_from_model",
    "llama_free",
    "llama_synchronize",
    "llama_get_memory",
    "llama_memory_seq_rm",
    "llama_memory_seq_pos_max",
    "llama_batch_init",
    "llama_batch_free",
    "llama_decode",
    "llama_get_logits_ith",
    "llama_model_get_vocab",
    "llama_vocab_n_tokens",
    "llama_vocab_is_eog",
    "llama_vocab_is_control",
    "llama_vocab_bos",
    "llama_vocab_eos",
    "llama_vocab_get_add_bos",
    "llama_vocab_get_attr",
    "llama_vocab_get_text",
    "llama_vocab_fim_pre",
    "llama_vocab_fim_suf",
    "llama_vocab_fim_mid",
    "llama_vocab_fim_rep",
    "llama_vocab_fim_sep",
    "llama_tokenize",
    "llama_token_to_piece",
    "llama_log_callback",
    "llama_log_set",
    "llama_progress_callback",
    "ggml_abort_callback",
    "LLAMA_FLASH_ATTN_TYPE_DISABLED",
    "LLAMA_FLASH_ATTN_TYPE_ENABLED",
)

_LOADING = threading.Lock()

# ggml's log levels (ggml.h: NONE, DEBUG, INFO, WARN, ERROR, CONT in current sources; CONT continues a line).
_CONTINUE = 5
_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}


def install_hint() -> str:
    """How to install llama.cpp for this edgespec."""
    command = install_command("llama")
    return f"install it with `{command}`; without a prebuilt wheel this compiles for about 5 minutes"


@dataclass(frozen=True, slots=True)
class LlamaLibrary:
    """llama-cpp-python's low-level module, loaded, with our log bridge installed.

    ``has_tiles``: it multiplies repacked weights by AMX, the tile registers of Intel's servers.
    """

    api: Any
    version: str
    build: str
    has_tiles: bool
    log_bridge: object

    def devices(self, *, with_memory: bool = True) -> tuple[Device, ...]:
        """Every device of every backend in this build, the CPU included.

        Without ``with_memory`` drivers are asked for names only, which wakes up none of the drivers.
        """
        return list_devices(self.api._lib, *_dependencies(self.api), with_memory=with_memory)


def load() -> LlamaLibrary:
    """Load the native library once per process.

    Raises RuntimeUnavailableError, with the reason and what to install, if it is missing, broken or too old.
    """
    with _LOADING:  # two parallel first calls would install two log bridges and free one that native code uses
        return _load()


@functools.cache
def _load() -> LlamaLibrary:
    try:
        import llama_cpp

        api: Any = llama_cpp.llama_cpp
        version = str(llama_cpp.__version__)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name in (None, "llama_cpp")
        reason = "llama.cpp is not installed" if missing else f"llama-cpp-python cannot be imported: {error}"
        raise RuntimeUnavailableError(reason, hint=install_hint()) from error
    except (OSError, RuntimeError, AttributeError) as error:
        raise RuntimeUnavailableError(
            f"llama-cpp-python is installed but its native library does not load: {error}", hint=install_hint()
        ) from error
    lacking = [name for name in _NEEDED if not hasattr(api, name)]
    if lacking:
        raise RuntimeUnavailableError(
            f"llama-cpp-python {version} lacks {lacking[0]}; edgespec needs {MINIMUM_VERSION} or newer",
            hint=install_hint(),
        )
    bridge = _install_log_bridge(api)
    api.llama_backend_init()
    features = bytes(api.llama_print_system_info())
    return LlamaLibrary(
        api=api,
        version=version,
        build=_build_identity(api, version, features),
        has_tiles=b"AMX_INT8 = 1" in features,
        log_bridge=bridge,
    )


def _dependencies(api: Any) -> list[ctypes.CDLL]:
    """On Windows the loaded ggml libraries: there a name is not looked for in a library's dependencies."""
    folder = Path(str(api._lib._name)).parent
    names = ("ggml.dll", "ggml-base.dll", "libggml.dll", "libggml-base.dll") if sys.platform == "win32" else ()
    return [ctypes.CDLL(str(folder / name)) for name in names if (folder / name).is_file()]


def _build_identity(api: Any, version: str, features: bytes) -> str:
    """Version plus a digest of the native code: two builds of one version may round differently."""
    digest = hashlib.sha256(features)
    for library in sorted(Path(str(api._lib._name)).parent.glob("*")):
        if library.is_file() and not library.is_symlink() and ("llama" in library.name or "ggml" in library.name):
            digest.update(library.read_bytes())
    return f"{version}+{digest.hexdigest()[:12]}"


def _install_log_bridge(api: Any) -> object:
    """Send native log lines to ``logging.getLogger("edgespec.native")``.

    Native code logs in fragments and from any of its threads; a line is passed on when it is complete.
    """
    logger = logging.getLogger("edgespec.native")
    # Without any handler Python would print warnings to stderr; an application that wants them adds a handler.
    logger.addHandler(logging.NullHandler())

    class Fragments(threading.local):
        # One per thread instead of a lock: garbage collection in here may free an unreferenced cache, and the log
        # lines of that come from another thread, which this thread would wait for.
        def __init__(self) -> None:
            self.pending: list[str] = []
            self.level = logging.INFO

    fragments = Fragments()

    def bridge(level: int, text: bytes | None, _user_data: object) -> None:
        try:
            if level != _CONTINUE:
                fragments.level = _LEVELS.get(level, logging.DEBUG)
            fragments.pending.append((text or b"").decode("utf-8", "replace"))
            if fragments.pending[-1].endswith("\n"):
                line = "".join(fragments.pending).rstrip()
                fragments.pending.clear()
                logger.log(fragments.level, "%s", line)
        except Exception:  # an exception must not travel through native frames
            fragments.pending.clear()

    callback = api.llama_log_callback(bridge)
    api.llama_log_set(callback, ctypes.c_void_p(0))
    return callback

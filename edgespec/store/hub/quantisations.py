"""The quantisations of a model in a hub repository, and the choice for this machine, from the hub's listing alone.

Before the download only a file's name tells whether our kernels run the file: quantisations are published by name.
The header states the types.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from edgespec.architectures.table import ARCHITECTURES
from edgespec.errors import DownloadError
from edgespec.files.disk import gib, megabytes
from edgespec.files.gguf.header import to_convert
from edgespec.files.gguf.names import (
    QUANTISATION,
    model_stem,
    models_among,
    part_name,
    quantisation_name,
    usual_quantisation,
)
from edgespec.store.hub.listing import HubListing

# The types of our kernels (runtimes/native), by the weights of a block. The store must not import runtimes: a test
# compares the two sets.
_FLOATS = ("BF16", "F16", "F32")
_OF_32 = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
_OF_256 = ("Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ3_XXS", "IQ3_S", "IQ4_XS")
KERNEL_TYPES = frozenset((*_FLOATS, *_OF_32, *_OF_256))

# Names of mixtures by the type that most of their weights have. llama.cpp's mixture IQ3_XXS holds IQ2_S as well.
_MIXTURES = {"IQ3_XS": "IQ3_S", "IQ3_M": "IQ3_S", "MXFP4_MOE": "MXFP4", "IQ3_XXS": "IQ2_S"}

# A decoding step reads all weights once, so four bits are the fastest that our kernels run. Q4_K_M is the usual
# compromise between size and loss (README of llama.cpp's quantize tool). Larger types follow.
_FOUR_BITS = ("Q4_K_M", "Q4_K_S", "Q4_K_L", "Q4_0", "Q4_1", "IQ4_NL", "IQ4_XS", "MXFP4", "MXFP4_MOE")
PREFERRED = (*_FOUR_BITS, "Q5_K_M", "Q5_K_S", "Q5_0", "Q5_1", "Q6_K", "Q8_0")

# Share of the available memory that may be used, as in the default profile; a test compares the two.
MEMORY_FRACTION = 0.8

# Memory beyond the file: buffers of 0.1 to 0.2 GiB, and a KV cache of 4096 tokens, which with 16 bits is 5 % of
# Qwen2.5 7B at four bits, 11 % of Llama 3.1 8B and 21 % of Gemma 3 4B (by their config.json).
_REST_OF_FILE, _LEAST_REST_BYTES = 0.25, 512 * 2**20

# IQ3's weights take 4.375 bits in our kernels' memory, so this much of a file of IQ3_XS, about 3.25 bits.
_LAID_OUT_IQ3 = 1.35

# A name that tells the bits of a weight and not the type. Elsewhere in a name it is a part of the model's.
_BITS_ALONE = re.compile(r"(?<![a-z0-9])(?:q|int)([2-8])(?:k[sml]?)?$", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """A model of the repository in one quantisation: a file, or all ``files`` of a split model.

    ``name`` is None if the file's name states none. ``native``: whether our kernels run it, None if its name does not
    tell. ``fits``: whether this machine has enough memory. Facts that the hub does not state are None.
    """

    name: str | None
    files: tuple[str, ...]
    bytes: int | None
    native: bool | None
    fits: bool | None

    @property
    def says_bits_alone(self) -> bool:
        """Whether the name tells the bits of a weight and not the type."""
        return self.name is not None and _BITS_ALONE.match(self.name) is not None

    @property
    def label(self) -> str:
        """The quantisation's name in messages."""
        return self.name or self.files[0]

    @property
    def needed_bytes(self) -> int | None:
        """Estimated memory of the model."""
        return None if self.bytes is None else needed_bytes(self.bytes, self.name if self.native else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisationChoice:
    """All quantisations of a repository, the smallest first, and the ``chosen`` one with a ``reason``."""

    listing: HubListing
    found: tuple[Quantisation, ...]
    chosen: Quantisation
    reason: str

    @property
    def words(self) -> str:
        """The choice and its reason, as a sentence."""
        size = "" if self.chosen.bytes is None else f", {megabytes(self.chosen.bytes)}"
        return f"{self.chosen.label}{size}: {self.reason}"


def runs_natively(name: str | None, architecture: str | None) -> bool | None:
    """Whether our kernels run a quantisation of that name; None if the name does not tell."""
    if architecture is not None and architecture not in ARCHITECTURES:
        return False
    if name is None or _BITS_ALONE.match(name) or name.startswith("UD-"):  # mixtures that differ for each model
        return None
    k_type = re.match(r"Q\d_K", name)
    return (k_type[0] if k_type else _MIXTURES.get(name, name)) in KERNEL_TYPES


def needed_bytes(file_bytes: int, native: str | None = None) -> int:
    """Estimated memory of a model with a file of this size, in bytes. ``native``: its quantisation if our kernels run
    it.
    """
    grows = native is not None and native.startswith("IQ3")
    weights_bytes = int(_LAID_OUT_IQ3 * file_bytes) if grows else file_bytes
    return weights_bytes + max(int(_REST_OF_FILE * file_bytes), _LEAST_REST_BYTES)


def find_quantisations(listing: HubListing, room_bytes: int) -> tuple[Quantisation, ...]:
    """Every model of the repository, the smallest first; offline only models whose parts are all cached."""
    sizes = {entry.name: entry.bytes for entry in listing.entries}
    models: dict[str, tuple[str, ...]] = {}
    for file in models_among(sizes):
        part = part_name(file)
        files = (file,) if part is None else part.names
        models[files[0]] = files
    found = []
    for first, files in models.items():
        if listing.cached and not all(file in sizes for file in files):
            continue
        told = [sizes.get(file) for file in files]
        size = None if None in told else sum(filter(None, told))
        name = quantisation_name(first) or _bits_alone(first)
        native = runs_natively(name, listing.architecture)
        each = Quantisation(name=name, files=files, bytes=size, native=native, fits=None)
        needed = each.needed_bytes
        found.append(each if needed is None else replace(each, fits=needed <= room_bytes))
    return tuple(sorted(found, key=lambda each: (each.bytes or 0, each.files)))


def choose_quantisation(listing: HubListing, available_bytes: int, named: str | None = None) -> QuantisationChoice:
    """Choose the quantisation for a machine with ``available_bytes`` of memory available.

    Among those that fit: first types that our kernels run, four bits before more; then types that llama.cpp runs,
    four bits before more, and otherwise the largest. Weights of 16 bits come after the same model in about half the
    size or less whose type is unknown. A ``named`` quantisation is taken even if it does not fit.
    Raises DownloadError if the repository has no model, none that fits or has that name, or several different models.
    """
    room = int(MEMORY_FRACTION * available_bytes)
    repo, found = listing.repo, find_quantisations(listing, room)
    if not found:
        hint = "choose a repository with GGUF files"
        if any(name.endswith(".safetensors") for name in listing.names):
            hint += f", or {to_convert(listing.reference())}"
        raise DownloadError(f"{repo} holds no .gguf model", hint=hint)
    wanted = None if named is None else usual_quantisation(named)
    fitting = [each for each in found if (each.fits is not False if named is None else each.name == wanted)]
    if not fitting and named is not None:
        raise DownloadError(f"{repo} has no quantisation {named}", hint=_nearest(named, found))
    if not fitting:
        least = found[0]
        raise DownloadError(
            f"no quantisation of {repo} fits in the {gib(room)} of memory that edgespec may use here: the smallest, "
            f"{least.label}, needs about {gib(least.needed_bytes or 0)}",
            hint="choose a smaller model, or fetch this one anyway: "
            f"edgespec pull {listing.reference(least.files[0])}",
        )
    chosen = min(fitting, key=_rank)
    if chosen.name in _FLOATS:
        fewer_bits = [each for each in fitting if each.says_bits_alone and _model(each) == _model(chosen)]
        chosen = min(fewer_bits, key=_rank, default=chosen)
    like = [each for each in fitting if each.name == chosen.name or (each.says_bits_alone and chosen.says_bits_alone)]
    rivals = [each for each in like if _model(each) != _model(chosen)]
    if rivals:
        names = ", ".join(sorted(each.files[0] for each in (chosen, *rivals)))
        raise DownloadError(
            f"{repo} holds {len(rivals) + 1} models, and the request does not say which: {names}",
            hint=f"name one: {listing.reference(chosen.files[0])}",
        )
    return QuantisationChoice(
        listing=listing,
        found=found,
        chosen=chosen,
        reason=_reason(chosen, single=len(found) == 1, room=room) if named is None else "you named it",
    )


def _nearest(named: str, found: Sequence[Quantisation]) -> str:
    names = list(dict.fromkeys(each.label for each in found))
    near = get_close_matches(named, names, n=2)
    return f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(names)}"


def _rank(each: Quantisation) -> tuple[int, int, int, int, Sequence[str]]:
    """Sort key of ``choose_quantisation``, the best lowest. One file comes before the same model in parts, and a
    shorter name before one that says more, such as other types of some tensors.
    """
    name, files = each.name or "", (len(each.files), len(each.files[0].rpartition("/")[2]), each.files)
    if bits := _BITS_ALONE.match(name):
        name = next((usual for usual in PREFERRED if usual.startswith(f"Q{bits[1]}")), name)
    preferred = (*PREFERRED, *_FLOATS) if each.native else PREFERRED
    if name in preferred:
        return 0 if each.native else 1, preferred.index(name), *files
    return 3 if name in _FLOATS else 2, -(each.bytes or 0), *files


def _bits_alone(filename: str) -> str | None:
    """The bits at the end of a file's name; None if there are none."""
    found = _BITS_ALONE.search(model_stem(filename))
    return None if found is None else found[0].upper()


def _model(each: Quantisation) -> str:
    """The model's name without its quantisation, as far as the file's name tells."""
    stem = model_stem(each.files[0]).rpartition("/")[2]
    return (_BITS_ALONE if each.says_bits_alone else QUANTISATION).sub("", stem).strip("-._ ").lower()


def _reason(chosen: Quantisation, *, single: bool, room: int) -> str:
    """Why this quantisation was chosen, as a clause."""
    runs = {True: "runs on our kernels", False: "needs llama.cpp", None: "the download will show what runs it"}
    needs = "the hub does not state its size"
    if chosen.needed_bytes is not None:
        needs = f"takes about {gib(chosen.needed_bytes)} of the {gib(room)} of memory that may be used"
    return f"{'the only one, ' if single else ''}{runs[chosen.native]}, {needs}"

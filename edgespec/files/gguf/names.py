"""Parses names of GGUF files: parts, quantisations, and files next to a model: auxiliary ones, and drafters."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

# The names that llama-gguf-split gives: NAME-00001-of-00003.gguf and so on.
_PART = re.compile(r"(?P<stem>(?s:.)*[^/])-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<ending>\.gguf)", re.IGNORECASE)

# The largest published models have fewer than 200 parts; a larger count in a name would only waste time.
MOST_PARTS = 1024

# Auxiliary files: image projectors (mmproj) and importance matrices (imatrix) of quantisers. The name of a model
# quantised with an importance matrix may also contain "imatrix", but states the type (Q4_K_M) as well. macOS keeps a
# file's attributes in a second file, ._NAME, on disks that cannot hold them.
_NO_MODEL = re.compile(r"mmproj|^(?!.*q\d).*imatrix|^\._", re.IGNORECASE)

# Drafters that only work with the model beside them, as they are published: MTP/mtp-NAME-Q8_0.gguf. The name of a
# whole model with a layer that drafts has "MTP" inside.
_DRAFTS = re.compile(r"(?:^|/)(?:mtp|eagle3|dflash|dspark)-|(?:^|/)MTP/", re.IGNORECASE)

# The name of a quantisation, with the type of the embeddings or the output if that follows.
QUANTISATION = re.compile(
    r"(?<![a-z0-9])((?:ud-)?(?:i?q[1-8]_(?:k(?:_(?:xxs|xs|s|m|l|xl))?|[01](?:_\d_\d)?|nl|xxs|xs|s|m)"
    r"|bf16|fp?16|fp?32|tq[12]_0|mxfp4(?:_moe)?))(?:[-._](?:emb|out)[a-z]*[-._](?:bf16|fp?16|fp?32))?(?![a-z0-9])",
    re.IGNORECASE,
)

# What to do with an adapter: no runtime applies one here.
MERGE_ADAPTER = "merge the adapter into the model with llama.cpp's llama-export-lora, and name the new file"


@dataclass(frozen=True, slots=True)
class PartName:
    """The parsed name of one part. ``stem`` is the model's name, with its folder if the name has one."""

    stem: str
    number: int
    count: int
    ending: str = ".gguf"

    @property
    def first(self) -> str:
        return self.of(1)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parts, in order."""
        return tuple(self.of(number) for number in range(1, self.count + 1))

    def of(self, number: int) -> str:
        """The name of another part."""
        return f"{self.stem}-{number:05d}-of-{self.count:05d}{self.ending}"


def part_name(name: str) -> PartName | None:
    """Parse the name of a part of a split model; None for a model in one file, also for part 1 of 1."""
    found = _PART.fullmatch(name)
    if found is None:
        return None
    number, count = int(found["number"]), int(found["count"])
    if not 1 <= number <= count or not 1 < count <= MOST_PARTS:
        return None
    return PartName(found["stem"], number, count, found["ending"])


def model_stem(name: str) -> str:
    """The name of a file without its ending and its number, with its folder if it has one."""
    part = part_name(name)
    return part.stem if part is not None else name[:-5] if name.lower().endswith(".gguf") else name


def quantisation_name(name: str) -> str | None:
    """The quantisation in a file's name, else in its folder's, as llama.cpp writes it; None if neither has one."""
    for piece in reversed(model_stem(name).split("/")):
        if found := QUANTISATION.findall(piece):  # some files also name their source
            return usual_quantisation(found[-1].upper())
    return None


def usual_quantisation(name: str) -> str:
    """The name that llama.cpp has for a quantisation."""
    return {"FP16": "F16", "FP32": "F32"}.get(name, name)


def is_auxiliary(name: str) -> bool:
    """Whether a GGUF file of this name is an auxiliary file (projector, imatrix, attributes) and not a model."""
    return _NO_MODEL.search(name.rpartition("/")[2]) is not None


def models_among(names: Iterable[str]) -> list[str]:
    """The names of GGUF files, with their folders, that are models; drafters only where there is nothing else."""
    found = [name for name in names if name.lower().endswith(".gguf") and not is_auxiliary(name)]
    return [name for name in found if _DRAFTS.search(name) is None] or found

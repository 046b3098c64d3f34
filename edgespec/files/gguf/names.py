"""What the name of a GGUF file says: which part of a split model it is, and whether it is a model at all."""

from __future__ import annotations

import re
from dataclasses import dataclass

# As llama-gguf-split names them: NAME-00001-of-00003.gguf and so on.
_PART = re.compile(r"(?P<stem>(?s:.)*[^/])-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<ending>\.gguf)", re.IGNORECASE)

# The largest published models come in fewer than 200 parts; names of more would only keep a reader busy.
MOST_PARTS = 1024

# What lies beside models: projectors, which turn images into tokens, and the statistics that quantisers weigh by.
# The latter also stand in the names of models that were quantised with them, which tell their type (Q4_K_M) as well.
_NO_MODEL = re.compile(r"mmproj|^(?!.*q\d).*imatrix", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PartName:
    """What the name of one part says. ``stem`` names the model, with its folder where the name has one."""

    stem: str
    number: int
    count: int
    ending: str = ".gguf"

    @property
    def first(self) -> str:
        return self.of(1)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all parts, in order."""
        return tuple(self.of(number) for number in range(1, self.count + 1))

    def of(self, number: int) -> str:
        """The name of another part."""
        return f"{self.stem}-{number:05d}-of-{self.count:05d}{self.ending}"


def part_name(name: str) -> PartName | None:
    """What a file's name says of a split model; None for a file that stands alone, also as the only part."""
    found = _PART.fullmatch(name)
    if found is None:
        return None
    number, count = int(found["number"]), int(found["count"])
    if not 1 <= number <= count or not 1 < count <= MOST_PARTS:
        return None
    return PartName(found["stem"], number, count, found["ending"])


def is_auxiliary(name: str) -> bool:
    """Whether a GGUF file of this name is made to lie beside a model, and is none itself."""
    return _NO_MODEL.search(name.rpartition("/")[2]) is not None

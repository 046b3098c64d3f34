"""How much of a model a device can hold: bytes by layer from the file header, and how many layers fit.

Layers are counted as in llama.cpp: from the end, with the output head as one layer more than the model's blocks. One
layer is the head alone, ``block_count`` + 1 layers are the whole model. The token embedding always stays in the
machine's memory. A layer's cache is in the layer's memory.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from edgespec.files.gguf.records import GgufHeader

_BLOCK = re.compile(r"blk\.(\d+)\.")

# Tensors that only the first step of a forward reads; llama.cpp never moves that step to a GPU.
_INPUT_TABLES = ("token_embd", "token_types", "position_embd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The bytes of a placed model: on the device, and in the machine's memory."""

    device_weights: int
    device_cache: int
    host_weights: int
    host_cache: int

    @property
    def device_bytes(self) -> int:
        return self.device_weights + self.device_cache

    @property
    def host_bytes(self) -> int:
        return self.host_weights + self.host_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes of a model's weights and of one token's cache, block by block; the cache may be fractional.

    ``shared_weights`` of the head are the input's embedding: only a device needs a second copy.
    """

    input_weights: int
    head_weights: int
    shared_weights: int
    block_weights: tuple[int, ...]
    block_cache: tuple[float, ...]

    @property
    def layers(self) -> int:
        """The largest number of layers on a device: the blocks and the head."""
        return len(self.block_weights) + 1

    def split(self, gpu_layers: int | None, context_length: int) -> Split:
        """The bytes with ``gpu_layers`` layers on a device (None: all) and a cache for ``context_length`` tokens."""
        moved = self.layers if gpu_layers is None else max(0, min(gpu_layers, self.layers))
        first = self.layers - moved  # the first block on the device
        host_head = 0 if moved else self.head_weights - self.shared_weights
        return Split(
            device_weights=sum(self.block_weights[first:]) + (self.head_weights if moved else 0),
            device_cache=math.ceil(sum(self.block_cache[first:]) * context_length),
            host_weights=self.input_weights + sum(self.block_weights[:first]) + host_head,
            host_cache=math.ceil(sum(self.block_cache[:first]) * context_length),
        )


def layer_bytes(header: GgufHeader, kv_bits_per_element: float) -> LayerBytes:
    """Bytes of each layer of a model. Raises ModelFileError if the header has no blocks or heads."""
    blocks = header.block_count
    weights = [0] * blocks
    entrance = head = shared = 0
    own_head = any(tensor.name == "output.weight" for tensor in header.tensors)
    for tensor in header.tensors:
        block = _BLOCK.match(tensor.name)
        if block is not None:
            weights[min(int(block[1]), blocks - 1)] += tensor.byte_count
        elif tensor.name.startswith(_INPUT_TABLES):
            entrance += tensor.byte_count
            if tensor.name == "token_embd.weight" and not own_head:
                shared = tensor.byte_count
        else:
            head += tensor.byte_count
    heads = header.head_count_kv
    by_block = (heads,) * blocks if isinstance(heads, int) else (*heads, *heads[-1:] * blocks)[:blocks]
    head_bytes = (header.key_length + header.value_length) * kv_bits_per_element / 8 if any(by_block) else 0.0
    return LayerBytes(
        input_weights=entrance,
        head_weights=head + shared,
        shared_weights=shared,
        block_weights=tuple(weights),
        block_cache=tuple(count * head_bytes for count in by_block),
    )


def layers_that_fit(model: LayerBytes, context_length: int, free_bytes: int, *, headroom_bytes: int) -> int:
    """How many layers fit in ``free_bytes`` of a device's memory, 0 to ``model.layers``.

    ``headroom_bytes`` are kept free for working buffers.
    """
    room = free_bytes - headroom_bytes
    fitting = 0
    while fitting < model.layers and model.split(fitting + 1, context_length).device_bytes <= room:
        fitting += 1
    return fitting

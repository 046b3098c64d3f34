"""How much of a model goes on a device: bytes layer by layer from the file's header, and how many layers fit.

Layers are counted as llama.cpp counts them: from the end, the output head being one more than the model's blocks. One
layer is the head alone, ``block_count`` + 1 layers are everything; the table that tokens are looked up in stays in
the machine's memory all the same. A layer's cache lies where the layer does.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from edgespec.files.gguf.records import GgufHeader

_BLOCK = re.compile(r"blk\.(\d+)\.")

# Tensors that only the first step of a forward reads; llama.cpp puts no GPU to that.
_INPUT_TABLES = ("token_embd", "token_types", "position_embd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """What a placed model takes, in bytes: on the device, and beside it in the machine's memory."""

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
    """A model's weights and the cache of one token in bytes, block by block; the cache need not be whole bytes.

    ``shared_weights`` of the head are the input's own table: only a device needs them a second time.
    """

    input_weights: int
    head_weights: int
    shared_weights: int
    block_weights: tuple[int, ...]
    block_cache: tuple[float, ...]

    @property
    def layers(self) -> int:
        """All that can be put on a device: the blocks, and the head."""
        return len(self.block_weights) + 1

    def split(self, gpu_layers: int | None, context_length: int) -> Split:
        """The bytes with so many layers on a device (None: all) and a cache for ``context_length`` tokens."""
        moved = self.layers if gpu_layers is None else max(0, min(gpu_layers, self.layers))
        first = self.layers - moved  # the first block that is not the CPU's
        host_head = 0 if moved else self.head_weights - self.shared_weights
        return Split(
            device_weights=sum(self.block_weights[first:]) + (self.head_weights if moved else 0),
            device_cache=math.ceil(sum(self.block_cache[first:]) * context_length),
            host_weights=self.input_weights + sum(self.block_weights[:first]) + host_head,
            host_cache=math.ceil(sum(self.block_cache[:first]) * context_length),
        )


def layer_bytes(header: GgufHeader, kv_bits_per_element: float) -> LayerBytes:
    """Bytes of each layer of the model of this header. Raises ModelFileError if it states no blocks or heads."""
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

"""gemma4-assistant: the drafter that is published with a Gemma 4 model, of which it reads the caches.

Its layers have queries alone. Those with a window see the keys and values of the target's last layer with a window,
the others those of the last one without. It reads the target's output for the text's last token but one, next to the
embedding of the last, and gives such an output for the token that it drafts. All tokens of a draft have the position
of the text's last token.
"""

from __future__ import annotations

import math
from dataclasses import replace

from edgespec.architectures import gemma4
from edgespec.architectures.shape import (
    FEATURE_OUT,
    OTHERS_CACHE,
    PAIR,
    ROPE_FACTORS,
    Architecture,
    Facts,
    SavedForm,
    Scales,
    Sizes,
    UnsupportedError,
    Variations,
)

# A head that scores some clusters of tokens. What it leaves out is scored here.
_CLUSTERS = ("masked_embd_centroids.weight", "masked_embd_ordering")


def _caches(facts: Facts, kinds: tuple[bool, ...], _kv_heads: tuple[int, ...]) -> tuple[int, ...]:
    layers = len(kinds)
    for key in ("attention.shared_kv_layers", "nextn_predict_layers"):
        if facts.integer(key, layers) not in (0, layers):
            raise facts.wrong(f"it states {key} for {facts.value(key)} of its {layers} layers, not for all")
    return (OTHERS_CACHE,) * layers


def _varied(facts: Facts) -> Variations:
    if facts.integer("embedding_length_per_layer_input", 0):
        raise UnsupportedError("its layers have inputs")
    found, read = gemma4.varied(facts, _caches), facts.integer("embedding_length_out", least=1)
    width = found.largest.width
    unused = {name: facts.tensors[name] for name in _CLUSTERS if name in facts.tensors}
    pair = {PAIR: (2 * read, width), FEATURE_OUT: (width, read)}
    return replace(found, largest=replace(found.largest, read=read), tensors=pair | unused)


def _windows(facts: Facts, sizes: Sizes) -> tuple[int, ...]:
    found = gemma4.windows(facts, sizes)
    if 1 in found:
        raise UnsupportedError("its window of 1 position holds the drafted token alone, which has no key")
    return found


def _scales(facts: Facts, sizes: Sizes) -> Scales:
    if facts.value("attn_logit_softcapping"):
        raise UnsupportedError("it has attn_logit_softcapping")
    facts.value("final_logit_softcapping")  # the target's, which its own scores do not have
    return Scales(embedding=math.sqrt(sizes.read), score=1.0)


ARCHITECTURE = Architecture(
    name="gemma4-assistant",
    saved=SavedForm(),
    rope_tensors=frozenset({ROPE_FACTORS}),
    gelu=True,
    windows=_windows,
    ropes=gemma4.ropes,
    scales=_scales,
    varied=_varied,
)

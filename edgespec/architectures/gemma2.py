"""gemma2: norms around both halves of a layer, GELU, windows in every other layer, soft caps of scores."""

from __future__ import annotations

import math

from edgespec.architectures.shape import (
    Architecture,
    Facts,
    SavedForm,
    Scales,
    Sizes,
    decoder_layer,
    windows_by_pattern,
)

_PERIOD, _WINDOW = 2, 4096
_LAYERS_OF_27B = 46  # the largest model scales attention by width / heads (its config.json)
_SCORE_CAP, _LOGIT_CAP = 50.0, 30.0  # llama.cpp's, for a file that states none
_CAPS = (1e-3, 1e6)  # beyond them a float has no room for the scores, or none for the cap


def _windows(facts: Facts, sizes: Sizes) -> tuple[int, ...]:
    return windows_by_pattern(facts, sizes, period=_PERIOD, default=_WINDOW)


def _scales(facts: Facts, sizes: Sizes) -> Scales:
    share = sizes.width // sizes.heads if sizes.layers == _LAYERS_OF_27B else sizes.head
    return Scales(
        embedding=math.sqrt(sizes.width),
        score=1.0 / math.sqrt(share),
        score_cap=facts.number("attn_logit_softcapping", _SCORE_CAP, within=_CAPS),
        logit_cap=facts.number("final_logit_softcapping", _LOGIT_CAP, within=_CAPS),
    )


ARCHITECTURE = Architecture(
    name="gemma2",
    saved=SavedForm(
        classes={"Gemma2ForCausalLM": "gemma2"},
        activation="hidden_activation",
        activations=frozenset({"gelu_pytorch_tanh"}),
        # Of transformers' Gemma2Config. The caps must be stated: null means none there, and 50 and 30 in llama.cpp.
        defaults={"head_dim": 256, "sliding_window": _WINDOW, "tie_word_embeddings": True},
        keys={name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")},
        norm_offset=1.0,
        keeps_windows=True,
    ),
    layer=decoder_layer(post_norms=True),
    gelu=True,
    windows=_windows,
    scales=_scales,
    caps=True,
)

"""What the JSON of an answer has: its keys and their types."""

from __future__ import annotations

from typing import Any

NUMBER = (int, float)
STATS: dict[str, tuple[type, ...]] = {
    "prompt_tokens": (int,),
    "emitted_tokens": (int,),
    "rounds": (int,),
    "proposed": (int,),
    "evaluated": (int,),
    "accepted": (int,),
    "invalid_proposals": (int,),
    "tokens_per_round": (*NUMBER, type(None)),
    "accepted_lengths": (list,),
    "ttft_s": (*NUMBER, type(None)),
    "decode_s": (*NUMBER, type(None)),
    "decode_tokens_per_s": (*NUMBER, type(None)),
}
PLAN: dict[str, tuple[type, ...]] = {
    "mode": (str,),
    "exactness": (str,),
    "numeric_class": (dict,),
    "target": (dict,),
    "drafter": (dict, type(None)),
    "depth_cap": (int,),
    "predicted_tokens_per_s": (*NUMBER, type(None)),
    "reasons": (list,),
}


def check_keys(found: dict[str, Any], keys: dict[str, tuple[type, ...]]) -> None:
    for key, types in keys.items():
        assert isinstance(found[key], types), (key, found[key])
        assert not isinstance(found[key], bool)


def check_generate(found: dict[str, Any]) -> None:
    assert found["schema_version"] == 1
    assert isinstance(found["text"], str)
    assert all(isinstance(token, int) for token in found["token_ids"])
    assert found["finish_reason"] in ("stop", "length", "cancelled")
    check_keys(found["stats"], STATS)
    check_keys(found["plan"], PLAN)
    assert found["plan"]["mode"] in ("plain", "serial", "pipelined")
    assert found["plan"]["exactness"] in ("W", "N", "D")
    assert found["plan"]["target"].keys() >= {"model", "runtime", "device", "threads"}
    if found["plan"]["drafter"] is not None:
        assert found["plan"]["drafter"].keys() >= {"kind", "model", "runtime", "device"}

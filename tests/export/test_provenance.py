"""What a manifest says about an export's source."""

from __future__ import annotations

import pytest

from edgespec.errors import InvalidRequestError
from edgespec.export.provenance import Provenance


def manifest(provenance: Provenance, mask_token_id: int | None = None) -> dict[str, object]:
    return provenance.manifest(
        "gguf", source_bytes=7, architecture="a", vocabulary_size=9, mask_token_id=mask_token_id, tools={"x": "1"}
    )


def test_a_manifest_without_notes_and_mask_has_neither_key() -> None:
    said = manifest(Provenance(name="tiny"))
    assert said["source"] == {"name": "tiny", "sha256": None, "bytes": 7}
    assert (said["quant"], said["licence"]) == ("keep", None)
    assert not {"trim", "mask_token_id"} & said.keys()
    assert manifest(Provenance(name="tiny"), 5)["mask_token_id"] == 5


def test_notes_become_trim_as_json_returns_them() -> None:
    assert manifest(Provenance(name="tiny", notes={"why": ("a",)}))["trim"] == {"why": ["a"]}


@pytest.mark.parametrize("wrong", [{"name": ""}, {"name": "x", "notes": {"a": float("nan")}}])
def test_a_source_without_a_name_and_notes_that_are_not_json_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError):
        Provenance(**wrong)  # type: ignore[arg-type]

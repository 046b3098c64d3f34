from __future__ import annotations

from importlib import resources

import pytest

from edgespec.errors import ModelNotFoundError, ProfileError
from edgespec.store.catalogue import catalogue, lookup, parse_catalogue
from edgespec.store.references import HubFile, PackageParts


def text() -> str:
    return resources.files("edgespec.store").joinpath("catalogue.toml").read_text(encoding="utf-8")


def mirrors() -> str:
    return resources.files("edgespec.store.mirrors").joinpath("catalogue.toml").read_text(encoding="utf-8")


OF_TODAY = ["qwen3-4b-2507", "qwen3-8b", "qwen3-coder-30b-a3b"]  # for 8, 16 and 32 GB


def test_the_catalogue_lists_four_models_that_ran_three_of_today_and_the_prompt_set() -> None:
    known = catalogue()
    ran = ["qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", "smollm2-135m", "gemma3-270m"]
    assert list(known) == [*ran, *OF_TODAY, "humaneval"]
    for name, gigabytes in zip(OF_TODAY, (8, 16, 32), strict=True):
        assert f"for {gigabytes} GB of memory; not run by us" in known[name].description
        assert (known[name].bytes or 0) < 0.75 * gigabytes * 1e9  # the rest is the cache's and other programs'
    assert known["qwen2.5-coder-1.5b"].drafter == "qwen2.5-coder-0.5b"
    assert known["humaneval"].kind == "prompts"
    assert not known["gemma3-270m"].chat
    for spec in known.values():
        assert spec.licence
        assert spec.bytes is not None


def test_catalogue_parts_have_hash_and_size_and_the_hub_is_tried_first() -> None:
    for name, spec in catalogue().items():
        if name in OF_TODAY:  # no package index carries them
            assert [type(source) for source in spec.sources] == [HubFile]
            continue
        kinds = [type(source) for source in spec.sources]
        assert kinds in ([HubFile, PackageParts], [PackageParts])
        packages = spec.sources[-1]
        assert isinstance(packages, PackageParts)
        assert all(part.sha256 and part.bytes for part in packages.parts)
        assert sum(part.bytes or 0 for part in packages.parts) == packages.bytes == spec.bytes
        assert len({part.package for part in packages.parts}) == len(packages.parts)


def test_a_misspelt_name_gets_a_suggestion() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        lookup("qwen2.5-code-1.5")
    assert "qwen2.5-coder-1.5b" in (caught.value.hint or "")
    with pytest.raises(ModelNotFoundError) as caught:
        lookup("zzz")
    assert "smollm2-135m" in (caught.value.hint or "")


def test_the_beginning_of_a_name_gets_suggestions() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        lookup("Qwen")
    assert (caught.value.hint or "").startswith("did you mean qwen2.5-coder-1.5b or qwen2.5-coder-0.5b?")


@pytest.mark.parametrize("name", ["zzz", "humaneva"])
def test_hints_list_models_and_paths_only_where_they_help(name: str) -> None:
    for to_fetch in (False, True):
        with pytest.raises(ModelNotFoundError) as caught:
            lookup(name, to_fetch=to_fetch)
        hint = caught.value.hint or ""
        assert "humaneval" not in hint, "it is a set of prompts"
        assert ("A path to a .gguf file" in hint) is not to_fetch
        assert caught.value.message.endswith(", and no such file is here") is not to_fetch


def test_callers_cannot_change_the_catalogue() -> None:
    with pytest.raises(TypeError):
        catalogue()["x"] = lookup("smollm2-135m")  # type: ignore[index]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema_version = 1", "schema_version = 2", "schema_version"),
        ("schema_version = 1", "schema_version = true", "schema_version true"),
        ('licence = "MIT"', "", "licence"),
        ('licence = "MIT"', 'license = "MIT"', "license"),
        ('licence = "MIT"', "licence = 1", "licence must be a string, got 1"),
        ('drafter = "qwen2.5-coder-0.5b"', 'drafter = "other"', "other"),
        ('kind = "prompts"', 'kind = "weights"', "weights"),
        ("bytes = 44877\nchat", "bytes = 0\nchat", "bytes must be a whole number of at least 1, got 0"),
        ('file_name = "HumanEval.jsonl.gz"', 'file_name = "../x"', "plain"),
        ("b796127e", "B796127e", "hex"),
        ("bytes = 44877\nsha256", "bytes = 44878\nsha256", "add up"),
        (
            'schema_version = 1\n\n[models."qwen2.5-coder-1.5b"]\nbytes',
            'schema_version = 9\n[models."qwen2.5-coder-1.5b"]\nbytes',
            "mirrors has schema_version 9",
        ),
        ("[models.", "[models", "TOML"),
    ],
)
def test_an_invalid_catalogue_entry_raises_an_error_that_names_it(old: str, new: str, message: str) -> None:
    assert old in text() + mirrors()
    with pytest.raises(ProfileError, match=message):
        parse_catalogue(text().replace(old, new), mirrors().replace(old, new))


def test_a_mirror_of_an_unknown_model_is_an_error() -> None:
    with pytest.raises(ProfileError, match="mirrors: 'humaneval' is not a known model"):
        parse_catalogue(text().partition("[models.humaneval]")[0].partition('[models."humaneval"]')[0], mirrors())


def test_a_catalogue_model_without_a_source_is_an_error() -> None:
    with pytest.raises(ProfileError, match=r"'smollm2-135m': .* a source or a mirror"):
        parse_catalogue(text(), "schema_version = 1\n[models]\n")


def test_the_mirror_catalogue_checks_its_schema_version() -> None:
    with pytest.raises(ProfileError, match="mirrors has schema_version 9"):
        parse_catalogue(text(), mirrors().replace("schema_version = 1", "schema_version = 9"))

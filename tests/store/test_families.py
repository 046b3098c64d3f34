"""The table of families: its entries are valid, and files are recognised from their headers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from edgespec.architectures.table import ARCHITECTURES
from edgespec.decoding.sampling import Sampling
from edgespec.errors import InvalidRequestError, ModelNotFoundError, ProfileError
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.records import GgufArray, GgufHeader
from edgespec.files.home import Home
from edgespec.store.catalogue import catalogue, lookup
from edgespec.store.families import families, family_of, models_by_name, parse_families
from edgespec.store.locate import Locator
from edgespec.store.references import CatalogueName, HubReference, parse_reference
from edgespec.store.store import Store
from tests.support.tiny_models import TinyModels


def header(architecture: str, pre: str | None, tokens: int, **general: str) -> GgufHeader:
    """A header with only the fields that identify a family."""
    path = Path("x.gguf")
    metadata: dict[str, object] = {f"general.{key}": value for key, value in general.items()}
    metadata["tokenizer.ggml.tokens"] = GgufArray(path, "string", tokens, 0, 8 * tokens)
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return GgufHeader(
        path=path,
        file_bytes=0,
        version=3,
        architecture=architecture,
        alignment=32,
        metadata=MappingProxyType(metadata),  # type: ignore[arg-type]
        tensors=(),
        data_offset=0,
    )


def recognised(file_name: str, *header_of: object, **general: str) -> str | None:
    family = family_of(header(*header_of, **general), file_name)  # type: ignore[arg-type]
    return None if family is None else family.name


# ------------------------------------------------------------------------------------------------ the table


def test_every_family_drafter_has_a_hub_reference_and_sizes() -> None:
    assert {family.name for family in families()} >= {
        "Qwen2.5-Coder",
        "Qwen2.5",
        "Qwen3",
        "Llama 3.1 to 3.3",
        "Gemma 3",
        "SmolLM2",
        "Mistral 7B v0.3",
    }
    for family in families():
        for drafter in family.drafters:
            reference = parse_reference(drafter.model, catalogue().keys())
            assert isinstance(reference, CatalogueName | HubReference)
            assert drafter.licence
            assert drafter.bytes is not None
            # A short head skips most of an embedding, and no drafter reads more than its file.
            assert 0.4 * drafter.bytes < drafter.draft_bytes <= drafter.bytes
        assert bool(family.drafters) != (family.why_no_drafter is not None)


def test_every_dense_architecture_that_the_kernels_run_has_a_family() -> None:
    converted = {name for name, each in ARCHITECTURES.items() if each.saved.classes}
    assert converted - {each for family in families() for each in family.architectures} == set()


def test_published_sampling_settings_of_families_are_valid() -> None:
    for family in families():
        assert Sampling(**family.sampling).greedy == (not family.sampling)  # type: ignore[arg-type]


def test_a_family_drafter_in_the_catalogue_is_referred_to_by_its_catalogue_name() -> None:
    (coder,) = (family for family in families() if family.name == "Qwen2.5-Coder")
    assert [drafter.model for drafter in coder.drafters] == ["qwen2.5-coder-0.5b"]
    assert catalogue()["qwen2.5-coder-0.5b"].bytes == coder.drafters[0].bytes
    (qwen3,) = (family for family in families() if family.name == "Qwen3")
    assert qwen3.drafters[0].model == "hf:unsloth/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q4_K_M.gguf"


GOOD = """
schema_version = 1
[[families]]
name = "X"
architectures = ["llama"]
pre = ["default"]
vocabulary = [100, 200]
called = 'x'
sampling = { temperature = 0.5 }
[[families.drafters]]
name = "X small"
repo = "org/x"
filename = "x.gguf"
licence = "MIT"
draft_bytes = 10
cache_bytes = 1
"""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("schema_version = 1", "schema_version = 2"), "reads 1"),
        (("[[families]]", "[[families"), "not valid TOML"),
        (('name = "X"', 'name = "X"\ncolour = "red"'), 'families 1: unknown key "colour"'),
        (("vocabulary = [100, 200]", ""), "families 1, vocabulary is missing"),
        (("[100, 200]", "[200, 100]"), "the smallest and the largest number of tokens"),
        (("[100, 200]", "[100]"), "vocabulary must be the smallest and the largest number of tokens"),
        (('["default"]', "[1]"), "pre 1 must be a string, got 1"),
        (("'x'", "'('"), "is not a regular expression"),
        (("temperature = 0.5", "heat = 0.5"), 'sampling, "heat" must be "temperature" or'),
        (("temperature = 0.5", "temperature = true"), 'sampling, "temperature" must be'),
        (
            ("draft_bytes = 10", "draft_bytes = 0"),
            "drafters 1, draft_bytes must be a whole number of at least 1",
        ),
        (("draft_bytes = 10", "draft_bytes = true"), "draft_bytes must be a whole number of at least 1, got true"),
        (('licence = "MIT"', ""), "drafters 1, licence is missing"),
    ],
)
def test_an_invalid_family_table_raises_an_error_with_family_and_key(change: tuple[str, str], words: str) -> None:
    assert parse_families(GOOD)[0].drafters[0].bytes is None
    with pytest.raises(ProfileError, match=words.replace("[", r"\[")):
        parse_families(GOOD.replace(*change, 1))


# ------------------------------------------------------------------------------------------------ recognising


@pytest.mark.parametrize(
    ("family", "file_name", "of", "general"),
    [
        ("Qwen2.5-Coder", "x", ("qwen2", "qwen2", 152064), {"basename": "Qwen2.5-Coder"}),
        ("Qwen2.5", "x", ("qwen2", "qwen2", 152064), {"basename": "Qwen2.5", "name": "Qwen2.5 7B Instruct"}),
        ("Qwen2.5", "qwen2.5-7b-instruct-q4_k_m", ("qwen2", "qwen2", 151936), {}),
        (None, "x", ("qwen2", "qwen2", 151936), {"basename": "Qwen2.5-Math"}),
        (None, "x", ("qwen2", "qwen2", 151936), {"basename": "Qwen2"}),
        (None, "qwen2.5-7b", ("qwen2", "qwen2", 32000), {}),
        (
            "DeepSeek-R1-Distill-Qwen",
            "x",
            ("qwen2", "deepseek-r1-qwen", 152064),
            {"basename": "DeepSeek-R1-Distill-Qwen"},
        ),
        ("Qwen3", "x", ("qwen3", "qwen2", 151936), {"basename": "Qwen3-4B"}),
        ("Qwen3", "x", ("qwen3", "qwen2", 151936), {"name": "Qwen3-4B-Thinking-2507"}),
        ("Qwen3-Instruct-2507", "x", ("qwen3", "qwen2", 151936), {"name": "Qwen3-4B-Instruct-2507"}),
        ("Qwen3", "x", ("qwen3moe", "qwen2", 151936), {"name": "Qwen3-30B-A3B"}),
        ("Qwen3-Instruct-2507", "x", ("qwen3moe", "qwen2", 151936), {"name": "Qwen3-30B-A3B-Instruct-2507"}),
        ("Qwen3", "x", ("qwen3moe", "qwen2", 151936), {"name": "Qwen3-30B-A3B-Thinking-2507"}),
        ("Qwen3-Coder", "x", ("qwen3moe", "qwen2", 151936), {"name": "Qwen3-Coder-30B-A3B-Instruct"}),
        ("Qwen3.5", "x", ("qwen35", "qwen35", 248320), {"name": "Qwen3.5 4B"}),
        ("Qwen3.5", "Qwen3.6-35B-A3B-Q4_K_M", ("qwen35moe", "qwen35", 248320), {}),
        (None, "x", ("qwen3", "qwen2", 151669), {"name": "Qwen3 Embedding 0.6B"}),
        ("Llama 3.1 to 3.3", "x", ("llama", "llama-bpe", 128256), {"name": "Meta Llama 3.1 8B Instruct"}),
        ("Llama 3.1 to 3.3", "Llama-3.2-3B-Instruct-Q4_K_M", ("llama", "llama-bpe", 128256), {}),
        ("Llama 3.1 to 3.3", "llama3.2:3b", ("llama", "llama-bpe", 128256), {}),
        (None, "x", ("llama", "llama-bpe", 128256), {"name": "Meta-Llama-3-8B-Instruct"}),
        (None, "x", ("llama", "llama-bpe", 128256), {"name": "DeepSeek R1 Distill Llama 3.1 8B"}),
        ("Gemma 3", "x", ("gemma3", "default", 262208), {"name": "Gemma 3 4b It"}),
        ("Gemma 3", "gemma-3-1b-it", ("gemma3", None, 262144), {}),
        ("Gemma 4", "gemma-4-E4B-it-Q4_K_M", ("gemma4", None, 262144), {}),
        ("SmolLM2", "x", ("llama", "smollm", 49152), {"basename": "smollm2"}),
        (None, "x", ("llama", "smollm", 49152), {"basename": "smollm"}),
        ("Mistral 7B v0.3", "Mistral-7B-Instruct-v0.3-Q4_K_M", ("llama", "default", 32768), {}),
        (None, "Mistral-7B-Instruct-v0.2", ("llama", "default", 32000), {}),
        ("Mistral Small 3", "x", ("llama", "tekken", 131072), {"name": "Mistral Small 3.1 24B Instruct 2503"}),
        ("Granite 3", "granite-3.3-8b-instruct-Q4_K_M", ("granite", "refact", 49159), {}),
        ("Phi-3", "Phi-3.5-mini-instruct-Q4_K_M", ("phi3", "default", 32064), {}),
        ("Phi-4", "phi-4-Q4_K_M", ("phi3", "dbrx", 100352), {}),
        ("gpt-oss", "gpt-oss-20b-mxfp4", ("gpt-oss", "gpt-4o", 201088), {"name": "Gpt Oss 20b"}),
        ("Granite 4", "granite-4.0-micro-Q4_K_M", ("granite", "dbrx", 100352), {}),
        ("SmolLM3", "SmolLM3-Q4_K_M", ("smollm3", "smaug-bpe", 128256), {}),
        ("Ministral 3", "x", ("mistral3", "tekken", 131072), {"basename": "Ministral-3"}),
        ("Mistral Small 3", "x", ("mistral3", "tekken", 131072), {"name": "Devstral Small 2507"}),
        ("Gemma 2", "gemma-2-9b-it-Q4_K_M", ("gemma2", "default", 256000), {}),
        ("OLMo 2", "OLMo-2-1124-7B-Instruct-Q4_K_M", ("olmo2", "dbrx", 100352), {}),
        ("OLMo 3", "Olmo-3-7B-Instruct-Q4_K_M", ("olmo2", "dbrx", 100278), {}),
        ("EXAONE 4", "EXAONE-4.0-32B-Q4_K_M", ("exaone4", "exaone4", 102400), {}),
        ("GLM-4", "x", ("glm4", "glm4", 151552), {"name": "GLM 4 9B 0414"}),
        ("Seed-OSS", "Seed-OSS-36B-Instruct-Q4_K_M", ("seed_oss", "seed-coder", 155136), {}),
        ("ERNIE 4.5", "ERNIE-4.5-0.3B-PT-Q8_0", ("ernie4_5", "default", 103424), {}),
        (None, "Qwen3", ("mamba", "qwen2", 151936), {}),
    ],
)
def test_a_family_is_recognised_from_the_gguf_header(
    family: str | None, file_name: str, of: tuple[str, str | None, int], general: dict[str, str]
) -> None:
    assert recognised(file_name, *of, **general) == family


def test_family_matching_tolerates_non_string_and_very_long_names() -> None:
    odd = header("qwen3", "qwen2", 151936)
    with_number = {**odd.metadata, "general.name": 3, "general.basename": "x" * 10**6 + "qwen3"}
    strange = replace(odd, metadata=with_number)
    assert family_of(strange, "model") is None
    assert family_of(strange, "qwen3") is not None
    without = replace(odd, metadata={})
    assert family_of(without, "qwen3") is None


def test_family_of_accepts_a_custom_list_of_families(tiny: TinyModels) -> None:
    known = parse_families(GOOD.replace("[100, 200]", "[1, 100000]").replace("'x'", "'target'"))
    found = family_of(read_header(tiny.target), "target", known)
    assert found is not None
    assert found.name == "X"
    assert family_of(read_header(tiny.target), "target", ()) is None


# ------------------------------------------------------------------------------------------------ hints


def test_an_unknown_model_name_of_a_known_family_suggests_its_hub_repository(home: Home) -> None:
    assert models_by_name()["qwen3-4b"] == "hf:Qwen/Qwen3-4B-GGUF"
    assert models_by_name()["llama-3.1-8b"] == "hf:bartowski/Meta-Llama-3.1-8B-Instruct-GGUF"
    for name in models_by_name().values():
        assert isinstance(parse_reference(name), HubReference)
    with pytest.raises(ModelNotFoundError) as caught:
        Locator(store=Store(home)).locate("qwen3-14b")
    assert (caught.value.hint or "").startswith("did you mean hf:Qwen/Qwen3-14B-GGUF?")
    with pytest.raises(ModelNotFoundError) as caught:
        lookup("gemma-3", others=models_by_name())
    assert (caught.value.hint or "").count("hf:") == 3  # two suggestions, and the hint's general form
    with pytest.raises(ModelNotFoundError) as caught:
        lookup("qwen2.5-coder", others=models_by_name())
    assert (caught.value.hint or "").startswith("did you mean qwen2.5-coder-1.5b or"), "catalogue names come first"


def test_an_empty_model_argument_is_an_invalid_request(home: Home) -> None:
    with pytest.raises(InvalidRequestError):
        Locator(store=Store(home)).locate("")


# ------------------------------------------------------------------------------------------------ real models


@pytest.mark.models
@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("qwen2.5-coder-1.5b", "Qwen2.5-Coder"),
        ("qwen2.5-coder-0.5b", "Qwen2.5-Coder"),
        ("smollm2-135m", "SmolLM2"),
        ("gemma3-270m", "Gemma 3"),
    ],
)
def test_headers_of_real_models_are_assigned_to_their_family(model: str, family: str) -> None:
    from edgespec.files.home import home as users_home

    located = Locator(store=Store(users_home()), download=True).locate(model)
    found = family_of(located.header, located.name)
    assert found is not None
    assert found.name == family
    assert located.name in (drafter.model for drafter in found.drafters) or model != "qwen2.5-coder-0.5b"

"""The quantisation of a hub repository chosen for a machine, from names and sizes alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.errors import DownloadError
from edgespec.files.gguf.names import quantisation_name
from edgespec.profiles.profile import load_profile
from edgespec.runtimes.native.tensors import TYPES
from edgespec.store.hub.listing import HubEntry, HubListing
from edgespec.store.hub.quantisations import (
    KERNEL_TYPES,
    MEMORY_FRACTION,
    choose_quantisation,
    find_quantisations,
    needed_bytes,
    runs_natively,
)

GB = 10**9
LADDER = {
    "Q2_K": 3,
    "IQ4_XS": 4.2,
    "Q4_0": 4.4,
    "Q4_K_S": 4.5,
    "Q4_K_M": 4.7,
    "Q5_K_M": 5.5,
    "Q8_0": 8.1,
    "F16": 15.2,
}


def listing(sizes: dict[str, float | None], **more: object) -> HubListing:
    entries = tuple(HubEntry(name, None if size is None else int(size * GB)) for name, size in sizes.items())
    given = {"repo": "org/repo", "revision": "main", "commit": "0" * 40, "entries": entries, **more}
    return HubListing(**given)  # type: ignore[arg-type]


def ladder(*left_out: str, **more: object) -> HubListing:
    return listing({f"m-{name}.gguf": size for name, size in LADDER.items() if name not in left_out}, **more)


def chosen(found: HubListing, gigabytes: float = 64) -> str:
    """The choice where ``gigabytes`` may be used."""
    return choose_quantisation(found, int(gigabytes / MEMORY_FRACTION * GB) + 2).chosen.label


def test_kernel_types_and_memory_fraction_match_the_runtime_and_the_profile(tmp_path: Path) -> None:
    assert set(TYPES) == KERNEL_TYPES
    default = load_profile("default", environ={}, cwd=tmp_path, user_dir=tmp_path)
    assert default.max_memory_fraction == MEMORY_FRACTION


@pytest.mark.parametrize(
    ("filename", "name", "native"),
    [
        ("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "Q4_K_M", True),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1", True),
        ("m-f16-Q8_0.gguf", "Q8_0", True),
        ("m-fp16.gguf", "F16", True),
        ("Q5_K_S/R1-00001-of-00009.gguf", "Q5_K_S", True),
        ("BF16/m-00001-of-00002.gguf", "BF16", True),
        ("m-Q6_K_L.gguf", "Q6_K_L", True),
        ("m-IQ4_XS.gguf", "IQ4_XS", True),
        ("m-IQ3_M.gguf", "IQ3_M", True),
        ("m-IQ3_XXS.gguf", "IQ3_XXS", False),
        ("m-Q2_K.gguf", "Q2_K", False),
        ("m-MXFP4_MOE.gguf", "MXFP4_MOE", True),
        ("m.i1-IQ1_S.gguf", "IQ1_S", False),
        ("m-Q3_K_XL.gguf", "Q3_K_XL", True),
        ("m-Q4_0_4_4.gguf", "Q4_0_4_4", False),
        ("oss-20b-mxfp4.gguf", "MXFP4", True),
        ("m-UD-Q4_K_XL.gguf", "UD-Q4_K_XL", None),
        ("m-int4-Q4_0.gguf", "Q4_0", True),
        *((f"m-qat-q4_0-unquantized.{name}.gguf", name, True) for name in ("Q4_K_M", "Q8_0", "BF16")),
        ("m-it-qat-int4-unquantized-F16.GGUF", "F16", True),
        ("m-q8_0-from-Q4_K_M.gguf", "Q4_K_M", True),
        ("M-Q4_K_M-embed-f16.gguf", "Q4_K_M", True),
        ("M-Q8_0.output.bf16-00001-of-00002.gguf", "Q8_0", True),
        ("M-embedding-f16.gguf", "F16", True),
        ("Q3-8B-Kintsugi-f16.gguf", "F16", True),
        ("BF16/Q3-30B-A3B-X-00001-of-00002.gguf", "BF16", True),
        ("m-q4.gguf", None, None),
        ("model.gguf", None, None),
        ("Qwen-q42.gguf", None, None),
        ("faq8_0x.gguf", None, None),
    ],
)
def test_quantisation_names_are_read_from_file_and_folder_names(
    filename: str, name: str | None, native: bool | None
) -> None:
    assert quantisation_name(filename) == name
    assert runs_natively(name, "llama") == runs_natively(name, None) == native
    assert runs_natively(name, "mamba") is False


def test_a_repositorys_drafters_are_not_its_models() -> None:
    drafters = {"MTP/mtp-m-qat-Q4_0.gguf": 0.06, "MTP/mtp-m-qat-Q8_0.gguf": 0.1, "eagle3-m-Q8_0.gguf": 1}
    assert chosen(listing({"m-qat-UD-Q4_K_XL.gguf": 3, **drafters})) == "UD-Q4_K_XL"
    assert chosen(listing({"m-Q8_0.gguf": 5, **drafters})) == "Q8_0"
    whole = listing({"m-MTP-Q8_0.gguf": 5})  # a model with a layer that drafts
    assert chosen(whole) == "Q8_0"
    assert chosen(listing({"mtp-m-Q8_0.gguf": 0.1})) == "Q8_0", "a repository of a drafter alone"


def test_the_list_of_quantisations_skips_other_files_and_sums_parts() -> None:
    files = {
        "README.md": 0.1,
        "mmproj-F16.gguf": 1,
        "m.imatrix.gguf": 1,
        "m-Q8_0.gguf": 8,
        "m-Q4_K_M-00002-of-00002.gguf": 2,
        "m-Q4_K_M-00001-of-00002.gguf": 3,
        "m-Q2_K.gguf": None,
    }
    found = find_quantisations(listing(files), 7 * GB)
    assert [(each.name, each.bytes, each.fits) for each in found] == [
        ("Q2_K", None, None),
        ("Q4_K_M", 5 * GB, True),
        ("Q8_0", 8 * GB, False),
    ]
    assert found[1].files == ("m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M-00002-of-00002.gguf")
    half = {name: size for name, size in files.items() if "00002-of" not in name}
    assert [each.name for each in find_quantisations(listing(half), 7 * GB)] == ["Q2_K", "Q4_K_M", "Q8_0"]
    assert [each.name for each in find_quantisations(listing(half, cached=True), 7 * GB)] == ["Q2_K", "Q8_0"]


def test_needed_memory_is_the_file_and_a_quarter_or_at_least_512_mib() -> None:
    assert needed_bytes(4 * GB) == 5 * GB
    assert needed_bytes(GB) == GB + 512 * 2**20


def test_iq3_needs_more_memory_in_our_kernels_than_its_file() -> None:
    assert needed_bytes(4 * GB, "IQ3_M") == int(6.4 * GB)
    files = {"m-IQ3_M.gguf": 4}
    for architecture, fits in (("llama", False), ("mamba", True)):
        (found,) = find_quantisations(listing({**files}, architecture=architecture), 6 * GB)
        assert found.fits is fits


def test_kernel_types_near_four_bits_are_chosen_before_llama_cpp_types() -> None:
    assert chosen(ladder()) == "Q4_K_M"
    assert chosen(ladder("Q4_K_M")) == "Q4_K_S"
    assert chosen(ladder("Q4_K_M", "Q4_K_S")) == "Q4_0"
    assert chosen(ladder("Q4_K_M", "Q4_K_S", "Q4_0")) == "IQ4_XS"
    four = ("Q4_K_M", "Q4_K_S", "Q4_0", "IQ4_XS")
    assert chosen(ladder(*four)) == "Q5_K_M"
    assert chosen(ladder(*four, "Q5_K_M")) == "Q8_0"
    assert chosen(ladder(*four, "Q5_K_M", "Q8_0")) == "F16"
    assert chosen(listing({"m-Q2_K.gguf": 3, "m-IQ4_XS.gguf": 4, "m-Q3_K_M.gguf": 3.5})) == "IQ4_XS"


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({"Phi-3-mini-4k-instruct-q4.gguf": 2.4, "Phi-3-mini-4k-instruct-fp16.gguf": 7.6}, "Q4"),
        ({"m-q8.gguf": 8.5, "m-F16.gguf": 16}, "Q8"),
        ({"m-int4.gguf": 4, "m-q8.gguf": 8, "m-q5.gguf": 5, "m-BF16.gguf": 16}, "INT4"),
        ({"m.q4km.GGUF": 4, "m-F16.gguf": 16}, "Q4KM"),
        ({"m.q4km.gguf": 4, "m.Q8_0.gguf": 8}, "Q8_0"),
        ({"a/m-q4.gguf": 4, "b/m-F16.gguf": 16}, "Q4"),
        ({"m-NVFP4.gguf": 4, "m-F16.gguf": 16}, "F16"),
        ({"m.gguf": 4, "m-F16.gguf": 16}, "F16"),
        ({"m-q2.gguf": 2, "m-q3.gguf": 3}, "Q3"),
        *(
            ({name: size, "Foo-8B-F16.gguf": 16}, "F16")
            for name, size in {
                "foo-lora.gguf": 0.1,
                "Foo-8B-lora.gguf": 0.1,
                "tokenizer.gguf": 0.01,
                "wavtokenizer.gguf": 2,
                "Foo-draft.gguf": 2,
                "Foo-draft-q4.gguf": 2,
                "Foo-8B-draft.gguf": 2,
                "Foo-8B-Chat-q4.gguf": 4,
            }.items()
        ),
        ({"m-F16.gguf": 16, "m-Q2_K.gguf": 3.2, "m-UD-IQ1_S.gguf": 2}, "F16"),
    ],
)
def test_sixteen_bits_come_after_the_same_model_whose_name_says_fewer_bits_alone(
    files: dict[str, float | None], name: str
) -> None:
    assert chosen(listing(files)) == name
    assert choose_quantisation(listing({**files, "m-F32.gguf": 32}), 0, "F32").chosen.name == "F32"


@pytest.mark.parametrize("named", [None, "Q4_K_M"])
def test_a_file_that_names_fewer_types_is_chosen_before_one_of_the_same_model_that_names_more(
    named: str | None,
) -> None:
    files = [f"M-{name}{other}.gguf" for name in ("Q4_K_M", "Q8_0") for other in ("-embed-f16", "")]
    choice = choose_quantisation(listing(dict.fromkeys(files, 5)), 64 * GB, named)
    assert choice.chosen.files == ("M-Q4_K_M.gguf",)


def test_a_quantisation_that_does_not_fit_in_memory_is_not_chosen() -> None:
    need = 1.25 * LADDER["Q4_K_M"]
    assert chosen(ladder(), need) == "Q4_K_M"
    assert chosen(ladder(), need - 0.001) == "Q4_K_S"
    assert chosen(ladder(), 1.25 * LADDER["IQ4_XS"]) == "IQ4_XS"
    assert chosen(ladder(), 1.25 * LADDER["Q2_K"]) == "Q2_K"
    with pytest.raises(DownloadError) as caught:
        chosen(ladder(), 3.7)
    assert caught.value.message == (
        "no quantisation of org/repo fits in the 3.45 GiB of memory that edgespec may use here: "
        "the smallest, Q2_K, needs about 3.49 GiB"
    )
    assert "edgespec pull hf:org/repo/m-Q2_K.gguf" in (caught.value.hint or "")


def test_four_bits_are_preferred_for_architectures_only_llama_cpp_runs() -> None:
    assert chosen(ladder(architecture="mamba")) == "Q4_K_M"
    assert chosen(listing({"m-F16.gguf": 2, "m-Q3_K_M.gguf": 1}, architecture="mamba")) == "Q3_K_M"
    found = choose_quantisation(ladder(architecture="mamba"), 64 * GB)
    assert {each.native for each in found.found} == {False}
    assert "needs llama.cpp" in found.reason


def test_a_model_in_one_file_is_preferred_to_the_same_model_in_parts() -> None:
    files = {"q/m-Q4_K_M-00001-of-00002.gguf": 2.0, "q/m-Q4_K_M-00002-of-00002.gguf": 2.0, "m-Q4_K_M.gguf": 4.0}
    assert choose_quantisation(listing({**files}), 64 * GB).chosen.files == ("m-Q4_K_M.gguf",)


def test_a_repository_with_several_models_is_an_error() -> None:
    with pytest.raises(DownloadError) as caught:
        chosen(listing({"a-0.5b-q4_k_m.gguf": 1, "a-1.5b-q4_k_m.gguf": 2}))
    which = "holds 2 models, and the request does not say which: a-0.5b-q4_k_m.gguf, a-1.5b-q4_k_m.gguf"
    assert which in caught.value.message
    assert caught.value.hint == "name one: hf:org/repo/a-0.5b-q4_k_m.gguf"
    with pytest.raises(DownloadError, match="holds 2 models"):
        chosen(listing({"M-1B-q4.gguf": 1, "M-3B-q8.gguf": 3}))
    with pytest.raises(DownloadError, match="holds 2 models"):
        chosen(listing({"a.gguf": 1, "b.gguf": 2}))
    with pytest.raises(DownloadError, match=r"no \.gguf model"):
        chosen(listing({"README.md": 1, "mmproj.gguf": 1}))
    with pytest.raises(DownloadError) as caught:
        chosen(listing({"model.safetensors": 1}))
    assert "edgespec export hf:org/repo --to gguf" in (caught.value.hint or "")


def test_the_chosen_quantisation_is_described_in_words() -> None:
    assert choose_quantisation(ladder(), 10 * GB).words == (
        "Q4_K_M, 4700 MB: runs on our kernels, takes about 5.47 GiB of the 7.45 GiB of memory that may be used"
    )
    only = choose_quantisation(listing({"model.gguf": None}, revision="v1"), 10 * GB)
    assert only.words == (
        "model.gguf: the only one, the download will show what runs it, the hub does not state its size"
    )
    assert only.listing.reference("x.gguf") == "hf:org/repo@v1/x.gguf"


def test_a_quantisation_is_found_by_either_of_its_names() -> None:
    for name in ("FP16", "F16"):
        assert choose_quantisation(listing({"m-fp16.gguf": GB, "m-q8_0.gguf": GB}), GB, name).chosen.name == "F16"
    assert choose_quantisation(listing({"m-q4.gguf": GB, "m-q8_0.gguf": GB}), GB, "Q4").chosen.label == "Q4"


def test_a_quantisation_that_is_named_is_taken_whether_it_fits_or_not() -> None:
    names = {each.name for each in find_quantisations(ladder(), 64 * GB)}
    assert {"Q8_0", "Q4_K_M"} <= names
    choice = choose_quantisation(ladder(), 1, "Q8_0")
    assert (choice.chosen.name, choice.reason) == ("Q8_0", "you named it")
    with pytest.raises(DownloadError, match="has no quantisation Q4_K_N") as caught:
        choose_quantisation(ladder(), 64 * GB, "Q4_K_N")
    assert "did you mean Q4_K_" in str(caught.value.hint)

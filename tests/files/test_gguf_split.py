"""Split GGUF models: any part gives the whole model, and an incomplete set is refused."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.errors import ModelFileError
from edgespec.files.atomic import sha256_file, sha256_of_parts
from edgespec.files.gguf.header import read_header
from edgespec.files.gguf.names import MOST_PARTS, PartName, is_auxiliary, part_name
from edgespec.files.model_file import read_model_file
from tests.support.raw_gguf import ARCH, I32, U16, Key, build, tensor
from tests.support.split_gguf import split_gguf
from tests.support.tiny_models import TinyModels

PARTS = 3


def keys(number: int, count: int, total: int) -> list[Key]:
    return [("split.no", U16, number), ("split.count", U16, count), ("split.tensors.count", I32, total)]


@pytest.fixture
def parts(tiny: TinyModels, tmp_path: Path) -> list[Path]:
    found = split_gguf(tiny.target, tmp_path / "set", tensors=9, name="tiny")
    assert len(found) == PARTS
    return found


def test_names_of_split_models_are_parsed() -> None:
    assert part_name("a/b-00002-of-00003.gguf") == PartName("a/b", 2, 3, ".gguf")
    assert part_name("x-00001-of-00002.GGUF").names == ("x-00001-of-00002.GGUF", "x-00002-of-00002.GGUF")  # type: ignore[union-attr]
    assert part_name("x-00003-of-00003.gguf").first == "x-00001-of-00003.gguf"  # type: ignore[union-attr]
    numbers = ("00001-of-00001", "00004-of-00003", "00000-of-00003", "1-of-2", f"00001-of-{MOST_PARTS + 1:05d}")
    for alone in ("", "x.gguf", "-00001-of-00002.gguf", "a/-00001-of-00002.gguf", *(f"x-{n}.gguf" for n in numbers)):
        assert part_name(alone) is None, alone
    assert is_auxiliary("mmproj-model-f16.gguf")
    assert is_auxiliary("sub/gemma.mmproj.gguf")
    assert is_auxiliary("qwen3-7B.imatrix.gguf")
    assert is_auxiliary("imatrix_unsloth.gguf")
    assert is_auxiliary("sub/._tiny-Q4_0.gguf")
    assert not is_auxiliary("m-imatrix-IQ4_XS.gguf")
    assert not is_auxiliary("mmproj/model.gguf")


@pytest.mark.parametrize("number", range(PARTS))
def test_reading_any_part_gives_the_header_of_the_whole_model(
    tiny: TinyModels, parts: list[Path], number: int
) -> None:
    whole, split = read_header(tiny.target), read_header(parts[number])
    assert split.path == parts[0]
    assert [part.path for part in split.parts] == parts
    assert split.file_bytes == sum(path.stat().st_size for path in parts)
    assert [(each.name, each.shape, each.type_name) for each in split.tensors] == [
        (each.name, each.shape, each.type_name) for each in whole.tensors
    ]
    joined, content = b"".join(path.read_bytes() for path in parts), tiny.target.read_bytes()
    for one, other in zip(split.tensors, whole.tensors, strict=True):
        assert joined[one.offset :][: one.byte_count] == content[other.offset :][: other.byte_count]
    assert split.vocabulary_size == whole.vocabulary_size
    assert (split.tensor_bytes, split.bytes_per_forward) == (whole.tensor_bytes, whole.bytes_per_forward)
    located = read_model_file(parts[number])
    assert (located.name, located.path) == ("tiny", parts[0])
    assert located.identity == read_model_file(parts[0]).identity


def test_a_model_in_one_file_has_one_part_and_takes_no_others(tiny: TinyModels, tmp_path: Path) -> None:
    header = read_header(tiny.target)
    assert header.split == ()
    assert [(part.path, part.start, part.byte_count) for part in header.parts] == [
        (tiny.target, 0, header.file_bytes)
    ]
    alone = tmp_path / "x-00001-of-00001.gguf"
    alone.write_bytes(build([ARCH, *keys(0, 1, 1)], [tensor("t", (32,))], data=128))
    assert read_header(alone).split == ()
    with pytest.raises(ModelFileError, match="a whole model, not a part"):
        read_header(alone, [tiny.target])


def test_the_first_part_of_a_split_model_may_hold_no_tensors(tiny: TinyModels, tmp_path: Path) -> None:
    found = split_gguf(tiny.target, tmp_path / "set", tensors=9, small_first=True)
    assert read_header(found[-1]).parameter_count == read_header(tiny.target).parameter_count


def test_a_folder_with_one_split_model_is_read_as_a_model(tiny: TinyModels, parts: list[Path]) -> None:
    (parts[0].parent / "mmproj-f16.gguf").write_bytes(b"GGUF")
    for part in parts:  # macOS's companions on disks of other systems
        part.with_name(f"._{part.name}").write_bytes(b"\0\5\26\7")
    assert read_model_file(parts[0].parent).header.split
    shutil.copy(tiny.target, parts[0].parent / "other.gguf")
    with pytest.raises(ModelFileError, match="holds 2 models, not one"):
        read_model_file(parts[0].parent)


def test_replacing_a_part_changes_the_identity_of_a_split_model(parts: list[Path]) -> None:
    before = read_model_file(parts[0]).identity
    parts[2].touch()
    assert read_model_file(parts[0]).identity != before


def test_parts_may_have_any_name_if_all_paths_are_given(parts: list[Path]) -> None:
    moved = [path.rename(path.with_name(f"sha256-{number}")) for number, path in enumerate(parts)]
    header = read_header(moved[2], [moved[0], moved[1]])
    assert [part.path for part in header.parts] == moved
    with pytest.raises(ModelFileError, match=r"sha256-1: it is part 2 of 3 of a split model, and its name does not"):
        read_header(moved[1])
    with pytest.raises(ModelFileError, match="it has 3 parts, but 2 are given"):
        read_header(moved[0], moved[1:2])
    with pytest.raises(ModelFileError, match=r"sha256-1: it is part 2 of 3, but part 3 of 3 was expected"):
        read_header(moved[0], [moved[1], moved[1]])


def _missing(parts: list[Path]) -> None:
    parts[1].unlink()


def _first_missing(parts: list[Path]) -> None:
    parts[0].unlink()


def _truncated(parts: list[Path]) -> None:
    parts[2].write_bytes(parts[2].read_bytes()[:-64])


def _swapped(parts: list[Path]) -> None:
    aside = parts[1].rename(parts[1].with_name("aside"))
    parts[2].rename(parts[1])
    aside.rename(parts[2])


def _whole_model(parts: list[Path]) -> None:
    parts[1].write_bytes(build([ARCH], [tensor("t", (32,))], data=128))


def _another_architecture(parts: list[Path]) -> None:
    parts[1].write_bytes(
        build([("general.architecture", 8, "mamba"), *keys(1, 3, 21)], [tensor("t", (32,))], data=128)
    )


def _of_a_larger_model(parts: list[Path]) -> None:
    parts[1].write_bytes(build(keys(1, 3, 99), [tensor("t", (32,))], data=128))


def _tensors_twice(parts: list[Path]) -> None:
    parts[1].write_bytes(build(keys(1, 3, 21), [tensor("token_embd.weight", (32,))], data=128))


def _too_few_tensors(parts: list[Path]) -> None:
    parts[1].write_bytes(build(keys(1, 3, 21), [tensor("t", (32,))], data=128))


def _too_many_tensors(parts: list[Path]) -> None:
    strange = [tensor(f"t{number}", (32,), offset=128 * number) for number in range(20)]
    parts[1].write_bytes(build(keys(1, 3, 21), strange, data=128 * 20))


def _part_beyond_the_count(parts: list[Path]) -> None:
    parts[1].write_bytes(build(keys(3, 3, 21)))


def _no_total(parts: list[Path]) -> None:
    parts[1].write_bytes(build(keys(1, 3, 21)[:2]))


def _a_folder(parts: list[Path]) -> None:
    parts[1].unlink()
    parts[1].mkdir()


@pytest.mark.parametrize(
    ("damage", "named", "sentence"),
    [
        (_missing, 1, "part 2 of 3 of this model is missing"),
        (_first_missing, 0, "part 1 of 3 of this model is missing"),
        (_truncated, 2, "truncated"),
        (_swapped, 1, "its name says part 2 of 3, its content says part 3 of 3"),
        (_whole_model, 1, "its name says part 2 of 3, its content says a whole model"),
        (_another_architecture, 1, "it is part 2 of another model"),
        (_of_a_larger_model, 1, "it is part 2 of another model"),
        (_tensors_twice, 1, "it and an earlier part hold tensor 'token_embd.weight'"),
        (_too_few_tensors, 0, "its 3 parts hold 13 tensors, but the model has 21"),
        (_too_many_tensors, 1, "parts 1 to 2 hold 29 tensors, but the model has 21"),
        (_part_beyond_the_count, 1, "it is part 4 of 3"),
        (_no_total, 1, "does not state split.tensors.count"),
        (_a_folder, 1, "it is a directory"),
    ],
)
def test_an_incomplete_or_mixed_split_model_is_refused_with_the_part(
    parts: list[Path], damage: Callable[[list[Path]], None], named: int, sentence: str
) -> None:
    damage(parts)
    with pytest.raises(ModelFileError) as caught:
        read_header(parts[0] if parts[0].exists() else parts[1])
    assert sentence in caught.value.message
    assert caught.value.path == parts[named]
    assert caught.value.hint


def test_a_part_whose_name_states_another_count_is_refused(parts: list[Path]) -> None:
    strange = parts[0].rename(parts[0].with_name("tiny-00001-of-00002.gguf"))
    with pytest.raises(ModelFileError, match="its name says part 1 of 2, its content says part 1 of 3"):
        read_header(strange)


def test_an_implausible_count_of_parts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x-00001-of-00002.gguf"
    path.write_bytes(build([ARCH, ("split.count", U16, 65535)]))
    with pytest.raises(ModelFileError, match=r"split\.count is 65535: 0 to 1024 is allowed"):
        read_header(path)
    path.write_bytes(build([("split.no", U16, 1)]))
    with pytest.raises(ModelFileError, match="it is part 2 of 0"):
        read_header(path)


def test_the_digest_of_a_split_model_is_the_sha256_of_its_parts_digests(tmp_path: Path) -> None:
    digests = [hashlib.sha256(text).hexdigest() for text in (b"a", b"b")]
    for name, text in (("1", b"a"), ("2", b"b")):
        (tmp_path / name).write_bytes(text)
    assert sha256_of_parts(digests[:1]) == sha256_file(tmp_path / "1")
    if shutil.which("sha256sum"):
        said = subprocess.run("sha256sum 1 2 | cut -c-64 | sha256sum", shell=True, cwd=tmp_path, capture_output=True)
        assert said.stdout.decode()[:64] == sha256_of_parts(digests)

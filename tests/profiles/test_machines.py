"""Finding described machines: built in, or a file of the user's."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.errors import ProfileError
from edgespec.profiles.machines import machine_names, read_machine


def test_every_built_in_machine_can_be_read() -> None:
    assert "laptop-small-gpu" in machine_names()
    for name in machine_names():
        origin, short_name, table = read_machine(name, cwd=Path())
        assert (origin, short_name) == (f"built-in machines/{name}.toml", name)
        assert isinstance(table["description"], str)


def test_a_built_in_machine_is_not_listed_as_a_profile() -> None:
    from edgespec.profiles.profile import list_profiles

    assert not {summary.name for summary in list_profiles(Path("/nowhere"))} & set(machine_names())


def test_a_machine_file_path_is_relative_to_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("description = 'mine'\n", encoding="utf-8")
    expected = (str(tmp_path / "mine.toml"), "mine", {"description": "mine"})
    assert read_machine("mine.toml", cwd=tmp_path) == expected
    assert read_machine(str(tmp_path / "mine.toml"), cwd=Path("/nowhere")) == expected
    (tmp_path / "plain").write_text("", encoding="utf-8")
    assert read_machine("./plain", cwd=tmp_path)[1] == "plain"


def test_an_unknown_machine_name_hints_at_the_nearest_known(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match='no described machine "ultrabok-8gb"') as raised:
        read_machine("ultrabok-8gb", cwd=tmp_path)
    assert raised.value.hint is not None
    assert raised.value.hint.startswith("Did you mean ultrabook-8gb? Described machines: ")


@pytest.mark.parametrize("name", ["none.toml", "a/b", "../x.toml", "nul\0.toml", "." + "/"])
def test_a_missing_machine_file_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProfileError, match="no machine file") as raised:
        read_machine(name, cwd=tmp_path)
    assert raised.value.hint


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"description = ", "line 1: not valid TOML"),
        (b"\xff\xff", "not UTF-8"),
        (b"#" * 1_000_001, "larger than"),
        (b"a = " + b"9" * 5000, "a number that is too long"),
    ],
)
def test_a_machine_file_that_is_not_toml_is_an_error(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "m.toml").write_bytes(content)
    with pytest.raises(ProfileError, match=words):
        read_machine("m.toml", cwd=tmp_path)

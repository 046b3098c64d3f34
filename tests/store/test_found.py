"""Models of other programs: found, listed with their runtime, run in place, and left unchanged."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.files.disk import expanded
from edgespec.files.model_file import read_model_file
from edgespec.store import scan
from edgespec.store.found import ModelFolders, find_models
from tests.support.command_line import run_here, succeeded
from tests.support.other_programs import LIBRARY, User, write_file
from tests.support.rewritten_gguf import rewrite_gguf
from tests.support.split_gguf import split_gguf
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import TinyModels
from tests.support.vocabularies import byte_letters, write_vocabulary


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path / "user")


@pytest.fixture
def weights(tiny: TinyModels) -> bytes:
    return tiny.target.read_bytes()


def test_models_of_every_supported_program_are_found(user: User, weights: bytes) -> None:
    ollama = user.to_ollama(f"{LIBRARY}/smol/135m", weights)
    studio = user.to_lm_studio("repo/smol.gguf", weights + b"1")
    hub = user.to_hub("org/repo-GGUF", "smol-q4.gguf", weights + b"22")
    found = find_models(user.folders)
    assert [(model.name, model.program, model.path, model.bytes) for model in found.models] == [
        ("ollama:smol:135m", "Ollama", ollama, len(weights)),
        (str(studio), "LM Studio", studio, len(weights) + 1),
        (str(hub), "Hugging Face", hub, len(weights) + 2),
    ]
    assert found.ignored == {}


def test_the_ending_of_a_models_file_may_be_in_capitals(user: User, weights: bytes) -> None:
    studio = user.to_lm_studio("repo/smol.GGUF", weights)
    assert [model.path for model in find_models(user.folders).models] == [studio]
    assert read_model_file(studio.parent).path == studio


def test_no_models_are_found_without_other_programs(tmp_path: Path) -> None:
    folders = ModelFolders.of({}, tmp_path / "absent")
    assert find_models(ModelFolders(folders.hub_cache, folders.ollama[:1], folders.lm_studio)).models == ()


def test_a_user_without_a_home_folder_has_no_models_of_other_programs_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it returns without a home folder
    monkeypatch.setattr(os, "environ", {})
    assert ModelFolders.here().hub_cache == Path("~/.cache/huggingface/hub")
    assert expanded("~absent-user/x") == Path("~absent-user/x")


def test_environment_variables_locate_other_programs_models(tmp_path: Path) -> None:
    told = {"OLLAMA_MODELS": "/models", "HF_HUB_CACHE": "/cache/hub", "HF_HOME": "/hf"}
    assert (ModelFolders.of(told, tmp_path).ollama, ModelFolders.of(told, tmp_path).hub_cache) == (
        (Path("/models"),),
        Path("/cache/hub"),
    )
    assert ModelFolders.of({"OLLAMA_MODELS": ' "/my models" '}, tmp_path).ollama == (Path("/my models"),)
    assert ModelFolders.of({"HF_HOME": "/hf"}, tmp_path).hub_cache == Path("/hf/hub")
    assert ModelFolders.of({"HUGGINGFACE_HUB_CACHE": "/older"}, tmp_path).hub_cache == Path("/older")
    assert ModelFolders.of({"XDG_CACHE_HOME": "/x"}, tmp_path).hub_cache == Path("/x/huggingface/hub")
    assert ModelFolders.of({}, tmp_path).hub_cache == tmp_path / ".cache" / "huggingface" / "hub"
    assert Path("/usr/share/ollama/.ollama/models") in ModelFolders.of({}, tmp_path).ollama


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "it lists no layers"),
        ('{"layers": 3}', "it lists no layers"),
        (
            '{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../etc/passwd"}]}',
            "its 'model' has no valid digest",
        ),
        (" " * (2**20 + 1), "it is too large"),
        ("[" * 200_000, "recursion"),
        ("\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "Expecting value"),
    ],
)
def test_a_damaged_ollama_manifest_is_ignored_with_a_reason(
    user: User, weights: bytes, text: str, reason: str
) -> None:
    user.to_ollama(f"{LIBRARY}/good/1b", weights)
    bad = user.manifest(f"{LIBRARY}/bad/1b", text)
    found = find_models(user.folders)
    assert [model.name for model in found.models] == ["ollama:good:1b"]
    assert reason in found.ignored[bad]


def test_incomplete_models_and_non_gguf_files_are_not_listed(user: User, weights: bytes) -> None:
    user.to_ollama(f"{LIBRARY}/gone/1b", weights).unlink()
    user.to_ollama(f"{LIBRARY}/adapter/1b", b"GGUF", layer="application/vnd.ollama.image.adapter")
    page = user.to_lm_studio("repo/page.gguf", b"<!doctype html>")
    for name in ("mmproj-f16.gguf", "big-00002-of-00003.gguf", "notes.txt", "x.gguf.part"):
        user.to_lm_studio(f"repo/{name}", weights)
    whole = user.to_lm_studio("repo/whole.gguf", weights)
    first = user.to_lm_studio("repo/big-00001-of-00003.gguf", weights)
    second = user.to_lm_studio("late/big-00002-of-00002.gguf", weights)
    (user.root / ".lmstudio" / "models" / "again").symlink_to(user.root / ".lmstudio")
    found = find_models(user.folders)
    assert [model.path for model in found.models] == [whole]
    assert found.ignored[page] == "it is not a GGUF file"
    assert found.ignored[first] == "part 3 of 3 of this model is missing"
    assert found.ignored[second] == "part 1 of 2 of this model is missing"
    adapter = user.ollama / "manifests" / LIBRARY / "adapter" / "1b"
    assert found.ignored[adapter] == "this model of Ollama has no GGUF file"
    assert len(found.ignored) == 5


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_named_pipes_and_deep_folders_do_not_block_the_search(user: User, weights: bytes) -> None:
    path = user.to_lm_studio("repo/x.gguf", weights)
    os.mkfifo(path.with_name("pipe.gguf"))
    user.manifest(f"{LIBRARY}/smol/x", "{}").unlink()
    os.mkfifo(user.ollama / "manifests" / LIBRARY / "smol" / "pipe")
    deep = path.parent.joinpath(*["d"] * 300)
    deep.mkdir(parents=True)
    (deep / "deep.gguf").write_bytes(weights)
    assert user.names() == [str(path)]


def test_the_search_stops_after_a_maximum_number_of_entries(
    user: User, weights: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = user.to_lm_studio("repo/x.gguf", weights)
    for number in range(20):
        user.to_lm_studio(f"repo/{number}.txt", b"")
    assert user.names() == [str(path)]
    monkeypatch.setattr(scan, "_MOST_ENTRIES", 10)
    (reason,) = find_models(user.folders).ignored.values()
    assert reason == "it holds more than 10 entries; the rest was not examined"


def test_a_file_name_with_control_characters_is_ignored(user: User, weights: bytes, tmp_path: Path) -> None:
    odd = user.to_lm_studio("repo/\x1b]0;title\x07\n.gguf", weights)
    assert find_models(user.folders).ignored == {odd: "its name contains control characters"}
    shown = succeeded(run_here("models", home=tmp_path / "home", env=user.environment))
    assert "\x1b" not in shown.out + shown.err
    assert "its name contains control characters" in shown.err


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such file names")
def test_a_file_name_that_is_not_utf_8_is_ignored_and_its_path_works(
    user: User, weights: bytes, tmp_path: Path
) -> None:
    odd = user.to_lm_studio(os.fsdecode(b"repo/sm\xf6l.gguf"), weights)
    assert find_models(user.folders).ignored == {odd: "its name is not UTF-8: give its path as MODEL"}
    succeeded(run_here("generate", "hi", "-m", str(odd), "--max-tokens", "2", home=tmp_path, env=user.environment))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="this user may read everything")
def test_an_unreadable_folder_is_ignored_with_a_reason(user: User, weights: bytes) -> None:
    path = user.to_lm_studio("repo/x.gguf", weights)
    path.parent.chmod(0)
    try:
        assert find_models(user.folders).ignored == {path.parent: "it cannot be read: Permission denied"}
    finally:
        path.parent.chmod(0o755)


def test_a_file_shared_by_two_programs_is_listed_once(user: User, weights: bytes) -> None:
    path = user.to_lm_studio("repo/x.gguf", weights)
    (path.parent / "y.gguf").symlink_to(path)
    assert user.names() == [str(path)]


def test_linked_folders_are_entered_and_links_in_a_circle_end(user: User, weights: bytes) -> None:
    path = user.to_lm_studio("repo/x.gguf", weights)
    elsewhere = write_file(user.root / "drive" / "other" / "linked" / "linked.gguf", weights + b"1")
    models = user.root / ".lmstudio" / "models"
    (models / "other").symlink_to(elsewhere.parent.parent)
    (elsewhere.parent / "up").symlink_to(models)
    (models / "gone").symlink_to(user.root / "nowhere")
    (models / "gone.gguf").symlink_to(user.root / "nowhere.gguf")
    found = find_models(user.folders)
    assert sorted(model.path.name for model in found.models) == ["linked.gguf", path.name]
    assert list(found.ignored) == [models / "gone.gguf"]


@pytest.mark.parametrize("folder", [".lmstudio", ".cache/lm-studio", "moved"])
def test_lm_studios_models_are_found_where_its_settings_moved_them(user: User, weights: bytes, folder: str) -> None:
    path = write_file(user.root / "drive" / "set.gguf", weights)
    write_file(user.root / ".lmstudio-home-pointer", f"{user.root / 'moved'}\n".encode())
    settings = user.root / folder / "settings.json"
    for told in (str(path.parent), "~/drive"):
        write_file(settings, json.dumps({"downloadsFolder": told}).encode())
        assert [model.path for model in find_models(ModelFolders.of({}, user.root)).models] == [path]
    usual = user.to_lm_studio("repo/x.gguf", weights + b"1")
    assert len(find_models(ModelFolders.of({}, user.root)).models) == 2, "the usual folder is looked at too"
    for damaged in (b"{", b"[]", b'{"downloadsFolder": 3}', b"\xff", b'{"downloadsFolder": "\\u0000"}', b"[" * 10**5):
        write_file(settings, damaged)
        assert [model.path for model in find_models(ModelFolders.of({}, user.root)).models] == [usual]


# ------------------------------------------------------------------------------------------------ the commands


@pytest.fixture
def environment(user: User) -> dict[str, str]:
    return user.environment


def test_models_lists_other_programs_files_and_generate_runs_them(
    user: User, environment: dict[str, str], weights: bytes, tmp_path: Path
) -> None:
    user.to_ollama(f"{LIBRARY}/smol/135m", weights)
    only_llama = write_vocabulary(tmp_path / "v.gguf", [(letter, 1) for letter in byte_letters()])
    data = (
        only_llama.read_bytes()
        .replace(b"llama.", b"mamba.")
        .replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba")
    )
    user.to_lm_studio("repo/odd.gguf", data)
    before, home = user.everything(), tmp_path / "home"
    shown = succeeded(run_here("models", home=home, env=environment)).out
    assert "ollama:smol:135m\n" in shown
    assert "Ollama, llama, runs on our kernels\n" in shown
    assert "LM Studio, mamba, needs llama.cpp\n" in shown
    rows: list[dict[str, Any]] = run_here("models", "--json", home=home, env=environment).json["models"]
    own = {row["name"]: row for row in rows if "program" in row}
    assert own["ollama:smol:135m"]["native"] is True
    assert (own["ollama:smol:135m"]["family"], own["ollama:smol:135m"]["reason"]) == ("llama", None)
    options = ("--draft", "none", "--max-tokens", "3", "--json")
    for _ in range(2):  # the second time from prepared weights
        found = succeeded(
            run_here("generate", "hi", "--target", "ollama:smol:135m", *options, home=home, env=environment)
        )
        assert found.json["plan"]["target"]["model"] == "smol:135m"
    assert list((home / "prepared").glob("*/native.tiles")), "kept in edgespec's home"
    assert user.everything() == before, "other programs' folders are unchanged"
    wrong = run_here("generate", "hi", "--target", "ollama:absent", home=home, env=environment)
    assert wrong.code == 1
    assert "Ollama has no model 'absent:latest'" in wrong.err


def test_a_split_model_is_listed_once_and_runs_from_any_part(
    user: User, environment: dict[str, str], tiny: TinyModels, tmp_path: Path
) -> None:
    parts = split_gguf(tiny.target, tmp_path / "set", tensors=9, name="tiny")
    studio = [user.to_lm_studio(f"repo/{part.name}", part.read_bytes()) for part in parts]
    hub = [user.to_hub("org/repo-GGUF", part.name, part.read_bytes() + bytes(32)) for part in parts]
    user.split_to_ollama(
        f"{LIBRARY}/smol/135m", [*parts[:2], write_file(tmp_path / "3", parts[2].read_bytes() + b"0")]
    )
    before, home = user.everything(), tmp_path / "home"
    rows: list[dict[str, Any]] = run_here("models", "--json", home=home, env=environment).json["models"]
    own = {row["name"]: row for row in rows if "program" in row}
    assert list(own) == ["ollama:smol:135m", str(studio[0]), str(hub[0])]
    assert own[str(studio[0])]["parts"] == [str(path) for path in studio]
    assert own[str(studio[0])]["bytes"] == sum(path.stat().st_size for path in parts)
    assert all(row["native"] for row in own.values())
    texts = set()
    for name in (str(tiny.target), "ollama:smol:135m", str(studio[1]), str(hub[2])):
        for runtime in ("native", "llama"):
            profile = write_file(
                tmp_path / f"{runtime}.toml", f'inherits = "laptop"\nruntime = "{runtime}"\n'.encode()
            )
            options = ("--draft", "none", "--max-tokens", "6", "--profile", str(profile), "--json")
            found = succeeded(run_here("generate", "hi", "--target", name, *options, home=home, env=environment))
            assert found.json["plan"]["target"]["runtime"] == runtime
            texts.add((runtime, found.json["text"]))
    assert len(texts) == 2, "each runtime gives the parts the same text as the whole file"
    assert user.everything() == before, "other programs' folders are unchanged"
    studio[1].unlink()
    gone = run_here("generate", "hi", "--target", str(studio[0]), home=home, env=environment)
    assert gone.code == 1
    assert f"{studio[1]}: part 2 of 3 of this model is missing" in gone.err


def test_a_model_with_a_vision_part_runs_as_text_only_with_a_notice(
    user: User, environment: dict[str, str], tmp_path: Path
) -> None:
    plain = write_tiny_gguf(tmp_path / "plain.gguf", architecture="gemma3", quant="Q8_0", seed=3)
    left_out = ("gemma3.rope.", "tokenizer.ggml.add_space_prefix")
    seeing = rewrite_gguf(
        plain,
        tmp_path / "seeing.gguf",
        keep=lambda key: not key.startswith(left_out),
        keys={"gemma3.mm.tokens_per_image": 256},
        tensors={
            "v.patch.weight": np.zeros((4, 32), dtype=np.float32),
            "mm.0.weight": np.zeros(32, dtype=np.float32),
        },
    )
    user.to_ollama(f"{LIBRARY}/gemma3/4b", seeing.read_bytes())
    user.to_lm_studio("repo/mmproj-model-f16.gguf", seeing.read_bytes())
    home, said = tmp_path / "home", "images are left out: this file's vision part is not used"
    listed = succeeded(run_here("models", home=home, env=environment)).out
    assert "Ollama, gemma3, text runs on our kernels, images are left out\n" in listed
    (row,) = [
        row for row in run_here("models", "--json", home=home, env=environment).json["models"] if "program" in row
    ]
    assert (row["name"], row["native"], row["vision"]) == ("ollama:gemma3:4b", True, True)
    pair = ("--target", "ollama:gemma3:4b", "--draft", "none", "--max-tokens", "3")
    generated = succeeded(run_here("generate", "hi", *pair, home=home, env=environment))
    assert generated.err.count(said) == 1
    chat = succeeded(run_here("chat", *pair, home=home, env=environment, stdin="hi\nthere\n"))
    assert chat.err.count(said) == 1
    as_json = succeeded(run_here("generate", "hi", *pair, "--json", home=home, env=environment))
    assert as_json.err == ""
    other = run_here("generate", "hi", "--target", str(plain), *pair[2:], home=home, env=environment)
    assert said not in other.err

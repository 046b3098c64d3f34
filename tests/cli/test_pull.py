"""``edgespec pull`` and MODEL as ``hf:ORG/REPO``: what is shown, chosen and kept, against a hub on loopback."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.models import _wanted
from edgespec.cli.terminal.output import ProgressPrinter
from edgespec.files.home import Home
from edgespec.store.references import HubReference, Network
from edgespec.store.store import Store
from tests.support.command_line import Result, run_cli
from tests.support.hub_server import HubServer, running
from tests.support.split_gguf import split_gguf
from tests.support.tiny_models import TinyModels

Run = Callable[..., Result]


@pytest.fixture
def hub(tiny: TinyModels, tmp_path: Path) -> Iterator[HubServer]:
    files = {"README.md": b"read me", "mmproj-F16.gguf": b"GGUF", "tiny-Q2_K.gguf": b"GGUF", "tiny-F16.gguf": b"GGUF"}
    for part in split_gguf(tiny.target, tmp_path / "set", tensors=9, name="tiny-Q8_0"):
        files[f"q8/{part.name}"] = part.read_bytes()
    described = {"cardData": {"license": "apache-2.0"}, "gguf": {"architecture": "llama"}}
    with running(HubServer(files=files, sizes={"tiny-F16.gguf": 10**15}, described=described)) as hub:
        yield hub


@pytest.fixture
def edgespec(hub: HubServer, tmp_path: Path) -> Run:
    # A relative cache is one of the folder that the command runs in, which is tmp_path.
    env = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": "hub", "HOME": str(tmp_path)}
    return lambda *arguments, **more: run_cli(*arguments, home=tmp_path / "home", env=env, **more)


FIRST = "q8/tiny-Q8_0-00001-of-00003.gguf"


def test_the_quantisations_are_shown_and_one_is_fetched(edgespec: Run, hub: HubServer, tmp_path: Path) -> None:
    shown = edgespec("pull", "hf:org/repo")
    assert shown.code == 0, shown.err
    assert shown.out == ""
    lines = shown.err.splitlines()
    start = lines.index("hf:org/repo holds 3 quantisations")
    assert lines[start + 1].split() == ["Q2_K", "0", "MB", "needs", "llama.cpp", "tiny-Q2_K.gguf"]
    assert lines[start + 2].split() == ["*", "Q8_0", "0", "MB", "runs", "on", "our", "kernels", FIRST]
    assert "too large for this machine  tiny-F16.gguf" in lines[start + 3]
    assert lines[start + 4].startswith("* Q8_0, 0 MB: runs on our kernels, takes about 0.50 GiB of the ")
    assert lines[start + 5] == "for another one: edgespec pull hf:org/repo:QUANT"
    assert lines[-1].startswith("hf:org/repo: 0 MB, licence apache-2.0, llama, runs on our kernels, ")
    assert {request.path for request in hub.bodies()} == {f"/cdn/{name}" for name in hub.files if "q8" in name}
    hub.requests = []
    again = edgespec("pull", "hf:org/repo")
    assert "* Q8_0, 0 MB: it is already stored" in again.err
    assert hub.bodies() == []


@pytest.mark.parametrize(("name", "value"), [("HF_HUB_ETAG_TIMEOUT", "10s"), ("HF_HUB_DOWNLOAD_TIMEOUT", "")])
def test_a_time_out_that_is_not_a_number_is_one_error(tmp_path: Path, name: str, value: str) -> None:
    result = run_cli("pull", "hf:org/repo", home=tmp_path, env={"HF_HUB_CACHE": str(tmp_path), name: value})
    assert result.code == 1
    assert "HF_HUB_ETAG_TIMEOUT or HF_HUB_DOWNLOAD_TIMEOUT is not a whole number of seconds" in result.err


@pytest.mark.parametrize("renamed", [False, True])
def test_a_stored_model_stays_where_the_hub_has_another_file_and_the_line_tells_how_to_fetch_that(
    hub: HubServer, tmp_path: Path, renamed: bool
) -> None:
    store = Store(Home(tmp_path / "home"), Network(endpoint=hub.endpoint, cache=tmp_path / "hub"))
    reference = HubReference("org/repo", quant="Q2_K")

    def pulled() -> tuple[str, str]:
        spec, choice = _wanted(reference, store, ProgressPrinter())
        assert choice is not None
        return choice.reason, store.fetch(spec).sha256

    before = hashlib.sha256(b"GGUF").hexdigest()
    assert pulled() == ("you named it", before)
    assert pulled() == ("it is already stored", before)
    del hub.files["tiny-Q2_K.gguf"]
    hub.files["new-Q2_K.gguf" if renamed else "tiny-Q2_K.gguf"] = b"GGUF, repaired"
    hub.revisions["main"] = "f" * 40
    again = "`edgespec models rm hf:org/repo:Q2_K`, then `edgespec pull hf:org/repo:Q2_K`"
    assert pulled() == (f"another file is stored as hf:org/repo:Q2_K; to fetch this one: {again}", before)
    store.remove("hf:org/repo:Q2_K")
    assert pulled() == ("you named it", hashlib.sha256(b"GGUF, repaired").hexdigest())


def test_the_json_lists_every_candidate_and_the_choice(edgespec: Run, hub: HubServer) -> None:
    result = edgespec("pull", "hf:org/repo", "--json")
    (model,) = result.json["models"]
    assert (model["licence"], model["family"], model["native"]) == ("apache-2.0", "llama", True)
    found: list[dict[str, Any]] = model["quantisations"]
    assert [(each["name"], each["native"], each["fits"], each["chosen"]) for each in found] == [
        ("Q2_K", False, True, False),
        ("Q8_0", True, True, True),
        ("F16", True, False, False),
    ]
    assert found[1]["model"] == f"hf:org/repo/{FIRST}"
    assert found[1]["bytes"] == model["bytes"] == sum(len(hub.files[name]) for name in found[1]["files"])
    assert found[1]["reason"].startswith("runs on our kernels")
    named = edgespec("pull", "hf:org/repo/tiny-Q2_K.gguf", "--json").json["models"][0]
    assert named["quantisations"] is None
    assert (named["family"], named["native"]) == (None, False)
    assert "no GGUF header" in named["reason"]


def test_a_hub_repository_can_be_target_and_drafter(edgespec: Run, hub: HubServer, tmp_path: Path) -> None:
    pair = ("--target", "hf:org/repo", "--draft", f"hf:org/repo/{FIRST}")
    first = edgespec("generate", "hi", *pair, "--max-tokens", "3")
    assert first.code == 0, first.err
    said = "hub org/repo: Q8_0, 0 MB: runs on our kernels, takes about 0.50 GiB of the "
    assert first.err.count(said) == 1
    assert "; `edgespec pull hf:org/repo` lists all 3" in first.err
    asked = len(hub.requests)
    chat = edgespec(
        "chat", "hf:org/repo", "--draft", "none", "--max-tokens", "3", "--json", "--offline", stdin="hi\n"
    )
    assert chat.code == 0, chat.err
    assert chat.json["text"]
    assert len(hub.requests) == asked
    listed = {row["name"]: row for row in edgespec("models", "--json").json["models"] if row["on_disk"]}
    assert {len(row["parts"]) for row in listed.values()} == {3}
    assert edgespec("models", "verify", "hf:org/repo").code == 0
    assert "the hub's cache still holds 3 files in " in edgespec("models", "rm", "hf:org/repo").err


def test_a_repository_without_a_model_that_fits_is_an_error(edgespec: Run, hub: HubServer) -> None:
    hub.sizes = dict.fromkeys(hub.files, 10**15)
    result = edgespec("pull", "hf:org/repo")
    result.failed_well("no quantisation of org/repo fits")
    assert "edgespec pull hf:org/repo/tiny-F16.gguf" in result.hint
    assert hub.bodies() == []
    hub.files = {"README.md": b""}
    edgespec("pull", "hf:org/repo").failed_well("org/repo holds no .gguf model")

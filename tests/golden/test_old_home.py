"""A home as edgespec 0.1.0 wrote it: everything in it is read, or replaced with one sentence, and nothing is lost."""

from __future__ import annotations

import json
import shutil
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.calibration.kinds import ACCEPTANCE, CONTENTION, PLAIN, TIMES, WIDTHS, Kind
from edgespec.calibration.measurement_store import Measurements, load_bandwidth
from edgespec.errors import RuntimeUnavailableError
from edgespec.export.trim.token_counts import CountedAnswersKey, load_answers
from edgespec.files.home import Home
from edgespec.hardware.machine import Machine
from edgespec.interfaces.model import ModelFacts
from edgespec.runtimes.native.library import load as load_native
from edgespec.store.locate import Locator
from edgespec.store.store import Store
from tests.support.command_line import InProcess, command, environment, succeeded
from tests.support.exporting import is_whole
from tests.support.planning import model_facts
from tests.support.terminal import EDITING, Terminal
from tests.support.tiny_models import answer

OLD = Path(__file__).parent / "home-0.1.0"
TARGET, DRAFTER = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"
MEASUREMENTS = sorted(path.name for path in (OLD / "home" / "measurements").iterdir())
KINDS = ("acceptance", "contention", "plain", "times", "widths")


@pytest.fixture
def old(tmp_path: Path) -> Home:
    """A copy to work with."""
    shutil.copytree(OLD / "home", tmp_path / "home")
    return Home(tmp_path / "home")


@pytest.fixture
def exports(tmp_path: Path) -> Path:
    shutil.copytree(OLD / "exports" / "trimmed-gguf", tmp_path / "exports" / "trimmed-gguf")
    with zipfile.ZipFile(OLD / "exports" / "onnx.zip") as packed:
        packed.extractall(tmp_path / "exports")
    return tmp_path / "exports"


@pytest.fixture
def here(old: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> InProcess:
    return InProcess(old.root, monkeypatch, capsys)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def without_time(files: dict[str, bytes]) -> dict[str, object]:
    """Manifests hold the file's time, which a copy changes."""
    parsed = {name: json.loads(data) for name, data in files.items() if name.endswith("/manifest.json")}
    return {**files, **{name: {**each, "mtime_ns": None} for name, each in parsed.items()}}


def is_sidecar(name: str) -> bool:
    return name.endswith(".tiles")


# ------------------------------------------------------------------------------------------------ the home itself


@pytest.mark.parametrize(
    "arguments",
    [("models",), ("profiles",), ("profiles", "show", "mine"), ("plan", "--simulate", "board-4gb"), ("doctor",)],
)
def test_read_only_commands_do_not_change_an_old_home(old: Home, here: InProcess, arguments: tuple[str, ...]) -> None:
    before = contents(old.root)
    result = succeeded(here(*arguments))
    assert contents(old.root) == before
    told = result.err.splitlines()
    if arguments == ("models",):
        (line,) = told
        assert line.endswith("its file /nowhere/hub/model.gguf is gone")
    else:
        assert told == []


def test_an_answer_keeps_everything_and_numbers_the_home(old: Home, here: InProcess) -> None:
    before = contents(old.root)
    options = ("--target", TARGET, "--max-tokens", "8", "--offline", "--json")
    found = succeeded(here("generate", "the water", *options, "--depth", "2")).json
    assert found["plan"]["target"]["model"] == TARGET
    assert found["plan"]["drafter"]["model"] == DRAFTER
    after = contents(old.root)
    assert after.pop("format") == b"1\n"
    for name, data in without_time(before).items():
        assert is_sidecar(name) or without_time(after)[name] == data, name
    assert len(found["token_ids"]) == 8
    alone = succeeded(here("generate", "the water", *options, "--plain")).json
    assert alone["token_ids"] == found["token_ids"]


# -------------------------------------------------------------------------------------------------------- profiles


def test_profiles_of_an_old_home_are_read(old: Home, here: InProcess) -> None:
    written = tomllib.loads((old.profiles / "mine.toml").read_text(encoding="utf-8"))
    assert written.pop("inherits") == "laptop"
    assert len(written) == 12
    shown = succeeded(here("profiles", "show", "mine", "--json")).json["profile"]
    origin = str(old.profiles / "mine.toml")
    assert {key: shown[key] for key in written} == {
        key: {"value": value, "origin": origin} for key, value in written.items()
    }
    assert shown["max_memory_fraction"] == {"value": 0.5, "origin": str(old.root / "config.toml")}
    rows = {row["name"]: row for row in succeeded(here("profiles", "--json")).json["profiles"]}
    assert rows["mine"] == {"name": "mine", "description": "My own", "origin": origin, "problem": None}


# ---------------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("name", [TARGET, DRAFTER])
def test_models_of_an_old_home_are_read(old: Home, here: InProcess, name: str) -> None:
    before = contents(old.root)
    manifest = json.loads(before[f"models/{name}/manifest.json"])
    verified = succeeded(here("models", "verify", name, "--json")).json["verified"]
    assert {key: verified[key] for key in ("name", "kind", "bytes", "sha256", "source", "revision", "licence")} == {
        key: manifest[key] for key in ("name", "kind", "bytes", "sha256", "source", "revision", "licence")
    }
    assert verified["path"] == str(old.models / name / "model.gguf")
    assert without_time(contents(old.root)) == without_time(before)


def test_a_model_whose_file_left_the_hubs_cache_is_not_here(here: InProcess) -> None:
    result = here("generate", "hi", "--target", "hf:org/repo/model.gguf", "--offline")
    result.failed_well("hf:org/repo/model.gguf is not on this machine", "edgespec pull hf:org/repo/model.gguf")


@pytest.mark.parametrize("name", [TARGET, DRAFTER])
def test_a_sidecar_is_read_or_replaced(old: Home, name: str) -> None:
    try:
        load_native()
    except RuntimeUnavailableError as error:
        pytest.skip(error.message)
    path = old.models / name / "native.tiles"
    recorded = path.read_bytes()
    answers, states = [], []
    for sidecar in (True, True, False):
        with (
            edgespec.Engine.load(
                name, draft="none", runtime="native", threads=1, native_sidecar=sidecar, store_home=old
            ) as engine,
            engine.session() as session,
        ):
            assert not any("ignored" in reason for reason in engine.plan.reasons)
            answers.append(answer(session.generate("the water", max_tokens=16)).token_ids)
        states.append((path.stat().st_mtime_ns, path.read_bytes()))
    assert answers[0] == answers[1] == answers[2]
    assert states[0] == states[1] == states[2], "what is there after the first load is used by the second"
    assert states[0][1] == recorded or states[0][1].startswith(b"edgespec tiles ")


# ---------------------------------------------------------------------------------------------------- measurements


def facts_of(key: dict[str, Any]) -> ModelFacts:
    """The parts of a key."""
    return model_facts(
        name=key["model_name"],
        sha256=key["model_sha256"],
        weight_bytes=key["model_bytes"],
        runtime=key.get("runtime", "llama"),
        build=key.get("build", ""),
        device=key.get("device", "cpu"),
        threads=key.get("threads", 1),
        kv_type=key.get("kv_type", "f16"),
        settings=key.get("settings", {}),
    )


KINDS: dict[str, Kind[Any, Any]] = {kind.name: kind for kind in (WIDTHS, TIMES, PLAIN, CONTENTION, ACCEPTANCE)}


def load(store: Measurements, name: str, key: dict[str, Any]) -> object:
    """What the store says, as it stands in the file."""
    kind, sides = KINDS[name], [key.get("target", key), *([key["drafter"]] if name == "contention" else [])]
    found = store.load(kind, *map(facts_of, sides), *([key["source"]] if name == "acceptance" else []))
    return None if found is None else kind.stored(found)


def store_of(home: Home, key: dict[str, Any]) -> Measurements:
    """The store on the machine that was measured."""
    own = key.get("target", key)
    return Measurements(home.measurements, own.get("machine", "any"), own.get("power_source", "mains"))


def machine() -> tuple[Machine, str]:
    """The machine that was measured, and its fingerprint of then."""
    facts = json.loads((OLD / "machine.json").read_text(encoding="utf-8"))
    fingerprint = facts.pop("fingerprint")
    return Machine(**{**facts, "isa": tuple(facts["isa"])}), fingerprint


@pytest.mark.parametrize("kind", ["times", "plain", "contention"])
def test_kernel_times_of_an_old_home_are_used(old: Home, kind: str) -> None:
    """And what else was timed does not: another build of llama.cpp may be another program."""
    served = {True: 0, False: 0}
    for name in MEASUREMENTS:
        if not name.startswith(kind):
            continue
        stored = json.loads((OLD / "home" / "measurements" / name).read_text(encoding="utf-8"))
        key, store = stored["key"], store_of(old, stored["key"])
        sides = [key["target"], key["drafter"]] if kind == "contention" else [key]
        ours = sides[0]["runtime"] == "native"
        today = [replace(facts_of(side), build="99+0123456789ab", bit_equal_by_construction=ours) for side in sides]
        assert (store.load(KINDS[kind], *today) is not None) == ours
        assert store.notes == []
        served[ours] += 1
    assert all(served.values())


def test_a_kernel_probe_of_an_old_home_is_made_again(old: Home) -> None:
    """Each build of the kernels checks itself."""
    for name in MEASUREMENTS:
        stored = json.loads((OLD / "home" / "measurements" / name).read_text(encoding="utf-8"))
        if name.startswith("widths") and stored["key"]["runtime"] == "native":
            facts = replace(facts_of(stored["key"]), build="99+0123456789ab", bit_equal_by_construction=True)
            store = store_of(old, stored["key"])
            assert store.load(WIDTHS, facts) is None
            assert store.notes == []
            return
    raise AssertionError("there is none")


def test_there_is_a_measurement_of_every_kind() -> None:
    assert {name.partition("-")[0] for name in MEASUREMENTS} == {*KINDS, "machine"}


@pytest.mark.parametrize("name", [name for name in MEASUREMENTS if not name.startswith("machine-")])
def test_measurements_of_an_old_home_are_read(old: Home, name: str) -> None:
    kind = name.partition("-")[0]
    stored = json.loads((old.measurements / name).read_text(encoding="utf-8"))
    before = contents(old.root)
    store = store_of(old, stored["key"])
    expected = stored[kind]
    if kind == "acceptance":  # each rate has its own tokens now
        del expected["tokens"]
        for rates, tokens in (("by_position", "position_tokens"), ("by_confidence", "confidence_tokens")):
            expected[tokens] = [30.0] * len(expected[rates])
    assert load(store, kind, stored["key"]) == expected
    assert store.notes == []
    assert contents(old.root) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_measurement_of_another_version_is_ignored_with_one_sentence(old: Home, kind: str) -> None:
    path = next(old.measurements.glob(f"{kind}-*.json"))
    stored = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**stored, "schema_version": stored["schema_version"] - 1}), encoding="utf-8")
    store = store_of(old, stored["key"])
    for _ in range(2):
        assert load(store, kind, stored["key"]) is None
    (note,) = store.notes
    assert note == f"the measurement {path.name} is ignored and made again: another version of edgespec wrote it"


def test_a_machine_keeps_its_fingerprint() -> None:
    described, fingerprint = machine()
    assert described.fingerprint == fingerprint
    assert (OLD / "home" / "measurements" / f"machine-{fingerprint}.json").is_file()


def test_the_bandwidth_of_an_old_home_is_read(old: Home) -> None:
    described, fingerprint = machine()
    stored = json.loads((old.measurements / f"machine-{fingerprint}.json").read_text(encoding="utf-8"))
    measured = load_bandwidth(old.measurements, described)
    assert measured is not None
    assert measured.as_json() == stored["bandwidth"]


# --------------------------------------------------------------------------------- exports, and what they counted


def test_counted_answers_of_an_old_home_are_read(old: Home) -> None:
    (path,) = old.counted_answers.iterdir()
    stored = json.loads(path.read_text(encoding="utf-8"))
    key = CountedAnswersKey(
        target=stored["target"],
        prompts_sha256=stored["prompts_sha256"],
        prompt_ids=tuple(each["prompt"] for each in stored["answers"]),
        tokens_per_prompt=stored["tokens_per_prompt"],
    )
    assert key.file_name == path.name
    found = load_answers(old.counted_answers, key)
    assert [
        {"prompt": each.prompt_id, "token_ids": list(each.token_ids), "text": each.text} for each in found
    ] == stored["answers"]
    located = Locator(store=Store(old)).locate(TARGET)
    assert located.identity == stored["target"]


@pytest.mark.parametrize("name", ["trimmed-gguf", "onnx"])
def test_exports_of_an_old_version_are_read(old: Home, here: InProcess, exports: Path, name: str) -> None:
    if name == "onnx":
        pytest.importorskip("onnxruntime")
    folder = exports / name
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert is_whole(folder)
    locator = Locator(store=Store(old))
    located = locator.locate(str(folder))
    assert located.source_sha256 == manifest["source"]["sha256"]
    kept = None if located.kept_ids is None else len(located.kept_ids)
    assert kept == (290 if name == "trimmed-gguf" else None)
    source = locator.find_source(located)
    assert source is not None
    assert source.name == DRAFTER
    options = ("--target", TARGET, "--draft", folder, "--max-tokens", "12", "--offline", "--json")
    found = succeeded(here("generate", "the water", *options, "--depth", "2")).json
    assert found["plan"]["drafter"]["model"] == name
    assert succeeded(here("generate", "the water", *options, "--plain")).json["token_ids"] == found["token_ids"]
    assert is_whole(folder)


# --------------------------------------------------------------------------------------------------------- history


def test_the_chat_history_of_an_old_home_is_read(old: Home) -> None:
    lines = old.history.read_text(encoding="utf-8").splitlines()
    options = ("--target", TARGET, "--draft", "none", "--depth", "0", "--max-tokens", "2", "--offline")
    chat = Terminal(command("chat", *options), environment(old.root), term="xterm-256color")
    try:
        chat.wait_for(r"is ready.*\n")
        chat.wait_for(EDITING)
        chat.type(b"\x10")  # the line before
        chat.wait_for(lines[-1])
        chat.type(b"\x10")
        chat.wait_for(lines[-2])
        chat.type("\r")
        chat.wait_for(r"2 tokens|tok/s")
        chat.wait_for(EDITING)
        chat.type("/exit\r")
        assert chat.exit_code() == 0
    finally:
        chat.close()
    assert old.history.read_text(encoding="utf-8").splitlines()[: len(lines)] == lines

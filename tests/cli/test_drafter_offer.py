"""The question whether a drafter is to be fetched, in a real terminal, against a hub on loopback."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec import DrafterOffer
from edgespec.cli.chat import drafter_offer
from edgespec.files.home import Home
from tests.support.command_line import environment, run_here
from tests.support.hub_server import HubServer, running
from tests.support.other_programs import LIBRARY, User
from tests.support.tiny_models import TinyModels

if sys.platform == "win32":
    pytest.skip("terminals are a matter of POSIX", allow_module_level=True)

from tests.support.terminal import Terminal

CTRL_C, CTRL_D = "\x03", "\x04"
QUESTION = r"Fetch\s+it\?\s+\[Y/n\] "
ABOUT = r"Tiny 1M \(0\.0 GB, MIT\) would fit as its drafter\."

FAMILIES = """
schema_version = 1
[[families]]
name = "Tiny"
architectures = ["llama"]
pre = ["default"]
vocabulary = [1, 100000]
called = 'tiny'
[[families.drafters]]
name = "Tiny 1M"
repo = "org/repo"
filename = "small.gguf"
licence = "MIT"
bytes = 1000
draft_bytes = 100
cache_bytes = 1
"""

# The program, in whose families there are tiny models.
PROGRAM = """
import sys
from pathlib import Path
from edgespec.store import families
found = families.parse_families(Path(sys.argv.pop(1)).read_text())
families.families = lambda: found
from edgespec.cli import main
sys.exit(main())
"""


@pytest.fixture
def hub(tiny: TinyModels) -> Iterator[HubServer]:
    with running(HubServer(files={"small.gguf": tiny.target.read_bytes()})) as hub:
        yield hub


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path / "user")


@pytest.fixture
def env(hub: HubServer, user: User, tmp_path: Path) -> dict[str, str]:
    places = {**user.environment, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hub")}
    del places["HF_HUB_CACHE"]
    return environment(tmp_path / "home", {**places, "HF_HUB_DISABLE_XET": "1", "EDGESPEC_RUNTIME": "native"})


@pytest.fixture
def arguments(tmp_path: Path, tiny: TinyModels) -> list[str]:
    table = tmp_path / "families.toml"
    table.write_text(FAMILIES)
    return [sys.executable, "-c", PROGRAM, str(table), "chat", str(tiny.slow), "--max-tokens", "3"]


@pytest.fixture
def chat(arguments: list[str], env: dict[str, str]) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_chat(*more: str, **variables: str) -> Terminal:
        opened.append(Terminal([*arguments, *more], {**env, **variables}))
        return opened[-1]

    yield open_chat
    for terminal in opened:
        terminal.close()


def leave(terminal: Terminal) -> None:
    terminal.wait_for(r"\n> ")
    terminal.type("/exit\r")
    assert terminal.exit_code() == 0


def stored(env: dict[str, str]) -> list[str]:
    folder = Path(env["EDGESPEC_HOME"]) / "models"
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


@pytest.mark.parametrize("typed", ["\r", "y\r", "maybe\rYES\r"])
def test_yes_downloads_the_offered_drafter_and_uses_it(
    chat: Callable[..., Terminal], env: dict[str, str], typed: str
) -> None:
    terminal = chat()
    terminal.wait_for(ABOUT)
    terminal.wait_for(QUESTION)
    terminal.type(typed)
    terminal.wait_for(r"is ready")
    terminal.wait_for(r"\n> ")
    terminal.type("/plan\r")
    terminal.wait_for(r"drafting for slow|Drafts|drafter|guess")
    leave(terminal)
    (folder,) = stored(env)
    manifest = json.loads((Path(env["EDGESPEC_HOME"]) / "models" / folder / "manifest.json").read_text())
    assert (manifest["name"], manifest["licence"]) == ("hf:org/repo/small.gguf", "MIT")
    again = chat()
    again.wait_for(r"is ready")
    leave(again)
    assert "Fetch it?" not in again.screen
    shown = run_here("plan", "--json", *_target(terminal), home=Path(env["EDGESPEC_HOME"]), env=env).json
    assert shown["plan"]["drafter"]["model"] == "hf:org/repo/small.gguf"
    assert shown["drafter_offer"] is None


def _target(terminal: Terminal) -> tuple[str, str]:
    target = next(each for each in terminal.process.args if str(each).endswith("slow.gguf"))  # type: ignore[union-attr]
    return "--target", str(target)


@pytest.mark.parametrize("typed", ["n\r", "No\r", CTRL_D, CTRL_C])
def test_no_is_remembered_and_the_chat_runs_without_a_drafter(
    chat: Callable[..., Terminal], env: dict[str, str], hub: HubServer, typed: str
) -> None:
    terminal = chat()
    terminal.wait_for(QUESTION)
    terminal.type(typed)
    terminal.wait_for(r"`edgespec pull hf:org/repo/small.gguf` downloads it later")
    terminal.wait_for(r"is ready")
    terminal.wait_for(r"\n> ")
    terminal.type("hello\r")
    terminal.wait_for(r"tok/s|tokens")
    leave(terminal)
    again = chat()
    again.wait_for(r"is ready")
    leave(again)
    assert "Fetch it?" not in again.screen
    assert hub.requests == []
    assert stored(env) == []
    kept = json.loads((Path(env["EDGESPEC_HOME"]) / "declined-offers.json").read_text())
    assert len(kept["targets"]) == 1


def test_a_failing_hub_does_not_stop_the_chat(
    chat: Callable[..., Terminal], hub: HubServer, env: dict[str, str]
) -> None:
    hub.refuse_always = (404, {"X-Error-Code": "RepoNotFound"})
    for _ in range(2):  # nothing was declined: it is asked again
        terminal = chat()
        terminal.wait_for(QUESTION)
        terminal.type("\r")
        terminal.wait_for(r"edgespec: ")
        terminal.wait_for(r"the\s+chat\s+continues\s+without\s+this\s+drafter")
        terminal.wait_for(r"is ready")
        leave(terminal)
    assert stored(env) == []


def test_a_downloaded_drafter_with_another_vocabulary_is_not_offered_again(
    chat: Callable[..., Terminal], hub: HubServer, tiny: TinyModels
) -> None:
    hub.files["small.gguf"] = tiny.stranger.read_bytes()
    terminal = chat()
    terminal.wait_for(QUESTION)
    terminal.type("\r")
    terminal.wait_for(r"is ready")
    leave(terminal)
    again = chat()
    again.wait_for(r"is ready")
    again.wait_for(r"\n> ")
    again.type("/plan\r")
    again.wait_for(r"no\s+drafter\s+is\s+known")
    leave(again)
    assert "Fetch it?" not in again.screen


def test_ctrl_c_stops_the_drafters_download_but_not_the_chat(
    chat: Callable[..., Terminal], hub: HubServer, env: dict[str, str]
) -> None:
    hub.chunk_delay_s = 1.0
    terminal = chat()
    terminal.wait_for(QUESTION)
    terminal.type("\r")
    terminal.wait_for(r"downloading")
    terminal.type(CTRL_C)
    terminal.wait_for(r"stopped; `edgespec pull hf:org/repo/small.gguf` downloads the rest")
    terminal.wait_for(r"is ready")
    leave(terminal)
    assert not (Path(env["EDGESPEC_HOME"]) / "declined-offers.json").exists()


def test_sigterm_at_the_question_ends_the_program(chat: Callable[..., Terminal]) -> None:
    terminal = chat()
    terminal.wait_for(QUESTION)
    os.kill(terminal.process.pid, signal.SIGTERM)
    assert terminal.exit_code() == 143


@pytest.mark.parametrize("more", [("--offline",), ("--json",), ("--draft", "none"), ("--depth", "0")])
def test_no_drafter_is_offered_offline_with_json_or_without_guesses(
    chat: Callable[..., Terminal], hub: HubServer, more: tuple[str, ...]
) -> None:
    terminal = chat(*more)
    terminal.wait_for(r"> ")
    terminal.type("/exit\r")
    assert terminal.exit_code() == 0
    assert "Fetch" not in terminal.screen
    assert hub.requests == []


def test_keys_typed_before_the_offer_are_a_prompt_and_not_its_answer(
    chat: Callable[..., Terminal], hub: HubServer
) -> None:
    terminal = chat()
    terminal.type("hello\r")
    terminal.wait_for(r"is ready")
    terminal.wait_for(r"tok/s|tokens")
    leave(terminal)
    assert "Fetch" not in terminal.screen
    assert hub.requests == []


def test_no_drafter_is_offered_in_a_pipe(arguments: list[str], env: dict[str, str], hub: HubServer) -> None:
    import subprocess

    done = subprocess.run(arguments, input="hello\n", capture_output=True, env=env, text=True, check=True)
    assert "Fetch" not in done.stderr + done.stdout
    assert hub.requests == []


@pytest.mark.parametrize("columns", [40, 80])
def test_the_offer_wraps_to_the_terminal(chat: Callable[..., Terminal], columns: int) -> None:
    terminal = chat(COLUMNS=str(columns))
    terminal.wait_for(QUESTION)
    shown = terminal.screen.split("\r\n")
    assert max(map(len, shown)) <= columns, shown
    terminal.type("n\r")
    terminal.wait_for(r"is ready")
    leave(terminal)


# ------------------------------------------------------------------------------------- what is remembered


def test_the_question_says_that_a_drafter_has_another_vocabulary() -> None:
    own = offer_for("target")
    assert drafter_offer._about(own).endswith("would fit as its drafter.")
    said = drafter_offer._about(replace(own, translated=True))
    assert said.endswith("would fit as its drafter: it has another vocabulary, and guesses English best.")


def offer_for(target: str) -> DrafterOffer:
    return DrafterOffer(name="x", model="hf:a/b", bytes=1, licence="MIT", expected_speedup=1.5, target=target)


def test_only_the_latest_declined_targets_are_remembered(home: Home) -> None:
    assert drafter_offer._declined(home) == []
    for number in range(drafter_offer._MOST_DECLINED + 3):
        drafter_offer._decline(offer_for(f"target {number}"), home)
    kept = drafter_offer._declined(home)
    assert (kept[0], len(kept)) == ("target 3", drafter_offer._MOST_DECLINED)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"targets": 3}', '{"targets": [1, null, {}]}', "[" * 100_000, " " * (2 << 20), "\udcff"]
)
def test_a_damaged_list_of_declined_targets_is_replaced(home: Home, text: str) -> None:
    home.create(home.root)
    home.declined_offers.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert drafter_offer._declined(home) == []
    drafter_offer._decline(offer_for("target"), home)
    assert drafter_offer._declined(home) == ["target"]


def test_the_offer_repeats_if_the_home_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    drafter_offer._decline(offer_for("target"), Home(tmp_path / "file"))
    assert drafter_offer._declined(Home(tmp_path / "file")) == []


# ------------------------------------------------------------------------------------- plan and models


def test_plan_lists_considered_drafters_and_models_shows_the_drafter(
    user: User, env: dict[str, str], tiny: TinyModels
) -> None:
    user.to_ollama(f"{LIBRARY}/tiny/1m", tiny.target.read_bytes())
    target = user.to_lm_studio("x/slow.gguf", tiny.slow.read_bytes())
    stranger = user.to_lm_studio("x/stranger.gguf", tiny.stranger.read_bytes())
    home = Path(env["EDGESPEC_HOME"])
    shown = run_here("plan", "--target", target, "--explain", home=home, env=env)
    assert shown.code == 0, shown.err
    assert f"not {stranger} (LM Studio): another vocabulary: " in shown.out
    found = run_here("plan", "--target", target, "--json", home=home, env=env).json
    assert [one["reason_code"] for one in found["considered_drafters"]] == ["other_vocabulary"]
    rows = {row["name"]: row for row in run_here("models", "--json", home=home, env=env).json["models"]}
    assert rows[str(target)]["drafter"] == "ollama:tiny:1m"
    assert rows[str(stranger)]["drafter"] is None
    assert rows["qwen2.5-coder-1.5b"]["drafter"] == "qwen2.5-coder-0.5b"
    listed = run_here("models", home=home, env=env).out
    assert "LM Studio, llama, runs on our kernels, drafter ollama:tiny:1m" in listed


def test_pull_suggests_models_of_the_hub(env: dict[str, str]) -> None:
    result = run_here("pull", "llama-3.2-3b", home=Path(env["EDGESPEC_HOME"]), env=env)
    result.failed_well("did you mean hf:bartowski/Llama-3.2-3B-Instruct-GGUF?")

"""``edgespec serve`` as a process: its port, its signals, its messages."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from edgespec.cli.options import resolve_profile
from edgespec.cli.serve import _for_owners, _load, _names, page_address, texts_of
from edgespec.cli.terminal.log_writer import LogWriter
from edgespec.cli.terminal.output import ProgressPrinter, State
from edgespec.engine.engine import Engine
from edgespec.engine.pair.load import Limits
from edgespec.errors import DownloadError
from edgespec.files.home import Home
from edgespec.files.installation import install_command
from edgespec.files.progress import Job
from edgespec.server.faces.ollama_about import tagged
from edgespec.server.schema import Request
from edgespec.store.references import ModelSpec
from edgespec.store.store import Store, StoredModel
from tests.support.command_line import InProcess, command, environment
from tests.support.http_server import WAIT_S, wait_until
from tests.support.tiny_models import TinyModels, put_into_store

TARGET, DRAFTER = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"  # the catalogue's default pair
SERVING = re.compile(r"serving (.+) on http://[\d.]+:(\d+)/v1")


class Program:
    """A server's process: its address, and what it wrote on stderr."""

    def __init__(self, home: Path, log: Path, *arguments: str | Path, env: dict[str, str] | None = None) -> None:
        self._log = log
        with log.open("wb") as err:
            self.process = subprocess.Popen(
                command("serve", "--port", "0", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
                env=environment(home, env),
            )

    def wait(self) -> None:
        """Wait until it serves or has ended."""
        wait_until(lambda: SERVING.search(self.err) is not None or self.process.poll() is not None)

    @property
    def err(self) -> str:
        return self._log.read_text(encoding="utf-8")

    @property
    def url(self) -> str:
        found = SERVING.search(self.err)
        assert found is not None, self.err
        return f"http://127.0.0.1:{found[2]}"

    def get(self, path: str, **settings: object) -> httpx.Response:
        return httpx.get(self.url + path, timeout=WAIT_S, trust_env=False, **settings)  # type: ignore[arg-type]

    def chat(self, **body: object) -> httpx.Response:
        whole = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, **body}
        return httpx.post(self.url + "/v1/chat/completions", json=whole, timeout=WAIT_S, trust_env=False)


@contextmanager
def serving(
    tiny: TinyModels, log: Path, *arguments: str | Path, env: dict[str, str] | None = None
) -> Iterator[Program]:
    program = Program(tiny.home.root, log, *arguments, env=env)
    try:
        program.wait()
        yield program
    finally:
        program.process.kill()
        program.process.wait()


@pytest.mark.slow
def test_a_server_answers_logs_and_ends_with_its_running_answers(tiny: TinyModels, tmp_path: Path) -> None:
    arguments = (tiny.slow, "--draft", "none", "--context", "4096", "--depth", "0")
    with serving(tiny, tmp_path / "log", *arguments) as program:
        assert f"\nin a browser: {program.url}/\n" in program.err
        reply = program.chat().json()
        assert reply["model"] == "slow"
        assert program.chat(model=str(tiny.slow)).status_code == 200
        assert program.chat(model="another").status_code == 404
        wait_until(lambda: "POST /v1/chat/completions 404" in program.err)
        time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}"  # with the date: stderr is a file
        line = rf"^{time} 127\.0\.0\.1 POST /v1/chat/completions 200 .* 8 tokens, [\d.]+ tok/s"
        assert re.search(line, program.err, re.MULTILINE)
        assert reply["choices"][0]["message"]["content"] not in program.err
        assert "slow is loaded" in program.err
        with httpx.stream(
            "POST",
            program.url + "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "hello"}], "max_tokens": 200, "stream": True},
            timeout=WAIT_S,
            trust_env=False,
        ) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            program.process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert program.process.wait(WAIT_S) == 0
        assert "finishing the running answers" in program.err
        assert "Traceback" not in program.err


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_server_and_the_log_has_text_if_asked(tiny: TinyModels, tmp_path: Path) -> None:
    arguments = (tiny.slow, "--draft", "none", "--context", "8192", "--depth", "0", "--log-text")
    with serving(tiny, tmp_path / "log", *arguments) as program:
        program.chat(messages=[{"role": "user", "content": "a \x1b[2J word"}])
        wait_until(lambda: "\n> a \\x1b[2J word\n< " in program.err)
        with socket.create_connection(("127.0.0.1", int(program.url.rpartition(":")[2]))) as own:
            content = b'{"messages": [{"role": "user", "content": "hello"}], "stream": true}'
            own.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
            own.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(content), content))
            assert own.recv(100)
            program.process.send_signal(signal.SIGINT)
            wait_until(lambda: "finishing the running answers" in program.err)
            program.process.send_signal(signal.SIGINT)
            assert program.process.wait(WAIT_S) == 130
        cut = (
            r"completions 200 [\d.]+ s · (\d+) of \1 prompt tokens read · \d+ tokens · the server is shutting down\n"
        )
        assert re.search(cut, program.err)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [1, 2])
def test_answers_are_kept_for_guesses_only_if_all_are_of_one_owner(
    tiny: TinyModels, tmp_path: Path, keys: int
) -> None:
    profile, home = tmp_path / "keeping.toml", tmp_path / "home"
    profile.write_text("history = true\n", encoding="utf-8")
    names = [f"key-number-{number}" for number in range(keys)]
    options = [each for name in (*names, names[0]) for each in ("--api-key", name)]
    env = {"EDGESPEC_HOME": str(home)}
    with serving(
        tiny, tmp_path / "log", tiny.target, "--draft", "none", "--profile", profile, *options, env=env
    ) as own:
        reply = httpx.post(
            own.url + "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "hello"}], "max_tokens": 50},
            headers={"authorization": f"Bearer {names[0]}"},
            timeout=WAIT_S,
            trust_env=False,
        )
        assert reply.status_code == 200, reply.text
        own.process.send_signal(signal.SIGTERM)
        assert own.process.wait(WAIT_S) == 0
    assert any(home.glob("answers/*.text")) == (keys == 1)


@pytest.mark.slow
def test_a_server_that_is_ended_while_it_loads_has_not_failed(tiny: TinyModels, tmp_path: Path) -> None:
    with serving(tiny, tmp_path / "log", tiny.slow, "--draft", "none") as program:
        program.process.send_signal(signal.SIGTERM)
        assert program.process.wait(WAIT_S) == 0, program.err
        assert "Traceback" not in program.err


@pytest.mark.slow
def test_a_model_that_does_not_load_ends_the_server(tiny: TinyModels, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny.target.read_bytes()[:2000])
    with serving(tiny, tmp_path / "log", broken) as program:
        assert program.process.wait(WAIT_S) == 1
        assert "Traceback" not in program.err
        assert "broken.gguf" in program.err.splitlines()[-1] + program.err.splitlines()[-2]


class Unwritable(io.StringIO):
    """A stderr whose reader is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no disk that is always full")
def test_a_server_whose_stderr_is_on_a_full_disk_serves(tiny: TinyModels) -> None:
    with socket.create_server(("127.0.0.1", 0)) as own:
        port = own.getsockname()[1]
    options = ("--port", str(port), "--draft", "none", tiny.target)
    with Path("/dev/full").open("wb") as full:
        process = subprocess.Popen(command("serve", *options), stderr=full, env=environment(tiny.home.root))
    try:
        health = f"http://127.0.0.1:{port}/health"
        wait_until(lambda: process.poll() is not None or answers(health))
        process.terminate()
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()


def answers(address: str) -> bool:
    try:
        return httpx.get(address, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def test_a_model_loads_while_stderr_is_closed(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    log, lines = LogWriter(), list[str]()
    monkeypatch.setattr(log, "write", lines.append)
    monkeypatch.setattr(sys, "stderr", Unwritable())
    profile = resolve_profile(None, target=str(tiny.target), draft="none", context=128)
    with _load(profile, State(), threading.Event(), threading.Event(), Limits(), log):
        assert lines[0].startswith("loading")
        assert lines[-1] == "target is loaded"


def test_a_model_is_freed_if_the_end_of_its_bar_fails(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    profile, closed = resolve_profile(None, target=str(tiny.target), draft="none", context=128), list[Engine]()
    with monkeypatch.context() as changed:
        changed.setattr(Engine, "close", lambda engine: closed.append(engine))
        changed.setattr(ProgressPrinter, "__exit__", lambda *_raised: Unwritable().write("the end"))
        with pytest.raises(BrokenPipeError):
            _load(profile, State(less=True), threading.Event(), threading.Event(), Limits(), LogWriter())
    (engine,) = closed
    engine.close()


def test_only_the_first_load_may_fetch(tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that comes back after it was freed is loaded from what is on this machine."""
    place, fetched, loaded = Home(tmp_path / "home"), list[str](), threading.Event()

    def fetch(_store: Store, spec: ModelSpec, _job: Job) -> StoredModel:
        fetched.append(spec.name)
        raise DownloadError(spec.name)

    monkeypatch.setenv("EDGESPEC_HOME", str(place.root))
    monkeypatch.setattr(Store, "fetch", fetch)
    put_into_store(place, TARGET, tiny.target.read_bytes())
    drafter = put_into_store(place, DRAFTER, tiny.drafter.read_bytes())
    profile = resolve_profile(None, target=TARGET, context=128)
    load = partial(_load, profile, State(), threading.Event(), loaded, Limits(), LogWriter())
    with load() as engine:
        assert engine.plan.drafter_off is None
    shutil.rmtree(drafter.parent)
    with load() as engine:
        assert engine.plan.drafter_off is not None
        assert engine.ask("hello", max_tokens=3)
    assert fetched == []
    loaded.clear()
    with load():
        assert fetched == [DRAFTER]


@pytest.mark.slow
def test_a_key_from_the_environment_is_needed_and_an_alias_is_the_models_name(
    tiny: TinyModels, tmp_path: Path
) -> None:
    env = {"EDGESPEC_API_KEY": "first-long-key second-long-key"}
    options = ("--draft", "none", "--host", "0.0.0.0", "--alias", "coder", "--alias", "writer")
    with serving(tiny, tmp_path / "log", tiny.target, *options, env=env) as program:
        address = program.url + "/v1/models"
        assert httpx.get(address, trust_env=False).status_code == 401
        for key in env["EDGESPEC_API_KEY"].split():
            found = httpx.get(address, headers={"Authorization": f"Bearer {key}"}, trust_env=False)
            assert [model["id"] for model in found.json()["data"]] == ["coder"]
            for name, status in (("Coder", 200), ("writer", 200), ("target", 200), ("another", 404)):
                headers = {"Authorization": f"Bearer {key}"}
                assert httpx.get(f"{address}/{name}", headers=headers, trust_env=False).status_code == status


@pytest.mark.slow
def test_models_of_the_store_are_served_by_name(tiny: TinyModels, tmp_path: Path) -> None:
    place, names = Home(tmp_path / "home"), ["gemma3-270m", "smollm2-135m"]
    for name, path in zip(names, (tiny.target, tiny.ending), strict=True):
        put_into_store(place, name, path.read_bytes())
    env = {"EDGESPEC_HOME": str(place.root)}
    with serving(tiny, tmp_path / "log", "--models", "all", "--draft", "none", env=env) as program:
        assert "serving gemma3-270m and smollm2-135m on http://" in program.err
        assert [each["id"] for each in program.get("/v1/models").json()["data"]] == names
        for name in names:
            assert program.chat(model=name).json().get("model") == name
        assert program.chat(model=str(tiny.target)).status_code == 404


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--models", "none-such"), ("none-such is not in the store", "edgespec pull none-such")),
        (("--models", "/etc/passwd"), ("is not in the store",)),
        (("--models", "all"), ("no model is named", "edgespec pull")),
        (("--models", " , "), ("no model is named",)),
        (("--models", "all", "--alias", "coder"), ("no alias", "MODEL --alias NAME")),
        (("--models", "one", "two"), ("named twice", "--models")),
        (("--models", "one", "--target", "two"), ("named twice",)),
    ],
)
def test_wrong_models_are_one_sentence(here: InProcess, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    usage = any(each in words[0] for each in ("no model", "no alias", "twice"))
    here("serve", *arguments).failed_well(*words, code=2 if usage else 1)


def test_beginnings_are_kept_on_disk_with_at_most_one_key_unless_the_profile_says() -> None:
    usual = resolve_profile(None)
    assert [_for_owners(usual, keys).prefixes for keys in (0, 1, 2)] == [True, True, False]
    assert _for_owners(replace(usual, prefixes=True), 2).prefixes is True
    assert _for_owners(replace(usual, prefixes=False), 0).prefixes is False
    assert (_for_owners(usual, 1).history, _for_owners(usual, 2).history) == ("auto", False)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("models/My Model.gguf", "My Model"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct-GGUF", "Qwen2.5-Coder-7B-Instruct-GGUF"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M", "Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M"),
        ("build/qwen2.5-onnx/", "qwen2.5-onnx"),
        ("hf:org/repo@main/x.gguf", "hf:org/repo@main/x.gguf"),
        ("llama3.2:3b", "llama3.2:3b"),
        (".", "."),
    ],
)
def test_a_model_is_served_under_its_last_name_and_under_what_was_typed(given: str, name: str) -> None:
    profile = resolve_profile(None, target=given)
    assert _names(profile, ()) == tuple(dict.fromkeys((name, given, "default")))
    assert _names(profile, ("coder",))[0] == "coder"


@pytest.mark.parametrize(
    ("name", "listed", "further"),
    [
        ("llama3.2:3b", "llama3.2:3b", ()),
        ("llama3.2", "llama3.2:latest", ()),
        ("someone/tuned", "someone/tuned:latest", ("tuned",)),
        ("hf.co/ORG/REPO-GGUF:Q4_K_M", "hf.co/ORG/REPO-GGUF:Q4_K_M", ("REPO-GGUF:Q4_K_M",)),
    ],
)
def test_a_model_of_ollama_is_listed_under_the_name_that_ollama_shows(
    name: str, listed: str, further: tuple[str, ...]
) -> None:
    names = _names(resolve_profile(None, target=f"ollama:{name}"), ())
    assert names == (name, f"ollama:{name}", "default", *further)
    assert tagged(names[0]) == listed


def test_no_line_of_a_logged_text_looks_like_a_request() -> None:
    asked = Request(messages=({"role": "user", "content": "one\n12:00 POST"},))
    answers: list[Any] = [SimpleNamespace(text="two\n\x1b")]
    assert texts_of(asked, answers) == ["> one\n> 12:00 POST", "< two\n< \\x1b"]


def test_a_port_in_use_is_reported_with_its_holder(here: InProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        here("serve", "--port", port).failed_well(f"port {port} is in use by", f"(process {os.getpid()})", "--port")


@pytest.mark.parametrize(
    ("port", "words"),
    [("1024", "port 1024 is reserved or held by another program"), ("80", "this user may not listen on port 80")],
)
def test_a_port_that_is_refused_is_reported_with_what_to_choose(
    here: InProcess, monkeypatch: pytest.MonkeyPatch, port: str, words: str
) -> None:
    def refuse(_socket: socket.socket, _address: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    here("serve", "--port", port).failed_well(words, "--port")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--host", "0.0.0.0"), ("a key is needed", "EDGESPEC_API_KEY")),
        (("--host", "no such host"), ("a key is needed",)),
        (("--host", "127.0.0.1:8080"), ("not a host alone", "--host 127.0.0.1 --port 8080")),
        (("--api-key", "x"), ("too short: it has 1 character",)),
        (("--api-key", "a key with spaces"), ("characters that a header cannot hold",)),
        (("--allow-origin", "*"), ("not an origin",)),
        (("--port", "70000"), ("65535",)),
        (("a", "--target", "b"), ("named twice",)),
        (("--host", "203.0.113.7", "--api-key", "a-long-key"), ("203.0.113.7",)),
        (("--host", "nowhere.invalid", "--api-key", "a-long-key"), ("nowhere.invalid is not a host",)),
        (("--profile", "nothing"), ("nothing",)),
        (("--alias", " "), ("not a name",)),
    ],
)
def test_wrong_options_get_a_sentence(here: InProcess, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    here("serve", *arguments).failed_well(*words, code=2)


def test_without_its_packages_the_server_names_the_command(here: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    here("serve").failed_well("uvicorn", install_command("serve"))


@pytest.mark.slow
def test_open_starts_the_browser_with_the_page(tiny: TinyModels, tmp_path: Path) -> None:
    browser, told = tmp_path / "browser", tmp_path / "told"
    browser.write_text(f'#!/bin/sh\necho "$1" > {told}.part && mv {told}.part {told}\n')
    browser.chmod(0o755)
    with serving(tiny, tmp_path / "log", tiny.target, "--open", env={"BROWSER": f"{browser} %s"}) as program:
        wait_until(told.exists)
        assert told.read_text() == f"{program.url}/\n"
        page = program.get("/", headers={"accept": "text/html", "user-agent": "Mozilla/5.0"})
        assert page.text.startswith("<!doctype html>")


@pytest.mark.slow
def test_without_a_browser_open_says_the_address_of_the_page(tiny: TinyModels, tmp_path: Path) -> None:
    nothing = {"PATH": str(tmp_path), "DISPLAY": "", "WAYLAND_DISPLAY": "", "BROWSER": ""}
    with serving(tiny, tmp_path / "log", tiny.target, "--open", env=nothing) as program:
        wait_until(lambda: f"no browser was found; the page is {program.url}/" in program.err)


def test_the_page_of_a_server_on_every_address_is_on_this_machine() -> None:
    assert page_address("http://0.0.0.0:8471") == "http://127.0.0.1:8471/"
    assert page_address("http://[::]:8471") == "http://[::1]:8471/"
    assert page_address("http://192.168.1.5:8471") == "http://192.168.1.5:8471/"

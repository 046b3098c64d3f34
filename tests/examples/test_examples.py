"""The programs in examples/ run, on tiny models; each is short and has a way to stop an answer."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from edgespec.engine.engine import Engine
from tests.server.conftest import server  # noqa: F401  the fixture
from tests.support.http_server import WAIT_S, Running, wait_until
from tests.support.pages import ROOT
from tests.support.tiny_models import TinyModels

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MOST_LINES = 80


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_to_start_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MOST_LINES
    assert f"python examples/{path.name}" in (ast.get_docstring(ast.parse(text)) or "")


def load(name: str) -> ModuleType:
    """An example as a module. Skips with the reason if this Python has no Tk; the extra `dev` has all others."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        if error.name not in ("tkinter", "_tkinter"):
            raise
        pytest.skip("this Python has no Tk")
    return module


@pytest.fixture
def engine(tiny: TinyModels) -> Any:
    with tiny.load(tiny.slow, draft="none", lookup=False, context=4096) as engine:
        yield engine


def test_the_openai_client_streams_an_answer(server: Running) -> None:  # noqa: F811
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "openai_client.py", f"{server.url}/v1", "hello"],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "[200 tokens, " in done.stdout
    wrong = subprocess.run(
        [sys.executable, ROOT / "examples" / "openai_client.py", "http://127.0.0.1:1/v1"],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert wrong.returncode == 1
    assert "is `edgespec serve` running?" in wrong.stderr


def test_the_tk_window_stays_responsive_and_its_button_stops_the_answer(engine: Engine) -> None:
    module = load("tk_window")
    with engine.session() as session:
        try:
            window = module.Window(session)
        except module.tk.TclError as error:
            pytest.skip(f"no display: {error}")
        try:
            window.prompt.insert(0, "hello")
            window.button.invoke()
            assert window.button["text"] == "Stop"
            updates = 0
            until = time.monotonic() + WAIT_S
            while len(window.output.get("1.0", "end").strip()) < 5:
                window.root.update()  # returns immediately: nothing of the model runs here
                updates += 1
                assert time.monotonic() < until
            assert updates > 1
            window.button.invoke()
            while window.button["text"] == "Stop":
                window.root.update()
                assert time.monotonic() < until
            assert "[cancelled]" in window.output.get("1.0", "end")
        finally:
            window.root.destroy()


def test_the_tk_windows_thread_passes_text_errors_and_the_end(engine: Engine) -> None:
    """Without a display: the part of the window that reads an answer."""
    module = load("tk_window")
    window = module.Window.__new__(module.Window)
    window.pieces = module.queue.Queue()
    with engine.session() as session:
        window.session = session
        thread = threading.Thread(target=window.read, args=("hello",))
        thread.start()
        wait_until(lambda: not window.pieces.empty())
        session.cancel()
        thread.join(WAIT_S)
        said = [window.pieces.get() for _ in range(window.pieces.qsize())]
        assert said[-2:] == ["\n[cancelled]\n\n", None]
        assert "".join(said[:-2])
        window.read("")
        assert [window.pieces.get(), window.pieces.get()] == ["the prompt is empty\n", None]
        window.session = None
        with pytest.raises(AttributeError):
            window.read("hello")
        assert window.pieces.get_nowait() is None, "a fault ends the answer too"


def test_a_return_during_an_answer_of_the_tk_window_leaves_its_stop_button() -> None:
    """Without a display: the part of the window that begins answers and shows them."""
    module = load("tk_window")
    window, labels, asked = module.Window.__new__(module.Window), list[str](), list[str]()
    window.session, window.busy, window.pieces = SimpleNamespace(cancel=None), False, module.queue.Queue()
    window.prompt = SimpleNamespace(get=lambda: "hello")
    window.button = SimpleNamespace(config=lambda text, command: labels.append(text))
    window.root = SimpleNamespace(after=lambda _ms, _call: None)
    window.read = asked.append
    for _ in range(2):
        window.ask()
    assert labels == ["Stop"]
    window.pieces.put(None)
    window.show()
    window.ask()
    assert labels == ["Stop", "Ask", "Stop"]
    wait_until(lambda: asked == ["hello", "hello"])


def test_the_textual_screen_answers_and_escape_stops(engine: Engine) -> None:
    module = load("textual_app")

    async def run() -> None:
        with engine.session() as session:
            app = module.Chat(session)
            async with app.run_test() as pilot:
                await pilot.press(*"hello")
                log = app.query_one(module.Log)
                # Not by the pilot, which waits until the screen is idle: the answer would be complete.
                app.simulate_key("enter")
                async with asyncio.timeout(WAIT_S):
                    while len("".join(log.lines)) < 15:
                        await asyncio.sleep(0.005)
                    assert session.answering
                    app.simulate_key("escape")
                    while session.answering:
                        await asyncio.sleep(0.005)
                assert "> hello" in log.lines[0]

    asyncio.run(run())


def test_the_fastapi_page_streams_an_answer_and_leaving_ends_it(engine: Engine) -> None:
    module = load("fastapi_app")
    import httpx

    async def run() -> None:
        app = module.make_app(engine)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert "<button" in (await client.get("/")).text
            assert (await client.get("/", headers={"host": "evil.example"})).status_code == 400
            assert (await client.get("/ask")).status_code == 405, "an address alone starts no answer"
            assert (await client.post("/ask", content="hello")).text
        parts = module.answer(engine, "hello")
        assert await anext(parts)
        await parts.aclose()
        assert not engine.pair.answering
        assert [text async for text in module.answer(engine, "")] == ["the prompt is empty"]

    asyncio.run(run())


def test_the_first_example_runs(tiny: TinyModels, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "embed.py", str(tiny.target)],
        capture_output=True,
        text=True,
        env=os.environ | {"EDGESPEC_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "EDGESPEC_THREADS": "1"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "stopped: " in done.stdout

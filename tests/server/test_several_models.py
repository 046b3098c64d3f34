"""Several models on one server: by exact names, loaded by their first request, the one idle longest makes room."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from edgespec.engine.engine import Engine
from edgespec.engine.pair import load
from edgespec.engine.pair.load import Limits
from edgespec.errors import CancelledError, MemoryLimitError, ModelFileError, ModelNotFoundError, PromptTooLongError
from edgespec.files.home import Home
from edgespec.hardware.machine import describe_machine
from edgespec.placement.memory import MemoryEstimate, MemoryLedger
from edgespec.server.errors import ApiError
from edgespec.server.faces.table import FACES
from edgespec.server.keeper import ModelKeeper, Shared
from edgespec.server.room import MOST_LOADING, GivenUpError, Room
from edgespec.server.run import Server, open_sockets
from edgespec.server.security import Access
from edgespec.server.service import Served, Service
from edgespec.text.chat_template.template import ChatTemplate
from edgespec.text.conversation import model_template
from edgespec.text.request_budget import RequestBudget
from tests.support.http_server import WAIT_S, Running, wait_until
from tests.support.tiny_models import TinyModels, answer
from tests.support.watched_sequences import HeldAnswer

GIB = 2**30


# ------------------------------------------------------------------------------------------------------------ memory


def reserved(engine: Engine) -> int:
    """What an engine takes, and what one conversation that fills the context still may."""
    return engine.pair.pool._reserved_bytes


def test_each_engine_may_take_what_the_others_leave() -> None:
    ledger, one, other = MemoryLedger(10), object(), object()
    ledger.join(one, lambda: 3)
    ledger.join(other, lambda: 4)
    assert (ledger.left_bytes, ledger.left_beside(one), ledger.left_beside(other)) == (3, 6, 7)
    assert ledger.taken_bytes == 7
    ledger.leave(one)
    ledger.leave(one)
    assert (ledger.left_bytes, ledger.left_beside(other)) == (6, 10)


def test_room_is_asked_for_once_and_what_does_not_fit_is_refused_with_the_numbers() -> None:
    asked: list[int] = []
    ledger = MemoryLedger(4 * GIB, asked.append)
    model = MemoryEstimate(weights_bytes=GIB, cache_bytes=GIB, buffers_bytes=GIB, positions=1, grows=False)
    ledger.require("tiny", [model], 9 * GIB)
    with pytest.raises(MemoryLimitError, match=r"tiny needs about 6.00 GiB .* 4.00 GiB may be used"):
        ledger.require("tiny", [model, model], 9 * GIB)
    with pytest.raises(MemoryLimitError, match=r"tiny needs about 3.00 GiB .* 2.00 GiB may be used"):
        ledger.require("tiny", [model], 2 * GIB)  # other programs take the rest now
    assert asked == [3 * GIB, 6 * GIB, 5 * GIB]
    MemoryLedger(3 * GIB).require("tiny", [model], 3 * GIB)


@pytest.mark.parametrize("mapped", [False, True])
def test_what_other_programs_take_after_the_start_is_left_to_them(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, mapped: bool
) -> None:
    """Another engine makes room if that helps: its mapped weights are available as they are, and count once."""
    machine = replace(describe_machine(), available_memory_bytes=GIB // 1024)
    monkeypatch.setattr(load, "describe_machine", lambda: machine)
    monkeypatch.setattr(load, "process_bytes", lambda: 0 if mapped else 4 * GIB)
    another = object()
    ledger = MemoryLedger(10 * GIB, lambda _needed_bytes: ledger.leave(another))

    def load_now() -> None:
        tiny.load(limits=Limits(ledger=ledger), draft="none").close()

    with pytest.raises(MemoryLimitError, match=r"0\.00 GiB may be used"):
        load_now()
    ledger.join(another, lambda: 2 * GIB)
    with pytest.raises(MemoryLimitError, match=r"0\.00 GiB may be used") if mapped else nullcontext():
        load_now()
    assert ledger.taken_bytes == (2 * GIB if mapped else 0)


def test_engines_with_one_ledger_count_each_other(tiny: TinyModels) -> None:
    ledger = MemoryLedger(GIB)
    with tiny.load(limits=Limits(ledger=ledger), draft="none") as one:
        alone = ledger.left_bytes
        assert alone == GIB - reserved(one)
        assert one.memory["allowed_bytes"] == GIB
        with tiny.load(tiny.ending, limits=Limits(ledger=ledger), draft="none") as other:
            assert other.memory["allowed_bytes"] == alone
            assert one.memory["allowed_bytes"] == GIB - reserved(other)
            with one.session(), one.session():
                assert ledger.left_bytes == GIB - reserved(one) - reserved(other)
        assert ledger.left_bytes == alone
    assert ledger.left_bytes == GIB


def test_a_drafter_is_counted_before_it_is_loaded(tiny: TinyModels, tmp_path: Path) -> None:
    ledger = MemoryLedger(GIB)
    # In a home where no answer has shown that the drafter pays: otherwise the load has it too.
    with tiny.load(store_home=Home(tmp_path), limits=Limits(ledger=ledger)) as engine:
        drafter = engine.pair.pool.drafter
        assert drafter is not None
        assert engine.memory["drafters"] == {}
        before = ledger.left_bytes
        engine.load_drafter()
        assert len(engine.memory["drafters"]) == 1
        assert ledger.left_bytes == before == GIB - reserved(engine)


# -------------------------------------------------------------------------------------------------------------- room


def test_a_prompt_is_too_long_for_its_own_models_context(tiny: TinyModels) -> None:
    with tiny.load(draft="none") as engine, engine.session() as session:
        context = session.context_length
        with pytest.raises(PromptTooLongError, match=f"more than {2 * context} tokens.* size of {context} tokens"):
            session.generate("hello " * 40 * context, budget=RequestBudget(2 * context))


def test_a_load_that_failed_takes_no_room(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = MemoryLedger(GIB)

    def fails(*_: object) -> object:
        raise ModelFileError(tiny.target, "llama.cpp could not load it")

    monkeypatch.setattr(load, "_open_target", fails)
    with pytest.raises(ModelFileError) as kept:  # whose traceback holds what the load had
        tiny.load(limits=Limits(ledger=ledger), draft="none")
    assert ledger.left_bytes == GIB
    assert kept.tb is not None


@dataclass
class Model:
    """A keeper that only says what it does; it takes all memory while it is loaded."""

    room: Room
    loading: bool = False
    in_use: bool = False
    wanted: bool = True
    idle_since: float | None = None
    freed: int = 0
    stopped: int = 0

    def __post_init__(self) -> None:
        self.room.join(self)

    def stop_measuring(self) -> None:
        self.stopped += 1

    async def free(self) -> None:
        self.freed += 1
        self.idle_since = None
        assert self.room.ledger is not None
        self.room.ledger.leave(self)

    def takes(self, count: int, idle_since: float | None) -> Model:
        assert self.room.ledger is not None
        self.room.ledger.join(self, lambda: count)
        self.idle_since = idle_since
        self.in_use = idle_since is None
        return self


async def room_for(room: Room, needed: int, model: Model | None = None) -> None:
    """A load that needs these bytes."""
    assert room.ledger is not None
    estimate = MemoryEstimate(weights_bytes=needed, cache_bytes=0, buffers_bytes=0, positions=1, grows=False)
    async with room.loading(model or Model(room)):
        await asyncio.to_thread(room.ledger.require, "new", [estimate], room.ledger.allowed_bytes)


@pytest.mark.anyio
async def test_the_models_that_are_idle_longest_make_room_and_no_more_of_them() -> None:
    room = Room(10)
    models = [Model(room).takes(3, since) for since in (2.0, 1.0, 3.0)]
    await room_for(room, 4)
    assert [model.freed for model in models] == [0, 1, 0]
    await room_for(room, 1)
    assert [model.freed for model in models] == [0, 1, 0]
    with pytest.raises(MemoryLimitError):
        await room_for(room, 11)
    assert [model.freed for model in models] == [1, 1, 1]


@pytest.mark.anyio
async def test_a_load_waits_for_a_model_in_use_and_later_requests_wait_behind_it() -> None:
    room = Room(10)
    used, new = Model(room).takes(10, None), Model(room)
    waiting = asyncio.create_task(room_for(room, 10))
    while room._none_waits.is_set():  # private: nothing else shows that a load waits
        await asyncio.sleep(0.001)
    later = asyncio.create_task(room.enter(used))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert not later.done(), "it would keep the model in use for ever"
    used.in_use, used.idle_since = False, 5.0
    room.left()
    await asyncio.wait_for(asyncio.gather(waiting, later), WAIT_S)
    assert used.freed == 1
    await room.enter(new)


@pytest.mark.anyio
async def test_a_load_whose_requests_have_left_waits_for_no_room_and_frees_no_model() -> None:
    room = Room(10)
    used, new = Model(room).takes(10, None), Model(room, loading=True)
    waiting = asyncio.create_task(room_for(room, 10, new))
    while room._none_waits.is_set():
        await asyncio.sleep(0.001)
    later = asyncio.create_task(room.enter(used))
    await asyncio.wait_for(room.enter(new), WAIT_S)  # it waits for that load itself
    new.wanted = False
    room.left()
    with pytest.raises(CancelledError):
        await asyncio.wait_for(waiting, WAIT_S)
    await asyncio.wait_for(later, WAIT_S)
    used.in_use, used.idle_since = False, 5.0
    with pytest.raises(CancelledError):
        await room_for(room, 10, new)
    assert used.freed == 0


@pytest.mark.anyio
async def test_one_model_is_loaded_one_waits_and_further_ones_are_refused_for_a_while() -> None:
    room, order = Room(10), list[str]()

    async def load(name: str, release: asyncio.Event) -> None:
        async with room.loading(models[0]):
            order.append(name)
            await release.wait()

    release = asyncio.Event()
    loads = [asyncio.create_task(load(name, release)) for name in "ab"]
    models = [Model(room, loading=True), Model(room, loading=True), Model(room), Model(room).takes(1, 1.0)]
    await asyncio.sleep(0.01)
    assert order == ["a"]
    assert len(loads) == MOST_LOADING
    for model in (models[0], models[3]):
        await room.enter(model)
    with pytest.raises(ApiError) as raised:
        await room.enter(models[2])
    assert (raised.value.status, raised.value.code, raised.value.retry_s) == (503, "loading", 5)
    release.set()
    await asyncio.gather(*loads)
    assert order == ["a", "b"]


@pytest.mark.anyio
async def test_nothing_is_measured_while_another_model_runs_and_a_request_for_any_ends_it() -> None:
    room = Room(10)
    one, other = Model(room), Model(room)
    async with room.measuring(one) as alone:
        assert alone
        second = asyncio.create_task(measured(room, other))
        await asyncio.sleep(0.01)
        assert not second.done(), "one at a time"
        await room.enter(other)
        assert (one.stopped, other.stopped) == (1, 0)
    assert await second
    other.in_use = True
    async with room.measuring(one) as alone:
        assert not alone
    assert room.leave(one) is False
    assert room.leave(other) is True


async def measured(room: Room, model: Model) -> bool:
    async with room.measuring(model) as alone:
        return alone


# ---------------------------------------------------------------------------------------------------------- over HTTP


@contextmanager
def serving(loads: dict[str, Callable[[Limits], Engine]], allowed_bytes: int, **settings: Any) -> Iterator[Running]:
    """A server of several models by name."""
    shared = Shared(Room(allowed_bytes))
    limits = Limits(ledger=shared.room.ledger)

    def served(name: str, load: Callable[[Limits], Engine]) -> Served:
        return Served(keeper=ModelKeeper(lambda: load(limits), None, shared=shared, **settings), names=(name,))

    first, *others = [served(name, load) for name, load in loads.items()]
    lines: list[Any] = []
    service = Service(keeper=first.keeper, names=first.names, others=tuple(others), log=lines.append)
    sockets = open_sockets("127.0.0.1", 0)
    server = Server(service, sockets)
    thread = threading.Thread(target=server.run_to_end, daemon=True)
    thread.start()
    try:
        yield Running(service, server, sockets[0].getsockname()[1], lines)
    finally:
        server.stop()
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.fixture
def loads(tiny: TinyModels) -> dict[str, Callable[[Limits], Engine]]:
    def load(path: Path) -> Callable[[Limits], Engine]:
        return lambda limits: tiny.load(path, limits=limits, draft="none", depth=0, lookup=False)

    return {"one": load(tiny.target), "two": load(tiny.ending), "three": load(tiny.stranger)}


def states(server: Running) -> dict[str, str]:
    with server.client() as client:
        found: dict[str, str] = client.get("/health").json()["models"]
    return found


def test_no_template_is_compiled_between_the_pieces_of_another_models_answer(
    loads: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template's text may take a quarter of a second: on the event loop all clients would wait for it."""
    compile_one, on_a_loop = ChatTemplate.__init__, list[bool]()

    def compile_seen(template: ChatTemplate, *args: Any, **settings: Any) -> None:
        on_a_loop.append(asyncio._get_running_loop() is not None)
        compile_one(template, *args, **settings)

    monkeypatch.setattr(ChatTemplate, "__init__", compile_seen)
    monkeypatch.setattr(model_template, "call_format", lambda source: source)  # all formats are known
    with serving(loads, GIB) as server, server.client() as client:
        for name in loads:
            assert server.chat("hello", model=name, max_tokens=1).status_code == 200
            assert client.post("/api/show", json={"model": name}).status_code == 200
    assert len(on_a_loop) >= 2 * len(loads)
    assert not any(on_a_loop)


def test_each_model_answers_to_its_name_and_to_no_other(loads: dict[str, Any]) -> None:
    with serving(loads, GIB) as server, server.client() as client:
        assert states(server) == {"one": "unloaded", "two": "unloaded", "three": "unloaded"}
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["one", "two", "three"]
        assert server.chat("hello", model="two", max_tokens=4).json()["model"] == "two"
        assert states(server) == {"one": "unloaded", "two": "ready", "three": "unloaded"}
        assert server.chat("hello", model="ONE:latest", max_tokens=4).json()["model"] == "one"
        assert client.get("/v1/models/two").json()["meta"]["n_ctx"] > 0
        assert client.get("/v1/models/three").json()["meta"] is None
        for name in ("four", "default", "/etc/passwd", "../one", "one.gguf", "hf:org/repo", None, ""):
            refused = server.chat("hello", model=name, max_tokens=4)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
            assert "'one', 'two', 'three'" in refused.json()["error"]["message"]
        assert client.get("/v1/models/four").status_code == 404
        metrics = client.get("/metrics").text
        assert "edgespec_model_loaded 2" in metrics
        assert "edgespec_model_loads_total 2" in metrics


def test_a_model_whose_own_name_has_ollamas_tag_is_asked_for_with_and_without_it(loads: dict[str, Any]) -> None:
    with serving({"one:latest": loads["one"], "two": loads["two"]}, GIB) as server, server.client() as client:
        for name in ("one:latest", "One:LATEST", "one"):
            assert client.get(f"/v1/models/{name}").json()["id"] == "one:latest"
        assert client.get("/v1/models/latest").status_code == 404


def test_a_colon_in_a_name_may_be_a_hyphen_unless_another_model_has_that_name(loads: dict[str, Any]) -> None:
    served = {"coder-1.5b": "one", "small:3b": "two", "small-3b": "three"}
    with serving({name: loads[load] for name, load in served.items()}, GIB) as server, server.client() as client:
        for asked, name in (("Coder:1.5b", "coder-1.5b"), ("small:3B", "small:3b"), ("SMALL-3b:latest", "small-3b")):
            assert client.get(f"/v1/models/{asked}").json()["id"] == name
            assert client.post("/api/pull", json={"model": asked, "stream": False}).json() == {"status": "success"}


def test_tokens_are_counted_by_the_model_that_is_named(loads: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "hello the people"}]}
    with serving(loads, GIB) as server, server.client() as client:
        path = "/v1/messages/count_tokens"
        counts = {name: client.post(path, json={**body, "model": name}).json() for name in ("one", "three")}
        assert counts["one"]["input_tokens"] < counts["three"]["input_tokens"], "another vocabulary"
        assert client.post(path, json={**body, "model": "claude"}).status_code == 404


def test_tokens_and_properties_are_those_of_the_model_that_is_named(loads: dict[str, Any]) -> None:
    with serving(loads, GIB) as server, server.client() as client:
        found = {}
        for name in ("one", "three"):
            about = client.get("/props", params={"model": name}).json()
            tokens = client.post("/tokenize", json={"model": name, "content": "hello"}).json()["tokens"]
            back = client.post("/detokenize", json={"model": name, "tokens": tokens}).json()
            assert (about["model_alias"], back["content"].strip()) == (name, "hello")
            found[name] = tokens
        assert found["one"] != found["three"], "another vocabulary"
        for body in ({"content": "hello"}, {"model": "claude", "content": "hello"}):
            assert client.post("/tokenize", json=body).status_code == 404
        assert client.get("/props").status_code == 404


def test_a_model_that_was_removed_is_not_listed_and_the_others_are(
    loads: dict[str, Any],
) -> None:
    def removed(limits: Limits) -> Engine:
        raise ModelNotFoundError("two is not on this machine")

    with serving({**loads, "two": removed}, GIB) as server, server.client() as client:
        assert [each["name"] for each in client.get("/api/tags").json()["models"]] == ["one:latest", "three:latest"]
        assert server.chat("hello", model="two", max_tokens=4).status_code == 503


def test_a_request_says_for_how_long_its_own_model_stays(loads: dict[str, Any]) -> None:
    with serving(loads, GIB) as server, server.client() as client:
        assert text(server, "one")
        body = {"model": "two", "messages": [{"role": "user", "content": "hello"}], "stream": False, "keep_alive": 0}
        assert client.post("/api/chat", json={**body, "options": {"num_predict": 4}}).json()["model"] == "two"
        server.wait_until(lambda: states(server) == {"one": "ready", "two": "unloaded", "three": "unloaded"})
        assert [each["name"] for each in client.get("/api/ps").json()["models"]] == ["one:latest"]
        listed = [each["name"] for each in client.get("/api/tags").json()["models"]]
        assert listed == ["one:latest", "two:latest", "three:latest"]


def test_agents_names_for_models_are_refused_where_several_are_served(loads: dict[str, Any]) -> None:
    with serving(loads, GIB) as server, server.client() as client:
        for face in FACES:
            if face.any_model:
                body = {"model": "an-agents-own", "messages": [{"role": "user", "content": "hi"}], "input": "hi"}
                assert client.post(face.path, json={**body, "max_tokens": 4}).status_code in (400, 404)


def test_the_model_idle_longest_makes_room_and_comes_back(tiny: TinyModels, loads: dict[str, Any]) -> None:
    with tiny.load(draft="none") as engine:
        each = reserved(engine)
    with serving(loads, int(2.5 * each)) as server:
        expected = {name: text(server, name) for name in ("one", "two")}
        assert states(server) == {"one": "ready", "two": "ready", "three": "unloaded"}
        assert text(server, "one") == expected["one"]
        assert text(server, "three")
        assert states(server) == {"one": "ready", "two": "unloaded", "three": "ready"}
        assert text(server, "two") == expected["two"]
        assert states(server) == {"one": "unloaded", "two": "ready", "three": "ready"}


def text(server: Running, name: str) -> str:
    reply = server.chat("hello the people", model=name, max_tokens=16)
    assert reply.status_code == 200, reply.text
    content: str = reply.json()["choices"][0]["message"]["content"]
    return content


def test_a_model_that_never_fits_is_an_error_and_the_others_answer(tiny: TinyModels, loads: dict[str, Any]) -> None:
    own: dict[str, Any] = {"draft": "none", "depth": 0, "context": 16384}
    loads = {**loads, "large": lambda limits: tiny.load(tiny.slow, limits=limits, **own)}
    with tiny.load(draft="none") as engine:
        each = reserved(engine)
    with serving(loads, int(1.5 * each)) as server:
        refused = server.chat("hello", model="large", max_tokens=4)
        assert refused.status_code in (500, 503)
        assert "may be used" in refused.json()["error"]["message"]
        assert text(server, "one")
        assert states(server)["large"] == "failed"


def test_a_load_changes_no_token_of_a_running_answer(
    tiny: TinyModels, loads: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = {"slow": lambda limits: tiny.load(tiny.slow, limits=limits, draft="none", lookup=False, context=2048)}
    with tiny.load(tiny.slow, draft="none", lookup=False, context=2048) as engine, engine.session() as session:
        alone = answer(session.generate("hello the people", max_tokens=100)).content
    begun, released = threading.Event(), threading.Event()

    def held(limits: Limits) -> Engine:
        begun.set()
        assert released.wait(WAIT_S)
        return loads["two"](limits)  # type: ignore[no-any-return]

    with serving({**slow, "two": held}, 4 * GIB) as server:
        server.chat("hello", model="slow", max_tokens=1)
        holding = HeldAnswer(monkeypatch)
        running = server.asking("hello the people", model="slow", max_tokens=100, temperature=0)
        assert holding.come.wait(WAIT_S)
        second = server.asking("hello", model="two", max_tokens=4)
        assert begun.wait(WAIT_S)
        assert not running.done()
        holding.release.set()
        released.set()
        assert second.result(WAIT_S).status_code == 200
        assert running.result(WAIT_S).json()["choices"][0]["message"]["content"] == alone


@contextmanager
def answering_with_room_for_one(
    tiny: TinyModels, two: Any, monkeypatch: pytest.MonkeyPatch, *, tokens: int
) -> Iterator[tuple[Running, Future[httpx.Response], threading.Event]]:
    """A server with memory for one of two models, which answers until the event is set; and that answer."""
    slow = {"slow": lambda limits: tiny.load(tiny.slow, limits=limits, draft="none", lookup=False, context=2048)}
    with tiny.load(tiny.slow, draft="none", lookup=False, context=2048) as engine:
        only = reserved(engine)
    with serving({**slow, "two": two}, only + 1) as server:
        server.chat("hello", model="slow", max_tokens=1)
        holding = HeldAnswer(monkeypatch)
        running = server.asking("hello the people", model="slow", max_tokens=tokens)
        assert holding.come.wait(WAIT_S)
        yield server, running, holding.release


def test_the_server_ends_while_a_load_waits_for_room(
    tiny: TinyModels, loads: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering_with_room_for_one(tiny, loads["two"], monkeypatch, tokens=200) as (server, running, holding):
        waiting = server.asking("hello", model="two", max_tokens=4)
        wait_until(lambda: server.service.others[0].keeper.state == "loading")
        holding.set()
        server.server.stop()
        assert waiting.result(WAIT_S).status_code == 503
        assert running.result(WAIT_S).status_code == 200


def test_a_load_that_waits_for_room_ends_with_its_last_request(
    tiny: TinyModels, loads: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering_with_room_for_one(tiny, loads["two"], monkeypatch, tokens=20) as (server, running, holding):
        room = server.service.keeper._common.room
        with server.connect() as own:
            server.send_chat(own, "hello", model="two", max_tokens=4)
            wait_until(lambda: not room._none_waits.is_set())  # private: nothing else shows that a load waits
        server.wait_until(lambda: states(server)["two"] == "unloaded")
        holding.set()
        assert running.result(WAIT_S).status_code == 200
        assert states(server) == {"slow": "ready", "two": "unloaded"}


@pytest.mark.anyio
async def test_a_request_that_comes_while_its_load_is_given_up_loads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = ModelKeeper(lambda: None)  # type: ignore[arg-type, return-value]
    loads = list[object]()

    async def load() -> object:
        loads.append(object())
        if len(loads) == 1:
            raise GivenUpError("the requests for this model have left")
        keeper._loaded = loads[-1]  # type: ignore[assignment]
        return keeper._loaded

    monkeypatch.setattr(keeper, "start", lambda: asyncio.ensure_future(load()))
    async with keeper.use() as loaded:
        assert loaded is loads[1]


def test_a_client_may_leave_while_its_model_waits(loads: dict[str, Any]) -> None:
    begun, release = threading.Event(), threading.Event()

    def held(limits: Limits) -> Engine:
        begun.set()
        assert release.wait(WAIT_S)
        return loads["two"](limits)  # type: ignore[no-any-return]

    with serving({"one": loads["one"], "two": held}, GIB) as server:
        with server.connect() as own:
            server.send_chat(own, "hello", model="two", max_tokens=4)
            assert begun.wait(WAIT_S)
        server.wait_until(lambda: server.service.queue.running == 0)
        release.set()
        server.wait_until(lambda: states(server)["two"] == "ready")
        assert text(server, "two")


def test_one_model_has_no_ledger() -> None:
    assert Room().ledger is None
    assert Service(keeper=SimpleNamespace(), names=("tiny",)).others == ()  # type: ignore[arg-type]


def test_health_names_the_models_to_those_with_a_key(loads: dict[str, Any]) -> None:
    with serving(loads, GIB) as server, server.client() as client:
        object.__setattr__(server.service, "access", Access(keys=("a-long-key",)))
        assert client.get("/health").json() == {"status": "ok"}
        known = client.get("/health", headers={"Authorization": "Bearer a-long-key"}).json()
        assert known["models"] == {"one": "unloaded", "two": "unloaded", "three": "unloaded"}


def test_an_exact_name_comes_before_the_same_name_with_a_tag() -> None:
    tagged, plain = ("a:latest",), ("a",)
    one = Service(keeper=SimpleNamespace(), names=tagged, others=(Served(keeper=SimpleNamespace(), names=plain),))  # type: ignore[arg-type]
    assert one.check_model("a").names == plain
    assert one.check_model("a:latest").names == one.check_model("A:Latest").names == tagged

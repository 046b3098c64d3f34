"""A short hour of mixed traffic: every API at the same time, with clients that leave, wait and break things."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.face_clients import measure
from benchmarks.mixed_traffic import REQUESTS, Alone, Traffic, ask_alone
from tests.support.faces import ANSWERS, TEXTS, TOKENS
from tests.support.http_server import Running, running
from tests.support.tiny_models import TinyModels

# As long as every kind of client needs to come up several times.
SECONDS = 6.0
PATHS = {*ANSWERS, *TEXTS, *TOKENS}


@pytest.fixture(scope="module")
def filling(tiny: TinyModels) -> Iterator[Running]:
    """A server whose model fills holes, and guesses in every round."""
    with running(lambda: tiny.load(tiny.filling, draft="none", depth=3)) as found:
        found.wait_until(lambda: found.service.keeper.state == "ready")
        yield found


@pytest.fixture(scope="module")
def alone(filling: Running) -> Alone:
    return ask_alone(filling.url, stream=False)


def test_the_requests_have_every_route_that_answers_or_counts(alone: Alone) -> None:
    assert {asked.way.path for asked in REQUESTS} == PATHS
    assert [REQUESTS[number].way.path for number, (status, _) in enumerate(alone.answers) if status != 200] == []
    assert all(text for _, (text, _) in alone.answers)
    assert alone.page.startswith("<!doctype html>")


def test_streams_say_what_whole_replies_say(filling: Running, alone: Alone) -> None:
    assert ask_alone(filling.url, stream=True) == alone


def test_mixed_traffic_changes_no_answer_and_leaves_nothing(filling: Running, alone: Alone) -> None:
    traffic = Traffic(filling.url, alone, slow_s=0.002)
    traffic.run_for(SECONDS, 3, seed=1)
    assert traffic.problems == []
    kinds = {"answer", "slow", "replaced", "page", "left", "nonsense", "too large", "half"}
    assert {kind for kind, count in traffic.counts.items() if count} == kinds
    assert {name.split()[0] for name in traffic.answers} == PATHS
    filling.wait_until(lambda: filling.service.queue.running == filling.service.queue.waiting == 0)
    filling.wait_until(lambda: filling.service.connections() == 0)
    assert ask_alone(filling.url, stream=True) == alone


def test_other_texts_and_failures_are_counted_separately(filling: Running, alone: Alone) -> None:
    other = Alone([(200, ("another text", None)) for _ in alone.answers], "another page")
    traffic = Traffic(filling.url, other)
    traffic.run_for(1.0, 2, seed=1)
    assert traffic.counted("wrong") > 0
    assert traffic.counted("failed") == traffic.counted("stuck") == 0
    traffic = Traffic("http://127.0.0.1:9", alone)
    traffic.run_for(0.1, 1, seed=1)
    assert traffic.counted("failed") > 0
    assert traffic.counted("wrong") == 0


def test_clients_of_every_api_get_the_ids_that_they_get_alone(tiny: TinyModels) -> None:
    report = measure(tiny.load(tiny.filling, draft="none", depth=3), 42, (2, 4, 8))
    assert set(report["paths"]) == {*ANSWERS, *TEXTS}
    assert report["refused"] == []
    assert report["tokens"] > 200
    assert 0 < report["streamed"] < 42
    for found in report["clients"].values():
        assert found == {"answers": 42, "other_ids": [], "other_replies": []}

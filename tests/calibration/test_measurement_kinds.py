"""Every kind of measurement: stored, found under its key, and ignored with a note if damaged."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.calibration import kinds
from edgespec.calibration.measurement_store import SCHEMA_VERSION, Measurements
from edgespec.calibration.timing import ModelTimes
from edgespec.errors import CancelledError
from edgespec.files.checked import read, to_json
from edgespec.planning.cost.acceptance import BINS, POSITIONS, AcceptancePrior
from edgespec.planning.cost.contention import Contention
from tests.calibration.test_measurements import FACTS, PROBE, TIMES, changed, stored_file

SMALL = replace(FACTS, name="small", sha256="sha256:ef", weight_bytes=10**8)
BOTH = Contention(target_factor=1.25, drafter_factor=2.5)
PRIOR = AcceptancePrior(
    by_position=(0.8, None, *(0.5,) * (POSITIONS - 2)), by_confidence=(None,) * (BINS - 1) + (1.0,)
)

Kind = tuple[Callable[[Measurements], None], Callable[[Measurements], Any], Any]

KINDS: dict[str, Kind] = {
    "widths": (
        lambda kept: kept.save(kinds.WIDTHS, PROBE, FACTS),
        lambda kept: kept.load(kinds.WIDTHS, FACTS),
        PROBE,
    ),
    "times": (lambda kept: kept.save(kinds.TIMES, TIMES, FACTS), lambda kept: kept.load(kinds.TIMES, FACTS), TIMES),
    "plain": (lambda kept: kept.save(kinds.PLAIN, 0.125, FACTS), lambda kept: kept.load(kinds.PLAIN, FACTS), 0.125),
    "contention": (
        lambda kept: kept.save(kinds.CONTENTION, BOTH, FACTS, SMALL),
        lambda kept: kept.load(kinds.CONTENTION, FACTS, SMALL),
        BOTH,
    ),
    "acceptance": (
        lambda kept: kept.save(kinds.ACCEPTANCE, PRIOR, FACTS, "lookup"),
        lambda kept: kept.load(kinds.ACCEPTANCE, FACTS, "lookup"),
        PRIOR,
    ),
}


@pytest.fixture
def kept(tmp_path: Path) -> Measurements:
    return Measurements(tmp_path / "measurements", "machine-1", "mains")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def test_each_kind_of_measurement_is_loaded_again(kept: Measurements, kind: Kind) -> None:
    save, load, value = kind
    assert load(kept) is None
    save(kept)
    assert load(kept) == value
    assert load(Measurements(kept.folder, "machine-1", "mains")) == value
    assert kept.notes == []


def test_kinds_of_measurements_do_not_overwrite_each_other(kept: Measurements) -> None:
    for save, _, _ in KINDS.values():
        save(kept)
    assert all(load(kept) == value for _, load, value in KINDS.values())
    names = sorted(path.name.partition("-")[0] for path in kept.folder.iterdir())
    assert names == sorted(KINDS)


def test_newer_times_of_a_setting_replace_its_old_curve(kept: Measurements, tmp_path: Path) -> None:
    nowhere = Measurements(tmp_path / "measurements" / "widths", "machine-1")
    for store in (kept, nowhere):
        store.save(kinds.TIMES, TIMES, FACTS)
        store.save(kinds.PLAIN, 0.125, FACTS)
        (tmp_path / "measurements").mkdir(exist_ok=True)
        assert store.plain_s(FACTS) == TIMES.curves.curves[0].plain_s
        store.forget(kinds.TIMES, FACTS)
        assert store.load(kinds.TIMES, FACTS) is None
        assert store.plain_s(FACTS) == 0.125
        store.forget(kinds.TIMES, FACTS)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b"{", b"\xff", b"[" * 10_000])
def test_a_damaged_file_of_each_kind_is_ignored_with_a_note(kept: Measurements, kind: Kind, data: bytes) -> None:
    save, load, value = kind
    save(kept)
    path = stored_file(kept)
    path.write_bytes(data)
    assert load(kept) is None
    assert kept.notes == [f"the measurement {path.name} is ignored and made again: it is damaged"]
    save(kept)
    assert load(kept) == value


def test_a_file_of_a_newer_version_of_each_kind_is_ignored_with_a_note(kept: Measurements, kind: Kind) -> None:
    save, load, _ = kind
    save(kept)
    path = stored_file(kept)
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**document, "schema_version": SCHEMA_VERSION + 1}), encoding="utf-8")
    assert load(kept) is None
    assert "another version of edgespec wrote it" in kept.notes[0]


def test_a_file_with_another_key_of_each_kind_is_ignored_with_a_note(kept: Measurements, kind: Kind) -> None:
    save, load, _ = kind
    save(kept)
    path = stored_file(kept)
    document = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**document, "key": {**document["key"], "machine": "other"}}), encoding="utf-8")
    assert load(kept) is None
    assert "it was measured on another machine or model" in kept.notes[0]


HOSTILE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "no curve": ("times", lambda d: changed(d, "times", "forward_s", to=[])),
    "a row too few": ("times", lambda d: changed(d, "times", "forward_s", to=[[0.1, 0.2, 0.3]])),
    "a short row": ("times", lambda d: changed(d, "times", "forward_s", 0, to=[0.1, 0.2])),
    "a forward of 0 s": ("times", lambda d: changed(d, "times", "forward_s", 0, 0, to=0)),
    "no width 1": ("times", lambda d: changed(d, "times", "widths", to=[2, 3, 4])),
    "widths out of order": ("times", lambda d: changed(d, "times", "widths", to=[1, 4, 2])),
    "contexts out of order": ("times", lambda d: changed(d, "times", "contexts", to=[1018, 96])),
    "a context twice": ("times", lambda d: changed(d, "times", "contexts", to=[96, 96])),
    "a prompt time of 0": ("times", lambda d: changed(d, "times", "prompt_token_s", to=0)),
    "no repetition": ("times", lambda d: changed(d, "times", "repetitions", to=0)),
    "plain of 0 s": ("plain", lambda d: changed(d, "plain", "forward_s", to=0)),
    "faster together": ("contention", lambda d: changed(d, "contention", "target_factor", to=0.5)),
    "no factor": ("contention", lambda d: changed(d, "contention", to={})),
    "more than all accepted": ("acceptance", lambda d: changed(d, "acceptance", "by_position", 0, to=1.5)),
    "too few positions": ("acceptance", lambda d: changed(d, "acceptance", "by_position", to=[0.5])),
    "too many bins": ("acceptance", lambda d: changed(d, "acceptance", "by_confidence", to=[0.5] * (BINS + 1))),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_implausible_numbers_in_a_measurement_are_ignored(kept: Measurements, name: str) -> None:
    which, damage = HOSTILE[name]
    save, load, value = KINDS[which]
    save(kept)
    path = stored_file(kept)
    path.write_text(json.dumps(damage(json.loads(path.read_text(encoding="utf-8")))), encoding="utf-8")
    assert load(kept) is None
    assert "is ignored and made again" in kept.notes[0]
    save(kept)
    assert load(kept) == value


# -------------------------------------------------------------------------------------- keys


def test_times_depend_on_the_power_source_and_widths_do_not(kept: Measurements) -> None:
    for save, _, _ in KINDS.values():
        save(kept)
    for power in ("battery", None):
        other = Measurements(kept.folder, "machine-1", power)
        found = {name: load(other) is not None for name, (_, load, _) in KINDS.items()}
        assert found == {"widths": True, "times": False, "plain": False, "contention": False, "acceptance": True}
        assert other.notes == []


def test_the_power_source_is_unknown_by_default(tmp_path: Path) -> None:
    assert Measurements(tmp_path, "machine-1") == Measurements(tmp_path, "machine-1", None)


def test_acceptance_is_keyed_by_the_models_and_not_the_machine(kept: Measurements) -> None:
    kept.save(kinds.ACCEPTANCE, PRIOR, FACTS, "model:a")
    elsewhere = Measurements(kept.folder, "machine-2", "battery")
    assert (
        elsewhere.load(kinds.ACCEPTANCE, replace(FACTS, threads=1, build="other", device="gpu0"), "model:a") == PRIOR
    )
    assert elsewhere.load(kinds.ACCEPTANCE, FACTS, "model:b") is None
    assert elsewhere.load(kinds.ACCEPTANCE, replace(FACTS, sha256="sha256:00"), "model:a") is None


def test_contention_is_keyed_by_target_and_drafter(kept: Measurements) -> None:
    kept.save(kinds.CONTENTION, BOTH, FACTS, SMALL)
    assert kept.load(kinds.CONTENTION, SMALL, FACTS) is None
    assert kept.load(kinds.CONTENTION, replace(FACTS, threads=1), SMALL) is None
    assert kept.load(kinds.CONTENTION, FACTS, replace(SMALL, threads=1)) is None


def test_model_times_survive_json() -> None:
    assert read(ModelTimes, json.loads(json.dumps(to_json(TIMES)))) == TIMES
    assert TIMES.curves.at(96).plain_s == 0.1
    assert TIMES.curves.at(1018).plain_s == 0.2
    assert TIMES.curves.at(1940).plain_s == pytest.approx(0.3), "linear beyond what was measured"
    cost = TIMES.draft_cost.at(96)
    assert (cost.token_s, cost.lag_token_s, cost.round_s) == (pytest.approx(0.1), 0.003, 0.0)


# -------------------------------------------------------------------------------------------------- the lock

HOLD = """
import sys
from pathlib import Path
from edgespec.calibration.measurement_store import Measurements
with Measurements(Path("unused"), "machine").exclusive(Path(sys.argv[1]), wait=False) as alone:
    print(alone, flush=True)
    sys.stdin.readline()
"""


def test_a_second_calibration_waits_for_the_first_process(kept: Measurements, tmp_path: Path) -> None:
    locks = tmp_path / "not" / "yet" / "locks"
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(locks)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "True\n"
        with kept.exclusive(locks, wait=False) as alone:
            assert not alone
        entered = threading.Event()

        def wait() -> None:
            with kept.exclusive(locks, wait=True) as alone:
                assert alone
                entered.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not entered.wait(0.3)
        asked = list[int]()

        def gives_up() -> None:
            asked.append(1)
            if len(asked) == 3:
                raise CancelledError("enough")

        with pytest.raises(CancelledError, match="enough"), kept.exclusive(locks, wait=True, waiting=gives_up):
            raise AssertionError("another process holds the lock")
        child.stdin.write("\n")
        child.stdin.flush()
        assert entered.wait(60)
        waiting.join()
    finally:
        child.kill()
        child.communicate()
    with kept.exclusive(locks, wait=False) as alone:
        assert alone


def test_the_calibration_lock_is_released_after_an_error(kept: Measurements, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), kept.exclusive(tmp_path / "locks", wait=True):
        raise ZeroDivisionError
    with kept.exclusive(tmp_path / "locks", wait=False) as alone:
        assert alone


def test_calibration_proceeds_if_no_lock_file_can_be_created(kept: Measurements, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file", encoding="utf-8")
    for wait in (False, True):
        with kept.exclusive(tmp_path / "file" / "locks", wait=wait) as alone:
            assert alone

"""Arguments of wrong types and in unusual forms: one clear sentence, or what the caller expects."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec import Limits
from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError, InvalidRequestError
from tests.support.tiny_models import TinyModels, answer


@pytest.fixture(scope="module")
def engine(tiny: TinyModels) -> Iterator[Engine]:
    with tiny.load(draft="none") as engine:
        yield engine


@pytest.mark.parametrize("value", [0, -3, 1.5, True, "2", float("nan")])
@pytest.mark.parametrize("name", ["max_threads", "max_memory_bytes"])
def test_limits_are_whole_numbers_from_one_on(name: str, value: Any) -> None:
    assert Limits() == Limits(max_memory_bytes=None, max_threads=None)
    with pytest.raises(InvalidRequestError, match=f"{name} must be a whole number of at least 1"):
        Limits(**{name: value})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"limits": 5}, "limits must be Limits, not int"),
        ({"profile": 5}, "profile must be a name or a path, not int"),
        ({"draft": 5}, "draft must be a MODEL"),
        ({"threads": True}, "threads must be"),
        ({"store_home": 5}, "a home must be a folder's path, not int"),
        ({"store_home": "~no-such-user/x"}, "the home folder cannot be found"),
    ],
)
def test_what_is_not_a_limit_or_a_folder_is_refused(tiny: TinyModels, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(EdgespecError, match=said):
        Engine.load(str(tiny.target), **{"draft": "none", **wrong})


def test_paths_and_the_numbers_of_numpy_are_taken_as_text_and_numbers_are(tiny: TinyModels, tmp_path: Path) -> None:
    profile = tmp_path / "own.toml"
    profile.write_text("depth = 1\n")
    given = {"context": np.int64(512), "threads": np.int32(1), "max_memory_fraction": np.float32(0.5)}
    limits = Limits(max_threads=np.int64(1))  # type: ignore[arg-type]
    with Engine.load(tiny.target, draft=tiny.drafter, profile=profile, limits=limits, **given) as engine:  # type: ignore[arg-type]
        found, values = engine.profile, {name: engine.profile.values()[name] for name in given}
        assert (found.target, found.draft, found.depth) == (str(tiny.target), str(tiny.drafter), 1)
        assert json.loads(json.dumps(values)) == values == given
        assert type(limits.max_threads) is int


def test_a_relative_path_is_never_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for missing in ("qwen2.5-coder-1.5b", "models/mine"):  # of the catalogue, and as on the hub
        with pytest.raises(EdgespecError, match=r"no such file|does not exist|is not there"):
            Engine.load(Path(missing), store_home=tmp_path / "home")
    with pytest.raises(EdgespecError, match=r"fast"):
        Engine.load(profile=Path("fast"), store_home=tmp_path / "home")


@pytest.mark.parametrize("kind", [str, Path])
def test_a_home_may_be_a_folder(tiny: TinyModels, tmp_path: Path, kind: type) -> None:
    with Engine.load(str(tiny.target), draft="none", threads=1, store_home=kind(tmp_path)) as engine:
        assert engine.pair.home.root == tmp_path


@pytest.mark.parametrize("wrong", [None, 5, b"x", []])
def test_a_path_is_text(engine: Engine, wrong: Any) -> None:
    with engine.session() as session, pytest.raises(InvalidRequestError, match="must be text or a Path"):
        session.save(wrong)
    with pytest.raises(InvalidRequestError, match="must be text or a Path"):
        engine.restore(wrong)


@pytest.mark.parametrize("wrong", [None, 5, b"hello", ["hello"]])
def test_what_is_counted_is_text(engine: Engine, wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match="the text must be text, not") as raised:
        engine.count_tokens(wrong)
    assert raised.value.param == "text"


@pytest.mark.parametrize("wrong", ["100", 1.5, True, -1])
def test_room_for_a_branch_is_a_whole_number(engine: Engine, wrong: Any) -> None:
    with engine.session() as session, pytest.raises(InvalidRequestError, match="spare_tokens must be"):
        session.branch(spare_tokens=wrong)


@pytest.mark.parametrize("wrong", [None, 5, "hello", {"role": "user"}])
def test_earlier_messages_are_a_list(engine: Engine, wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match="messages must be a list"):
        engine.session(messages=wrong)


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_saving_through_a_link_replaces_the_file_behind_it(engine: Engine, tmp_path: Path) -> None:
    real, link = tmp_path / "real.session", tmp_path / "link.session"
    with engine.session() as session:
        session.save(real)
        link.symlink_to(real)
        answer(session.generate("hello", max_tokens=5))
        size = session.save(link)
        assert link.is_symlink()
        assert real.stat().st_size == size
        with engine.restore(link) as restored:
            assert restored.messages == session.messages


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such file names")
def test_a_file_name_need_not_be_utf8(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"b\xe4d.session")
    with engine.session() as session:
        session.save(path)
        with engine.restore(path) as restored:
            assert restored.messages == session.messages

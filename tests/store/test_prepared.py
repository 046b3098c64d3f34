"""Folders for prepared data of models outside the store: one per content, in limited number."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.files.home import Home
from edgespec.files.model_file import LocatedModel, read_model_file
from edgespec.runtimes.native.model import NativeSettings
from edgespec.runtimes.native.runtime import NATIVE_SIDECAR, NativeRuntime
from edgespec.runtimes.native.weights import NativeWeights
from edgespec.store.locate import Locator
from edgespec.store.prepared import MOST_BYTES, RECENT_S, prepared_folder, use_prepared
from edgespec.store.store import Store
from tests.support.kernel_calls import require_native
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "drafter.gguf", quant="Q4_0", width=128)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def located(home: Home, path: Path) -> LocatedModel:
    return Locator(store=Store(home)).locate_to_run(str(path))


def changed_behind_its_back(path: Path) -> None:
    """Change weights in the middle of a matrix and keep header, size and modification time."""
    before = path.stat()
    tensors = read_model_file(path).header.tensors
    matrix = next(tensor for tensor in tensors if tensor.name == "blk.0.ffn_down.weight")
    with path.open("r+b") as file:
        file.seek(matrix.offset + matrix.byte_count // 2)
        bits = file.read(512)
        file.seek(-len(bits), os.SEEK_CUR)
        file.write(bytes(bit ^ 1 for bit in bits))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(path: Path) -> None:
    other = path.with_name("other.gguf")
    other.write_bytes(path.read_bytes())
    status = path.stat()
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize("change", [changed_behind_its_back, replaced, longer])
def test_changed_file_content_gets_another_prepared_folder(
    home: Home, path: Path, change: Callable[[Path], None]
) -> None:
    before = located(home, path).prepared_folder
    assert before is not None
    assert before.parent == home.prepared
    assert located(home, path).prepared_folder == before
    change(path)
    assert located(home, path).prepared_folder != before
    assert not home.root.exists(), "finding a folder creates nothing"


def test_locate_alone_gives_an_outside_file_no_prepared_folder(home: Home, path: Path) -> None:
    assert Locator(store=Store(home)).locate(str(path)).prepared_folder is None


def test_a_deleted_file_has_no_prepared_folder(home: Home, path: Path) -> None:
    file = read_model_file(path)
    path.unlink()
    assert prepared_folder(home, file) is None


def test_prepared_weights_of_a_changed_file_are_never_reused(
    home: Home, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_native()
    relayed: list[object] = []
    relay = NativeWeights.relay
    monkeypatch.setattr(NativeWeights, "relay", lambda own, strip: relayed.append(strip) or relay(own, strip))

    def scores() -> bytes:
        file, settings = located(home, path), NativeSettings()
        expected = bool(relayed) and not changed
        assert NativeRuntime().is_prepared(file, settings) is expected
        with NativeRuntime().load(file, settings) as model, model.open(8) as sequence:
            return sequence.forward([5, 6, 7], 1).logits(0).tobytes()

    changed = False
    first = scores()
    count = len(relayed)
    assert count > 0
    assert scores() == first
    assert len(relayed) == count, "mapped"
    assert [each.name for each in home.prepared.glob("*/*")] == [NATIVE_SIDECAR]
    changed = True
    changed_behind_its_back(path)
    second = scores()
    assert len(relayed) == 2 * count, "laid out again"
    assert second != first
    assert len(list(home.prepared.iterdir())) == 2


def test_without_sidecars_no_prepared_weights_are_stored(home: Home, path: Path) -> None:
    require_native()
    file, settings = located(home, path), NativeSettings(sidecar=False)
    NativeRuntime().load(file, settings).close()
    assert not NativeRuntime().is_prepared(file, settings)
    assert not home.root.exists()


def test_prepared_weights_are_not_stored_in_a_read_only_home(tmp_path: Path, path: Path) -> None:
    require_native()
    (tmp_path / "file").write_text("not a folder")
    file = located(Home(tmp_path / "file" / "home"), path)
    NativeRuntime().load(file, NativeSettings()).close()
    assert not NativeRuntime().is_prepared(file, NativeSettings())


def folder_of(home: Home, name: str, size: int, used_at: float) -> Path:
    folder = home.prepared / name
    folder.mkdir(parents=True)
    (folder / NATIVE_SIDECAR).write_bytes(bytes(size))
    os.utime(folder, (used_at, used_at))
    return folder


def test_the_least_recently_used_prepared_folder_is_removed_first(home: Home) -> None:
    for number in range(5):
        folder_of(home, f"old-{number}", 100, 1000.0 + number)
    use_prepared(home.prepared / "old-1", 300, 0.0)
    assert sorted(each.name for each in home.prepared.iterdir()) == ["old-1", "old-3", "old-4"]
    use_prepared(home.prepared / "old-3", 50, 0.0)
    assert [each.name for each in home.prepared.iterdir()] == ["old-3"], "recently used folders stay, however large"
    use_prepared(home.prepared / "new", 50, 0.0)
    assert [each.name for each in home.prepared.iterdir()] == []
    use_prepared(Home(home.root / "none").prepared / "new")
    defaults = inspect.signature(use_prepared).parameters
    assert defaults["most_bytes"].default == MOST_BYTES == 12 * 2**30


def test_prepared_folders_of_a_target_and_its_drafter_are_kept_together(home: Home) -> None:
    """Even if they are large: the drafter is used right after its target."""
    now = time.time()
    folder_of(home, "old", 100, now - RECENT_S - 60)
    for name in ("target", "drafter"):
        folder_of(home, name, 100, now - RECENT_S - 60)
    use_prepared(home.prepared / "target", 250)
    use_prepared(home.prepared / "drafter", 50)
    left = sorted(each.name for each in home.prepared.iterdir())
    assert "target" in left
    assert "old" not in left

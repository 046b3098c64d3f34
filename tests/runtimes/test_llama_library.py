"""Loading the native library: messages if it is missing, broken or old, and its identity if it loads."""

from __future__ import annotations

import ast
import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import edgespec
from edgespec.files.installation import install_command
from edgespec.runtimes.llama import library as llama_library
from edgespec.runtimes.llama.library import MINIMUM_VERSION, load

REPOSITORY = Path(edgespec.__file__).parent.parent

REPORT = """
from edgespec.errors import RuntimeUnavailableError
from edgespec.runtimes.llama.library import load
for _ in range(2):  # a failure is not remembered as a success
    try:
        load()
    except RuntimeUnavailableError as error:
        print(error.message)
        print(error.hint)
"""


def python(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter that searches ``folders`` first."""
    paths = [str(folder) for folder in (*folders, REPOSITORY)]
    code = f"import sys; sys.path[:0] = {paths!r}\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def stub(folder: Path, package: str, low_level: str = "") -> Path:
    """A folder with a stub ``llama_cpp``."""
    (folder / "llama_cpp").mkdir()
    (folder / "llama_cpp" / "__init__.py").write_text(package, encoding="utf-8")
    (folder / "llama_cpp" / "llama_cpp.py").write_text(low_level, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("package", "says"),
    [
        ('raise ModuleNotFoundError("No module named llama_cpp")', "not installed"),
        ('raise ImportError("DLL load failed while importing")', "DLL load failed"),
        ('raise OSError("libgomp.so.1: cannot open shared object file")', "libgomp.so.1"),
        ('raise FileNotFoundError("Shared library with base name llama not found")', "base name llama"),
        ('raise RuntimeError("Failed to load shared library")', "Failed to load shared library"),
        ('raise AttributeError("undefined symbol: llama_new")', "undefined symbol: llama_new"),
        ('from . import llama_cpp\n__version__ = "0.2.1"', "0.2.1 lacks llama_"),
        ('__version__ = "0.0.1"', "llama_cpp"),  # another package of that name
        ("", "llama_cpp"),
    ],
)
def test_an_unusable_llama_cpp_package_raises_the_reason_and_a_hint(tmp_path: Path, package: str, says: str) -> None:
    done = python(REPORT, stub(tmp_path, package))
    assert (done.returncode, done.stderr) == (0, "")
    first, second = done.stdout.splitlines()[:2], done.stdout.splitlines()[2:]
    assert first == second
    message, hint = first
    assert says in message
    assert install_command("llama") in hint


def test_a_build_without_a_newer_function_is_reported_as_too_old(tmp_path: Path) -> None:
    names = [name for name in llama_library._NEEDED if name != "llama_memory_seq_rm"]
    low_level = "\n".join(f"{name} = None" for name in names)
    done = python(REPORT, stub(tmp_path, 'from . import llama_cpp\n__version__ = "0.3.9"', low_level))
    assert "llama-cpp-python 0.3.9 lacks llama_memory_seq_rm" in done.stdout
    assert MINIMUM_VERSION in done.stdout.splitlines()[0]


def test_loading_checks_for_every_native_function_that_is_called() -> None:
    """Otherwise an old build would fail in the middle of an answer."""
    package = Path(edgespec.__file__).parent
    called = set()
    for path in [*(package / "runtimes" / "llama").glob("*.py"), package / "text" / "tokenizers" / "llama_cpp.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr.lower().startswith(("llama_", "ggml_")):
                owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
                if owner in ("api", "_api"):
                    called.add(node.attr)
    assert "llama_decode" in called
    assert called <= set(llama_library._NEEDED)


def test_importing_the_runtimes_does_not_load_native_code() -> None:
    done = python("import sys, edgespec.runtimes.llama.model; print('llama_cpp' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


def test_the_cpu_is_among_the_devices() -> None:
    cpus = [device for device in load().devices() if device.kind == "cpu"]
    assert [device.name for device in cpus] == ["cpu"]
    assert cpus[0].total_bytes > 0
    assert cpus[0].free_bytes <= cpus[0].total_bytes
    assert len({device.name for device in load().devices()}) == len(load().devices())


def test_the_build_identity_is_the_same_in_every_process() -> None:
    build = load().build
    assert build.startswith(load().version + "+")
    assert len(build.rsplit("+", 1)[1]) == 12
    done = python("from edgespec.runtimes.llama.library import load; print(load().build)")
    assert done.stdout.strip() == build, done.stderr


def test_the_build_identity_follows_the_native_code(tmp_path: Path) -> None:
    class Api:
        class _lib:  # noqa: N801 - the name llama-cpp-python gives it
            _name = str(tmp_path / "libllama.so")

    def identity(version: str = "1.0", features: bytes = b"AVX = 1") -> str:
        return llama_library._build_identity(Api, version, features)

    (tmp_path / "libllama.so").write_bytes(b"code")
    (tmp_path / "libggml-cpu.so").write_bytes(b"kernels")
    (tmp_path / "unrelated.txt").write_bytes(b"")
    before = identity()
    (tmp_path / "unrelated.txt").write_bytes(b"changed")
    assert identity() == before
    assert identity("1.1") != before
    assert identity(features=b"AVX = 0") != before
    (tmp_path / "libggml-cpu.so").write_bytes(b"other kernels")
    assert identity() != before


def test_parallel_first_calls_load_the_library_once() -> None:
    code = """
import threading
import edgespec.runtimes.llama.library as library
import llama_cpp
count, real = [0], library._install_log_bridge
def counting(api):
    count[0] += 1
    return real(api)
library._install_log_bridge = counting
found, barrier = [], threading.Barrier(8)
def call():
    barrier.wait()
    found.append(library.load())
threads = [threading.Thread(target=call) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(count[0], len(found), len(set(map(id, found))))
"""
    done = python(code)
    assert done.stdout.split() == ["1", "8", "1"], done.stderr


# ------------------------------------------------------------------------------------------- log bridge


class LogApi:
    """The two functions the bridge needs; ``say`` plays native code that logs."""

    def __init__(self) -> None:
        self.say = None

    def llama_log_callback(self, function: object) -> object:
        return function

    def llama_log_set(self, function: object, _data: object) -> None:
        self.say = function


@pytest.fixture
def api() -> LogApi:
    api = LogApi()
    llama_library._install_log_bridge(api)
    return api


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records if record.name == "edgespec.native"]


def test_native_lines_keep_their_level(api: LogApi, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="edgespec.native")
    for level in (1, 2, 3, 4, 0, 77):
        api.say(level, b"line %d\n" % level, None)
    assert lines(caplog) == [
        (logging.DEBUG, "line 1"),
        (logging.INFO, "line 2"),
        (logging.WARNING, "line 3"),
        (logging.ERROR, "line 4"),
        (logging.DEBUG, "line 0"),
        (logging.DEBUG, "line 77"),
    ]


def test_fragments_of_native_log_lines_are_joined(api: LogApi, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="edgespec.native")
    api.say(3, b"loading ", None)
    api.say(5, b"100 % of \xff", None)
    assert lines(caplog) == []
    api.say(5, b" %s\n", None)
    api.say(5, None, None)
    api.say(2, b"next\n", None)
    assert lines(caplog) == [(logging.WARNING, "loading 100 % of � %s"), (logging.INFO, "next")]


def test_a_failing_handler_does_not_reach_native_code(api: LogApi) -> None:
    class Failing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise ZeroDivisionError

    logger, handler = logging.getLogger("edgespec.native"), Failing()
    logger.addHandler(handler)
    try:
        api.say(4, b"boom\n", None)
    finally:
        logger.removeHandler(handler)


def test_lines_of_many_threads_all_arrive(api: LogApi, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="edgespec.native")
    threads = [
        threading.Thread(target=lambda own=own: [api.say(2, b"%d-%d\n" % (own, i), None) for i in range(50)])
        for own in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(text for _, text in lines(caplog)) == sorted(f"{own}-{i}" for own in range(4) for i in range(50))

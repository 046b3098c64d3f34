"""Bad input, one case after the other: a sentence and a hint, no traceback, the right exit code, nothing lost."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.engine.engine import Engine
from edgespec.files.home import Home
from tests.support.command_line import InProcess, run_cli, run_here, run_python, status_lines
from tests.support.tiny_models import TinyModels, put_into_store

STORED = "smollm2-135m"

# The check of a bad file may take this long, a hostile template a little longer.
CHECK_S, TEMPLATE_S = 1.0, 8.0


# ---------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("command", ["generate", "chat", "verify"])
@pytest.mark.parametrize("offline", [True, False])
def test_an_unknown_model_name_is_an_error_with_a_hint(command: str, offline: bool, here: InProcess) -> None:
    prompt = ("hi",) if command == "generate" else ()
    options = ("--offline",) if offline else ()
    result = here(command, *prompt, "--target", "qwen2.5-coder-1b", *options, stdin="hi\n")
    result.failed_well("qwen2.5-coder-1b")
    assert "did you mean qwen2.5-coder-1.5b" in result.hint
    assert result.out == ""


def test_pull_and_rm_reject_an_unknown_model_name(here: InProcess) -> None:
    pulled = here("pull", "smollm2")
    pulled.failed_well("smollm2")
    assert "smollm2-135m" in pulled.hint
    for action in ("rm", "verify"):
        here("models", action, "smollm2").failed_well("smollm2 is not on this machine")
    assert not here.home.exists()


def test_an_unknown_suite_is_an_error_with_a_hint(here: InProcess) -> None:
    known = "built-in suites: ours, quick, long-prompts, short, verify; give a file by its path"
    for name, hint in (("quik", f"did you mean quick? {known}"), ("zzz", known)):
        unknown = here("bench", "--suite", name)
        unknown.failed_well(f"there is no suite '{name}'", code=2)
        assert unknown.hint == hint
    for command in ("bench", "verify"):
        absent = here(command, "--suite", "nope.jsonl")
        absent.failed_well("the suite nope.jsonl cannot be read", code=2)
        assert absent.hint == "give the path of a file with a prompt a line, or JSON Lines"


def missing(_data: bytes) -> bytes | None:
    return None


def empty(_data: bytes) -> bytes:
    return b""


def another_format(data: bytes) -> bytes:
    return b"PK\x03\x04" + data[4:]


def cut_in_the_header(data: bytes) -> bytes:
    return data[:2000]


def cut_in_the_weights(data: bytes) -> bytes:
    return data[: len(data) - 100_000]


def huge_count(data: bytes) -> bytes:
    """Announces 2^60 tensors."""
    return data[:8] + (2**60).to_bytes(8, "little") + data[16:]


def text_file(_data: bytes) -> bytes:
    return b"version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 12345\n"


DAMAGES = [missing, empty, another_format, cut_in_the_header, cut_in_the_weights, huge_count, text_file]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_file_is_rejected_before_loading(
    tiny: TinyModels, here: InProcess, tmp_path: Path, damage: Callable[[bytes], bytes | None]
) -> None:
    path = tmp_path / "damaged.gguf"
    data = damage(tiny.target.read_bytes())
    if data is not None:
        path.write_bytes(data)
    here("generate", "hi", "--target", "/nowhere/missing.gguf")  # imports what there is to import
    started = time.process_time()
    result = here("generate", "hi", "--target", path)
    assert time.process_time() - started < CHECK_S
    result.failed_well()
    assert f"edgespec: {path}: " in result.err
    assert result.hint


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES[1:])
def test_a_damaged_model_file_never_reaches_native_code(
    tiny: TinyModels, home: Home, tmp_path: Path, damage: Callable[[bytes], bytes | None]
) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damage(tiny.target.read_bytes()) or b"")
    code = (
        "import sys, edgespec\n"
        "from edgespec.runtimes.llama.library import load\n"
        "api = load().api\n"
        "def never(*_): raise SystemExit('native code was asked')\n"
        "api.llama_model_load_from_file = api.llama_model_init_from_user = never\n"
        "for options in ({'target': sys.argv[1]}, {'target': sys.argv[2], 'draft': sys.argv[1]}):\n"
        "    try: edgespec.Engine.load(**options)\n"
        "    except edgespec.ModelFileError as error: print(error.message)\n"
    )
    result = run_python(code, path, tiny.target, home=home.root)
    assert (result.code, result.err) == (0, "")
    assert [line.startswith(str(path)) for line in result.out.splitlines()] == [True, True]


def test_a_stored_model_whose_file_changed_is_an_error(tiny: TinyModels, here: InProcess) -> None:
    path = put_into_store(Home(here.home), STORED, tiny.target.read_bytes())
    before = here("generate", "hi", "--target", STORED, "--max-tokens", "3")
    assert before.code == 0, before.err
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    for arguments in (("generate", "hi", "--target", STORED), ("models", "verify", STORED)):
        result = here(*arguments)
        result.failed_well("has changed since it was stored", str(path))
        assert f"edgespec pull {STORED}" in result.hint
    assert path.read_bytes() == bytes(data), "the file is the user's to look at"


@pytest.mark.slow
@pytest.mark.parametrize("command", [("pull", STORED), ("generate", "hi", "--target", STORED)])
def test_offline_commands_use_no_network(command: tuple[str, ...], home: Home) -> None:
    # Nothing listens there: an attempt would fail in another way than the sentence below.
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}
    result = run_here(*command, "--offline", home=home.root, env=env)
    result.failed_well(STORED)
    assert result.hint
    assert "refused" not in result.err


@pytest.mark.parametrize("command", [("generate", "hello"), ("chat",), ("bench",), ("plan",), ("calibrate",)])
def test_a_named_drafter_with_another_vocabulary_is_an_error(
    command: tuple[str, ...], tiny: TinyModels, here: InProcess
) -> None:
    options = ("--target", tiny.target, "--draft", tiny.stranger)
    here(*command, *options).failed_well("cannot be used", "stranger has another vocabulary", "--draft auto", code=2)


# --------------------------------------------------------------------------------------------------- prompts


def test_a_prompt_longer_than_the_context_is_an_error_and_the_chat_continues(
    tiny: TinyModels, here: InProcess
) -> None:
    options = ("--target", tiny.target, "--draft", "none", "--context", "128", "--max-tokens", "4", "--verbose")
    result = here("generate", "-", *options, stdin="water " * 300)
    result.failed_well("exceeds the available context size of 128 tokens")
    assert "--context" in result.hint
    chat = here("chat", *options, stdin="hello\n" + "water " * 300 + "\nhello\n")
    chat.failed_well("exceeds the available context size of 128 tokens")
    assert len(status_lines(chat.err)) == 2, "the chat continues"


@pytest.mark.slow
def test_input_that_is_not_utf8_is_an_error_and_the_chat_continues(tiny: TinyModels, home: Home) -> None:
    options = ("--target", tiny.target, "--draft", "none", "--max-tokens", "4", "--verbose")
    strict = {"PYTHONIOENCODING": "utf-8:strict"}
    for env in ({}, strict):
        result = run_here("generate", "-", *options, home=home.root, stdin=b"text\xff\xfe", env=env)
        result.failed_well("not UTF-8", "byte 4", code=2)
        assert result.hint
        chat = run_here("chat", *options, home=home.root, stdin=b"hello\n\xff\xfe\nhello\n", env=env)
        chat.failed_well("not UTF-8")
        assert len(status_lines(chat.err)) == 2, "the chat continues"


@pytest.mark.parametrize("wrong", [("",), ("hi", "--stop", "")])
def test_an_impossible_request_is_rejected_before_a_model_is_loaded(
    wrong: tuple[str, ...], tiny: TinyModels, here: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_arguments: object, **_settings: object) -> None:
        raise AssertionError("it is loaded")

    monkeypatch.setattr(Engine, "load", load)
    here("generate", *wrong, "--target", tiny.target).failed_well("empty", code=2)


def test_a_missing_argument_names_the_help_of_its_command(here: InProcess) -> None:
    for command in ("rm", "verify"):
        result = here("models", command)
        result.failed_well("MODEL", code=2)
        assert result.hint == f"see `edgespec models {command} --help`"
    assert here("pull").hint == "see `edgespec pull --help`"
    assert here("models", "--nonsense").hint == "see `edgespec models --help`"


def test_pull_does_not_suggest_models_that_cannot_be_downloaded(here: InProcess) -> None:
    result = here("pull", "nope")
    result.failed_well("no model is called 'nope'")
    assert "path" not in result.hint
    assert "hf:ORG/REPO works too" in result.hint
    assert "A path to a .gguf file" in here("generate", "hi", "--target", "nope").hint


def test_an_empty_prompt_is_an_error_in_generate_and_skipped_in_chat(tiny: TinyModels, here: InProcess) -> None:
    options = ("--target", tiny.target, "--draft", "none", "--max-tokens", "4", "--verbose")
    for prompt in ("", "  \n", "-"):
        result = here("generate", prompt, *options)
        result.failed_well("the prompt is empty", code=2)
        assert result.hint
    chat = here("chat", *options, stdin="\n   \n")
    assert (chat.code, chat.out) == (0, "")
    assert not status_lines(chat.err)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="arguments are text, not bytes, on this system")
def test_prompts_and_paths_may_contain_bytes_that_are_not_utf8(tiny: TinyModels, home: Home) -> None:
    options = ("--target", str(tiny.target), "--draft", "none", "--max-tokens", "4")
    spoken = run_cli("generate", "caf\udce9", *options, "--json", home=home.root)
    assert spoken.code == 0
    assert spoken.json["text"]
    result = run_cli("generate", "hi", "--target", "/nowhere/caf\udce9.gguf", "--json", home=home.root)
    result.failed_well("no such file")
    assert result.json["error"]["type"] == "ModelFileError"


# -------------------------------------------------------------------------------------------------- profiles


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("contxt = 512\n", ("contxt", "context")),
        ("context = 'many'\n", ("context",)),
        ("context = [\n", ("mine.toml", "TOML")),
        ("inherits = 'laptp'\n", ("laptp", "laptop")),
        ("inherits = 'mine'\n", ("mine", "inherits from itself")),
        ("\x00", ("mine.toml",)),
    ],
)
def test_an_invalid_profile_is_an_error_that_names_the_problem(
    content: str, words: tuple[str, ...], here: InProcess
) -> None:
    (here.home / "profiles").mkdir(parents=True)
    ((here.home / "profiles") / "mine.toml").write_text(content)
    here("generate", "hi", "--profile", "mine").failed_well(*words, code=2)
    here("profiles", "show", "mine").failed_well(*words, code=2)
    listed = here("profiles")
    assert listed.code == 0
    assert "laptop" in listed.out


def test_an_unknown_profile_name_is_an_error_with_a_hint(here: InProcess) -> None:
    result = here("generate", "hi", "--profile", "laptob")
    result.failed_well("laptob", code=2)
    assert "laptop" in result.hint


# ------------------------------------------------------------------------------------------------- templates


HOSTILE = {
    "endless": "{% for i in range(1000000000) %}{% for j in range(1000000000) %}{% endfor %}{% endfor %}",
    "huge": "{% for i in range(100000) %}{{ 'x' * 100000 }}{% endfor %}",
    "attributes": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "syntax": "{% for message in messages %}",
    "refusing": "{{ raise_exception('no such role') }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_chat_template_is_an_error(name: str, tiny: TinyModels, here: InProcess) -> None:
    target = tiny.with_template(f"hostile-{name}", HOSTILE[name])
    options = ("--target", target, "--draft", "none", "--max-tokens", "3")
    started = time.process_time()
    result = here("generate", "hi", *options, "--json")
    assert time.process_time() - started < TEMPLATE_S
    result.failed_well("no such role" if name == "refusing" else "template")
    assert len(result.err) < 2000
    assert result.json["error"]["type"] == "TemplateError"
    assert here("generate", "hi", *options, "--raw").code == 0


# ----------------------------------------------------------------------------------------------------- places


@pytest.mark.slow
def test_model_paths_may_have_spaces_and_non_ascii_letters(tiny: TinyModels, tmp_path: Path) -> None:
    folder = tmp_path / "my models – Übung 模型 🙂"
    folder.mkdir()
    target = folder / "ein Modell (1).gguf"
    shutil.copyfile(tiny.target, target)
    home = folder / "home of mine"
    result = run_here("generate", "hi", "--target", target, "--json", "--max-tokens", "3", home=home)
    assert result.code == 0, result.err
    assert result.json["plan"]["target"]["model"] == "ein Modell (1)"
    calibrated = run_here("calibrate", "--quick", "--target", target, "--json", home=home)
    assert calibrated.code == 0, calibrated.err
    assert list((home / "measurements").glob("widths-*.json"))
    relative = run_here(
        "chat", "--target", f"./{target.name}", "--max-tokens", "3", home=home, cwd=folder, stdin="hi\n"
    )
    assert relative.code == 0, relative.err


@pytest.mark.slow
def test_a_home_folder_that_is_a_file_is_an_error(tiny: TinyModels, tmp_path: Path) -> None:
    (tmp_path / "user").write_text("not a folder")
    env = {"HOME": str(tmp_path / "user"), "USERPROFILE": str(tmp_path / "user"), "XDG_DATA_HOME": ""}
    options = ("generate", "hi", "--target", tiny.target, "--max-tokens", "3")
    with_ours = run_here(*options, home=tmp_path / "ours", env=env)
    assert with_ours.code == 0, with_ours.err
    without = run_here(*options, home=tmp_path, env={**env, "EDGESPEC_HOME": ""})
    assert without.code == 0, without.err
    assert without.out == with_ours.out
    result = run_here("pull", STORED, "--offline", home=tmp_path, env={**env, "EDGESPEC_HOME": ""})
    result.failed_well()
    for arguments in (("models",), ("doctor",), options):
        run_here(*arguments, home=tmp_path / "user").failed_well("is a file, not a folder", "EDGESPEC_HOME")


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="this user may write everywhere, read-only or not"
)
def test_with_a_read_only_home_generate_works_and_pull_fails(tiny: TinyModels, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o500)
    try:
        options = ("generate", "hi", "--target", tiny.target, "--max-tokens", "3")
        assert run_here(*options, home=tmp_path / "ours", env={"HOME": str(locked)}).code == 0
        assert run_here(*options, home=locked / "ours").code == 0
        run_here("pull", STORED, "--offline", home=locked / "ours").failed_well()
    finally:
        locked.chmod(0o700)


def test_an_invalid_suite_file_is_an_error(tiny: TinyModels, here: InProcess, tmp_path: Path) -> None:
    for content in ("", "not json\n", '{"id": "1"}\n'):
        suite = tmp_path / "suite.jsonl"
        suite.write_text(content)
        result = here("verify", "--target", tiny.target, "--suite", suite, "--json")
        result.failed_well("suite.jsonl", code=2)
        assert json.loads(result.out)["error"]["message"]

"""The program, run as a user or a script runs it."""

from __future__ import annotations

import ctypes
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec import __version__
from edgespec.cli.terminal.interrupts import Interrupts
from edgespec.cli.terminal.output import note, prepare_streams, read_input, stderr_is_rich
from edgespec.errors import InvalidRequestError
from edgespec.files.home import Home
from tests.support.command_line import InProcess, command, environment, run_cli, run_here, status_lines, succeeded
from tests.support.reply_keys import PLAN, check_generate, check_keys
from tests.support.tiny_models import TinyModels, context_of, put_into_store

# ------------------------------------------------------------------------------------------------- generate


@pytest.mark.slow
def test_generate_prints_the_answer_and_nothing_else(pair: tuple[str, ...], root: Path) -> None:
    result = succeeded(run_cli("generate", "hello", *pair, "--max-tokens", "9", "--verbose", home=root))
    found = succeeded(run_cli("generate", "hello", *pair, "--max-tokens", "9", "--json", home=root)).json
    check_generate(found)
    assert result.out == found["text"] + "\n"
    assert len(status_lines(result.err)) == 1
    assert "cut at the token limit" in result.err
    assert found["finish_reason"] == "length"


@pytest.mark.slow
def test_generate_reads_stdin(pair: tuple[str, ...], root: Path) -> None:
    found = [
        succeeded(run_here("generate", prompt, *pair, "--max-tokens", "9", home=root, stdin=stdin)).out
        for prompt, stdin in (("two\nlines 你好", ""), ("-", "two\nlines 你好"))
    ]
    assert found[0] == found[1]


def test_generate_plain_and_every_depth_are_equal(
    pair: tuple[str, ...], here: InProcess, loaded_drafter: None
) -> None:
    base = ("generate", "hello world", *pair, "--json", "--max-tokens", "80", "--temperature", "0.8", "--seed", "5")
    plain = here(*base, "--plain").json
    deep = here(*base, "--depth", "5").json
    auto = here(*base, "--depth", "auto").json
    assert plain["token_ids"] == deep["token_ids"] == auto["token_ids"]
    assert plain["stats"]["proposed"] == 0
    assert here(*base, "--plain").json["plan"]["numeric_class"] == deep["plan"]["numeric_class"]  # which is known now
    if deep["plan"]["depth_cap"] > 0:
        assert deep["stats"]["accepted"] > 0
        assert deep["stats"]["rounds"] < plain["stats"]["rounds"]
    other_seed = here(*base[:-1], "6").json
    assert other_seed["token_ids"] != plain["token_ids"]
    rejection = here(*base, "--rule", "rejection", "--depth", "3").json
    assert len(rejection["token_ids"]) == 80


def test_a_random_seed_is_shown_and_reproduces_the_answer(pair: tuple[str, ...], here: InProcess) -> None:
    base = ("generate", "hello world", *pair, "--max-tokens", "20", "--temperature", "0.9")
    drawn = here(*base, "--json").json
    assert isinstance(drawn["seed"], int)
    told = here(*base, "--seed", str(drawn["seed"]), "--verbose")
    assert told.out == drawn["text"] + "\n"
    assert f"seed {drawn['seed']}" in " ".join(told.err.split())
    greedy = here(*base[:-1], "0", "--verbose")
    assert "seed" not in greedy.err
    assert here(*base[:-1], "0", "--json").json["seed"] is None


def test_generate_raw_continues_the_text_up_to_the_stop_string(pair: tuple[str, ...], here: InProcess) -> None:
    raw = here("generate", "hello", *pair, "--raw", "--json", "--max-tokens", "20").json
    chat = here("generate", "hello", *pair, "--json", "--max-tokens", "20").json
    assert raw["stats"]["prompt_tokens"] < chat["stats"]["prompt_tokens"]
    assert raw["token_ids"] != chat["token_ids"]
    stop = chat["text"][10:14]
    options = ("--stop", stop, "--stop", "never", "--max-tokens", "20")
    stopped = here("generate", "hello", *pair, "--json", *options).json
    assert stopped["text"] == chat["text"][: chat["text"].index(stop)]
    assert stopped["finish_reason"] == "stop"


def test_generate_continues_text_without_a_template(tiny: TinyModels, here: InProcess) -> None:
    target = ("--target", str(tiny.without_template), "--draft", "none", "--max-tokens", "5")
    here("generate", "hello", *target).failed_well("no chat template", "--raw")
    assert succeeded(here("generate", "hello", *target, "--raw")).out.strip()


# ------------------------------------------------------------------------------------------- other commands


def test_models_json_lists_stored_and_known_models(tiny: TinyModels, here: InProcess) -> None:
    stored = put_into_store(Home(here.home), "smollm2-135m", tiny.target.read_bytes())
    found = succeeded(here("models", "--json")).json
    assert found["schema_version"] == 1
    rows = {row["name"]: row for row in found["models"]}
    assert rows["smollm2-135m"]["on_disk"] is True
    assert rows["smollm2-135m"]["path"] == str(stored)
    assert rows["smollm2-135m"]["bytes"] == stored.stat().st_size
    assert rows["qwen2.5-coder-1.5b"] == {
        "name": "qwen2.5-coder-1.5b",
        "kind": "model",
        "on_disk": False,
        "bytes": 1117320768,
        "licence": "Apache-2.0",
        "drafter": "qwen2.5-coder-0.5b",
    }
    table = succeeded(here("models")).out
    assert "humaneval" not in table, "a prompt set is not a model"
    assert re.search(r"^smollm2-135m +on disk +< 1 MB", table, re.MULTILINE)
    assert re.search(r"^qwen2.5-coder-1.5b +not here +1117 MB", table, re.MULTILINE)
    # A stored model is used by its name, and removed by it.
    spoken = here("generate", "hi", "--target", "smollm2-135m", "--max-tokens", "4")
    assert succeeded(spoken).out.strip()
    assert succeeded(here("models", "verify", "smollm2-135m")).out
    removed = succeeded(here("models", "rm", "smollm2-135m", "--json")).json
    assert removed["removed"] == "smollm2-135m"
    assert not stored.exists()


def test_profiles_lists_the_built_in_profiles(here: InProcess) -> None:
    home = here.home
    (home / "profiles").mkdir(parents=True)
    (home / "profiles" / "mine.toml").write_text('description = "my own"\ncontext = 512\n')
    (home / "profiles" / "bad.toml").write_text("contxt = 512\n")
    found = succeeded(here("profiles", "--json")).json
    rows = {row["name"]: row for row in found["profiles"]}
    assert rows.keys() >= {"default", "laptop", "mine", "bad"}
    assert rows["mine"]["description"] == "my own"
    assert "contxt" in rows["bad"]["problem"]
    assert "laptop" in succeeded(here("profiles")).out


def test_profiles_show_prints_the_origin_of_each_value(
    here: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = here.home
    (home / "profiles").mkdir(parents=True)
    (home / "profiles" / "mine.toml").write_text("context = 512\n")
    (tmp_path / "edgespec.toml").write_text("[profile]\nlookup = false\n")
    monkeypatch.setenv("EDGESPEC_DEPTH", "3")
    monkeypatch.setenv("EDGESPEC_RUNTIME", "native")
    found = succeeded(here("profiles", "show", "mine", "--json")).json["profile"]
    assert found["runtime"] == {"value": "native", "origin": "EDGESPEC_RUNTIME"}
    assert found["draft_runtime"] == {"value": "auto", "origin": "built-in default.toml"}
    assert found["context"] == {"value": 512, "origin": str(home / "profiles" / "mine.toml")}
    assert found["lookup"] == {"value": False, "origin": str(tmp_path / "edgespec.toml")}
    assert found["depth"] == {"value": 3, "origin": "EDGESPEC_DEPTH"}
    assert found["target"] == {"value": "qwen2.5-coder-1.5b", "origin": "built-in default.toml"}
    text = succeeded(here("profiles", "show", "mine")).out
    assert re.search(r"^depth +=.*3 .*# EDGESPEC_DEPTH$", text, re.MULTILINE)
    assert re.search(r'^runtime += "native" +# EDGESPEC_RUNTIME$', text, re.MULTILINE)
    assert re.search(r'^draft_runtime += "auto" +# built-in default.toml$', text, re.MULTILINE)
    monkeypatch.setattr("edgespec.profiles.profile._is_trusted", lambda _file: False)
    assert f"{tmp_path / 'edgespec.toml'} is another user's file" in succeeded(here("profiles", "show", "mine")).err


@pytest.mark.slow
def test_doctor_reports_machine_runtimes_and_models(tmp_path: Path) -> None:
    found = succeeded(run_cli("doctor", "--json", home=tmp_path / "home")).json
    assert found["schema_version"] == 1
    assert found["edgespec"] == __version__
    assert found["machine"]["physical_cores"] >= 1
    assert found["machine"]["total_memory_bytes"] >= found["machine"]["available_memory_bytes"] > 0
    assert found["runtimes"]["llama"]["available"] is True
    assert any(device["name"] == "cpu" for device in found["runtimes"]["llama"]["devices"])
    assert found["bandwidth"] == {"read_bytes_per_s": None}  # not measured, not guessed
    assert found["disk"]["home"] == str(tmp_path / "home")
    assert found["disk"]["free_bytes"] > 0
    assert not (tmp_path / "home").exists(), "looking creates nothing"
    text = succeeded(run_cli("doctor", home=tmp_path / "home")).out
    assert "llama.cpp  works" in text


@pytest.mark.slow
def test_verify_finds_identical_tokens(pair: tuple[str, ...], here: InProcess, tmp_path: Path) -> None:
    suite = tmp_path / "suite.jsonl"
    lines = [{"id": f"p{n}", "category": "chat", "prompt": text} for n, text in enumerate(("hello", "water", "你好"))]
    suite.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    options = (*pair, "--suite", str(suite), "--depth", "2", "--max-tokens", "25")
    found = succeeded(here("verify", *options, "--prompts", "2", "--json")).json
    assert found["schema_version"] == 1
    assert found["level"] in ("W", "N")
    assert (found["prompts"], found["identical"], found["divergences"]) == (2, 2, [])
    assert found["width_classes"][0]["widths"][0][0] == 1
    check_keys(found["plan"], PLAN)
    text = succeeded(here("verify", *options))
    assert "the promise holds" in text.out
    assert "3 of 3 prompts" in text.out
    without = here("verify", "--target", pair[1], "--depth", "0", "--suite", suite)
    without.failed_well("no speculation to verify")


# ------------------------------------------------------------------------------------- a text that is piped in


def test_generate_puts_piped_text_before_the_prompt(pair: tuple[str, ...], root: Path) -> None:
    options = (*pair, "--max-tokens", "4", "--json")
    asked = succeeded(run_here("generate", "What is it?", *options, home=root, stdin="\ufeffThe text.\nIts end.\n\n"))
    whole = succeeded(run_here("generate", "The text.\nIts end.\n\nWhat is it?", *options, home=root)).json
    assert asked.json["stats"]["prompt_tokens"] == whole["stats"]["prompt_tokens"]
    assert asked.json["token_ids"] == whole["token_ids"]
    alone = succeeded(run_here("generate", "What is it?", *options, home=root, stdin=" \n")).json
    assert alone["stats"]["prompt_tokens"] < whole["stats"]["prompt_tokens"]
    dash = succeeded(run_here("generate", "-", *options, home=root, stdin="What is it?")).json
    assert dash["token_ids"] == alone["token_ids"]


def test_a_model_after_a_pipe_is_not_taken_for_the_prompt(
    tiny: TinyModels, here: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_TARGET", str(tiny.target))
    options = ("--draft", "none", "--max-tokens", "3")
    put_into_store(Home(here.home), "hf:org/repo", tiny.target.read_bytes())
    for name in ("qwen2.5-coder-0.5b", "org/repo", "hf:org/other", "ollama:mine:3b", str(tiny.ending)):
        refused = here("generate", name, *options, stdin="Name a bird.")
        refused.failed_well(f"{name} is a model, and one argument alone is the prompt", code=2)
        assert refused.hint == f"`edgespec generate {name} -` asks it; with `-m MODEL` the argument is the prompt"
    for prompt in ("and/or", "hf: what is it?", "bird", str(tiny.target.parent / "none.gguf")):
        assert succeeded(here("generate", prompt, *options, stdin="Name a bird.")).out
    assert succeeded(here("generate", "qwen2.5-coder-0.5b", *options)).out, "nothing is in the pipe"
    assert succeeded(here("generate", "smollm2-135m", "-m", tiny.target, *options, stdin="Name a bird.")).out
    assert succeeded(here("generate", tiny.target, "-", *options, stdin="Name a bird.")).out


@pytest.mark.parametrize("prompt", ["What is it?", "-"])
@pytest.mark.parametrize(
    ("stdin", "said"),
    [
        (b"\xff\xfe binary", "stdin is not UTF-8 text (byte 0)"),
        (b"PK\x03\x04\x00zip", "stdin is not text (a zero at byte 4)"),
        (b"a" * (16_000_000 + 1), "stdin holds more than 16 MB"),
    ],
    ids=["not-utf-8", "binary", "too-long"],
)
def test_piped_input_that_is_not_text_is_an_error(tmp_path: Path, prompt: str, stdin: bytes, said: str) -> None:
    """Told before a model is loaded for it."""
    result = run_here("generate", prompt, "--target", tmp_path / "absent.gguf", home=tmp_path / "home", stdin=stdin)
    result.failed_well(said, code=2)


def test_piped_text_of_windows_programs_is_read_or_the_hint_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    def piped(data: bytes) -> str:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return read_input(Interrupts())

    for encoding in ("utf-16", "utf-8-sig"):
        assert piped("né 猫".encode(encoding)) == "né 猫"
    assert piped("\ufeffné".encode("utf-16-be")) == "né"
    with pytest.raises(InvalidRequestError, match="not text"):
        piped("né\0猫".encode("utf-16"))
    for platform, word in (("win32", "chcp 65001"), ("linux", "iconv")):
        monkeypatch.setattr(sys, "platform", platform)
        with pytest.raises(InvalidRequestError) as caught:
            piped("né".encode("cp850"))
        assert word in str(caught.value.hint)


def test_generate_on_a_terminal_reports_how_much_it_read_from_stdin(
    here: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who loops over a file sees why the loop ends after one answer."""
    from edgespec.cli import generate

    asked = ("generate", "What is it?", "--target", "absent.gguf")
    assert "from stdin" not in here(*asked, stdin="text").err
    monkeypatch.setattr(generate, "stderr_columns", lambda: 80)
    assert "read 4 characters from stdin" in here(*asked, stdin="text\n").err
    assert "from stdin" not in here(*asked).err
    assert "from stdin" not in here(*asked, "--json", stdin="text").err


@pytest.mark.slow
def test_generate_reports_that_it_waits_for_a_pipe_to_end(pair: tuple[str, ...], root: Path) -> None:
    process = subprocess.Popen(
        command("generate", "What is it?", *pair, "--max-tokens", "3"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(root),
    )
    assert process.stdin is not None
    assert process.stderr is not None
    assert process.stderr.readline() == b"waiting for the end of stdin; add `</dev/null` to read nothing from stdin\n"
    process.stdin.write(b"The text.")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.strip()


# ------------------------------------------------------------------------------- manners of the whole program


@pytest.mark.slow
def test_version_option_prints_the_version() -> None:
    done = subprocess.run(command("--version"), capture_output=True, text=True, check=True)
    assert done.stdout == f"edgespec {__version__}\n"


COMMANDS = (
    (),
    ("chat",),
    ("generate",),
    ("pull",),
    ("models",),
    ("models", "rm"),
    ("models", "verify"),
    ("calibrate",),
    ("export",),
    ("verify",),
    ("doctor",),
    ("profiles",),
    ("profiles", "show"),
)


@pytest.mark.parametrize("name", COMMANDS, ids=lambda name: " ".join(name) or "edgespec")
def test_help_fits_a_narrow_terminal(name: tuple[str, ...], here: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    result = succeeded(here(*name, "--help"))
    assert result.out.startswith("Usage: edgespec")
    assert result.err == ""
    assert max(map(len, result.out.splitlines())) <= 50  # the option parser folds no narrower
    assert not here.home.exists()


@pytest.mark.slow
def test_help_and_usage_errors_in_a_separate_process(tmp_path: Path) -> None:
    assert succeeded(run_cli("chat", "--help", home=tmp_path / "home")).out.startswith("Usage: edgespec chat")
    run_cli("chat", "--nonsense", home=tmp_path / "home").failed_well("--nonsense", code=2)


def test_generate_takes_the_model_before_the_prompt_and_the_prompt_from_a_pipe(
    tiny: TinyModels, here: InProcess
) -> None:
    options = ("--draft", "none", "--max-tokens", "3", "--json")
    answers = [
        succeeded(here("generate", tiny.target, "hello", *options)),
        succeeded(here("generate", "hello", "-m", tiny.target, *options)),
        succeeded(here("generate", "--model", tiny.target, *options, stdin="hello")),
        succeeded(here("generate", "hello", "--target", tiny.target, *options)),
    ]
    assert len({tuple(each.json["token_ids"]) for each in answers}) == 1
    asked = ("generate", tiny.target, "hello", *options)
    told = succeeded(here(*asked, "--system", "be kind and be brief")).json
    assert told["stats"]["prompt_tokens"] > answers[0].json["stats"]["prompt_tokens"] + 4
    here(*asked, "--system", "be kind", "--raw").failed_well("--raw has no system message", code=2)
    here(*asked, "-m", tiny.target).failed_well("named twice", code=2)
    assert succeeded(here(*asked, "--plain")).json["plan"]["mode"] == "plain"


def test_a_context_that_the_model_does_not_have_is_named_on_stderr(tiny: TinyModels, here: InProcess) -> None:
    most = context_of(tiny.target)
    told = f"the context holds {most} tokens, all that the model was trained for: 99999 were asked for"
    options = (tiny.target, "--draft", "none", "--plain", "--json", "--context")
    for asked in ("99999", str(most)):
        result = succeeded(here("generate", options[0], "hello", "--max-tokens", "2", *options[1:], asked))
        assert (told in result.err) == (asked == "99999")
        assert result.json["plan"]["context_length"] == most


def test_old_commands_and_other_spellings_are_understood(here: InProcess) -> None:
    assert succeeded(here("version")).out == succeeded(here("--version")).out
    assert succeeded(here("history", "--json")).out == succeeded(here("memory", "--json")).out
    assert succeeded(here("learn", "--help")).out == succeeded(here("memory", "learn", "--help")).out
    assert succeeded(here("help")).out == succeeded(here("--help")).out
    assert succeeded(here("help", "memory", "learn")).out == succeeded(here("learn", "--help")).out
    assert succeeded(here("history", "clear")).err == "no answers are kept\n"
    result = here("profiles", "show", "laptop-battery")
    assert result.err.startswith("the profile laptop-battery is not listed any more; it stands for")
    assert "context             = 2048" in result.out


def test_near_misses_of_options_and_commands_are_named(here: InProcess) -> None:
    assert here("chat", "--contxt", "512").hint == "did you mean --context?"
    assert here("chat", "-t", "4").hint == "did you mean --threads?"
    assert here("generate", "--ctx-size", "512", "hi").hint == "did you mean --context?"
    assert here("doctor", "-t", "4").hint != "did you mean --threads?", "it has none"
    result = here("memory", "lern")
    assert result.hint == "see `edgespec memory --help`"
    assert "Did you mean 'learn'" in result.err


def test_no_arguments_show_the_help(tmp_path: Path) -> None:
    result = run_here(home=tmp_path / "home")
    assert result.code == 2
    assert result.err.startswith("Usage: edgespec")
    assert "hint:" not in result.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nonsense",), "nonsense"),
        (("generate",), "PROMPT"),
        (("generate", "hi", "--max-tokens", "0"), "--max-tokens must be at least 1, not 0"),
        (("generate", "hi", "--max-tokens", "many"), "--max-tokens must be a whole number, not 'many'"),
        (("generate", "hi", "--temperature", "hot"), "--temperature must be a number, not 'hot'"),
        (("generate", "hi", "--json=3"), "--json takes no value"),
        (("--version=3",), "--version takes no value"),
        (("generate", "hi", "--no-such-option"), "--no-such-option"),
        (("generate", "hi", "--temperature", "-1"), "temperature"),
        (("generate", "hi", "--top-p", "0"), "top_p"),
        (("generate", "hi", "--seed", "-1"), "seed"),
        (("generate", "hi", "--depth", "99"), "depth"),
        (("generate", "hi", "--rule", "other"), "rule"),
        (("generate", "hi", "--exactness", "other"), "exactness"),
        (("generate", "hi", "--raw", "--no-think"), "--raw has no thinking to leave out"),
        (("chat", "--context", "1"), "context"),
        (("models", "nonsense"), "nonsense"),
        (("pull", "hf:not a repo"), "repository"),
        (("pull", "./file.gguf"), "nothing to download"),
        (("pull", "org/repo/file.gguf"), "a file of the hub is hf:org/repo/file.gguf"),
        (("pull", "https://example.com/file.gguf"), "is not an address of the hub"),
        (("verify", "--suite", "missing.jsonl"), "missing.jsonl"),
    ],
)
def test_usage_errors_are_one_sentence_with_exit_code_2(
    arguments: tuple[str, ...], words: str, here: InProcess
) -> None:
    result = here(*arguments, "--json")
    result.failed_well(words, code=2)
    found = result.json
    assert found["schema_version"] == 1
    assert found["error"].keys() == {"type", "message", "hint"}
    assert found["error"]["type"] in ("InvalidRequestError", "ProfileError")
    assert found["error"]["message"] in result.err


@pytest.mark.slow
def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    arguments = ("generate", "hi", "--target", "missing.gguf")
    run_here(*arguments, home=tmp_path / "home").failed_well("missing.gguf")
    with_debug = run_here(*arguments, "--debug", home=tmp_path / "home")
    assert with_debug.code == 1
    assert "Traceback (most recent call last)" in with_debug.err
    assert "ModelFileError" in with_debug.err


def test_debug_shows_the_native_log(pair: tuple[str, ...], root: Path) -> None:
    root.mkdir(exist_ok=True)
    (root / "llama.toml").write_text('runtime = "llama"\n', encoding="utf-8")
    asked = ("generate", "hi", *pair, "--max-tokens", "2", "--profile", root / "llama.toml")
    result = succeeded(run_cli("--debug", *asked, home=root))
    assert "edgespec.native: llama_model_loader" in result.err
    assert "llama_model_loader" not in result.out


@pytest.mark.parametrize(
    ("asked", "here"),
    [
        ("run", "use `edgespec chat smollm2-135m`"),
        ("start", "use `edgespec serve smollm2-135m`"),
        ("list", "use `edgespec models`"),
        ("ls", "use `edgespec models`"),
        ("show", "use `edgespec models`, or `edgespec plan smollm2-135m` for one"),
        ("rm", "use `edgespec models rm smollm2-135m`"),
        ("download", "use `edgespec pull smollm2-135m`"),
        ("ps", "no model stays loaded when a command ends; `edgespec models` lists those on the disk"),
        ("stop", "no model stays loaded when a command ends; Ctrl-C ends `edgespec serve`"),
        ("create", "use a profile, which names a model and its settings"),
        ("cp", "use a profile, which names a model and its settings"),
        ("push", "use `edgespec export smollm2-135m --to gguf -o DIR`, and upload the files"),
    ],
)
def test_command_names_of_other_programs_hint_at_ours(tmp_path: Path, asked: str, here: str) -> None:
    result = run_here(asked, "smollm2-135m", home=tmp_path / "home")
    assert (result.code, result.out) == (2, "")
    assert f"no such command '{asked}'" in result.err
    assert result.hint.startswith(here)


def test_a_command_name_of_another_program_alone_hints_at_ours(here: InProcess) -> None:
    assert here("run").hint == "use `edgespec chat MODEL`"
    assert here("run", "a model.gguf").hint == "use `edgespec chat 'a model.gguf'`"


def test_a_profile_named_without_show_is_hinted_at(here: InProcess) -> None:
    assert here("profiles", "laptop").hint == "use `edgespec profiles show NAME`"


@pytest.mark.slow
def test_an_unexpected_exception_is_reported_in_one_sentence(tmp_path: Path) -> None:
    """Whatever goes wrong, a person sees a sentence, and a traceback only with --debug."""
    code = (
        "import sys; from edgespec.cli import models, app\n"
        "def fail(): raise ZeroDivisionError('by a test')\n"
        "models.home = fail\n"
        "sys.exit(app.run(sys.argv[1:]))"
    )
    for extra, traceback in (((), False), (("--debug",), True)):
        done = subprocess.run(
            [command()[0], "-c", code, "models", "--json", *extra],
            capture_output=True,
            text=True,
            env=environment(tmp_path),
            check=False,
        )
        assert done.returncode == 1
        assert "ZeroDivisionError: by a test" in done.stderr
        assert ("Traceback" in done.stderr) is traceback
        assert json.loads(done.stdout)["error"]["hint"]


@pytest.mark.slow
@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}, {"FORCE_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_escape_codes_without_a_terminal(pair: tuple[str, ...], root: Path, env: dict[str, str]) -> None:
    spoken = run_cli("chat", *pair, "--max-tokens", "3", home=root, stdin="hello\n/help\n", env=env)
    failed = run_cli("generate", "hi", "--target", "nonsense", home=root, env=env)
    for result in (spoken, failed):
        assert "\x1b" not in result.out + result.err
        assert "\r" not in result.out + result.err


@pytest.mark.slow
@pytest.mark.parametrize("command_name", ["models", "generate"])
def test_a_pipe_that_its_reader_closed_ends_silently(pair: tuple[str, ...], root: Path, command_name: str) -> None:
    arguments = {
        "models": ("models",),
        "generate": ("generate", "hello", *pair, "--max-tokens", "1500"),
    }[command_name]
    reading, writing = os.pipe()
    os.close(reading)  # the reader closes before anything is written
    try:
        done = subprocess.run(
            command(*arguments),
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=subprocess.PIPE,
            env=environment(root),
            check=False,
            text=True,
            timeout=60,
        )
    finally:
        os.close(writing)
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if not line.startswith("loading")]
    assert told == []


def test_head_ends_a_long_answer_early(pair: tuple[str, ...], root: Path) -> None:
    generate = shlex.join(command("generate", "hello", *pair, "--max-tokens", "1500"))
    script = f"{{ {generate}; echo code=$? >&2; }} | head -c 10"
    done = subprocess.run(["sh", "-c", script], capture_output=True, env=environment(root), timeout=60, check=False)
    assert len(done.stdout) == 10
    assert b"code=1" in done.stderr
    assert b"Traceback" not in done.stderr
    assert b"BrokenPipe" not in done.stderr


@pytest.mark.parametrize(
    ("is_terminal", "chosen", "written"),
    [(False, None, "né 猫".encode()), (True, None, b"n\xe9 ?"), (False, "cp1252", b"n\xe9 ?")],
)
def test_a_file_or_pipe_gets_utf_8_on_windows(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, chosen: str | None, written: bytes
) -> None:
    class Pipe(io.BytesIO):
        def isatty(self) -> bool:
            return is_terminal

    data = Pipe()
    stdout = io.TextIOWrapper(data, encoding="cp1252")
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    if chosen is not None:
        monkeypatch.setenv("PYTHONIOENCODING", chosen)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert prepare_streams()
    stdout.write("né 猫")
    stdout.flush()
    assert data.getvalue() == written


@pytest.mark.parametrize("obeys", [True, False])
def test_windows_classic_console_is_asked_to_obey_escape_codes(monkeypatch: pytest.MonkeyPatch, obeys: bool) -> None:
    class Console(io.StringIO):
        def isatty(self) -> bool:
            return True

        def fileno(self) -> int:
            return 2

    modes = {72: 3}

    def read(console: ctypes.c_void_p, mode: Any) -> int:
        mode._obj.value = modes[console.value or 0]
        return 1

    def change(console: ctypes.c_void_p, mode: int) -> int:
        modes.update({console.value or 0: mode} if obeys else {})
        return int(obeys)

    kernel = SimpleNamespace(GetConsoleMode=read, SetConsoleMode=change)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(get_osfhandle=lambda descriptor: 70 + descriptor))
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel), raising=False)
    stderr = Console()
    monkeypatch.setattr(sys, "stderr", stderr)
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert stderr_is_rich() == obeys
    assert modes == {72: 7 if obeys else 3}
    note("words", dim=True)
    assert ("\x1b[" in stderr.getvalue()) == obeys


@pytest.mark.slow
@pytest.mark.parametrize(("redirection", "code"), [(">&-", 1), ("<&-", 0), ("2>&-", 0), ("<&- 2>&-", 0)])
def test_commands_survive_closed_standard_streams(
    pair: tuple[str, ...], root: Path, redirection: str, code: int
) -> None:
    line = shlex.join(command("generate", "hello", *pair, "--max-tokens", "3"))
    done = subprocess.run(
        ["sh", "-c", f"{line} {redirection}"], capture_output=True, env=environment(root), timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
    assert b"Traceback" not in done.stderr
    assert bool(done.stdout) is (code == 0)


@pytest.mark.slow
def test_characters_that_the_output_encoding_lacks_become_question_marks(pair: tuple[str, ...], root: Path) -> None:
    """An ASCII terminal shows ``?``; JSON loses nothing, since it can spell every character."""
    env = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    options = ("generate", "hello", *pair, "--max-tokens", "60")
    text = succeeded(run_cli(*options, home=root, env=env)).out
    found = succeeded(run_cli(*options, "--json", home=root, env=env)).json
    assert not found["text"].isascii()
    assert text == found["text"].encode("ascii", "replace").decode() + "\n"

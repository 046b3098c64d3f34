"""``chat`` with its lines on stdin: answers, slash commands, and what a script gets."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from edgespec.cli.chat import chat_commands
from tests.support.command_line import run_cli, run_here, status_lines, succeeded
from tests.support.reply_keys import check_generate
from tests.support.tiny_models import TinyModels


@pytest.mark.slow
def test_chat_answers_each_line_of_stdin(pair: tuple[str, ...], root: Path) -> None:
    options = (*pair, "--max-tokens", "6", "--depth", "0", "--verbose")
    result = succeeded(run_cli("chat", *options, home=root, stdin="hello\n\nwhat is water\n"))
    first, second = status_lines(result.err)
    assert re.fullmatch(r"\d+\.\d tok/s · cut at the token limit · no guesses: .+", first)
    assert re.fullmatch(r"\d+\.\d tok/s · cut at the token limit", second), "the reason for no guesses is shown once"
    alone = succeeded(run_cli("generate", "hello", *pair, "--max-tokens", "6", home=root))
    assert result.out.startswith(alone.out)
    assert len(result.out) > len(alone.out) + 3
    assert result.out.endswith("\n")
    assert "> " not in result.err


@pytest.mark.slow
def test_chat_takes_several_lines_between_triple_quotes(pair: tuple[str, ...], root: Path) -> None:
    stdin = (
        '"""first line\nsecond line"""\n"""\n/help is not a command here\n"""\n"""one line"""\n"""never closed\nends'
    )
    result = succeeded(run_here("chat", *pair, "--max-tokens", "4", "--json", home=root, stdin=stdin))
    answers = [json.loads(line) for line in result.out.splitlines()]
    assert len(answers) == 4
    same = run_here("generate", "first line\nsecond line", *pair, "--max-tokens", "4", "--json", home=root).json
    assert same["token_ids"] == answers[0]["token_ids"]
    assert same["stats"]["prompt_tokens"] == answers[0]["stats"]["prompt_tokens"]


def test_chat_runs_slash_commands(pair: tuple[str, ...], root: Path) -> None:
    stdin = (
        "\ufeff/stats\nhello\n/stats\n/plan why\n/clear\nhello\n/nonsense\n/clera\n/sta\n/hel\n/quit\nnever asked\n"
    )
    result = succeeded(run_here("chat", *pair, "--max-tokens", "5", "--verbose", home=root, stdin=stdin))
    assert len(status_lines(result.err)) == 2
    first, second = result.out[: len(result.out) // 2], result.out[len(result.out) // 2 :]
    assert first == second  # after /clear the same question is the first one again
    for words in (
        "no answer yet",
        "answer         5 tokens, ",
        "the conversation was cleared",
        "/nonsense is not a command; /help lists them",
        "/clera is not a command; did you mean /clear?",
        "/clear ",
    ):
        assert words in result.err
    assert re.search(r"^- target on cpu, 1 thread$", result.err, re.MULTILINE)


def test_chat_undoes_and_retries_answers(pair: tuple[str, ...], root: Path) -> None:
    stdin = "/retry\nhello\n/retry\nwhat is water\n/undo\nwhat is water\n/undo\n/undo\n/undo\n"
    result = succeeded(run_here("chat", *pair, "--max-tokens", "5", "--json", home=root, stdin=stdin))
    hello, again, water, retried = (json.loads(line) for line in result.out.splitlines())
    assert again["token_ids"] == hello["token_ids"], "greedy"
    assert retried["token_ids"] == water["token_ids"]
    assert retried["stats"]["prompt_tokens"] == water["stats"]["prompt_tokens"] > hello["stats"]["prompt_tokens"]
    for words in (
        "there is no answer to try again",
        "greedy decoding gives the same answer",
        "undone: what is water",
        "undone: hello",
        "there is nothing to undo",
    ):
        assert words in result.err


def test_chat_uses_the_given_sampling_settings(pair: tuple[str, ...], root: Path) -> None:
    options = ("--max-tokens", "12", "--json", "--temperature", "0.9", "--top-k", "50", "--seed", "7")
    change = "/undo\n/set SEED none\n/set top_p 0.9\n/set temperature 0\n"
    stdin = f"hello\n/undo\n/set seed 8\nhello\n{change}hello\n/set\n"
    result = succeeded(run_here("chat", *pair, *options, home=root, stdin=stdin))
    first, second, greedy = (json.loads(line)["token_ids"] for line in result.out.splitlines())
    asked = ("generate", "hello", *pair, *options)
    assert first == run_here(*asked, home=root).json["token_ids"] != second
    assert second == run_here(*asked[:-1], "8", home=root).json["token_ids"]
    assert greedy == run_here("generate", "hello", *pair, *options[:3], home=root).json["token_ids"]
    assert re.search(r"^temperature +0\.0$", result.err, re.MULTILINE)
    assert re.search(r"^seed +random for each answer$", result.err, re.MULTILINE)


def test_the_longest_answer_can_be_set_in_a_chat(pair: tuple[str, ...], root: Path) -> None:
    stdin = "hello\n/set max-tokens 3\nhello\n/more\n/set max_tokens none\n/set\n"
    result = succeeded(run_here("chat", *pair, "--max-tokens", "5", "--json", home=root, stdin=stdin))
    assert [len(json.loads(line)["token_ids"]) for line in result.out.splitlines()] == [5, 3, 3]
    assert re.search(r"^max-tokens +3$", result.err, re.MULTILINE)
    assert re.search(r"^max-tokens +as the context allows$", result.err, re.MULTILINE)


def test_undo_and_more_are_about_the_last_prompt_also_if_it_was_not_answered(
    pair: tuple[str, ...], root: Path
) -> None:
    """The answer before it, which was cut, is neither removed nor continued."""
    options = ("--context", "256", "--max-tokens", "5", "--json")
    stdin = "hello\n" + "water " * 500 + "\n/more\n/retry\n/undo\n/retry\n/undo\n"
    result = run_here("chat", *pair, *options, home=root, stdin=stdin)
    found = [json.loads(line) for line in result.out.splitlines()]
    assert [sorted(each.keys() & {"text", "error"}) for each in found] == [["text"], *3 * [["error"]], ["text"]]
    assert found[4]["token_ids"] == found[0]["token_ids"]
    assert "asked again: water water" in result.err
    assert "undone: water water" in result.err
    assert "undone: hello" in result.err


@pytest.mark.slow
def test_slash_model_continues_the_chat_with_another_model(tiny: TinyModels, root: Path) -> None:
    """The conversation is read by it; what was set stays; one that cannot be used changes nothing."""
    options = ("--target", tiny.target, "--draft", "none", "--max-tokens", "5", "--temperature", "0", "--json")
    broken, silent = root / "absent.gguf", tiny.without_template
    stdin = (
        f"hello\n/model {broken}\n/model ~unknown-user/x.gguf\n/model {silent}\n/model\n"
        f'/model "{tiny.ending}"\n/set seed 7\n'
        f"what is water\n/model {tiny.target}\n/set\n/undo\nwhat is water\n"
    )
    result = run_here("chat", *options, home=root, stdin=stdin)
    assert result.code == 1
    hello, *refused, other, back = (json.loads(line) for line in result.out.splitlines())
    assert [each.keys() for each in refused] == [{"schema_version", "error"}] * 3
    assert [each["plan"]["target"]["model"] for each in (hello, other, back)] == ["target", "ending", "target"]
    assert other["stats"]["prompt_tokens"] > hello["stats"]["prompt_tokens"] + 5, "it read the turn before"
    assert other["stats"]["prompt_tokens"] == back["stats"]["prompt_tokens"]
    for words in (
        f"{broken}: no such file",
        "~unknown-user/x.gguf",
        "without-template has no chat template",
        "target is the model",
        "ending continues the conversation",
        "target continues the conversation",
    ):
        assert words in result.err, words
    assert re.search(r"^seed +7$", result.err, re.MULTILINE)


def test_copy_takes_the_whole_of_an_answer_that_was_continued(
    pair: tuple[str, ...], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if another answer came between."""
    copied = list[str]()

    def copy(text: str) -> str:
        copied.append(text)
        return "copied"

    monkeypatch.setattr(chat_commands, "copy", copy)
    stdin = "hello\nwhat is water\n/undo\n/copy\n/more\n/copy\n"
    result = succeeded(run_here("chat", *pair, "--max-tokens", "3", "--json", home=root, stdin=stdin))
    hello, _water, more = (json.loads(line)["text"] for line in result.out.splitlines())
    assert copied == [hello, hello + more]


def test_copy_and_guesses_need_a_terminal(pair: tuple[str, ...], root: Path) -> None:
    stdin = "/copy\nhello\n/copy\n/guesses\n"
    result = succeeded(run_here("chat", *pair, "--max-tokens", "3", home=root, stdin=stdin))
    for words in ("no answer yet", "this terminal has no clipboard", "this terminal shows no colours"):
        assert words in result.err
    assert "\x1b" not in result.out + result.err


@pytest.mark.parametrize("command_name", ["chat", "generate"])
def test_no_think_without_effect_is_reported(pair: tuple[str, ...], root: Path, command_name: str) -> None:
    prompt = () if command_name == "chat" else ("hello",)
    options = (command_name, *prompt, *pair, "--max-tokens", "3", "--json")
    stdin = "hello\n" if command_name == "chat" else ""
    found = succeeded(run_here(*options, "--no-think", home=root, stdin=stdin))
    assert "--no-think has no effect: the template of target has no switch for thinking" in found.err
    plain = succeeded(run_here(*options, home=root, stdin=stdin))
    assert found.json["token_ids"] == plain.json["token_ids"]
    assert found.json["reasoning"] is None
    assert "--no-think" not in plain.err


@pytest.mark.parametrize("command_name", ["chat", "generate", "plan"])
def test_the_threads_option_sets_the_targets_threads(tiny: TinyModels, root: Path, command_name: str) -> None:
    prompt = ("hello",) if command_name == "generate" else ()
    short = () if command_name == "plan" else ("--max-tokens", "3")
    options = (command_name, *prompt, "--target", tiny.target, "--draft", "none", "--json", *short, "--threads", "2")
    found = succeeded(run_here(*options, home=root, stdin="hello\n" if command_name == "chat" else "")).json
    assert found["plan"]["target"]["threads"] == 2
    run_here(*options[:-1], "none", home=root).failed_well("threads", code=2)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set warmth 1", "there is no setting 'warmth'"),
        ("/set temprature 1", "did you mean temperature?"),
        ("/set seed x", "seed must be a whole number, got 'x'"),
        ("/set top-p hot", "top-p must be a number, got 'hot'"),
        ("/set temperature", "/set temperature takes one value"),
        ("/set temperature -1", "temperature cannot be -1.0"),
        ("/set max-tokens 0", "max-tokens must be at least 1, got 0"),
    ],
)
def test_a_wrong_value_of_slash_set_is_reported_in_one_sentence(
    pair: tuple[str, ...], root: Path, line: str, words: str
) -> None:
    result = run_here("chat", *pair, "--max-tokens", "3", home=root, stdin=f"{line}\nhello\n")
    result.failed_well(words)
    assert result.out.strip(), "the prompt after it is answered"


def test_slash_system_changes_the_system_message(pair: tuple[str, ...], root: Path) -> None:
    stdin = "/system\nhello\n/undo\n/system be kind and be brief\nhello\n/undo\n/system none\nhello\n"
    result = succeeded(run_here("chat", *pair, "--max-tokens", "3", "--json", home=root, stdin=stdin))
    without, with_one, removed = (json.loads(line)["stats"]["prompt_tokens"] for line in result.out.splitlines())
    assert with_one > without + 4
    assert removed == without
    assert "there is no system message" in result.err
    assert "system message: be kind and be brief" in result.err


def test_a_prompt_that_starts_with_two_slashes_keeps_one(pair: tuple[str, ...], root: Path) -> None:
    options = (*pair, "--max-tokens", "3", "--json")
    result = succeeded(run_here("chat", *options, home=root, stdin="//help\n"))
    assert result.json["token_ids"] == run_here("generate", "/help", *options, home=root).json["token_ids"]


def test_chat_accepts_the_model_as_an_argument(tiny: TinyModels, root: Path) -> None:
    options = ("--draft", "none", "--max-tokens", "3", "--json")
    result = succeeded(run_here("chat", tiny.target, *options, home=root, stdin="hello\n"))
    named = run_here("generate", "hello", "--target", tiny.target, *options, home=root)
    assert result.json["token_ids"] == named.json["token_ids"]
    twice = run_here("chat", tiny.target, "--target", tiny.drafter, home=root)
    assert (twice.code, twice.out) == (2, "")
    assert "the model was named twice" in twice.err


def test_a_wrong_sampling_value_is_an_error_before_a_model_is_loaded(tmp_path: Path) -> None:
    result = run_here("chat", "--target", tmp_path / "absent.gguf", "--top-p", "2", home=tmp_path / "home")
    assert result.code == 2
    assert "top_p cannot be 2.0" in result.err


@pytest.mark.slow
def test_chat_json_prints_one_object_per_line(pair: tuple[str, ...], root: Path) -> None:
    result = succeeded(
        run_here(
            "chat", *pair, "--json", "--max-tokens", "30", "--depth", "4", home=root, stdin="hello\nmore\n/exit\n"
        )
    )
    answers = [json.loads(line) for line in result.out.splitlines()]
    assert len(answers) == 2
    for found in answers:
        check_generate(found)
        assert len(found["token_ids"]) == found["stats"]["emitted_tokens"] == 30
    assert answers[1]["stats"]["prompt_tokens"] > answers[0]["stats"]["prompt_tokens"] + 30
    assert not status_lines(result.err)


@pytest.mark.slow
def test_the_system_option_sets_the_system_message(pair: tuple[str, ...], root: Path) -> None:
    lengths = [
        run_here("chat", *pair, *options, "--json", "--max-tokens", "3", home=root, stdin="hello\n").json["stats"]
        for options in ((), ("--system", "be kind and be brief"))
    ]
    assert lengths[1]["prompt_tokens"] > lengths[0]["prompt_tokens"] + 4


@pytest.mark.slow
def test_chat_continues_after_a_prompt_that_fails(pair: tuple[str, ...], root: Path) -> None:
    stdin = "hello\n" + "water " * 500 + "\nhello again\n"
    result = run_cli("chat", *pair, "--context", "256", "--max-tokens", "5", "--json", home=root, stdin=stdin)
    assert result.code == 1
    found = [json.loads(line) for line in result.out.splitlines()]
    assert [sorted(each.keys() & {"text", "error"}) for each in found] == [["text"], ["error"], ["text"]]
    assert found[1]["error"]["type"] == "PromptTooLongError"
    assert found[2]["stats"]["cached_tokens"] > 0  # the first turn is still there

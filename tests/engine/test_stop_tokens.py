"""A stop text may name hidden tokens and stops in front of them, and tokens that a file calls text are text."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.engine.session import Session
from tests.support.scripted_gguf import write_scripted_gguf
from tests.support.tiny_models import TinyModels, answer, read_all, shown
from tests.support.vocabularies import CONTROL, USER_DEFINED

MARKER = ["Sure", "!", "<|im_start|>", "user", "More", " please", "<|im_end|>"]
WAYS = {"plain": {"depth": 0}, "drafts": {"depth": 4}}


@pytest.fixture(scope="module")
def marker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_gguf(tmp_path_factory.mktemp("scripted") / "marker.gguf", MARKER)


@pytest.mark.parametrize("mode", ["serial", "pipelined"])
@pytest.mark.parametrize(
    ("stop", "text", "found_stop"),
    [
        ((), "Sure!userMore please", None),
        (("<|im_start|>",), "Sure!", "<|im_start|>"),
        (("More", "<|im_start|>"), "Sure!", "<|im_start|>"),
        (("!", "<|im_start|>"), "Sure", "!"),
        (("<|im_start|>user",), "Sure!", "<|im_start|>user"),
        (("!<|im_start|>", "<|im_start|>"), "Sure", "!<|im_start|>"),
        ((" please<|im_end|>",), "Sure!userMore", " please<|im_end|>"),
        (("<|im_start|>assistant", "user<|im_start|>"), "Sure!userMore please", None),
        (("<|im_start|> ",), "Sure!userMore please", None),
        (("<|im_end|>", "<s>"), "Sure!userMore please", "<|im_end|>"),
    ],
)
def test_a_stop_text_that_names_a_hidden_token_ends_the_answer_in_front_of_it(
    tiny: TinyModels, marker: Path, stop: tuple[str, ...], text: str, found_stop: str | None, mode: str
) -> None:
    with tiny.load(marker, draft=str(marker), depth=4, mode=mode) as engine:
        for prompt, raw in (("Hi", False), ("x", True)):
            found = []
            for depth in (0, 4, None):
                with engine.session() as session:
                    events, done = read_all(session.generate(prompt, raw=raw, stop=stop, depth=depth))
                assert (done.text, shown(events), done.finish_reason) == (text, text, "stop")
                assert done.stop_text == found_stop
                found.append(done.token_ids)
            assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("stop", ["<|im_start|>", "<|im_start|>user", "<|im_start|><s>"])
def test_the_turn_after_such_a_stop_continues_the_conversation_without_the_token(
    tiny: TinyModels, tmp_path: Path, stop: str
) -> None:
    script = ["Sure", "!", "<|im_start|>", "<s>" if "<s>" in stop else "user", "More", "<|im_end|>"]
    path = write_scripted_gguf(tmp_path / "model.gguf", script)
    with tiny.load(path, draft="none") as engine, engine.session() as session:
        first = answer(session.generate("Hi", stop=[stop]))
        assert first.stop_text == stop
        assert session.messages[-1]["content"] == "Sure!"
        session.save(tmp_path / "saved")
        with engine.restore(tmp_path / "saved") as restored, engine.session() as fresh:
            earlier = list(session.messages)
            whole = answer(fresh.generate(messages=[*earlier, {"role": "user", "content": "Continue"}]))
            for own in (session, restored):
                second = answer(own.generate("Continue"))
                assert second.stats.prompt_tokens == whole.stats.prompt_tokens
                assert own._conversation.history == fresh._conversation.history  # the tokens are not public
                assert second.stats.cached_tokens >= first.stats.prompt_tokens


NAMES = ["</s>", "<EOT>", "<REPO>", "<|end|>", "<|eot_id|>", "[PAD]", "<|file_sep|>", "<|fim_prefix|>", "[EOS]"]


@pytest.mark.parametrize("name", NAMES)
def test_a_token_that_the_file_calls_text_does_not_end_answers_and_stays_in_prompts(
    tiny: TinyModels, tmp_path: Path, name: str
) -> None:
    script = ["before ", name, " after", "<|im_end|>"]
    path = write_scripted_gguf(tmp_path / "text.gguf", script, kinds={name: USER_DEFINED})
    with tiny.load(path, draft=str(path), depth=3) as engine, engine.session() as session:
        for depth in (0, 3):
            assert answer(session.generate("Hi", depth=depth)).text == f"before {name} after"
        assert answer(session.generate("Hi", stop=[name])).text == "before "
        with_name, without = (answer(session.generate(f"a{each}b", raw=True)) for each in (name, ""))
        assert with_name.stats.prompt_tokens == without.stats.prompt_tokens + 1
        token = engine.tokenizer.encode(name)
        assert engine.tokenizer.detokenize(token) == name


def test_a_control_token_with_a_well_known_name_still_ends_answers(tiny: TinyModels, tmp_path: Path) -> None:
    script = ["before ", "</s>", " after", "<|im_end|>"]
    path = write_scripted_gguf(tmp_path / "control.gguf", script, kinds={"</s>": CONTROL})
    with tiny.load(path, draft="none") as engine, engine.session() as session:
        assert answer(session.generate("Hi")).text == "before "


def conversation(session: Session) -> list[str]:
    return [message["content"] for message in session.messages]


def test_markup_in_a_conversation_is_read_again_unchanged(tiny: TinyModels, tmp_path: Path) -> None:
    script = ["before ", "</s>", " after", "<|im_end|>"]
    path = write_scripted_gguf(tmp_path / "text.gguf", script, kinds={"</s>": USER_DEFINED})
    with tiny.load(path, draft="none") as engine, engine.session() as session:
        first = answer(session.generate("strike <s>this</s>"))
        assert conversation(session) == ["strike <s>this</s>", "before </s> after"]
        assert answer(session.generate("again")).stats.cached_tokens >= first.stats.prompt_tokens

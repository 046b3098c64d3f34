"""Stop texts that name hidden tokens, over HTTP."""

from __future__ import annotations

from pathlib import Path

from edgespec.engine.engine import Engine
from edgespec.text.conversation.answer_parts import AnswerText
from edgespec.text.conversation.ends import ends_of
from tests.support.http_server import running
from tests.support.scripted_gguf import write_scripted_gguf
from tests.support.tiny_models import TinyModels


def test_a_stop_text_that_names_a_hidden_token_ends_chats_and_completions_before_it(
    tiny: TinyModels, tmp_path: Path
) -> None:
    marker = write_scripted_gguf(tmp_path / "m.gguf", ["Sure", "!", "<|im_start|>", "user", "More", "<|im_end|>"])
    with running(lambda: tiny.load(marker, draft="none")) as server:
        server.wait_until(lambda: server.service.keeper.state == "ready")
        chat = server.chat("Hi", stop="<|im_start|>", logprobs=True).json()["choices"][0]
        assert (chat["message"]["content"], chat["finish_reason"]) == ("Sure!", "stop")
        assert [each["token"] for each in chat["logprobs"]["content"]] == ["Sure", "!"]
        body = {"prompt": "x", "stop": ["<|im_start|>"], "logprobs": 0}
        (choice,) = server.post("/v1/completions", **body).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("Sure!", "stop")
        assert choice["logprobs"]["tokens"] == ["Sure", "!"]
        chat = server.chat("Hi", stop="<|im_start|>user", logprobs=True).json()["choices"][0]
        assert (chat["message"]["content"], chat["finish_reason"]) == ("Sure!", "stop")
        assert [each["token"] for each in chat["logprobs"]["content"]][:2] == ["Sure", "!"]
        chat = server.chat("Hi", stop="<|im_start|>assistant").json()["choices"][0]
        assert (chat["message"]["content"], chat["finish_reason"]) == ("Sure!userMore", "stop")


def test_a_blank_that_a_vocabulary_puts_behind_a_control_token_is_a_part_of_the_stop(engine: Engine) -> None:
    stop, tokenizer = "<|im_start|>user", engine.tokenizer
    text = AnswerText(tokenizer, ends_of(tokenizer, [stop], ()))
    fed = [text.feed(token) for token in tokenizer.encode(f"yes{stop}", special=True)]
    assert ("".join(shown for shown, _ in fed).strip(), fed[-1][1], text.stop_text) == ("yes", True, stop)

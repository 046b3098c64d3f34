"""Raw prompts that end inside a token: what the answer is, and that guesses change none of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done, Text
from edgespec.interfaces.drawing import are_allowed
from edgespec.text.conversation.healing import healing
from tests.engine.answers import whole_characters
from tests.support.kernel_calls import require_native
from tests.support.tiny_gguf import similar_drafter
from tests.support.tiny_models import TinyModels, answer, read_all, shown

# They end inside words of the vocabulary, in characters of two and three bytes, and in blanks.
PROMPTS = (
    "one tw",
    "the people of the wor",
    "one two one two one t",
    "a caf",
    "a café",
    "世",
    "now look at this: 🙂 and n",
    "first\n  ",
)
WAYS = ["serial", "pipelined"]


@pytest.fixture(scope="module", params=WAYS)
def healer(
    request: pytest.FixtureRequest, tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    require_native()
    drafter = similar_drafter(tiny.filling, tmp_path_factory.mktemp("healing") / "drafter.gguf", 0.2)
    with tiny.load(tiny.filling, draft=str(drafter), depth=3, mode=request.param) as engine:
        yield engine


def ask(engine: Engine, prompt: str, depth: int | None = 0, **settings: Any) -> Done:
    asked: dict[str, Any] = {"raw": True, "heal": True, "max_tokens": 24, "depth": depth, **settings}
    with engine.session() as session:
        return answer(session.generate(prompt, **asked))


def by_hand(engine: Engine, prompt: str, tokens: int) -> str:
    """The text behind the prompt, of the best tokens that agree with the end that is taken back and end nothing."""
    tokenizer = engine.tokenizer
    pending, said, left = tokenizer.encode(prompt, add_bos=True), b"", 0
    own = healing(tokenizer, engine.pair.spellings, pending)
    if own is not None:
        pending, left = pending[: -own.taken], len(own.text)
    with engine.pair.target.open(256) as sequence:
        while tokens:
            scores = sequence.forward(pending, 1).logits(0).copy()
            scores[list(tokenizer.stop_ids)] = -np.inf
            if own is not None and left > 0:
                mask = own.mask(len(own.text) - left)
                assert mask is not None
                scores[~are_allowed(mask, np.arange(len(scores)))] = -np.inf
            pending = [int(np.argmax(scores))]
            text = tokenizer.token_bytes(pending[0])
            said += text[max(0, left) :]
            left -= len(text)
            tokens -= left < 0 or not text
    return whole_characters(said)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_answer_continues_behind_the_prompt(healer: Engine, prompt: str) -> None:
    done = ask(healer, prompt, ignore_eos=True)
    assert done.text == by_hand(healer, prompt, 24)
    assert done.stats.emitted_tokens == 24 == len(done.token_ids)
    assert done.stats.prompt_tokens == len(healer.tokenizer.encode(prompt, add_bos=True))


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.9, top_k=20, repeat_penalty=1.2, seed=4),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_guesses_change_no_text(healer: Engine, sampling: Sampling) -> None:
    accepted = 0
    for prompt in PROMPTS:
        plain, planned, deep = (ask(healer, prompt, depth, sampling=sampling) for depth in (0, None, 2))
        assert plain.text == planned.text == deep.text
        assert plain.token_ids == planned.token_ids == deep.token_ids
        accepted += deep.stats.accepted
    assert accepted > 0 or healer.plan.depth_cap == 0


def test_copies_change_no_text(tiny: TinyModels) -> None:
    with tiny.load(tiny.filling, draft="none", depth=3, lookup=True) as engine:
        for prompt in PROMPTS:
            again = f"{prompt}{ask(engine, prompt).text}\n{prompt}"
            assert ask(engine, again).text == ask(engine, again, None).text


def test_the_pieces_are_the_text_and_log_probabilities_are_of_what_is_shown(healer: Engine) -> None:
    with healer.session() as session:
        for prompt in PROMPTS:
            events, done = read_all(session.generate(prompt, raw=True, heal=True, max_tokens=12, logprobs=3))
            assert shown(events) == done.text == ask(healer, prompt, max_tokens=12).text
            tokens = [token for event in events if isinstance(event, Text) for token in event.tokens]
            data = b"".join(healer.tokenizer.token_bytes(token.id)[token.held :] for token in tokens)
            assert whole_characters(data) == done.text
            assert all(token.held == 0 for token in tokens[1:])
            first = tokens[0]
            assert first.logprob is not None
            assert first.logprob == max(own.logprob or 0.0 for own in first.top)
            assert all(own.held == first.held for own in first.top)
        assert session.messages == ()


def test_a_prompt_that_is_cached_has_the_same_answer(healer: Engine) -> None:
    with healer.session() as session:
        for prompt in ("one two three t", "one two three te", "one two three t", "one two three"):
            found = answer(session.generate(prompt, raw=True, heal=True, max_tokens=24))
            assert found.token_ids == ask(healer, prompt).token_ids
            again = answer(session.generate(prompt, raw=True, heal=True, max_tokens=24))
            assert again.token_ids == found.token_ids
            assert 0 < again.stats.cached_tokens < again.stats.prompt_tokens


def test_stop_texts_and_least_tokens_are_those_of_the_answer(healer: Engine) -> None:
    whole = ask(healer, "one tw").text
    stop = whole[len(whole) // 2 :][:3]
    assert ask(healer, "one tw", stop=[stop]).text == whole[: whole.index(stop)]
    assert ask(healer, "one tw", stop=["one tw" + whole[:2]]).text == whole, (
        "a stop text does not begin in the prompt"
    )
    first = ask(healer, "one tw").token_ids[0]
    ended = ask(healer, "one tw", stop_token_ids=[first])
    assert (ended.text, ended.finish_reason) == ("", "stop")
    kept = ask(healer, "one tw", stop_token_ids=[first], min_tokens=4)
    assert kept.stats.emitted_tokens >= 4


def test_what_is_not_healed_is_continued_as_it_is(healer: Engine) -> None:
    tokens = healer.tokenizer.encode("one tw", add_bos=True)
    for prompt, settings in (
        (tokens, {}),
        ("one tw", {"suffix": " three"}),
        ("one tw", {"regex": "[a-z ]{1,9}"}),
        ("one tw<|im_end|>", {}),
        ("one", {}),
    ):
        found = []
        for heal in (True, False):
            with healer.session() as session:
                found.append(answer(session.generate(prompt, raw=True, heal=heal, max_tokens=8, **settings)))  # type: ignore[arg-type]
        assert found[0].token_ids == found[1].token_ids
    with healer.session() as session:
        plain = answer(session.generate("one tw", raw=True, max_tokens=24))
        assert plain.text != ask(healer, "one tw").text
        assert answer(session.generate(tokens, raw=True, max_tokens=24)).text == plain.text


def test_banned_tokens_are_not_used_to_spell_an_end(healer: Engine) -> None:
    spelled = healer.pair.spellings
    text = healer.tokenizer.token_bytes(healer.tokenizer.encode("one tw", add_bos=True)[-1])
    banned = spelled.longer(text)
    assert 0 < len(banned) < 300
    found = ask(healer, "one tw", sampling=Sampling(logit_bias=dict.fromkeys(banned, -100)))
    assert not set(banned) & set(found.token_ids)
    assert found.text


def test_an_end_that_may_not_fit_the_context_is_not_taken_back(tiny: TinyModels) -> None:
    with tiny.load(tiny.filling, draft="none", lookup=False, context=512) as engine, engine.session() as session:
        for words in range(120, 520, 7):
            prompt = "the " * words + "tw"
            length = len(engine.tokenizer.encode(prompt, add_bos=True))
            if length >= 512:
                break
            done = answer(session.generate(prompt, raw=True, heal=True, ignore_eos=True))
            assert done.stats.prompt_tokens == length
            assert done.finish_reason == "length"
            assert abs(done.stats.emitted_tokens - (512 - length)) <= len("the tw")

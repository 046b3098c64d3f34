"""Where an answer ends: stop tokens, a least number of tokens, and answers that the model does not end."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import pytest

from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Done
from edgespec.engine.pair.loaded_pair import Speculation
from edgespec.engine.session import Session
from edgespec.errors import ConstraintError, InvalidRequestError
from edgespec.export.onnx.export import export_onnx
from edgespec.export.provenance import Provenance
from edgespec.planning.depth.base import FixedDepth
from tests.support.kernel_calls import require_native
from tests.support.rewritten_gguf import rewrite_gguf
from tests.support.scripted_gguf import write_scripted_gguf
from tests.support.tiny_models import TinyModels, answer, read_all, shown

SAMPLINGS = [None, Sampling(temperature=1.0, seed=3), Sampling(temperature=0.9, rule="rejection", seed=4)]
WAYS = ["native", "native pipelined", "native with an onnx drafter", "llama", "onnx"]
PROMPTS = ("hello world", "the people of the world", "one two one two one")
# What a request may ask of an answer of at most 40 tokens.
ENDS: dict[str, dict[str, Any]] = {
    "least": {"min_tokens": 25},
    "ignored": {"ignore_eos": True},
    "both": {"min_tokens": 25, "ignore_eos": True},
}


@pytest.fixture(scope="module", params=WAYS)
def ending(
    request: pytest.FixtureRequest, tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """A model that ends its answers early, and the same model as its drafter."""
    runtime, _, mode = request.param.partition(" ")
    target, drafter = tiny.ending, tiny.ending
    if runtime == "native":
        require_native()
    if "onnx" in request.param:
        drafter = tmp_path_factory.mktemp("ends") / "onnx"
        export_onnx(tiny.ending, drafter, Provenance(name="onnx"), kept=None)
    ways: dict[str, object] = {"depth": 3, "mode": "serial" if "onnx" in mode else mode or "serial"}
    if runtime == "onnx":
        target = drafter
    else:
        ways |= {"runtime": runtime, "draft_runtime": "auto" if "onnx" in mode else runtime}
    with tiny.load(target, draft=str(drafter), **ways) as engine:
        assert engine.plan.target.runtime == runtime
        yield engine


def answers(engine: Engine, sampling: Sampling | None, **ends: Any) -> list[Done]:
    """An answer to each prompt, the same at every depth."""
    found = dict[int | None, list[Done]]()
    for depth in (0, None, 2):
        with engine.session() as session:
            found[depth] = [
                answer(session.generate(prompt, max_tokens=40, sampling=sampling, depth=depth, **ends))
                for prompt in PROMPTS
            ]
    if sampling is None or sampling.rule == "keyed":
        assert [done.token_ids for done in found[0]] == [done.token_ids for done in found[None]]
        assert [done.token_ids for done in found[0]] == [done.token_ids for done in found[2]]
    assert (sum(done.stats.accepted for done in found[2]) > 0) == (engine.plan.depth_cap > 0)
    return found[2]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "keyed", "rejection"])
def test_an_end_that_may_not_come_is_never_written_and_drafting_changes_no_text(
    ending: Engine, sampling: Sampling | None
) -> None:
    stops = ending.tokenizer.stop_ids
    free = answers(ending, sampling)
    if sampling is not None and sampling.rule == "keyed":
        assert any(done.finish_reason == "stop" and len(done.token_ids) < 25 for done in free), (
            "it makes a difference"
        )
    for ends in ENDS.values():
        least = 40 if "ignore_eos" in ends else 25
        for done in answers(ending, sampling, **ends):
            assert len(done.token_ids) >= least, ends
            assert not stops.intersection(done.token_ids[:least])
            assert done.finish_reason == ("length" if len(done.token_ids) == 40 else "stop")


def test_answers_that_are_decoded_together_keep_their_own_bans(tiny: TinyModels) -> None:
    require_native()
    ways = [{}, *ENDS.values()] * 2
    with tiny.load(tiny.ending, draft=str(tiny.ending), runtime="native", draft_runtime="native", depth=3) as engine:

        def ask(ends: dict[str, Any]) -> tuple[int, ...]:
            with engine.session() as session:
                return answer(session.generate(PROMPTS[0], max_tokens=40, sampling=SAMPLINGS[1], **ends)).token_ids

        alone = [ask(ends) for ends in ways]
        assert len(set(alone)) > 1
        with ThreadPoolExecutor(len(ways)) as threads:
            assert list(threads.map(ask, ways)) == alone


def test_a_ban_is_that_of_one_answer(ending: Engine) -> None:
    with ending.session() as session:
        free = answer(session.generate(PROMPTS[0], max_tokens=40))
        session.clear()
        answer(session.generate(PROMPTS[0], max_tokens=40, ignore_eos=True))
        session.clear()
        assert answer(session.generate(PROMPTS[0], max_tokens=40)).token_ids == free.token_ids


# ------------------------------------------------------------------------------------------- a scripted answer

SCRIPT = ["One", " two", " three", ".", " Four", " five", ".", "<|im_end|>"]


@pytest.fixture(scope="module")
def scripted(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A model that says "One two three." and then "One two three." again, for want of an end."""
    path = write_scripted_gguf(tmp_path_factory.mktemp("ends") / "scripted.gguf", [*SCRIPT[:4], "<|im_end|>"])
    with tiny.load(path, draft=str(path), depth=3) as engine:
        yield engine


@pytest.fixture
def said(scripted: Engine) -> Iterator[Session]:
    with scripted.session() as session:
        yield session


def token(engine: Engine, text: str) -> int:
    (found,) = engine.tokenizer.encode(text)
    return found


@pytest.mark.parametrize("depth", [0, 3])
def test_an_answer_ends_at_a_stop_token_which_is_not_shown(scripted: Engine, said: Session, depth: int) -> None:
    stop = token(scripted, " three")
    events, done = read_all(said.generate("Hi", stop_token_ids=[9, stop], depth=depth))
    assert (done.text, shown(events), done.finish_reason) == ("One two", "One two", "stop")
    assert done.token_ids[-1] == stop
    assert said.messages[-1]["content"] == "One two"
    assert answer(said.generate("Hi", depth=depth)).text == "One two three."


def test_the_turn_after_a_stop_token_is_that_of_the_text_without_it(scripted: Engine, said: Session) -> None:
    answer(said.generate("Hi", stop_token_ids=[token(scripted, " three")]))
    second = answer(said.generate("More"))
    with scripted.session() as fresh:
        whole = answer(fresh.generate(messages=[*said.messages[:2], {"role": "user", "content": "More"}]))
    assert whole.stats.prompt_tokens == second.stats.prompt_tokens


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize(
    ("least", "stop", "text"),
    [
        (None, ["two"], "One "),
        (0, ["two"], "One "),
        (1, ["two"], "One "),
        (2, ["two"], "One two three."),
        (2, [" two", "ee"], "One two thr"),
        (2, ["o thr"], "One tw"),
        (3, ["o thr"], "One two three."),
    ],
)
def test_a_stop_text_ends_no_answer_before_the_least_number_of_tokens(
    said: Session, least: int | None, stop: list[str], text: str, depth: int
) -> None:
    events, done = read_all(said.generate("Hi", stop=stop, min_tokens=least, depth=depth))
    assert (done.text, shown(events), done.finish_reason) == (text, text, "stop")


def test_a_stop_token_does_not_come_before_the_least_number_of_tokens(scripted: Engine, said: Session) -> None:
    stop = token(scripted, " two")
    done = answer(said.generate("Hi", stop_token_ids=[stop], min_tokens=6, max_tokens=12))
    assert stop not in done.token_ids[:6]
    assert len(done.token_ids) > 6


def test_an_ignored_end_that_the_caller_names_still_ends_the_answer(scripted: Engine, said: Session) -> None:
    (end,) = scripted.tokenizer.encode("<|im_end|>", special=True)
    assert end in scripted.tokenizer.stop_ids
    for ways in ({"stop_token_ids": [end]}, {"stop": ["<|im_end|>"]}):
        done = answer(said.generate("Hi", ignore_eos=True, max_tokens=12, **ways))
        assert (done.text, done.finish_reason) == ("One two three.", "stop")
        said.clear()
    done = answer(said.generate("Hi", ignore_eos=True, max_tokens=12))
    assert (len(done.token_ids), done.finish_reason) == (12, "length")
    said.clear()
    assert answer(said.generate("Hi", max_tokens=12)).finish_reason == "stop", "by default the model ends its answers"


@pytest.mark.parametrize("way", ["serial", "chains", "pipelined"])
def test_what_ends_an_answer_in_a_complete_form_is_found_with_guesses_as_without(
    tiny: TinyModels, tmp_path: Path, way: str
) -> None:
    """Behind the form's text the model's own end is the only token, and it is banned."""
    path = write_scripted_gguf(tmp_path / "scripted.gguf", [*SCRIPT[:4], "<|im_end|>"])
    regex, free = "One two three", {"ignore_eos": True}
    with tiny.load(path, draft=str(path), depth=3, mode="pipelined" if way == "pipelined" else "serial") as engine:
        (end,), three = engine.tokenizer.encode("<|im_end|>", special=True), token(engine, " three")
        ways: list[dict[str, Any]] = [
            {**free, "stop": ["three"]},
            {**free, "stop_token_ids": [three]},
            {"logit_bias": {end: -100}, "stop": ["three"]},
            {**free, "stop": ["three"], "temperature": 1.0, "seed": 3},
            {**free, "stop": ["three"], "temperature": 1.0, "seed": 3, "rule": "rejection"},
        ]
        drafters = engine.pair.drafters
        chains = Speculation(drafters=drafters, policy=FixedDepth(3), depth_cap=3, trees=False)
        for settings in ways:
            found = list[Done]()
            for depth in (0, 1, 3, None):
                with engine.session(_speculation=chains if way == "chains" else None) as session:
                    found.append(answer(session.generate("Hi", regex=regex, depth=depth, **settings)))
            assert {done.text.rstrip() for done in found} == {"One two"}
            assert len({(done.text, done.token_ids, done.finish_reason) for done in found}) == 1
            assert found[2].stats.accepted > 0
        for depth in (0, 3):
            with engine.session() as session:
                generation = session.generate("Hi", regex=regex, min_tokens=10, depth=depth)
                with pytest.raises(ConstraintError, match="allows none of the scored"):
                    answer(generation)
                assert session.messages[-1]["content"] == regex


def test_a_token_that_the_file_suppresses_is_never_drawn_unless_it_is_named(
    tiny: TinyModels, scripted: Engine, tmp_path: Path
) -> None:
    two = token(scripted, " two")
    path = write_scripted_gguf(tmp_path / "plain.gguf", [*SCRIPT[:4], "<|im_end|>"])
    keys = {"tokenizer.ggml.suppress_tokens": [two, 10**6]}
    path = rewrite_gguf(path, tmp_path / "suppressing.gguf", keys=keys)
    with tiny.load(path, draft=str(path), depth=3) as engine, engine.session() as session:
        assert engine.tokenizer.suppressed == {two}
        found = []
        for depth in (0, 3):
            found.append(answer(session.generate("Hi", max_tokens=12, depth=depth)).token_ids)
            session.clear()
        assert found[0] == found[1]
        assert two not in found[0]
        named = answer(session.generate("Hi", stop_token_ids=[two], max_tokens=12))
        assert named.token_ids[-1] == two


def test_an_end_that_the_file_lists_ends_an_answer_before_it(tiny: TinyModels, tmp_path: Path) -> None:
    script = ["Sure", "!", "<|handover|>", "More", "<|im_end|>"]
    kinds = {"<|handover|>": int(gguf.TokenType.CONTROL)}
    path = write_scripted_gguf(tmp_path / "plain.gguf", script, kinds=kinds)
    with tiny.load(path, draft="none") as engine:
        assert engine.ask("Hi") == "Sure!More", "no other name says that it is an end"
        (end,) = engine.tokenizer.encode("<|handover|>", special=True)
    listing = rewrite_gguf(path, tmp_path / "listing.gguf", keys={"tokenizer.ggml.eos_token_ids": [3, end]})
    with tiny.load(listing, draft="none") as engine, engine.session() as session:
        done = answer(session.generate("Hi"))
        assert (done.text, done.finish_reason, done.token_ids[-1]) == ("Sure!", "stop", end)


@pytest.mark.parametrize(
    ("wrong", "said_of_it"),
    [
        ({"min_tokens": -1}, "min_tokens must be 0 or more, not -1"),
        ({"min_tokens": 1.5}, "min_tokens must be a whole number, not float 1.5"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9, more than the 8 tokens of max_tokens"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a list of token ids, not int 3"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be a list of token ids, not list"),
        ({"stop_token_ids": [True]}, "stop_token_ids must be a list of token ids, not list"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids names token 1000000, and this model's tokens are 0 to"),
        ({"stop_token_ids": range(301)}, "stop_token_ids names 301 tokens"),
        ({"stop_token_ids": range(264), "min_tokens": 1}, "no token may begin the answer"),
    ],
)
def test_wrong_ends_are_refused_in_a_sentence(said: Session, wrong: dict[str, Any], said_of_it: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        said.generate("Hi", **wrong)
    assert raised.value.message.startswith(said_of_it)
    if "no token" not in said_of_it:
        assert raised.value.param in wrong


def test_as_many_tokens_may_be_asked_for_as_may_come(said: Session) -> None:
    done = answer(said.generate("Hi", min_tokens=8, max_tokens=8))
    assert (len(done.token_ids), done.finish_reason) == (8, "length")

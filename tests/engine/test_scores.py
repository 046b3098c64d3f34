"""Log-probabilities and bias of a session's answers: plain decoding's, bit for bit, one for each token of a Text."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from edgespec.decoding.sampling import Sampling
from edgespec.engine.engine import Engine
from edgespec.engine.events import Text, Token
from edgespec.engine.session import Session
from edgespec.errors import InvalidRequestError
from edgespec.files.gguf.header import read_header
from tests.engine.answers import SAMPLED
from tests.support.tiny_models import TinyModels, read_all, require_speculation


def found(session: Session, sampling: Sampling, depth: int | None, *, top: int | None) -> list[Token]:
    events, done = read_all(
        session.generate("hello world", max_tokens=40, sampling=sampling, depth=depth, logprobs=top)
    )
    texts = [event for event in events if isinstance(event, Text)]
    assert all((each.logprob is None) == (top is None) for text in texts for each in text.tokens)
    assert (done.stats.proposed > 0) == (depth != 0)
    session.clear()
    return [replace(each, guessed_by=None) for text in texts for each in text.tokens]


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=str)
def test_drafting_gives_the_log_probabilities_of_plain_decoding(
    engine: Engine, session: Session, sampling: Sampling
) -> None:
    require_speculation(engine, 3)
    plain = found(session, sampling, 0, top=2)
    assert len(plain) == 40
    assert found(session, sampling, 3, top=2) == plain
    for each in plain:
        best, second = (other.logprob for other in each.top)
        assert best is not None and second is not None and each.logprob is not None  # noqa: PT018
        assert best >= second
        assert best >= each.logprob > -math.inf
    if sampling.greedy:
        assert all((each.top[0].id, each.top[0].logprob) == (each.id, each.logprob) for each in plain)


def test_pipelined_decoding_gives_the_log_probabilities_of_plain_decoding(tiny: TinyModels) -> None:
    with tiny.load_speculating(mode="pipelined") as engine, engine.session() as session:
        assert engine.plan.mode == "pipelined"
        plain = found(session, SAMPLED, 0, top=0)
        assert found(session, SAMPLED, 3, top=0) == plain
        assert all(each.top == () for each in plain)


def test_without_asking_there_are_no_log_probabilities(session: Session) -> None:
    assert all(each.top == () for each in found(session, Sampling(), 3, top=None))


@pytest.mark.parametrize(
    ("logprobs", "said"),
    [
        (-1, "logprobs must be 0 or more, not -1"),
        (21, "logprobs can be at most 20, not 21"),
        (True, "logprobs must be a whole number, not bool True"),
        ("3", "logprobs must be a whole number, not str '3'"),
    ],
)
def test_a_wrong_number_of_log_probabilities_is_refused(session: Session, logprobs: int, said: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        session.generate("hello", logprobs=logprobs)
    assert str(raised.value).splitlines()[0].startswith(said)


def test_a_bias_changes_the_text_and_not_the_log_probabilities(engine: Engine, session: Session) -> None:
    require_speculation(engine, 3)
    free = found(session, Sampling(), 0, top=1)
    least = free[0].id
    biased = Sampling(logit_bias={least: -100})
    plain = found(session, biased, 0, top=1)
    assert least not in {each.id for each in plain}
    assert plain[0].top == free[0].top, "the target's own probabilities, before bias"
    assert found(session, biased, 3, top=1) == plain


def test_a_bias_for_a_token_that_the_model_does_not_have_is_refused(tiny: TinyModels, session: Session) -> None:
    size = read_header(tiny.target).vocabulary_size
    with pytest.raises(InvalidRequestError) as raised:
        session.generate("hello", sampling=Sampling(logit_bias={size: 1.0}))
    assert raised.value.message == f"logit_bias names token {size}, and this model's tokens are 0 to {size - 1}"
    session.generate("hello", sampling=Sampling(logit_bias={size - 1: 1.0})).close()

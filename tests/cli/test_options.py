"""Options that several commands share: records of options, and the commands that take them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from edgespec.cli.options import (
    DecodingFlags,
    GuessFlags,
    ModelFlags,
    SamplingFlags,
    SeededFlags,
    expanded,
    named_once,
)
from edgespec.decoding.sampling import Sampling
from edgespec.errors import InvalidRequestError

NAMES = ("profile", "target", "draft", "context", "depth", "exactness", "threads")


@pytest.mark.parametrize(("record", "count"), [(ModelFlags, 4), (GuessFlags, 6), (DecodingFlags, 7)])
def test_each_record_adds_options_and_none_is_given_by_default(record: Any, count: int) -> None:
    assert tuple(inspect.signature(record).parameters) == NAMES[:count]
    assert record().given() == {}


def test_only_given_options_replace_the_usual_sampling() -> None:
    usual = Sampling(temperature=0.5, top_k=20, seed=1)
    assert SamplingFlags().over(usual) == usual
    assert SeededFlags(top_k=0).over(usual) == Sampling(temperature=0.5, top_k=0, seed=1)
    assert SamplingFlags(top_k=0).over(usual, seed=3) == Sampling(temperature=0.5, top_k=0, seed=3)
    assert SeededFlags().given() == {}


def test_a_wrong_option_of_sampling_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequestError, match="temperature"):
        SamplingFlags(temperature=-1.0).over(Sampling())


def test_a_record_becomes_options_in_its_place_and_the_command_gets_the_record() -> None:
    seen = list[Any]()

    def command(ctx: typer.Context, *, first: bool = False, flags: GuessFlags, last: int = 7) -> None:
        seen.append((ctx.params["last"], first, flags, last))

    shown = expanded(command)
    assert list(inspect.signature(shown).parameters) == ["ctx", "first", *NAMES[:6], "last"]
    app = typer.Typer()
    app.command()(shown)
    result = CliRunner().invoke(app, ["--target", "m", "--context", "64", "--first"])
    assert result.exit_code == 0, result.output
    assert seen == [(7, True, GuessFlags(target="m", context="64"), 7)]


def test_a_model_named_twice_is_an_error() -> None:
    assert named_once("a", ModelFlags()) == named_once(None, ModelFlags(target="a")) == "a"
    assert named_once(None, ModelFlags()) is None
    with pytest.raises(InvalidRequestError, match="named twice"):
        named_once("a", ModelFlags(target="b"))

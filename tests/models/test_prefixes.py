"""A beginning on disk with the default pair: the answer is the one after reading it."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec import Engine
from edgespec.engine.prefixes.stored import stored_prefixes
from edgespec.files.home import Home, home
from tests.support.pages import read_page
from tests.support.tiny_models import answer

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]

# Enough for 2048 tokens, and a quarter of a minute of reading.
SYSTEM = read_page("docs/guide/serve.md")[:10_000]
PROMPTS = ("Which port does the server use?", "Name three routes of the server.")


def test_the_default_pair_answers_from_the_disk_as_after_reading(tmp_path: Path) -> None:
    own = Home(tmp_path / "home")
    own.root.mkdir()
    own.models.symlink_to(home().models)
    settings = {"store_home": own, "prefixes": True, "context": 4096}
    with Engine.load(**settings) as engine, engine.session(system=SYSTEM) as first:
        read = [answer(first.generate(PROMPTS[0], max_tokens=32))]
        with first.branch() as second:  # its own conversation; what both share is not read again
            second.clear()
            second.system = SYSTEM
            read.append(answer(second.generate(PROMPTS[1], max_tokens=32)))
            said = engine.keep_prefixes()
    assert len(said) == 1
    [prefix] = stored_prefixes(own)
    with Engine.load(**settings) as engine:
        for prompt, before in zip(PROMPTS, read, strict=True):
            with engine.session(system=SYSTEM) as session:
                done = answer(session.generate(prompt, max_tokens=32))
            assert done.token_ids == before.token_ids
            assert done.stats.cached_tokens == prefix.length >= 2048
            assert done.stats.prompt_tokens == before.stats.prompt_tokens

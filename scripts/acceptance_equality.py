"""What the steps that compare texts with plain decoding's share: the forty prompts, and what is kept of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgespec.bench.equality import PromptResult
    from edgespec.bench.suite import Prompt

PROMPTS = 40


def verification_prompts() -> list[Prompt]:
    """HumanEval's first twenty and our own twenty."""
    from edgespec.bench.suite import builtin_suite, load_humaneval
    from edgespec.files.home import home
    from edgespec.store.catalogue import lookup
    from edgespec.store.store import Store

    humaneval = Store(home()).fetch(lookup("humaneval"))
    prompts = [*load_humaneval(humaneval.path, n=20), *builtin_suite("verify")]
    assert len(prompts) == PROMPTS
    return prompts


def row_of(result: PromptResult) -> dict[str, Any]:
    """One prompt, as results.json keeps it."""
    return {
        "category": result.category,
        "prompt_tokens": result.prompt_tokens,
        "emitted_tokens": result.emitted_tokens,
        "comparisons": result.comparisons,
        "proposed": result.proposed,
        "accepted": result.accepted,
        "identical": not result.divergences,
    }

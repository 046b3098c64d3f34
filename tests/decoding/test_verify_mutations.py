"""The checks of ``law.py`` detect every small mistake that verification could contain."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from edgespec.decoding import verify
from tests.decoding import law

SOURCE = Path(verify.__file__).read_text(encoding="utf-8")

TEST = "uniform * draft_prob < target_prob"
CORRECT = 'return Verdict(index, draw(residual(target, draft), index), "correction")'
BONUS = 'return Verdict(last, draw(target_probs(last), last), "bonus")'
RESIDUAL = "return left / total if total > 0 else target_probs"

# name -> (what is replaced, by what); the first must occur exactly once.
MUTATIONS: dict[str, tuple[str, str]] = {
    "target and draft swapped in the acceptance test": (TEST, "uniform * target_prob < draft_prob"),
    "the draft probability ignored": (TEST, "uniform < target_prob"),
    "accepts on NaN": (TEST, "not (uniform * draft_prob >= target_prob)"),
    "accepts what the target cannot emit": (TEST, "uniform * draft_prob <= target_prob"),
    "accepts at a draft probability of zero": ("0 < draft_prob <= 1 and", "0 <= draft_prob <= 1 and"),
    "accepts at a negative draft probability": ("0 < draft_prob <= 1 and", "draft_prob <= 1 and"),
    "accepts at a draft probability over one": ("0 < draft_prob <= 1 and", "0 < draft_prob and"),
    "always accepts": ("return bool(0 <", "return True or bool(0 <"),
    "never accepts": ("return bool(0 <", "return False and bool(0 <"),
    "residual dropped": (RESIDUAL, "return target_probs"),
    "residual not normalised": (RESIDUAL, "return left if total > 0 else target_probs"),
    "residual with the difference's size": (
        "np.maximum(target_probs - draft_probs, 0)",
        "abs(target_probs - draft_probs)",
    ),
    "residual with its arguments swapped": (
        "draw(residual(target, draft), index)",
        "draw(residual(draft, target), index)",
    ),
    "residual falls back to the draft": (RESIDUAL, "return left / total if total > 0 else draft_probs"),
    "correction from the draft": (CORRECT, 'return Verdict(index, draw(draft, index), "correction")'),
    "correction with the next place's noise": (
        CORRECT,
        'return Verdict(index, draw(residual(target, draft), index + 1), "correction")',
    ),
    "correction counted as accepted": (
        CORRECT,
        'return Verdict(index + 1, draw(residual(target, draft), index), "correction")',
    ),
    "continues after a rejection": (CORRECT, "continue"),
    "a rejection called a bonus": (CORRECT, CORRECT.replace("correction", "bonus")),
    "bonus from the last draft token's row": (BONUS, BONUS.replace("target_probs(last)", "target_probs(last - 1)")),
    "bonus with the former place's noise": (BONUS, BONUS.replace(", last)", ", last - 1)")),
    "bonus counts one too few": (BONUS, BONUS.replace("Verdict(last", "Verdict(last - 1")),
    "target row off by one": ("target = target_probs(index)", "target = target_probs(max(0, index - 1))"),
    "the first uniform number used for all": ("accepts(uniforms[index]", "accepts(uniforms[0]"),
    "copied token counted as impossible": ("draft[token] = 1", "draft[token] = 0"),
    "matching continues after a difference": ('return Verdict(index, token, "correction")', "continue"),
    "matching emits the draft's token": (
        'Verdict(index, token, "correction")',
        'Verdict(index, draft_token, "correction")',
    ),
    "matching accepts on a difference": ("if token != draft_token", "if token == draft_token"),
    "matching bonus off by one": (
        "target_token(len(draft_tokens))",
        "target_token(max(0, len(draft_tokens) - 1))",
    ),
    "matching target off by one": ("token = target_token(index)", "token = target_token(index + 1)"),
    "matching without a bonus asks for one": (
        "if not bonus:\n        return Verdict(len(",
        "if False:\n        return Verdict(len(",
    ),
    "matching always without a bonus": (
        "if not bonus:\n        return Verdict(len(",
        "if True:\n        return Verdict(len(",
    ),
    "matching without a bonus counts one too few": (
        "return Verdict(len(draft_tokens), None",
        "return Verdict(len(draft_tokens) - 1, None",
    ),
    "draws a bonus without being asked": (
        "if not bonus:\n        return Verdict(last",
        "if False:\n        return Verdict(last",
    ),
    "draws no bonus although asked": (
        "if not bonus:\n        return Verdict(last",
        "if True:\n        return Verdict(last",
    ),
    "without a bonus counts one too few": ("return Verdict(last, None", "return Verdict(last - 1, None"),
    "an open end called a bonus": ('Verdict(last, None, "open")', 'Verdict(last, None, "bonus")'),
    "token 0 not reported as following": (
        "return () if self.next_token is None else",
        "return () if self.next_token else",
    ),
    "the rejected token not counted as evaluated": (' + (self.kind == "correction")', ""),
    "the bonus counted as evaluated": ('self.kind == "correction"', "True"),
    "a tree's path without its last token": ("return TreeVerdict(tuple(path)", "return TreeVerdict(tuple(path[:-1])"),
    "a tree's correction called a bonus": ('"correction" if children else "bonus"', '"bonus"'),
    "a tree's bonus called a correction": ('"correction" if children else "bonus"', '"correction"'),
    "a tree's walk goes back to the root": ("here = path[-1] if path else -1", "here = -1"),
    "a tree's walk takes the first child": (
        "path.append(children[token])",
        "path.append(next(iter(children.values())))",
    ),
    "a tree's walk ends after a token": (
        "        if token not in children:\n            return Tree",
        "        if path or token not in children:\n            return Tree",
    ),
    "the last of equal children": (".setdefault(int(token), index)", ".__setitem__(int(token), index)"),
    "a tree's target asked at another node": ("token = target_token(here)", "token = target_token(max(here, 0))"),
    "a tree's target asked twice": (
        "token = target_token(here)",
        "token = target_token(here) if target_token(here) in children else target_token(here)",
    ),
}


def load(source: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("mutated_verify")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
    exec(compile(source, "mutated_verify.py", "exec"), module.__dict__)
    return module


def test_the_unchanged_verification_passes_all_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    law.check_all(load(SOURCE, monkeypatch))


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_of_verification_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = MUTATIONS[name]
    assert SOURCE.count(old) == 1, "the mutation no longer fits the source: adapt it"
    mutated = SOURCE.replace(old, new)
    assert mutated != SOURCE
    module = load(mutated, monkeypatch)
    with pytest.raises(AssertionError):
        law.check_all(module)

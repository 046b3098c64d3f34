"""``edgespec learn``."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from edgespec.cli.options import JsonOption, ProfileOption, TargetOption, resolve_profile, state_of
from edgespec.cli.terminal.output import note, print_json
from edgespec.errors import InvalidRequestError
from edgespec.files.disk import readable_bytes
from edgespec.files.home import home

_REASONS = {
    "binary": "not UTF-8 text",
    "too_large": "larger than 2 MB",
    "unreadable": "not readable",
    "no_room": "no room in the index",
}


def learn(
    context: typer.Context,
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="PATH", help="Text files and folders; none: say what was learned."),
    ] = None,
    forget: Annotated[bool, typer.Option("--forget", help="Remove these paths from the index instead.")] = False,
    target: TargetOption = None,
    profile: ProfileOption = None,
    json: JsonOption = False,
) -> None:
    """Index your own text to guess from. Answers stay the same, and come faster where they repeat it.

    The index serves models with the target's vocabulary. A path that is learned again replaces what was learned from
    it. Hidden files, binary files and files larger than 2 MB are left out.
    """
    from edgespec.engine.learned.learner import TextLearner
    from edgespec.store.locate import Locator
    from edgespec.store.store import Store
    from edgespec.text.tokenizers.choice import open_tokenizer

    state = state_of(context)
    if forget and not paths:
        raise InvalidRequestError("--forget needs a path", hint="`edgespec learn --forget PATH`")
    chosen, user_home = resolve_profile(profile, target=target), home()
    with state.progress() as progress:
        located = Locator(store=Store(user_home), download=not state.offline, job=progress.job).locate(chosen.target)
        learner = TextLearner(user_home, located)
        if not paths:
            learned = learner.known()
        elif forget:
            learned = learner.forget(paths)
        else:
            with closing(open_tokenizer(located.tokenizer_path, located.header)) as tokenizer:
                learned = progress.follow(learner.learn(paths, tokenizer), "reading")
    skipped = dict(learned.skipped)
    if learned.notice is not None:
        note(learned.notice)
    for reason, count in skipped.items():
        note(f"{count} {'file' if count == 1 else 'files'} left out: {_REASONS[reason]}")
    if json:
        print_json(
            {
                "learned": {
                    "target": located.name,
                    "path": str(learned.path),
                    "bytes": learned.bytes,
                    "tokens": learned.tokens,
                    "files": list(learned.names),
                    "added_files": learned.added_files,
                    "removed_files": learned.removed_files,
                    "skipped_files": {reason: skipped.get(reason, 0) for reason in _REASONS},
                }
            }
        )
        return
    if paths:
        note(f"files added: {learned.added_files}, removed or replaced: {learned.removed_files}")
    size = readable_bytes(learned.bytes)
    print(f"learned for {located.name}: {len(learned.names)} files, {learned.tokens} tokens, {size}, {learned.path}")

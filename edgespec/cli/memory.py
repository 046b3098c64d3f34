"""``edgespec memory``: texts and answers that are copied from, and how the chat begins to keep answers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from edgespec.cli import suggestions
from edgespec.cli.options import JsonOption, ProfileOption, resolve_profile, state_of, with_learned_text
from edgespec.cli.parser import SETTINGS, Command, Group
from edgespec.cli.terminal.output import note, print_json
from edgespec.errors import EdgespecError, InvalidRequestError, reason_of
from edgespec.files.disk import counted, readable_bytes
from edgespec.files.home import Home, home
from edgespec.profiles.profile import USER_FILE, Profile

app = typer.Typer(
    cls=Group,
    help="List the answers and beginnings that are kept of conversations, remove them, or learn texts.\n\n"
    "`edgespec chat` keeps the answers of models, the last conversation, and the lines that you typed, in files that "
    "only you can read. `history = false` in a profile switches this off. `edgespec serve` keeps what the model has "
    "read of beginnings that two conversations shared; `prefixes = false` switches that off.",
    invoke_without_command=True,
    **SETTINGS,
)

_REASONS = {
    "binary": "not UTF-8 text",
    "too_large": "larger than 2 MB",
    "unreadable": "not readable",
    "no_room": "no room in the index",
}

_ANY_ID = 2**31  # for counting, the size of the vocabulary does not matter


@dataclass(frozen=True, slots=True)
class _Kept:
    """One file of answers or of learned texts; no counts if it is damaged."""

    path: Path
    bytes: int
    texts: int | None
    tokens: int | None


@app.callback()
def memory(context: typer.Context, json: JsonOption = False) -> None:
    """Say where answers and learned texts are kept, and how many."""
    if context.invoked_subcommand is not None:
        return
    user_home, on = home(), resolve_profile(None).history is not False
    kept, learned = _kept(user_home.answers), _kept(user_home.learned)
    answers, tokens, size = _totals(kept)
    if json:
        files = [
            {"path": str(each.path), "bytes": each.bytes, "answers": each.texts, "tokens": each.tokens}
            for each in kept
        ]
        total = {"path": str(user_home.answers), "bytes": size, "answers": answers, "tokens": tokens}
        print_json(
            {
                "history": {
                    "on": on,
                    **total,
                    "files": files,
                    "prefixes": _prefixes_json(user_home),
                    "conversation": _file_json(user_home.conversation),
                    "typed": _file_json(user_home.history),
                    "learned": _learned_json(user_home, learned),
                }
            }
        )
        return
    print(f"history: {'on' if on else 'off'} in `edgespec chat`")
    print(f"{counted(answers, 'answer')}, {tokens} tokens, {readable_bytes(size)}, {user_home.answers}")
    if (last_bytes := _bytes_of(user_home.conversation)) is not None:
        print(f"the last conversation, {readable_bytes(last_bytes)}, {user_home.conversation}")
    if (typed_bytes := _bytes_of(user_home.history)) is not None:
        print(f"the lines that you typed, {readable_bytes(typed_bytes)}, {user_home.history}")
    turn = "off: history = false" if on else "on: history = true"
    print(f"to switch it {turn} under [profile] in {user_home.root / USER_FILE}")
    for each in (*kept, *learned):
        if each.texts is None:
            note(f"{each.path} is damaged; the next chat sets it aside")
    _print_prefixes(user_home)
    if learned:
        texts, tokens, size = _totals(learned)
        print(f"learned: {counted(texts, 'file')}, {tokens} tokens, {readable_bytes(size)}, {user_home.learned}")


def _totals(kept: Sequence[_Kept]) -> tuple[int, int, int]:
    """Texts, tokens and bytes of all the files."""
    return (
        sum(each.texts or 0 for each in kept),
        sum(each.tokens or 0 for each in kept),
        sum(each.bytes for each in kept),
    )


def _file_json(path: Path) -> dict[str, Any]:
    return {"path": str(path), "bytes": _bytes_of(path)}


def _learned_json(user_home: Home, learned: Sequence[_Kept]) -> dict[str, Any]:
    texts, tokens, size = _totals(learned)
    return {"path": str(user_home.learned), "bytes": size, "files": texts, "tokens": tokens}


def _prefixes_json(user_home: Home) -> dict[str, Any]:
    from edgespec.engine.prefixes.stored import model_of, stored_prefixes

    prefixes = stored_prefixes(user_home)
    files = [
        {"path": str(each.path), "bytes": each.bytes, "tokens": each.length, "model": model_of(each)[0]}
        for each in prefixes
    ]
    return {"path": str(user_home.prefixes), "bytes": sum(each.bytes for each in prefixes), "files": files}


def _print_prefixes(user_home: Home) -> None:
    """The beginnings that servers keep, if there are any."""
    from edgespec.engine.prefixes.stored import model_of, stored_prefixes

    prefixes = stored_prefixes(user_home)
    if not prefixes:
        return
    size = readable_bytes(sum(each.bytes for each in prefixes))
    print(f"{counted(len(prefixes), 'beginning')} of conversations in `edgespec serve`, {size}, {user_home.prefixes}")
    for each in prefixes:
        print(f"  {model_of(each)[0] or 'damaged'}: {each.length} tokens, {readable_bytes(each.bytes)}")


@app.command("learn", cls=Command)
def learn(
    context: typer.Context,
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="PATH", help="Text files and folders; none: say what was learned."),
    ] = None,
    forget: Annotated[bool, typer.Option("--forget", help="Remove these paths from the index instead.")] = False,
    target: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="A model that reads the text as tokens; the index is for its vocabulary.",
            autocompletion=suggestions.for_model,
        ),
    ] = None,
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
    json = json or state.json
    if forget and not paths:
        raise InvalidRequestError("--forget needs a path", hint="`edgespec memory learn --forget PATH`")
    chosen, user_home = resolve_profile(profile, target=target), home()
    download = bool(paths) and not forget and not state.offline  # a model is here if something was learned for it
    with state.progress() as progress:
        located = Locator(store=Store(user_home), download=download, job=progress.job).locate(chosen.target)
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
        note(f"{counted(count, 'file')} left out: {_REASONS[reason]}")
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


@app.command("clear", cls=Command, short_help="Remove what is kept of conversations.")
def clear(context: typer.Context, json: JsonOption = False) -> None:
    """Remove every kept answer and beginning, the last conversation, and the lines that you typed.

    Learned text stays: `edgespec memory learn --forget PATH` removes it.
    """
    from edgespec.engine.learned.answers import answers_lock
    from edgespec.engine.prefixes.stored import clear_prefixes

    user_home = home()
    kept = _kept(user_home.answers)
    conversation, typed = _file_json(user_home.conversation), _file_json(user_home.history)
    try:
        with answers_lock(user_home) if user_home.answers.is_dir() else contextlib.nullcontext():
            for path in [*(each.path for each in kept), *user_home.answers.glob("*.damaged")]:
                path.unlink(missing_ok=True)
        user_home.conversation.unlink(missing_ok=True)
        user_home.history.unlink(missing_ok=True)
        prefixes = clear_prefixes(user_home)
    except OSError as error:
        raise EdgespecError(
            f"the history cannot be removed: {reason_of(error)}: {error.filename}",
            hint="close the programs that use it and try again",
        ) from error
    answers, _, size = _totals(kept)
    learned = _kept(user_home.learned)
    if json or state_of(context).json:
        removed = {"path": str(user_home.answers), "bytes": size, "answers": answers, "prefixes": len(prefixes)}
        removed |= {"conversation": conversation, "typed": typed}
        print_json({"removed": removed, "stays": {"learned": _learned_json(user_home, learned)}})
        return
    note(f"{counted(answers, 'answer')} removed, {readable_bytes(size)}" if kept else "no answers are kept")
    for what, file in (("the last conversation", conversation), ("the lines that you typed", typed)):
        if file["bytes"] is not None:
            note(f"{what} removed, {readable_bytes(file['bytes'])}")
    if prefixes:
        note(f"{counted(len(prefixes), 'beginning')} removed, {readable_bytes(sum(each.bytes for each in prefixes))}")
    if learned:
        note(f"learned text stays in {user_home.learned}: `edgespec memory learn --forget PATH` removes it")


def _bytes_of(path: Path) -> int | None:
    """Size of a file; None without one."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def _kept(folder: Path) -> list[_Kept]:
    from edgespec.files.stored_text import DamagedTextError, StoredText

    found = []
    for path in sorted(folder.glob("*.text")):
        try:
            stored = StoredText.open(path, bytes.fromhex(path.stem), _ANY_ID)
            found.append(_Kept(path, path.stat().st_size, stored.texts, stored.tokens))
        except (DamagedTextError, ValueError):
            found.append(_Kept(path, path.stat().st_size, None, None))
        except OSError:
            continue
    return found


def for_chat(profile: Profile) -> Profile:
    """The profile of a chat, which keeps answers unless the profile says otherwise. The first chat says so."""
    profile = with_learned_text(profile)
    if profile.history != "auto":
        return profile
    user_home = home()
    if not (user_home.answers.exists() and user_home.conversations.exists()):
        with contextlib.suppress(EdgespecError):  # a home that cannot be written keeps nothing
            user_home.create(user_home.answers)
            user_home.create(user_home.conversations)
            note(
                "edgespec keeps answers of this chat on this machine, to guess later ones faster, the last "
                "conversation for `edgespec chat --continue`, and the lines that you type: `edgespec memory` says "
                "where and how to switch this off, `edgespec memory clear` removes them"
            )
    return replace(profile, history=True)

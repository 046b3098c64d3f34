"""Offers to download a drafter that fits the target: on a terminal, once for each target."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from edgespec.cli.chat.prompts import Prompts
from edgespec.cli.options import open_engine
from edgespec.cli.terminal.interrupts import Interrupts
from edgespec.cli.terminal.output import State, note, print_error, stderr_columns, wrapped
from edgespec.engine.engine import Engine
from edgespec.engine.pair.drafter_offer import DrafterOffer
from edgespec.errors import EdgespecError
from edgespec.files.atomic import write_json
from edgespec.files.checked import WrongValueError, read, read_object
from edgespec.files.home import Home, home
from edgespec.profiles.profile import Profile
from edgespec.store.catalogue import catalogue
from edgespec.store.references import CatalogueName, HubReference, ModelSpec, parse_reference, spec_of_hub_reference
from edgespec.store.store import Store

# Declined targets that are remembered. The oldest are dropped, and then offered again.
_MOST_DECLINED = 500
_LARGEST_BYTES = 1 << 20


@contextmanager
def open_with_offer(profile: Profile, state: State, *, as_json: bool, prompts: Prompts) -> Iterator[Engine]:
    """Open the engine for a chat, with a drafter that its user agreed to download. Raises as ``open_engine`` does.

    The question is skipped without a terminal, offline, and with ``as_json``. Keys that are typed while a model loads
    are for ``prompts``.
    """
    with prompts.held():
        engine = open_engine(profile, state)
    try:
        offer = None if as_json or state.offline or not _can_ask(prompts) else engine.drafter_offer
        if offer is not None and offer.target not in _declined(home()) and _fetched(offer, state):
            engine.close()
            with prompts.held():
                engine = _open_again(profile, state)
        yield engine
    finally:
        engine.close()


def _can_ask(prompts: Prompts) -> bool:
    """Whether a person can answer. Keys typed before the question are a prompt, not its answer."""
    return sys.stdin.isatty() and sys.stderr.isatty() and not prompts.typed_ahead()


def _fetched(offer: DrafterOffer, state: State) -> bool:
    """Ask, and download the drafter if the answer is yes. Errors are reported, and the chat continues without it."""
    if not _wanted(offer, state.interrupts):
        _decline(offer, home())
        note(f"`edgespec pull {offer.model}` downloads it later", dim=True)
        return False
    try:
        with state.interrupts.during(forgives=(signal.SIGINT,)), state.progress() as progress:
            Store(home()).fetch(_spec(offer), progress.job)
    except EdgespecError as error:
        if not state.interrupts.pending():
            print_error(error, as_json=False)
            note("the chat continues without this drafter", dim=True)
            return False
    except KeyboardInterrupt:
        pass
    else:
        return True
    _obey(state.interrupts)
    note(f"stopped; `edgespec pull {offer.model}` downloads the rest", dim=True)
    return False


def _obey(interrupts: Interrupts) -> None:
    """Obey a Ctrl-C that ends only the question or the download. Raises KeyboardInterrupt at a program's end."""
    interrupts.obeyed()
    interrupts.check()


def _wanted(offer: DrafterOffer, interrupts: Interrupts) -> bool:
    """The answer to the question; Ctrl-C and Ctrl-D mean no."""
    lines = wrapped(_about(offer) + " Fetch_it?_[Y/n]", (stderr_columns() or 80) - 1)
    question = "\n".join(lines).replace("Fetch_it?_[Y/n]", "Fetch it? [Y/n] ")  # underscores kept it on one line
    while True:
        try:
            with interrupts.during(forgives=(signal.SIGINT,)):
                sys.stderr.write(question)
                sys.stderr.flush()
                line = interrupts.read(sys.stdin.readline)
        except KeyboardInterrupt:
            _obey(interrupts)
            line = ""
        except UnicodeDecodeError:
            line = "?"
        if not line:
            sys.stderr.write("\n")
            return False
        answer = line.strip().lower()
        if answer in ("", "y", "yes"):
            return True
        if answer in ("n", "no"):
            return False


def _about(offer: DrafterOffer) -> str:
    fits = f"{offer.name} ({offer.bytes / 1e9:.1f} GB, {offer.licence}) would fit as its drafter"
    return f"{fits}: it has another vocabulary, and guesses English best." if offer.translated else f"{fits}."


def _open_again(profile: Profile, state: State) -> Engine:
    """Open the engine with the downloaded drafter, or without a drafter if that fails."""
    try:
        return open_engine(profile, state)
    except EdgespecError as error:
        print_error(error, as_json=False)
        return open_engine(replace(profile, draft="none"), state)


def _spec(offer: DrafterOffer) -> ModelSpec:
    reference = parse_reference(offer.model, catalogue().keys())
    if isinstance(reference, CatalogueName):
        return catalogue()[reference.name]
    assert isinstance(reference, HubReference)  # an offer names a catalogue model or a hub file
    return replace(spec_of_hub_reference(reference), licence=offer.licence)


def _declined(own: Home) -> list[str]:
    """The targets for which the user declined a drafter; empty if the file cannot be read."""
    with contextlib.suppress(EdgespecError, WrongValueError):
        return read(list[str], read_object(own.declined_offers, _LARGEST_BYTES).get("targets"))
    return []


def _decline(offer: DrafterOffer, own: Home) -> None:
    """Remember the answer no. If that fails, the next chat asks again."""
    with contextlib.suppress(OSError, EdgespecError):
        own.create(own.root)
        targets = [*_declined(own), offer.target][-_MOST_DECLINED:]
        write_json(own.declined_offers, {"schema_version": 1, "targets": targets})

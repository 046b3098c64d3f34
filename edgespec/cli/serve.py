"""``edgespec serve``."""

from __future__ import annotations

import logging
import os
import threading
import time
import webbrowser
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.options import AnswerFlags, expanded, note_context, state_of
from edgespec.cli.parser import rare
from edgespec.cli.terminal.interrupts import SIGNALS, Interrupts
from edgespec.cli.terminal.log_writer import LogWriter
from edgespec.cli.terminal.output import HARMLESS, ProgressPrinter, State
from edgespec.cli.terminal.reading import ReadingLog
from edgespec.errors import ESCAPES, InvalidRequestError, ModelNotFoundError, RuntimeUnavailableError
from edgespec.files.checked import is_line
from edgespec.files.home import home

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine
    from edgespec.engine.events import Done
    from edgespec.engine.pair.load import Limits
    from edgespec.profiles.profile import Profile
    from edgespec.server.run import Server
    from edgespec.server.schema import Request
    from edgespec.server.service import RequestLine, Service

PORT = 8471
KEY_VARIABLE = "EDGESPEC_API_KEY"
_LONGEST_PATH = 80


@expanded
def serve(
    ctx: typer.Context,
    *,
    host: Annotated[
        str,
        typer.Option("--host", metavar="ADDRESS", help="Address to serve on; others than this machine's need a key."),
    ] = ("127.0.0.1"),
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="Port to serve on; 0: any free one.")
    ] = PORT,
    open_page: Annotated[bool, typer.Option("--open", help="Open the server's page in the browser.")] = False,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            help=f"Key that clients must send; may be repeated. Better in {KEY_VARIABLE}: other users see options.",
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        rare("--allow-origin", metavar="ORIGIN", help="Let pages of this origin use the server; may be repeated."),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option("--alias", metavar="NAME", help="Name that clients see and use for the model; may be repeated."),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            "--models",
            metavar="NAME,...|all",
            help="Serve several models of the store, each loaded by its first request.",
        ),
    ] = None,
    log_text: Annotated[bool, rare("--log-text", help="Also log prompts and answers.")] = False,
    flags: AnswerFlags,
) -> None:
    """Serve a model over HTTP, with the interfaces of OpenAI, Anthropic and Ollama.

    Logs one line a request on stderr. Ctrl-C finishes the running answers; a second Ctrl-C ends immediately.
    """
    state = state_of(ctx)
    profiles = [flags.resolve(target=name) for name in _targets(models, flags.named, alias or ())]
    try:
        import starlette as _starlette  # noqa: F401
        import uvicorn as _uvicorn  # noqa: F401
    except ImportError as error:
        from edgespec.files.installation import install_command

        raise RuntimeUnavailableError(
            f"the server needs a package that is not installed: {error.name}", hint=install_command("serve")
        ) from error
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else the library warns in every child process
    from edgespec.engine.pair.load import Limits
    from edgespec.hardware.machine import describe_machine
    from edgespec.placement.context_length import MOST_TOKENS
    from edgespec.server.keeper import ModelKeeper, Shared
    from edgespec.server.room import Room
    from edgespec.server.run import Server, open_sockets, urls
    from edgespec.server.security import Access
    from edgespec.server.service import Served, Service
    from edgespec.store.locate import Locator
    from edgespec.store.store import Store

    if models is None:  # before the address is printed
        Locator(store=Store(home())).check(profiles[0].target)
    keys = list(dict.fromkeys([*(api_key or []), *os.environ.get(KEY_VARIABLE, "").split()]))
    access = Access(keys=tuple(keys), origins=tuple(allow_origin or ()))
    access.check_host(host)
    profiles = [_for_owners(each, len(keys)) for each in profiles]
    if not state.debug:
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # errors are in the request's own line
        logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of every write to a client that has left
    stopped, loaded = threading.Event(), threading.Event()
    log = LogWriter()
    allowed = int(describe_machine().available_memory_bytes * profiles[0].max_memory_fraction)
    shared = Shared(Room(None if models is None else allowed))
    limits = Limits(ledger=shared.room.ledger)
    first, *others = [
        Served(
            keeper=ModelKeeper(
                partial(_load, each, state, stopped, loaded, limits, log),
                context_length=MOST_TOKENS if each.context == "auto" else each.context,
                tell=lambda sentence: log.write(f"{_now()} {sentence}"),
                shared=shared,
                locate=None if models is None else partial(Locator(store=Store(home())).locate, each.target),
            ),
            names=_names(each, alias or ()) if models is None else (each.target,),
        )
        for each in profiles
    ]
    service = Service(
        keeper=first.keeper,
        names=first.names,
        others=tuple(others),
        access=access,
        log=lambda line: log.write(log_line(line, _now())),
        reading=lambda request: ReadingLog(lambda text: log.write(f"{_now()} {request} {text}")),
        content=(lambda request, answers: log.write(*texts_of(request, answers))) if log_text else None,
    )
    sockets = open_sockets(host, port)
    server = Server(service, sockets)
    addresses = " and ".join(f"{url}/v1" for url in urls(sockets))

    def listening() -> None:
        page = page_address(urls(sockets)[0])
        log.write(f"serving {_listed(service)} on {addresses}".translate(HARMLESS) + f"\nin a browser: {page}")
        if open_page:  # on a thread: a browser takes seconds to start
            threading.Thread(target=_open, args=(page, log), name="edgespec-open", daemon=True).start()

    try:
        with state.interrupts.during(partial(_stop, server, stopped, log, state.interrupts), forgives=SIGNALS):
            server.run_to_end(listening)
    finally:
        log.close()
    if server.force_exit:
        raise KeyboardInterrupt


def _targets(models: str | None, model: str | None, aliases: Sequence[str]) -> Sequence[str | None]:
    """The models to serve; None: the profile's. Raises InvalidRequestError, ModelNotFoundError for one not here."""
    if models is None:
        return [model]
    if model is not None:
        raise InvalidRequestError("the models were named twice", hint="give MODEL or --models NAME,...")
    if aliases:
        raise InvalidRequestError("several models have no alias", hint="give MODEL --alias NAME")
    from edgespec.store.locate import stored_name
    from edgespec.store.store import Store

    store = Store(home())
    here = [stored.name for stored in store.list() if stored.kind == "model"]
    given = filter(None, map(str.strip, models.split(",")))
    names = here if models == "all" else list(dict.fromkeys(stored_name(each, store) for each in given))
    if not names:
        raise InvalidRequestError("no model is named to be served", hint="`edgespec pull MODEL` fetches one")
    for name in names:
        if name not in here:
            hint = f"`edgespec pull {name}`; `edgespec models` lists what is there"
            raise ModelNotFoundError(f"{name[:_LONGEST_PATH]} is not in the store of models", hint=hint)
    return names


def _for_owners(profile: Profile, keys: int) -> Profile:
    """The profile of a server with this number of keys."""
    if keys > 1:  # guesses from one owner's answers would show them to the others, in the counts of right ones
        profile = replace(profile, history=False, learned=False)
    return replace(profile, prefixes=keys <= 1) if profile.prefixes == "auto" else profile


def _load(
    profile: Profile, state: State, stopped: threading.Event, loaded: threading.Event, limits: Limits, log: LogWriter
) -> Engine:
    """Load the models. Lines go to the log: stderr may be closed, or full and unread.

    ``loaded`` is set by the first load that succeeds. Those that follow it use no network: a model that was freed
    comes back from this machine, and what was removed since is not fetched again.
    """
    from edgespec.engine.engine import Engine

    def say(text: str) -> None:
        log.write(text.translate(HARMLESS))

    # Several models are those of the store.
    download = not state.offline and limits.ledger is None and not loaded.is_set()
    with ExitStack() as failed:  # the end of a bar may fail
        with ProgressPrinter(quiet=state.quiet, say=say) as progress:
            log.has_bar = lambda: progress.has_bar
            engine = Engine.load(
                profile=profile, limits=limits, download=download, progress=progress, cancelled=stopped.is_set
            )
            failed.enter_context(engine)
        failed.pop_all()
    loaded.set()
    say(f"{engine.plan.target.model} is loaded")
    note_context(engine, say)
    return engine


def _now() -> str:
    """The time of a line; with the date where lines are kept."""
    return time.strftime("%H:%M:%S" if os.isatty(2) else "%Y-%m-%dT%H:%M:%S%z")


def _listed(service: Service) -> str:
    names = [each.names[0] for each in service.models]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _names(profile: Profile, aliases: Sequence[str]) -> tuple[str, ...]:
    """The name that clients see, and the others that they may use for the model."""
    for alias in aliases:
        if not alias.strip() or not is_line(alias):
            raise InvalidRequestError(f"{alias!r:.40} is not a name for a model", hint="for example --alias coder")
    from edgespec.store.ollama import OLLAMA_PREFIX

    given, further = profile.target, "default"
    if given.startswith(OLLAMA_PREFIX):
        name = given.removeprefix(OLLAMA_PREFIX)  # as `ollama list` shows it
        further = name.rpartition("/")[2] or further  # clients may have stored it
    else:
        name = given if given.startswith("hf:") else Path(given).name.removesuffix(".gguf")
    return tuple(dict.fromkeys((*aliases, name or given, given, "default", further)))


def _stop(server: Server, stopped: threading.Event, log: LogWriter, interrupts: Interrupts) -> None:
    """Answer what has begun, and end; after a second signal end now."""
    if not server.should_exit:
        server.stop()
        log.write("finishing the running answers; Ctrl-C again ends now")
    elif interrupts.leaving and not server.force_exit:
        server.stop()
    stopped.set()  # after the stop: a load that ends now has not failed


def page_address(url: str) -> str:
    """The address of the page for a browser on this machine."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:") + "/"


def _open(page: str, log: LogWriter) -> None:
    """Open the page, or say its address. A browser in the terminal would hide the log: only a named one is used."""
    try:
        found = webbrowser.get()
        opened = (bool(os.environ.get("BROWSER")) or type(found) is not webbrowser.GenericBrowser) and found.open(
            page
        )
    except webbrowser.Error:
        opened = False
    if not opened:
        log.write(f"no browser was found; the page is {page}")


def log_line(line: RequestLine, now: str) -> str:
    """A request in one line, control characters as escapes."""
    parts = [
        f"{now} {line.client} {line.method} {line.path[:_LONGEST_PATH]} {line.status or '-'} {line.seconds:.2f} s"
    ]
    if line.answers:
        first, answers = line.answers[0].stats, line.answers
        emitted = sum(done.stats.emitted_tokens for done in answers)
        parts.append(f"{first.cached_tokens} of {first.prompt_tokens} prompt tokens cached")
        speed = answers[-1].stats.decode_tokens_per_s
        parts.append(f"{emitted} tokens" + ("" if speed is None else f", {speed:.1f} tok/s"))
        proposed, accepted = (sum(getattr(done.stats, name) for done in answers) for name in ("proposed", "accepted"))
        if proposed:
            parts.append(f"{accepted} of {proposed} guesses right")
    else:  # it ended before its answer
        if line.reading is not None:
            parts.append(f"{line.reading.tokens} of {line.reading.of} prompt tokens read")
        if line.begun:
            parts.append(f"{line.begun} tokens")
    if line.kept_in_part:
        parts.append("the schema is kept in part")
    if line.error is not None:
        parts.append(line.error)
    return " · ".join(parts).translate(ESCAPES)


def texts_of(request: Request, answers: list[Done]) -> list[str]:
    """What was asked and the answers, control characters as escapes. A mark begins each line: none is a request's."""
    asked = request.messages[-1]["content"] if request.is_chat else str(request.prompt)
    texts = (f"> {asked}".replace("\n", "\n> "), *(f"< {done.text}".replace("\n", "\n< ") for done in answers))
    return [text.translate(HARMLESS) for text in texts]

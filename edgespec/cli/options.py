"""Options that several commands share, and the opening of an Engine from these options.

Options that belong together are the fields of a record. A command takes the record as one argument, and ``expanded``
makes each field an option of the command.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from edgespec.cli import suggestions
from edgespec.cli.answer_form import FORM_OPTIONS, file_text, naming_options, schema_text
from edgespec.cli.parser import rare
from edgespec.cli.terminal.output import State, note
from edgespec.errors import InvalidRequestError, ProfileError
from edgespec.files.home import home
from edgespec.profiles.layers import from_settings
from edgespec.profiles.profile import Profile, load_profile
from edgespec.text.grammar.form import Form, form_of

if TYPE_CHECKING:
    from edgespec.decoding.sampling import Sampling
    from edgespec.engine.engine import Engine

MODEL_HELP = "A name, ORG/REPO[:QUANT], a hub address, or a path."

ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=suggestions.for_model)
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="MODEL", help="The same as MODEL.", autocompletion=suggestions.for_model),
]
_HiddenModelOption = Annotated[str | None, typer.Option("--model", "-m", hidden=True)]
ProfileOption = Annotated[
    str | None,
    rare(
        "--profile",
        metavar="NAME|FILE",
        help="Constraints and preferences to start from.",
        autocompletion=suggestions.for_profile,
    ),
]
PlainOption = Annotated[bool, typer.Option("--plain", help="Decode without guesses; the text is the same.")]
SystemOption = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system message.")]
MaxTokensOption = Annotated[
    int | None, typer.Option("--max-tokens", metavar="N", min=1, help="Longest answer, in tokens.")
]
NoThinkOption = Annotated[
    bool,
    rare("--no-think", help="Answer without thinking first, if the model's template supports it."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]


def state_of(context: typer.Context) -> State:
    """The shared options of this command line."""
    return context.obj if isinstance(context.obj, State) else State()


def resolve_profile(name: str | None, **flags: Any) -> Profile:
    """The profile in force: built-in < user < project < environment < flags. Raises ProfileError."""
    try:
        folder = Path.cwd()
    except FileNotFoundError as error:
        raise ProfileError("the current folder was removed", hint="change to another folder") from error
    profile = load_profile(
        name,
        environ=os.environ,
        cwd=folder,
        user_dir=home().root,
        flags={key: value for key, value in flags.items() if value is not None},
    )
    for sentence in filter(None, (profile.old, profile.ignored)):
        note(sentence)
    return profile


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flags:
    """Options that belong together; None is not given."""

    def given(self) -> dict[str, Any]:
        """The values that were given, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags(_Flags):
    """The models, their context and threads, and other values of the profile."""

    model: ModelArgument = None
    target: _HiddenModelOption = None
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            metavar="MODEL|auto|none",
            help="The drafter: a smaller model that guesses ahead.",
            autocompletion=suggestions.for_drafter,
        ),
    ] = None
    context: Annotated[
        str | None,
        typer.Option(
            "--context", metavar="N|auto", help="Tokens of a conversation; auto: as the model and the memory allow."
        ),
    ] = None
    profile: ProfileOption = None
    threads: Annotated[
        str | None,
        rare("--threads", metavar="N|auto", help="Threads of the model; auto: the fastest measured."),
    ] = None
    settings: Annotated[
        list[str] | None,
        rare(
            "--set",
            metavar="KEY=VALUE",
            help="Any key of a profile for this run (repeatable): depth=2, exactness=near.",
            autocompletion=suggestions.for_setting,
        ),
    ] = None

    @property
    def named(self) -> str | None:
        """The model that the command line names. Raises InvalidRequestError if it names two."""
        if self.model is not None and self.target is not None:
            raise InvalidRequestError("the model was named twice", hint="give MODEL or --model MODEL")
        return self.model or self.target

    def resolve(self, **changed: Any) -> Profile:
        """The profile in force with these flags, those ``changed`` that are not None. Raises ProfileError."""
        own = {"target": self.named, "draft": self.draft, "context": self.context, "threads": self.threads}
        flags = {key: value for key, value in {**own, **changed}.items() if value is not None}
        return resolve_profile(self.profile, **{**from_settings(self.settings or ()), **flags})


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFlags(ModelFlags):
    """What gives answers: the models, and whether they guess."""

    plain: PlainOption = False

    def resolve(self, **changed: Any) -> Profile:
        """As ModelFlags, with no depth for ``plain``."""
        # super() without arguments fails in a dataclass with slots.
        return ModelFlags.resolve(self, **({"depth": 0} if self.plain else {}), **changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags(_Flags):
    """How tokens are drawn."""

    temperature: Annotated[float | None, typer.Option("--temperature", metavar="X", help="0 is greedy.")] = None
    top_p: Annotated[
        float | None,
        rare("--top-p", metavar="X", help="Keep the likeliest tokens up to this total probability; 1: all."),
    ] = None
    top_k: Annotated[
        int | None,
        rare("--top-k", metavar="N", help="Keep the N likeliest tokens; 0: all."),
    ] = None
    min_p: Annotated[
        float | None,
        rare("--min-p", metavar="X", help="Drop tokens below this fraction of the top probability; 0: none."),
    ] = None

    def over(self, usual: Sampling, **more: Any) -> Sampling:
        """``usual`` with the given options, and ``more``, replaced. Raises InvalidRequestError."""
        return replace(usual, **self.given(), **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeededFlags(SamplingFlags):
    """How tokens are drawn, with a seed that need not be given."""

    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", help="The same seed gives the same text; random if not given."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FormFlags(_Flags):
    """The form of an answer, which one of the options names."""

    json_schema: Annotated[
        str | None,
        typer.Option(
            FORM_OPTIONS["schema"], metavar="FILE|-|JSON", help="Write JSON that this schema allows; -: read stdin."
        ),
    ] = None
    regex: Annotated[
        str | None,
        rare(FORM_OPTIONS["regex"], metavar="RE", help="Write a text that the whole expression matches."),
    ] = None
    grammar: Annotated[
        str | None,
        rare(FORM_OPTIONS["grammar"], metavar="FILE", help="Write a text of this grammar, in GBNF or Lark."),
    ] = None
    choice: Annotated[
        list[str] | None,
        rare(FORM_OPTIONS["choice"], metavar="TEXT", help="Write one of these texts; give it for each."),
    ] = None

    @property
    def reads_stdin(self) -> bool:
        """Whether stdin holds the schema."""
        return self.json_schema == "-"

    def form(self, read_stdin: Callable[[], str]) -> Form | None:
        """The form, if one is named. Raises InvalidRequestError, which names the option."""
        values = (self.json_schema, self.regex, self.grammar, self.choice or None)
        named = [option for option, value in zip(FORM_OPTIONS.values(), values, strict=True) if value is not None]
        if len(named) > 1:
            raise InvalidRequestError(f"{named[0]} and {named[1]} were given together", hint="an answer has one form")
        schema, regex, grammar, choice = values
        with naming_options():
            if schema is not None:
                schema = read_stdin() if self.reads_stdin else schema_text(schema)
            return form_of(schema, regex, None if grammar is None else file_text(grammar, "grammar"), choice)


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` as typer reads it: options for its fields replace each record among its parameters."""
    hints = get_type_hints(command, include_extras=True)
    records: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters = list[Parameter]()
    for name, own in signature(command).parameters.items():
        if name not in records:
            parameters.append(own.replace(annotation=hints[name]))
            continue
        options = get_type_hints(records[name], include_extras=True)
        for field in fields(records[name]):
            annotation = options[field.name]
            parameters.append(Parameter(field.name, own.kind, default=field.default, annotation=annotation))

    @wraps(command)
    def called(**given: Any) -> None:
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)})
            for name, kind in records.items()
        }
        command(**given, **made)

    called.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


def with_learned_text(profile: Profile) -> Profile:
    """The profile of a command that answers people: it copies from learned text unless the profile says otherwise."""
    return replace(profile, learned=True) if profile.learned == "auto" else profile


def open_engine(profile: Profile, state: State, *, calibrate: bool = False) -> Engine:
    """Load the profile's models, with progress on stderr. Missing models are downloaded unless ``state.offline``.

    ``calibrate`` is passed to ``Engine.load``, whose progress is then also shown without a terminal.
    """
    from edgespec.engine.engine import Engine

    with state.progress(loading=calibrate) as progress:
        engine = Engine.load(
            profile=profile,
            download=not state.offline,
            progress=progress,
            cancelled=state.interrupts.pending,
            calibrate=calibrate,
        )
    note_context(engine)
    return engine


def note_context(engine: Engine, say: Callable[[str], None] = partial(note, dim=True)) -> None:
    """Say that the context is shorter than what the profile asks for."""
    for reason in engine.plan.why:
        if reason.code == "context_chosen" and engine.profile.context != "auto":
            say(reason.text)


def check_thinking(engine: Engine, *, think: bool) -> None:
    """Report on stderr that ``--no-think`` has no effect, if the template has no switch for it."""
    if not think and not engine.has_thinking_switch:
        name = engine.plan.target.model
        note(f"--no-think has no effect: the template of {name} has no switch for thinking", dim=True)


def default_threads() -> int:
    """Threads for work other than decoding: as many as the profile gives a target on this processor."""
    from edgespec.hardware.machine import describe_machine
    from edgespec.placement.prepared import choose_threads

    return choose_threads(resolve_profile(None), describe_machine(), None)

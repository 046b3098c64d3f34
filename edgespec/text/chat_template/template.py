"""Chat templates: messages in, prompt text out. A template comes with a model file, so it is hostile input.

It runs in jinja's immutable sandbox behind an allow-list (``sandbox.py``), with limits on steps, bytes and time
(``budget.py``). Importing this module does not import jinja2; compiling a template does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import CodeType, MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

from edgespec.errors import CancelledError, EdgespecError, InvalidRequestError, TemplateError
from edgespec.text.chat_template.budget import NESTING, Budget, TemplateLimits, stored_bytes
from edgespec.text.chat_template.origin import Written, joined, written
from edgespec.text.plain import plain
from edgespec.text.request_budget import RequestBudget

if TYPE_CHECKING:
    from jinja2 import Template

_FILENAME = "<chat template>"
# A hostile template can make jinja report a name of megabytes.
_REASON_CHARACTERS = 300
# Python's compiler takes about 110 bytes a character (measured with tracemalloc): about 30 MB. Qwen2.5's template of
# 2.5 kB becomes 8 kB of Python.
_PYTHON_CHARACTERS = 256 * 1024
# Some templates put a role into a control token's name. These roles count as the template's own words.
_ROLES = ("system", "developer", "user", "assistant", "tool")
# The variables that rendering itself sets, next to those of further tokens that a model has.
RESERVED = frozenset({"messages", "add_generation_prompt", "bos_token", "eos_token"})
# What templates get where a request has none, as in transformers.
ABSENT: Mapping[str, Any] = MappingProxyType({"tools": None, "documents": None})


def not_settable(variable: str) -> InvalidRequestError:
    """The error for a template's variable that a request cannot set."""
    return InvalidRequestError(
        f"the template variable {variable} cannot be set", hint="edgespec or the template sets it"
    )


class ChatTemplate:
    """One compiled chat template. Rendering shares nothing between calls, so any thread may render at any time."""

    def __init__(self, source: str, *, tokens: Mapping[str, str], limits: TemplateLimits | None = None) -> None:
        """Compile ``source``; ``tokens`` are the texts of the model's tokens by their names in templates.

        Raises TemplateError if the source is too large, malformed, or uses forbidden syntax.
        """
        self.limits = TemplateLimits() if limits is None else limits
        self._tokens = dict(tokens)
        # Cut first, so that a gigabyte of source is refused without encoding it: a character has at least a byte.
        encoded = source[: self.limits.source_bytes + 1].encode("utf-8", "surrogatepass")
        if len(encoded) > self.limits.source_bytes:
            raise TemplateError(
                f"the chat template is longer than the {self.limits.source_bytes} bytes allowed",
                hint="use another template, or raise the limit if you trust this one",
            )
        self.sha256 = hashlib.sha256(encoded).hexdigest()
        #: The names that the template reads, its own ones too.
        self.reads: frozenset[str]
        self._code, self.reads = _compile(source, self.limits)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        limits: TemplateLimits | None = None,
        budget: RequestBudget | None = None,
        absent: Mapping[str, Any] = ABSENT,
    ) -> str:
        """The prompt for ``messages``; ``extra`` holds the template's other variables (``tools``, switches).

        ``absent`` holds the variables that the template finds where ``extra`` has none.

        ``origins_of`` it are the characters that the template itself wrote. ``limits`` None: those of the template.
        Raises TemplateError if the template refuses the messages (in the template's own words), fails, or exceeds its
        limits; InvalidRequestError if the arguments hold anything but text, numbers, lists and mappings; and what
        ``budget``, that of the request, raises.
        """
        from jinja2 import Template

        from edgespec.text.chat_template.sandbox import Sandbox

        if isinstance(messages, str) or any(not isinstance(message, Mapping) for message in messages):
            raise InvalidRequestError("messages must be a list of mappings, each with a role and a content")
        messages = list(messages)
        own = {"messages": messages, "add_generation_prompt": add_generation_prompt, **self._tokens}
        variables = {**absent, **own}
        if extra is not None:
            if taken := own.keys() & extra.keys():
                raise not_settable(min(taken))
            variables.update(extra)
        sizes = list[int]()
        copies = {
            name: plain(value, "a message or extra value", NESTING, lambda each: sizes.append(_size(each)))
            for name, value in variables.items()
        }
        copies |= {name: written(text) for name, text in self._tokens.items()}
        for message, given in zip(copies["messages"], messages, strict=True):
            if message.get("role") in _ROLES:
                message["role"] = written(message["role"])
            if isinstance(given.get("content"), Written):  # calls, where the template has no place for them
                message["content"] = given["content"]
        sandbox = Sandbox(Budget(limits or self.limits, sum(sizes), budget))
        template = Template.from_code(sandbox, self._code, {**sandbox.globals, **copies})
        try:
            return _collect(template, sandbox.budget)
        except Exception as error:
            failure = _failure(error, template)
        # Outside the handler: the traceback would keep the template's values alive.
        raise failure


def _compile(source: str, limits: TemplateLimits) -> tuple[CodeType, frozenset[str]]:
    """The template's code, and the names that it reads."""
    from jinja2 import TemplateSyntaxError, nodes

    from edgespec.text.chat_template.sandbox import Sandbox, rewrite

    sandbox = Sandbox(Budget(limits, 0))
    try:
        parsed = sandbox.parse(source)
        names = frozenset(name.name for name in parsed.find_all(nodes.Name) if name.ctx == "load")
        tree = rewrite(parsed)
        tree.set_environment(sandbox)
        python = sandbox.compile(tree, raw=True)
        if len(python) > _PYTHON_CHARACTERS:
            raise TemplateError("the chat template is too complex to compile")
        return compile(python, _FILENAME, "exec"), names
    except TemplateError:
        raise
    except TemplateSyntaxError as error:
        reason = _short(error.message or "it is malformed")
        raise TemplateError(f"the chat template has a syntax error on line {error.lineno}: {reason}") from error
    except Exception as error:  # RecursionError, MemoryError of the parser, ValueError of a huge literal, ...
        raise TemplateError(f"the chat template cannot be compiled: {_describe(error)}") from error


def _collect(template: Template, budget: Budget) -> str:
    pieces, size = [], 0
    # Not Template.render(): on an error jinja rebuilds every frame of the traceback, which is slow after recursion.
    for piece in template.root_render_func(template.new_context()):
        size += stored_bytes(piece)
        if size > budget.output_bytes:
            raise TemplateError(f"it writes more than the {budget.output_bytes} bytes allowed")
        pieces.append(piece)
    return joined(pieces)


def _failure(error: Exception, template: Template) -> EdgespecError:
    from edgespec.text.chat_template.sandbox import TemplateRaisedError

    if isinstance(error, CancelledError):
        return CancelledError(error.message)
    if isinstance(error, TemplateRaisedError):
        return TemplateError(error.message, hint="this model's chat template does not accept these messages")
    line = _line(error.__traceback__, template)
    where = "" if line is None else f" on line {line}"
    return TemplateError(f"the chat template failed{where}: {_describe(error)}")


def _line(trace: TracebackType | None, template: Template) -> int | None:
    """The template's line that failed: the line of its innermost frame."""
    found = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _FILENAME:
            found = trace.tb_lineno
        trace = trace.tb_next
    return None if found is None else template.get_corresponding_lineno(found)


def _describe(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it nests too deeply"
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    return _short(str(error)) or type(error).__name__


def _short(text: str) -> str:
    line = " ".join(text[: 2 * _REASON_CHARACTERS].split())
    return line if len(line) <= _REASON_CHARACTERS else line[:_REASON_CHARACTERS] + "..."


def _size(value: Any) -> int:
    """The bytes of a value without those of the values inside."""
    if isinstance(value, str):
        return stored_bytes(value)
    return sum(len(name) + 8 for name in value) if isinstance(value, Mapping) else 8

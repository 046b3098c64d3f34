"""The last conversation of a terminal, for ``edgespec chat --continue``: a file that only the user may read."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgespec.errors import EdgespecError, InvalidRequestError, reason_of
from edgespec.files.atomic import replacing
from edgespec.files.checked import parse_object, read
from edgespec.files.disk import is_there, read_bounded
from edgespec.files.home import Home
from edgespec.store.catalogue import catalogue
from edgespec.store.references import LocalPath, parse_reference
from edgespec.text.conversation.messages import check_messages

# More than the longest contexts hold; a larger file is not read.
_LARGEST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class KeptConversation:
    """A conversation without its thinking, and the model that answered, as a profile's ``target`` names it."""

    model: str
    system: str | None
    messages: Sequence[Mapping[str, Any]]

    def write(self, user_home: Home) -> None:
        """Replace the kept conversation; one without messages only removes it. A home that fails keeps nothing."""
        path = user_home.conversation
        with contextlib.suppress(OSError, EdgespecError):
            if not self.messages:
                path.unlink(missing_ok=True)
                return
            user_home.create(user_home.conversations)
            value = {"schema_version": 1, "model": self.model, "system": self.system, "messages": self.messages}
            with replacing(path, private=True) as file:
                file.write(json.dumps(value, ensure_ascii=False, indent=1).encode("utf-8", "replace"))

    @staticmethod
    def read(user_home: Home) -> KeptConversation:
        """The kept conversation. Raises InvalidRequestError if there is none, or if its file is damaged."""
        path = user_home.conversation
        try:
            data = read_bounded(path, _LARGEST_BYTES)
        except FileNotFoundError as error:
            raise InvalidRequestError(
                "no conversation is kept", hint="`edgespec chat` begins one, and keeps it unless history = false"
            ) from error
        except (OSError, ValueError) as error:
            hint = None if isinstance(error, OSError) else "`edgespec memory clear` removes it"
            raise InvalidRequestError(f"{path} cannot be read: {reason_of(error)}", hint=hint) from error
        try:
            document = parse_object(path, data)
            kept = read(KeptConversation, document, ignore_unknown=True)
            if document.get("schema_version") != 1:
                raise ValueError
            return replace(kept, messages=check_messages(kept.messages))
        except (ValueError, EdgespecError) as error:
            raise InvalidRequestError(
                f"the kept conversation is damaged: {path}", hint="`edgespec memory clear` removes it"
            ) from error


def name_of(target: str) -> str:
    """A model's name that means the same in every folder."""
    with contextlib.suppress(EdgespecError, OSError):
        reference = parse_reference(target, catalogue().keys())
        # A name of another kind, as ollama:NAME, is read as a path that does not exist.
        if isinstance(reference, LocalPath) and is_there(reference.path):
            return str(reference.path.absolute())
    return target

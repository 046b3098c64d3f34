"""Whether a file was made in this home: a message authentication code (HMAC, RFC 2104) by a secret of the home.

Only files that leave the home and come back have one: saved sessions. Files inside the home need none, for who can
write there can read the secret; their own digests find damage.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import secrets

from edgespec.errors import EdgespecError
from edgespec.files.atomic import replacing
from edgespec.files.disk import read_bounded
from edgespec.files.home import Home

MAC_BYTES = 32
NO_MAC = bytes(MAC_BYTES)

_SECRET_BYTES = 32


def mac_in(home: Home, digest: bytes) -> bytes:
    """The code of a content with this sha256, by the home's secret, which is made at its first use.

    NO_MAC if the home cannot keep a secret, or its secret cannot be read now.
    """
    with contextlib.suppress(OSError, EdgespecError):
        return _mac(_read_secret(home) or _make_secret(home), digest)
    return NO_MAC


def made_in(home: Home, digest: bytes, mac: bytes) -> bool:
    """Whether ``mac`` is the code of a content with this sha256 by the home's secret. False without a secret.

    Raises OSError if the secret cannot be read now.
    """
    secret = _read_secret(home)
    return secret is not None and hmac.compare_digest(_mac(secret, digest), mac)


def _mac(secret: bytes, digest: bytes) -> bytes:
    return hmac.digest(secret, digest, hashlib.sha256)


def _read_secret(home: Home) -> bytes | None:
    """The secret; None if it is missing or damaged. Raises OSError for a failure that may pass."""
    try:
        secret = read_bounded(home.secret, _SECRET_BYTES)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        if error.errno == errno.EINVAL:  # no regular file
            return None
        raise
    return secret if len(secret) == _SECRET_BYTES else None


def _make_secret(home: Home) -> bytes:
    with home.locked("secret", "making this home's secret"):
        secret = _read_secret(home)  # another process may have made it
        if secret is None:
            secret = secrets.token_bytes(_SECRET_BYTES)
            with replacing(home.secret, expected_bytes=_SECRET_BYTES, private=True) as file:
                file.write(secret)
        return secret

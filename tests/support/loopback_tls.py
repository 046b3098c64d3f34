"""A certificate for 127.0.0.1 and localhost, valid from 2020 to 2120, for tests over HTTPS.

The key is public: only tests trust it. Made with `openssl ca -selfsign`.
"""

from __future__ import annotations

import ssl
from pathlib import Path

KEY = """-----BEGIN EC PRIVATE KEY-----
MHcCAQEEIJVs5DQIiYPslCKW1A/e2R6bS9PHHinOm7evngoH77eQoAoGCCqGSM49
AwEHoUQDQgAE8hKjXV0LlkY5FQg7O5Qt5e4N1k64Bx3aKdMG3eS7+k+QBFk6hj6W
DDrXgCUyt1YY/tMGuHJ3E7dJ1Pq1af0VaA==
-----END EC PRIVATE KEY-----
"""
CERTIFICATE = """-----BEGIN CERTIFICATE-----
MIIBbzCCARWgAwIBAgIBATAKBggqhkjOPQQDAjAYMRYwFAYDVQQDDA1sb29wYmFj
ayB0ZXN0MCAXDTIwMDEwMTAwMDAwMFoYDzIxMjAwMTAxMDAwMDAwWjAYMRYwFAYD
VQQDDA1sb29wYmFjayB0ZXN0MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE8hKj
XV0LlkY5FQg7O5Qt5e4N1k64Bx3aKdMG3eS7+k+QBFk6hj6WDDrXgCUyt1YY/tMG
uHJ3E7dJ1Pq1af0VaKNOMEwwGgYDVR0RBBMwEYIJbG9jYWxob3N0hwR/AAABMA8G
A1UdEwEB/wQFMAMBAf8wHQYDVR0OBBYEFIWdJ+I0rgaFrmp6nOKE8dNsg0Y3MAoG
CCqGSM49BAMCA0gAMEUCIQCeeLCSNxOMiHhYSC4BCkgOh84QzA3ztQTRnUHAC2SS
bgIgPdKT7mNqc1Q/yTIMsxmbQBzSEniz+kdzBXJNjAVSH4Y=
-----END CERTIFICATE-----
"""


def write_certificate(folder: Path) -> Path:
    """The certificate without its key, as a company distributes it."""
    path = folder / "company.pem"
    path.write_text(CERTIFICATE)
    return path


def server_context(folder: Path) -> ssl.SSLContext:
    """The server's TLS context with certificate and key."""
    both = folder / "server.pem"
    both.write_text(KEY + CERTIFICATE)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(both)
    return context

"""The package onnx, which only those who write ONNX models have to install."""

from __future__ import annotations

from edgespec.errors import RuntimeUnavailableError


def require_onnx() -> None:
    """Raises RuntimeUnavailableError, with the command that helps, where the package cannot be imported."""
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"exporting to ONNX needs the package onnx, which cannot be imported: {error}",
            hint="pip install 'edgespec[onnx]'",
        ) from error

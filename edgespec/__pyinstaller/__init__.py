"""Tells PyInstaller what an application that embeds edgespec needs; found through pyproject.toml's entry point."""

from __future__ import annotations

from pathlib import Path


def hook_directories() -> list[str]:
    return [str(Path(__file__).parent)]

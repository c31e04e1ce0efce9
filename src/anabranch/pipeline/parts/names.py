"""Qualified names of modules."""

from __future__ import annotations

__all__ = ["is_within"]


def is_within(path: str, unit: str) -> bool:
    """Return True if the module named ``path`` is ``unit`` or inside it."""
    return path == unit or path.startswith(f"{unit}.")

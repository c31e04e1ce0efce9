"""Temporary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from anabranch.tensors import Structure

__all__ = ["ENDED", "BoundLoader"]


class _Ended:
    """x"""


ENDED: Final = _Ended()


class BoundLoader:
    """x"""

    def __init__(self, loader: Iterable[Structure], *, rank: int, world_size: int, prefetch: bool = True) -> None:
        self._loader = loader
        self._it: Iterator[Structure] | None = iter(loader)
        self._n = 0

    def next_batch(self) -> Structure:
        """X"""
        assert self._it is not None
        b = next(self._it, ENDED)
        if b is not ENDED:
            self._n += 1
        return b

    def start_epoch(self) -> None:
        """X"""
        self._it = iter(self._loader)
        self._n = 0

    def length(self) -> int | None:
        """X"""
        return len(self._loader) if hasattr(self._loader, "__len__") else None

    def state(self) -> object:
        """X"""
        return {"n": self._n}

    def restore(self, states: Sequence[object]) -> None:
        """X"""
        self.start_epoch()
        for _ in range(states[0]["n"]):  # type: ignore
            self.next_batch()

    def close(self) -> None:
        """X"""

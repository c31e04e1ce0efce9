"""Initial values of rows: a function of (seed, table, id, column), so that no worker ever creates a whole table."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constant:
    """Every element starts as ``value``."""

    value: float = 0.0

    def __post_init__(self) -> None:
        _check_finite("Constant", value=self.value)

    def numbers(self) -> tuple[int, float, float]:
        """Return the kernel's form: kind and two numbers."""
        return 0, float(self.value), 0.0


@dataclass(frozen=True, slots=True)
class Uniform:
    """Elements are drawn uniformly from [low, high)."""

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        _check_finite("Uniform", low=self.low, high=self.high)

    def numbers(self) -> tuple[int, float, float]:
        """Return the kernel's form: kind and two numbers."""
        return 1, float(self.low), float(self.high)


@dataclass(frozen=True, slots=True)
class Normal:
    """Elements are drawn from the normal distribution, as in ``torch.nn.Embedding``."""

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        _check_finite("Normal", mean=self.mean, std=self.std)

    def numbers(self) -> tuple[int, float, float]:
        """Return the kernel's form: kind and two numbers."""
        return 2, float(self.mean), float(self.std)


Initial = Constant | Uniform | Normal
"""The initial value of rows."""


def _check_finite(kind: str, **numbers: float) -> None:
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise ValueError(f"{kind}({name}={value!r}): the initial values of rows must be finite")


def table_key(seed: int, name: str) -> int:
    """64 bits for a table: another table or seed gives the same id other values.

    >>> table_key(0, "users") == table_key(0, "users"), table_key(0, "users") == table_key(1, "users")
    (True, False)
    """
    text = f"{seed}:{name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"anabranch").digest(), "little")

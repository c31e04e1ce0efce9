"""``TableSpec``: the facts of one table on which workers and servers must agree."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from anabranch.tables.initial import Constant, Initial, Normal, Uniform
from anabranch.tensors.dtypes import dtype_name, dtype_named

Eviction = Literal["age", "frequency"]
ALLOWED_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")
_STANDARD_NORMAL = Normal()
_INITIALS = {"Constant": Constant, "Uniform": Uniform, "Normal": Normal}


def _counts(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_name(name: str) -> str:
    """Return ``name`` if it is valid: letters, digits, dots, dashes and underscores, never a path."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not a table name; use at most 200 letters, digits, '_', '-' and '.', the first no '-' or '.'"
        )
    return name


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an optimizer's state beside weights of ``dtype``, and of rows that come with it.

    The squares of ordinary gradients underflow in float16, whose state is float32.

    >>> state_dtype(torch.float16), state_dtype(torch.bfloat16)
    (torch.float32, torch.bfloat16)
    """
    return torch.float32 if dtype == torch.float16 else dtype


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One table of rows: its shape, its dtype, the initial values and the eviction of rows.

    >>> TableSpec("users", rows=1000, width=16).stays
    True
    >>> TableSpec("users", rows=1000, width=0)
    Traceback (most recent call last):
    ValueError: table users: width=0 must be at least 1

    Attributes:
        name: a name, never a path.
        rows: ids are ``range(rows)``; ``None`` for a dynamic vocabulary, in which any int64 is an id.
        width: numbers per row.
        dtype: float32, float64, bfloat16 or float16; beside float16 the optimizer's state is float32.
        initial: the first values of rows.
        seed: with the name and the id, fixes the first values of a row.
        every_row_moves: the optimizer moves rows that get no gradient too, as a dense torch optimizer does; a row is
            brought up to date when it is next read.
        capacity: most rows in a dynamic table, ``None`` for no limit. A server's shard takes its share of it, and more
            only for rows of a checkpoint, which do not spread over the shards quite evenly.
        eviction: the row that leaves a full table for a new one: the one unused longest, or used in the fewest steps.
        admission: probability that a training use admits a new id.
        memory_map: each shard keeps its rows in a file and maps it; the system keeps the parts in use in memory.

    Raises:
        ValueError: names the table, the value and what is allowed.
    """

    name: str
    rows: int | None
    width: int
    dtype: torch.dtype = torch.float32
    initial: Initial = _STANDARD_NORMAL
    seed: int = 0
    every_row_moves: bool = False
    capacity: int | None = None
    eviction: Eviction = "age"
    admission: float = 1.0
    memory_map: bool = False

    def __post_init__(self) -> None:
        check_name(self.name)
        self._require(self.rows is None or _counts(self.rows), f"rows={self.rows!r} must be at least 1, or None")
        self._require(_counts(self.width), f"width={self.width!r} must be at least 1")
        self._require(
            self.dtype in ALLOWED_DTYPES, f"dtype={self.dtype} is not one of {', '.join(map(str, ALLOWED_DTYPES))}"
        )
        self._require(
            isinstance(self.initial, Initial), f"initial={self.initial!r} is not a Constant, Uniform or Normal"
        )
        kind, low, high = self.initial.numbers()
        most = max(abs(low), abs(high)) if kind < 2 else abs(low) + 9 * abs(high)
        self._require(
            self.dtype != torch.float16 or most <= torch.finfo(torch.float16).max,
            f"initial={self.initial!r} gives rows that float16 cannot represent",
        )
        self._require(self.capacity is None or _counts(self.capacity), f"capacity={self.capacity!r} must be at least 1")
        self._require(
            self.eviction in ("age", "frequency"), f"eviction={self.eviction!r} is neither 'age' nor 'frequency'"
        )
        self._require(
            isinstance(self.seed, int) and -(1 << 63) <= self.seed < 1 << 63, f"seed={self.seed!r} must be an int64"
        )
        self._require(0 < self.admission <= 1, f"admission={self.admission} must be above 0 and at most 1")
        if self.rows is not None:
            self._require(
                self.capacity is None and self.admission == 1,
                "capacity and admission are for a dynamic vocabulary; give rows=None with them",
            )

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise ValueError(f"table {self.name}: {otherwise}")

    @property
    def stays(self) -> bool:
        """True if a row, once admitted, is never evicted."""
        return self.rows is not None or self.capacity is None

    def to_dict(self) -> dict[str, object]:
        """Its fields as plain values, for a manifest or a message."""
        values = asdict(self)
        values["dtype"] = dtype_name(self.dtype)
        values["initial"] = {"kind": type(self.initial).__name__, **asdict(self.initial)}
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> TableSpec:
        """Return the spec from the ``values`` of ``to_dict``; unknown dtypes and initial values raise
        ``ValueError``.
        """
        found = dict(values)
        dtype = dtype_named(str(found.pop("dtype")), among=ALLOWED_DTYPES)
        initial = found.pop("initial")
        if not isinstance(initial, Mapping) or initial.get("kind") not in _INITIALS:
            raise ValueError(f"{initial!r} does not describe initial rows; give a Constant, Uniform or Normal")
        numbers = {str(key): value for key, value in initial.items() if key != "kind"}
        return cls(dtype=dtype, initial=_INITIALS[str(initial["kind"])](**numbers), **found)  # type: ignore[arg-type]

"""``TableSpec``: the facts of one table on which workers and servers must agree, first values and shards among them."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from typing import ClassVar, Literal

import torch

from anabranch.tensors.dtypes import dtype_name, dtype_named

# --- initial values ---------------------------------------------------------------------------------------------------
# A function of (seed, table, id, column), so that no worker ever creates a whole table.


class _Values:
    """One or two numbers from which rows are drawn; ``kind`` is the kernel's name for how."""

    __slots__ = ()
    kind: ClassVar[int]

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():  # type: ignore[call-overload]
            if not math.isfinite(value):
                raise ValueError(f"{type(self).__name__}({name}={value!r}): the initial values of rows must be finite")

    def numbers(self) -> tuple[int, float, float]:
        """Return the kernel's form: kind and two numbers."""
        first, second = (*map(float, astuple(self)), 0.0)[:2]  # type: ignore[call-overload]
        return self.kind, first, second


@dataclass(frozen=True, slots=True)
class Constant(_Values):
    """Every element starts as ``value``."""

    kind = 0
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Uniform(_Values):
    """Elements are drawn uniformly from [low, high)."""

    kind = 1
    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True, slots=True)
class Normal(_Values):
    """Elements are drawn from the normal distribution, as in ``torch.nn.Embedding``."""

    kind = 2
    mean: float = 0.0
    std: float = 1.0


Initial = Constant | Uniform | Normal
"""The initial value of rows."""


def table_key(seed: int, name: str) -> int:
    """64 bits for a table: another table or seed gives the same id other values.

    >>> table_key(0, "users") == table_key(0, "users"), table_key(0, "users") == table_key(1, "users")
    (True, False)
    """
    text = f"{seed}:{name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"anabranch").digest(), "little")


# --- tables -----------------------------------------------------------------------------------------------------------


Eviction = Literal["age", "frequency"]
ALLOWED_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")
_MOST_OF_HALF = torch.finfo(torch.float16).max
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
    """Return the dtype of an optimizer's state beside weights of ``dtype``.

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
        kind, low, high = self.initial.numbers() if isinstance(self.initial, Initial) else (0, math.nan, 0.0)
        most = max(abs(low), abs(high)) if kind < 2 else abs(low) + 9 * abs(high)
        limited = self.capacity is not None or self.admission != 1
        for holds, otherwise in (
            (self.rows is None or _counts(self.rows), f"rows={self.rows!r} must be at least 1, or None"),
            (_counts(self.width), f"width={self.width!r} must be at least 1"),
            (self.dtype in ALLOWED_DTYPES, f"dtype={self.dtype} is not one of {ALLOWED_DTYPES}"),
            (not math.isnan(low), f"initial={self.initial!r} is not a Constant, Uniform or Normal"),
            (self.dtype != torch.float16 or most <= _MOST_OF_HALF, f"float16 cannot represent {self.initial!r}"),
            (self.capacity is None or _counts(self.capacity), f"capacity={self.capacity!r} must be at least 1"),
            (self.eviction in ("age", "frequency"), f"eviction={self.eviction!r} is neither 'age' nor 'frequency'"),
            (isinstance(self.seed, int) and abs(self.seed) < 1 << 63, f"seed={self.seed!r} must be an int64"),
            (0 < self.admission <= 1, f"admission={self.admission} must be above 0 and at most 1"),
            (self.rows is None or not limited, "capacity and admission are for a dynamic vocabulary; give rows=None"),
        ):
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


# --- shards -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement:
    """The rows of one table over the shards, so that the most requested rows are not all on one.

    Ids are often ranked by frequency, or share a factor, so neither blocks of ids nor ``id % shards`` are safe. A keyed
    permutation of the ids comes first, then ``% shards`` (``permuted`` in ``kernels/numbers.py``). It is a bijection,
    so a fixed table needs no index. A dynamic table has no range to permute; there the mixed bits of the id determine
    the shard. A single shard keeps its rows in the order of their ids.

    >>> placement = Placement(rows=10, shards=3, key=7)
    >>> sum(placement.count(shard) for shard in range(3))
    10

    Attributes:
        rows: the number of rows of the table, ``None`` if any int64 is an id of it.
        shards: the number of shards that hold them.
        key: 64 bits that fix the permutation; every worker and shard must use the same.
    """

    rows: int | None
    shards: int
    key: int

    @classmethod
    def of(cls, spec: TableSpec, shards: int) -> Placement:
        """Return the placement of a table's rows over so many shards."""
        return cls(spec.rows, shards, table_key(spec.seed, spec.name))

    def count(self, shard: int) -> int:
        """Return the number of rows of a fixed table that ``shard`` holds."""
        assert self.rows is not None
        return (self.rows - shard + self.shards - 1) // self.shards

    @property
    def half(self) -> int:
        """Half the bits of the power of four in which a fixed table's ids are permuted."""
        assert self.rows is not None
        return max(1, (max(self.rows - 1, 1).bit_length() + 1) // 2)

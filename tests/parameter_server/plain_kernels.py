"""What the kernels compute, in NumPy: the oracle of their tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.tables.kernels.rows import QUANTILE
from anabranch.tables.table_spec import Placement

Array = NDArray[Any]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def place(ids: Array, rows: int, half: int, key: int) -> Array:
    """The place of each id in a keyed permutation of ``range(rows)``."""
    out, pending = ids.copy(), np.arange(ids.size)
    while pending.size:
        out[pending] = _feistel(out[pending], half, key)
        pending = pending[out[pending] >= rows]
    return out


def owners(placement: Placement, ids: Array) -> Array:
    """The shard of each id."""
    if placement.rows is None:
        return (mix(ids.view(np.uint64) ^ np.uint64(placement.key)) % np.uint64(placement.shards)).astype(np.int64)
    permuted = ids if placement.shards == 1 else place(ids, placement.rows, placement.half, placement.key)
    return np.asarray(permuted % placement.shards)


def _feistel(values: Array, half: int, key: int) -> Array:
    mask = np.uint64((1 << half) - 1)
    left, right = values.astype(np.uint64) >> np.uint64(half), values.astype(np.uint64) & mask
    for turn in range(4):
        salt = np.array([(int(key) + turn * int(_GOLDEN)) % 2**64], np.uint64)
        left, right = right, left ^ (mix(right + salt) & mask)
    return ((left << np.uint64(half)) | right).astype(np.int64)


def first_values(ids: Array, width: int, key: int, kind: int, low: float, high: float) -> Array:
    """The first values of rows in float64: kind 0 ``low``, 1 uniform in [low, high), 2 normal(low, high)."""
    words = mix(np.uint64(key) ^ mix(ids.view(np.uint64) + _GOLDEN))
    bits = mix(words[:, None] + np.arange(1, width + 1, dtype=np.uint64) * _GOLDEN)
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    if kind == 0:
        return np.full_like(uniform, low)
    return low + (high - low) * uniform if kind == 1 else low + high * quantile(uniform)


def quantile(p: Array) -> Array:
    """The normal distribution's quantile function, after Wichura's algorithm AS 241."""
    q = p - 0.5
    near = 0.180625 - q * q
    middle = q * _polynomial(near, 0) / _polynomial(near, 1)
    r = np.sqrt(-_logarithm(np.where(q < 0, p, 1.0 - p)))
    inner = _polynomial(r - 1.6, 2) / _polynomial(r - 1.6, 3)
    outer = _polynomial(r - 5.0, 4) / _polynomial(r - 5.0, 5)
    tail = np.where(r <= 5.0, inner, outer)
    return np.where(np.abs(q) <= 0.425, middle, np.where(q < 0, -tail, tail))


def _polynomial(x: Array, row: int) -> Array:
    total = np.full_like(x, QUANTILE[row, 7])
    for k in range(6, -1, -1):
        total = total * x + QUANTILE[row, k]
    return total


def _logarithm(x: Array) -> Array:
    mantissa, exponent = np.frexp(x)
    low = mantissa < 0.70710678118654752
    mantissa, exponent = np.where(low, mantissa * 2, mantissa), exponent - low
    t = (mantissa - 1.0) / (mantissa + 1.0)
    square, series = t * t, np.zeros_like(t)
    for k in range(12, -1, -1):
        series = series * square + 1.0 / (2.0 * k + 1.0)
    return np.asarray(exponent * 0.6931471805599453 + 2.0 * t * series)

"""The table kernels in plain PyTorch and NumPy: used without Numba, and the reference for ``_compiled``.

The update rules are those of ``_updates``, run on copies of the rows. Those copies are padded to whole vector
registers, because torch's kernels handle the last few elements of a tensor differently.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.tables.kernels._updates import Update, run_adagrad, run_adam, run_sgd

Array = NDArray[Any]
_REGISTER = 64  # elements; a multiple of every vector register's
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


# --- bfloat16 is stored as uint16 -----------------------------------------------------------------------------------


def _tensor(storage: Array) -> Tensor:
    tensor = torch.from_numpy(storage)
    return tensor.view(torch.bfloat16) if storage.dtype == np.uint16 else tensor


def _table(storage: Array, stride: int) -> Tensor:
    return _tensor(storage)[: storage.size // stride * stride].view(-1, stride)


def _working(storage: Array) -> torch.dtype:
    return torch.float64 if storage.dtype == np.float64 else torch.float32


# --- ids ------------------------------------------------------------------------------------------------------------


def first_outside(ids: Array, rows: int) -> int:
    """Return the position of the first id outside ``range(rows)``, -1 without any."""
    bad = np.flatnonzero((ids < 0) | (ids >= rows))
    return int(bad[0]) if bad.size else -1


def _mix(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def merge(rows: Array, buckets: Array, unique: Array, inverse: Array) -> int:
    """Numbers the distinct rows in the order in which they first appear; returns their count."""
    distinct, first, back = np.unique(rows, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    unique[: distinct.size] = distinct[order]
    rank = np.empty_like(order)
    rank[order] = np.arange(order.size)
    inverse[:] = rank[back]
    return int(distinct.size)


def place(ids: Array, rows: int, half: int, key: int, out: Array, forward: bool) -> None:
    """Find the place of each id in a keyed permutation of ``range(rows)``; without ``forward`` the id at each place."""
    out[:] = ids
    pending = np.arange(ids.size)
    while pending.size:
        out[pending] = _feistel(out[pending], half, key, forward)
        pending = pending[out[pending] >= rows]


def _feistel(values: Array, half: int, key: int, forward: bool) -> Array:
    mask = np.uint64((1 << half) - 1)
    left, right = values.astype(np.uint64) >> np.uint64(half), values.astype(np.uint64) & mask
    for turn in range(4) if forward else range(3, -1, -1):
        salt = np.array([(int(key) + turn * int(_GOLDEN)) % 2**64], np.uint64)
        if forward:
            left, right = right, left ^ (_mix(right + salt) & mask)
        else:
            left, right = right ^ (_mix(left + salt) & mask), left
    return ((left << np.uint64(half)) | right).astype(np.int64)


# --- rows in and out ------------------------------------------------------------------------------------------------


def _spaced(flat: Array, stride: int, width: int) -> Array:
    """Rows of ``width`` numbers that begin ``stride`` apart; the last may end where ``flat`` ends."""
    rows = (flat.size - width) // stride + 1 if flat.size else 0
    return np.lib.stride_tricks.as_strided(flat, (rows, width), (stride * flat.itemsize, flat.itemsize))


def gather(
    storage: Array, stride: int, width: int, rows: Array, out: Array, out_stride: int, first: int, last: int
) -> None:
    """Copy the weights of row ``rows[i]`` to ``out[i * out_stride:]``; a row of -1 is left as ``out`` has it."""
    known = np.flatnonzero(rows[first:last] >= 0) + first
    _spaced(out, out_stride, width)[known] = storage.reshape(-1, stride)[rows[known], :width]


def first_behind(stamps: Array, rows: Array, needed: int) -> int:
    """Return the position of the first row whose stamp is below ``needed``, -1 without any; rows of -1 have no
    stamp.
    """
    known = np.flatnonzero(rows >= 0)
    behind = known[stamps[rows[known]] < needed]
    return int(behind[0]) if behind.size else -1


def merge_sums(
    grads: Array,
    stride: int,
    width: int,
    source: Array,
    inverse: Array,
    merged: Array,
    first: int,
    last: int,
) -> None:
    """Add up the gradients of each distinct row, in the order of the lookups; this part's rows only."""
    sums, lookups = merged.reshape(-1, width), _spaced(grads, stride, width)
    sums[first:last] = 0
    for i, row in enumerate(inverse):
        if first <= row < last:
            sums[row] += lookups[source[i] if source.size else i]


# --- first values ---------------------------------------------------------------------------------------------------


def _logarithm(x: Array) -> Array:
    mantissa, exponent = np.frexp(x)
    low = mantissa < 0.70710678118654752
    mantissa, exponent = np.where(low, mantissa * 2, mantissa), exponent - low
    t = (mantissa - 1.0) / (mantissa + 1.0)
    square = t * t
    series = np.zeros_like(t)
    for k in range(12, -1, -1):
        series = series * square + 1.0 / (2.0 * k + 1.0)
    return cast(Array, exponent * 0.6931471805599453 + 2.0 * t * series)


def _polynomial(x: Array, coefficients: Array) -> Array:
    total = np.full_like(x, coefficients[7])
    for k in range(6, -1, -1):
        total = total * x + coefficients[k]
    return total


def _quantile(p: Array, coefficients: Array) -> Array:
    q = p - 0.5
    near = 0.180625 - q * q
    middle = q * _polynomial(near, coefficients[0]) / _polynomial(near, coefficients[1])
    r = np.sqrt(-_logarithm(np.where(q < 0, p, 1.0 - p)))
    inner = _polynomial(r - 1.6, coefficients[2]) / _polynomial(r - 1.6, coefficients[3])
    outer = _polynomial(r - 5.0, coefficients[4]) / _polynomial(r - 5.0, coefficients[5])
    tail = np.where(r <= 5.0, inner, outer)
    return np.where(np.abs(q) <= 0.425, middle, np.where(q < 0, -tail, tail))


def initialise(
    storage: Array,
    stride: int,
    width: int,
    rows: Array,
    ids: Array,
    key: int,
    kind: int,
    low: float,
    high: float,
    state: float,
    coefficients: Array,
    first: int,
    last: int,
) -> None:
    """Give each row the first values of its id: kind 0 ``low``, 1 uniform in [low, high), 2 normal(low, high)."""
    words = _mix(np.uint64(key) ^ _mix(ids[first:last].view(np.uint64) + _GOLDEN))
    columns = np.arange(1, width + 1, dtype=np.uint64) * _GOLDEN
    bits = _mix(words[:, None] + columns)
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    if kind == 0:
        values = np.full_like(uniform, low)
    elif kind == 1:
        values = low + (high - low) * uniform
    else:
        values = low + high * _quantile(uniform, coefficients)
    table, where = _table(storage, stride), torch.from_numpy(rows[first:last])
    block = torch.full((len(where), stride), state, dtype=_working(storage), device="cpu")
    block[:, :width] = torch.from_numpy(values).to(block.dtype)
    table[where] = block.to(table.dtype)


# --- the update rules -----------------------------------------------------------------------------------------------


def on_rows(storage: Array, stride: int, width: int, rows: Array, grads: Array, part: slice, update: Update) -> None:
    """Run ``update(weights, grads, states)`` on widened, padded copies of the rows, and put them back."""
    table, where = _table(storage, stride), torch.from_numpy(rows[part])
    grad = torch.from_numpy(grads).view(-1, width)[part].to(table.dtype).to(_working(storage))
    size = grad.numel()

    def padded(values: Tensor) -> Tensor:
        out = torch.zeros(-(-size // _REGISTER) * _REGISTER, dtype=values.dtype, device="cpu")
        out[:size] = values.reshape(-1)
        return out

    block = table[where].to(grad.dtype)
    columns = [padded(block[:, at : at + width]) for at in range(0, stride, width)]
    update(columns[0], padded(grad), columns[1:])
    for at, column in enumerate(columns):
        block[:, at * width : (at + 1) * width] = column[:size].view(-1, width)
    table[where] = block.to(table.dtype)


def step_sgd(
    storage: Array, stride: int, width: int, rows: Array, grads: Array, c: Array, first: int, last: int
) -> None:
    """SGD with momentum, dampening, Nesterov and L2 decay on distinct rows."""
    on_rows(storage, stride, width, rows, grads, slice(first, last), run_sgd(c))


def step_adagrad(
    storage: Array, stride: int, width: int, rows: Array, grads: Array, c: Array, first: int, last: int
) -> None:
    """Adagrad on distinct rows."""
    rounded = c.copy()
    rounded[0] = float(
        torch.tensor(c[0], device="cpu").to(_tensor(storage).dtype)
    )  # as torch's kernel does, to bfloat16
    on_rows(storage, stride, width, rows, grads, slice(first, last), run_adagrad(rounded))


def step_adam(
    storage: Array, stride: int, width: int, rows: Array, grads: Array, c: Array, first: int, last: int
) -> None:
    """Adam, AdamW and SparseAdam on distinct rows."""
    on_rows(storage, stride, width, rows, grads, slice(first, last), run_adam(c))


def step_row_wise_adagrad(
    storage: Array, stride: int, width: int, sums: Array, rows: Array, grads: Array, c: Array, first: int, last: int
) -> None:
    """Row-wise Adagrad on distinct rows; ``sums`` has one number per row, its squares added up in float64."""
    where = torch.from_numpy(rows[first:last])
    totals = torch.from_numpy(sums)

    def update(weights: Tensor, grad: Tensor, states: list[Tensor]) -> None:
        size = len(where) * width
        w, g = weights[:size].view(-1, width), grad[:size].view(-1, width)
        g = g * c[5] + w * c[4]
        total = totals[where] + (g.double().square().sum(1) / width).to(totals.dtype)
        totals[where] = total
        w -= g * (c[0] / (total.double().sqrt() + c[1])).to(g.dtype)[:, None]

    on_rows(storage, stride, width, rows, grads, slice(first, last), update)


# --- steps that a row missed ----------------------------------------------------------------------------------------


def replay(
    storage: Array,
    stride: int,
    width: int,
    rows: Array,
    since: Array,
    history: Array,
    adam: bool,
    may_rest: bool,
    steady: bool,
    zeros: Array,
    before: Array,
    first: int,
    last: int,
) -> None:
    """Move each distinct row through the steps ``history[since[i]:]``, one after the other and every one in full."""
    mine, start = rows[first:last], since[first:last]
    for k in range(int(start.min(initial=len(history))), len(history)):
        late = mine[start <= k]
        update = run_adam(history[k]) if adam else run_sgd(history[k])
        on_rows(storage, stride, width, late, np.zeros(late.size * width, before.dtype), slice(None), update)

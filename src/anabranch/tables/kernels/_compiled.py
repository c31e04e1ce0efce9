"""The table kernels, compiled by Numba: one function per mechanism, each with its plain form in ``_plain``.

Conventions that all of them share:

- *Storage is flat.* Row ``r`` is ``storage[r * stride:(r + 1) * stride]``: the weights, then each state, so a row and
  its state are neighbours in memory. bfloat16 is stored as ``uint16``, which Numba knows; arithmetic on it is float32.
- *Offsets are unsigned*, so that no index is tested for "counts from the end" and loops vectorise. Rows are checked
  against the table by the caller: nothing below checks them again.
- *Ranges.* ``first`` and ``last`` are the part of the work that this thread does; parts never write the same row.
- *Arithmetic is that of torch's fused optimizers, bit for bit*: where their compiled form multiplies and adds in one
  rounding, ``fma`` is used here, and otherwise a plain expression.
- ``error_model="numpy"`` because the test for a zero divisor stops vectorising; ``parallel=False`` because Numba's own
  thread layers abort when two threads enter a kernel, or after a fork.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from anabranch.tables.kernels._compiling import compiled

Function = Callable[..., Any]


_kernel = compiled


def _inline(function: Function) -> Function:
    return cast(Function, numba.njit(nogil=True, error_model="numpy", forceinline=True)(function))


def _instruction(function: Function) -> Function:
    return cast(Function, intrinsic(function))


def _overload(function: Function) -> Callable[[Function], Function]:
    return cast(Callable[[Function], Function], overload(function, strict=False))


U = np.uint64
_QUIET = 8  # steps in a row that leave the weights as they are
_PREFETCH = 8  # rows ahead


# --- instructions without a Python equivalent -----------------------------------------------------------------------


@_instruction
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return ``a * b + c`` in one rounding."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return a(a, a, a), generate


@_instruction
def _bits_to_float(typing: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


@_instruction
def _float_to_bits(typing: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@_instruction
def _prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Prefetches the cache line that holds ``array[index]``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, args[0])
        pointer = builder.gep(view.data, [args[1]])
        byte = builder.bitcast(pointer, ir.IntType(8).as_pointer())
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), word, word, word])
        function = builder.module.globals.get("llvm.prefetch.p0i8") or ir.Function(
            builder.module, kind, "llvm.prefetch.p0i8"
        )
        builder.call(function, [byte, word(1), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(array, index), generate


def load(storage: Any, index: Any) -> Any:
    """Return the number at ``index``: bfloat16 widened to float32, others unchanged."""


def store(storage: Any, index: Any, value: Any) -> None:
    """Store a number at ``index``: float32 rounded to bfloat16, half to even."""


@_overload(load)
def _load(storage: Any, index: Any) -> Any:
    if storage.dtype == types.uint16:
        return lambda storage, index: _bits_to_float(np.uint32(storage[index]) << np.uint32(16))
    return lambda storage, index: storage[index]


@_overload(store)
def _store(storage: Any, index: Any, value: Any) -> Any:
    if storage.dtype == types.uint16:

        def rounded(storage: Any, index: Any, value: Any) -> None:
            bits = _float_to_bits(np.float32(value))
            if value != value:
                storage[index] = np.uint16(0x7FC0)
            else:
                half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
                storage[index] = np.uint16((bits + half) >> np.uint32(16))

        return rounded

    def plain(storage: Any, index: Any, value: Any) -> None:
        storage[index] = value

    return plain


def number(storage: Any, value: Any) -> Any:
    """``value`` in the type that ``storage`` computes in."""


@_overload(number)
def _number(storage: Any, value: Any) -> Any:
    if storage.dtype == types.float64:
        return lambda storage, value: np.float64(value)
    return lambda storage, value: np.float32(value)


def coarse(storage: Any, value: Any) -> Any:
    """``value`` rounded to the type that ``storage`` holds, in the type that it computes in."""


@_overload(coarse)
def _coarse(storage: Any, value: Any) -> Any:
    if storage.dtype == types.uint16:

        def rounded(storage: Any, value: Any) -> Any:
            bits = _float_to_bits(np.float32(value))
            half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            return _bits_to_float(np.uint32((bits + half) & np.uint32(0xFFFF0000)))

        return rounded
    return lambda storage, value: number(storage, value)


# --- ids ------------------------------------------------------------------------------------------------------------


@_kernel
def first_outside(ids: Any, rows: int) -> int:
    """Return the position of the first id outside ``range(rows)``, -1 without any."""
    for i in range(ids.size):
        if ids[i] < 0 or ids[i] >= rows:
            return i
    return -1


@_inline
def _mix(x: Any) -> Any:
    """Return a bijection of 64 bits in which every bit of ``x`` reaches every bit of the result (Stafford's mix 13)."""
    x = (x ^ (x >> U(30))) * U(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U(27))) * U(0x94D049BB133111EB)
    return x ^ (x >> U(31))


@_kernel
def merge(rows: Any, buckets: Any, unique: Any, inverse: Any) -> int:
    """Numbers the distinct rows in the order in which they first appear; returns their count.

    ``buckets`` is scratch, a power of two above ``2 * rows.size``, of any content.
    """
    mask = U(buckets.size - 1)
    for b in range(buckets.size):
        buckets[b] = -1
    count = 0
    for i in range(rows.size):
        row = rows[i]
        at = (U(row) * U(0x9E3779B97F4A7C15) >> U(20)) & mask
        while True:
            held = buckets[at]
            if held < 0:
                buckets[at] = count
                unique[count] = row
                inverse[i] = count
                count += 1
                break
            if unique[held] == row:
                inverse[i] = held
                break
            at = (at + U(1)) & mask
    return count


@_inline
def _feistel(value: Any, half: Any, mask: Any, key: Any, forward: bool) -> Any:
    """Return a keyed bijection of ``2 * half`` bits: four rounds, each half mixed into the other."""
    left, right = value >> half, value & mask
    for turn in range(4):
        if forward:
            salt = key + U(turn) * U(0x9E3779B97F4A7C15)
            left, right = right, left ^ (_mix(right + salt) & mask)
        else:
            salt = key + U(3 - turn) * U(0x9E3779B97F4A7C15)
            left, right = right ^ (_mix(left + salt) & mask), left
    return (left << half) | right


@_kernel
def place(ids: Any, rows: int, half: int, key: Any, out: Any, forward: bool) -> None:
    """Find the place of each id in a keyed permutation of ``range(rows)``; without ``forward`` the id at each place.

    The bijection is of the next power of four; a value outside the range follows its cycle until it is inside.
    """
    bits, mask, end = U(half), (U(1) << U(half)) - U(1), U(rows)
    for i in range(ids.size):
        value = _feistel(U(ids[i]), bits, mask, U(key), forward)
        while value >= end:
            value = _feistel(value, bits, mask, U(key), forward)
        out[i] = value


# --- rows in and out ------------------------------------------------------------------------------------------------


@_kernel
def gather(storage: Any, stride: int, width: int, rows: Any, out: Any, out_stride: int, first: int, last: int) -> None:
    """Copy the weights of row ``rows[i]`` to ``out[i * out_stride:]``; a row of -1 is left as ``out`` has it."""
    wide, step, apart = U(width), U(stride), U(out_stride)
    for i in range(first, last):
        if i + _PREFETCH < last and rows[i + _PREFETCH] >= 0:
            _prefetch(storage, U(rows[i + _PREFETCH]) * step)
        if rows[i] >= 0:
            source, target = U(rows[i]) * step, U(i) * apart
            for j in range(wide):
                out[target + j] = storage[source + j]


@_kernel
def first_behind(stamps: Any, rows: Any, needed: int) -> int:
    """Return the position of the first row whose stamp is below ``needed``, -1 without any; rows of -1 have no
    stamp.
    """
    for i in range(rows.size):
        if i + _PREFETCH < rows.size and rows[i + _PREFETCH] >= 0:
            _prefetch(stamps, U(rows[i + _PREFETCH]))
        if rows[i] >= 0 and stamps[U(rows[i])] < needed:
            return i
    return -1


@_kernel
def merge_sums(
    grads: Any, stride: int, width: int, source: Any, inverse: Any, merged: Any, first: int, last: int
) -> None:
    """Add up the gradients of each distinct row, in the order of the lookups; this part's rows only.

    Lookup ``i`` belongs to the distinct row ``inverse[i]`` and adds row ``source[i]`` of the gradients (row ``i`` if
    ``source`` is empty), which begins at ``stride`` times that.
    """
    wide, apart = U(width), U(stride)
    for j in range(U(first) * wide, U(last) * wide):
        merged[j] = 0
    for i in range(inverse.size):
        if i + _PREFETCH < inverse.size:
            _prefetch(grads, U(source[i + _PREFETCH] if source.size else i + _PREFETCH) * apart)
        if first <= inverse[i] < last:
            target = U(inverse[i]) * wide
            at = U(source[i] if source.size else i) * apart
            for j in range(wide):
                merged[target + j] += grads[at + j]


# --- first values ---------------------------------------------------------------------------------------------------


@_inline
def _logarithm(x: float) -> Any:
    """log(x) for 0 < x < 1 from correctly rounded operations alone, so that every machine gets the same bits."""
    exponent = 0.0
    while x < 0.70710678118654752:
        x *= 2.0
        exponent -= 1.0
    t = (x - 1.0) / (x + 1.0)
    square = t * t
    series = 0.0
    for k in range(12, -1, -1):
        series = series * square + 1.0 / (2.0 * k + 1.0)
    return exponent * 0.6931471805599453 + 2.0 * t * series


@_inline
def _polynomial(x: float, coefficients: Any, row: int) -> Any:
    total = coefficients[row, 7]
    for k in range(6, -1, -1):
        total = total * x + coefficients[row, k]
    return total


@_inline
def _quantile(p: float, coefficients: Any) -> Any:
    """Return the normal distribution's quantile function, after Wichura's algorithm AS 241 (1988)."""
    q = p - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        return q * _polynomial(r, coefficients, 0) / _polynomial(r, coefficients, 1)
    r = math.sqrt(-_logarithm(p if q < 0 else 1.0 - p))
    if r <= 5.0:
        value = _polynomial(r - 1.6, coefficients, 2) / _polynomial(r - 1.6, coefficients, 3)
    else:
        value = _polynomial(r - 5.0, coefficients, 4) / _polynomial(r - 5.0, coefficients, 5)
    return -value if q < 0 else value


@_kernel
def initialise(
    storage: Any,
    stride: int,
    width: int,
    rows: Any,
    ids: Any,
    key: Any,
    kind: int,
    low: float,
    high: float,
    state: float,
    coefficients: Any,
    first: int,
    last: int,
) -> None:
    """Give each row the first values of its id: kind 0 ``low``, 1 uniform in [low, high), 2 normal(low, high).

    The numbers depend on ``(key, id, column)`` only. The rest of the row, its states, becomes ``state``.
    """
    wide, step = U(width), U(stride)
    for i in range(first, last):
        base = U(rows[i]) * step
        word = _mix(U(key) ^ _mix(U(ids[i]) + U(0x9E3779B97F4A7C15)))
        for j in range(wide):
            value = low
            if kind:
                bits = _mix(word + (j + U(1)) * U(0x9E3779B97F4A7C15))
                uniform = (np.float64(bits >> U(12)) + 0.5) * 2.0**-52
                if kind == 1:
                    value = low + (high - low) * uniform
                else:
                    value = low + high * _quantile(uniform, coefficients)
            store(storage, base + j, number(storage, value))
        for j in range(wide, step):
            store(storage, base + j, number(storage, state))


# --- the update rules, a row at a time ------------------------------------------------------------------------------


@_inline
def _sgd_row(storage: Any, base: Any, wide: Any, stateful: bool, grads: Any, at: Any, c: Any) -> None:
    lr, momentum, fresh = number(storage, -c[0]), number(storage, c[1]), number(storage, c[2])
    decay, sign = number(storage, c[4]), number(storage, c[5])
    if not stateful:
        for j in range(wide):
            w = load(storage, base + j)
            store(storage, base + j, fma(lr, fma(w, decay, grads[at + j] * sign), w))
        return
    nesterov, first = c[3] != 0, c[6] != 0
    for j in range(wide):
        w = load(storage, base + j)
        g = fma(w, decay, grads[at + j] * sign)
        b = load(storage, base + wide + j)
        b = g if first else fma(g, fresh, b * momentum)
        store(storage, base + wide + j, b)
        store(storage, base + j, fma(lr, fma(b, momentum, g) if nesterov else b, w))


@_inline
def _adagrad_row(storage: Any, base: Any, wide: Any, stateful: bool, grads: Any, at: Any, c: Any) -> None:
    lr = coarse(storage, c[0])  # torch rounds Adagrad's rate, and no other's, to bfloat16
    eps, decay, sign = number(storage, c[1]), number(storage, c[4]), number(storage, c[5])
    for j in range(wide):
        w = load(storage, base + j)
        g = fma(w, decay, grads[at + j] * sign)
        s = fma(g, g, load(storage, base + wide + j))
        store(storage, base + wide + j, s)
        store(storage, base + j, w - lr * g / (np.sqrt(s) + eps))


@_inline
def _adam_row(storage: Any, base: Any, wide: Any, stateful: bool, grads: Any, at: Any, c: Any) -> None:
    step, root, share, beta2 = (
        number(storage, c[0]),
        number(storage, c[1]),
        number(storage, c[2]),
        number(storage, c[3]),
    )
    decay, sign, eps, keep = number(storage, c[4]), number(storage, c[5]), number(storage, c[6]), number(storage, c[7])
    share2, rest = number(storage, c[8]), number(storage, 1.0) - share
    near = share < number(storage, 0.5)  # torch's lerp counts from the nearer end
    second = wide + wide
    for j in range(wide):
        w = load(storage, base + j)
        g = fma(w, decay, grads[at + j] * sign)
        w = w * keep
        m, v = load(storage, base + wide + j), load(storage, base + second + j)
        m = fma(share, g - m, m) if near else fma(m - g, rest, g)
        v = fma(share2 * g, g, v * beta2)
        store(storage, base + wide + j, m)
        store(storage, base + second + j, v)
        store(storage, base + j, w + step * m / (np.sqrt(v) / root + eps))


@_kernel
def step_sgd(storage: Any, stride: int, width: int, rows: Any, grads: Any, c: Any, first: int, last: int) -> None:
    """SGD with momentum, dampening, Nesterov and L2 decay on distinct rows."""
    wide, step = U(width), U(stride)
    for i in range(first, last):
        if i + _PREFETCH < last:
            _prefetch(storage, U(rows[i + _PREFETCH]) * step)
        _sgd_row(storage, U(rows[i]) * step, wide, step > wide, grads, U(i) * wide, c)


@_kernel
def step_adagrad(storage: Any, stride: int, width: int, rows: Any, grads: Any, c: Any, first: int, last: int) -> None:
    """Adagrad on distinct rows."""
    wide, step = U(width), U(stride)
    for i in range(first, last):
        if i + _PREFETCH < last:
            _prefetch(storage, U(rows[i + _PREFETCH]) * step)
            _prefetch(storage, U(rows[i + _PREFETCH]) * step + wide)
        _adagrad_row(storage, U(rows[i]) * step, wide, True, grads, U(i) * wide, c)


@_kernel
def step_adam(storage: Any, stride: int, width: int, rows: Any, grads: Any, c: Any, first: int, last: int) -> None:
    """Adam, AdamW and SparseAdam on distinct rows: they differ in their constants."""
    wide, step = U(width), U(stride)
    for i in range(first, last):
        if i + _PREFETCH < last:
            _prefetch(storage, U(rows[i + _PREFETCH]) * step)
            _prefetch(storage, U(rows[i + _PREFETCH]) * step + wide)
            _prefetch(storage, U(rows[i + _PREFETCH]) * step + wide + wide)
        _adam_row(storage, U(rows[i]) * step, wide, True, grads, U(i) * wide, c)


@_inline
def _row_wise_adagrad_row(storage: Any, base: Any, wide: Any, sums: Any, row: Any, grads: Any, at: Any, c: Any) -> None:
    decay, sign = number(storage, c[4]), number(storage, c[5])
    squares = 0.0
    for j in range(wide):
        g = grads[at + j] * sign + load(storage, base + j) * decay
        squares += np.float64(g) * np.float64(g)
    total = number(storage, sums[row] + number(storage, squares / wide))
    sums[row] = total
    scale = number(storage, c[0] / (np.sqrt(np.float64(total)) + c[1]))
    for j in range(wide):
        w = load(storage, base + j)
        store(storage, base + j, w - (grads[at + j] * sign + w * decay) * scale)


@_kernel
def step_row_wise_adagrad(
    storage: Any, stride: int, width: int, sums: Any, rows: Any, grads: Any, c: Any, first: int, last: int
) -> None:
    """Row-wise Adagrad on distinct rows; ``sums`` has one number per row, its squares added up in float64."""
    wide, step = U(width), U(stride)
    for i in range(first, last):
        if i + _PREFETCH < last:
            _prefetch(storage, U(rows[i + _PREFETCH]) * step)
            _prefetch(sums, U(rows[i + _PREFETCH]))
        row = U(rows[i])
        _row_wise_adagrad_row(storage, row * step, wide, sums, row, grads, U(i) * wide, c)


# --- steps that a row missed ----------------------------------------------------------------------------------------


@_inline
def _row(adam: bool, storage: Any, base: Any, wide: Any, stateful: bool, zeros: Any, c: Any) -> None:
    if adam:
        _adam_row(storage, base, wide, stateful, zeros, U(0), c)
    else:
        _sgd_row(storage, base, wide, stateful, zeros, U(0), c)


@_inline
def _stays_quiet(adam: bool, history: Any, quiet_since: int, now: int, until: int) -> bool:
    """Return True if no move after step ``now`` can change a weight, given that none since ``quiet_since`` has.

    A move at ``quiet_since`` was at most half a unit in the last place of its weight. Without a gradient a move shrinks
    by momentum (Adam: by beta1 / sqrt(beta2)) a step, times what the schedule does; decoupled decay shrinks the weight
    meanwhile, and the unit with it, in powers of two.
    """
    reach = abs(history[quiet_since, 0]) * (history[quiet_since, 1] if adam else 1.0)
    shrunk = 1.0
    for k in range(quiet_since + 1, until):
        move = abs(history[k, 0])
        if adam:
            keep = history[k, 7]
            if keep == 0.0:
                return False
            shrunk *= (1.0 - history[k, 2]) / (math.sqrt(history[k, 3]) * abs(keep))
            move *= history[k, 1] * (1.0 if keep == 1.0 else 2.0)
        else:
            shrunk *= history[k, 1]
        if k > now and move * shrunk > reach:
            return False
        if shrunk < 1e-200:
            return True
    return True


@_inline
def _decay_moments(adam: bool, storage: Any, base: Any, wide: Any, c: Any) -> bool:
    """Take a step whose move is too small to change a weight: decoupled decay, and the moments. True if a moment
    changed.
    """
    moved = False
    if adam:
        share, beta2, keep = number(storage, c[2]), number(storage, c[3]), number(storage, c[7])
        rest = number(storage, 1.0) - share
        near = share < number(storage, 0.5)
        for j in range(wide):
            m, v = load(storage, base + wide + j), load(storage, base + wide + wide + j)
            store(storage, base + j, load(storage, base + j) * keep)
            store(storage, base + wide + j, fma(share, -m, m) if near else m * rest)
            store(storage, base + wide + wide + j, v * beta2)
            moved |= load(storage, base + wide + j) != m
            moved |= load(storage, base + wide + wide + j) != v
    else:
        momentum = number(storage, c[1])
        for j in range(wide):
            b = load(storage, base + wide + j)
            store(storage, base + wide + j, b * momentum)
            moved |= load(storage, base + wide + j) != b
    return moved


@_kernel
def replay(
    storage: Any,
    stride: int,
    width: int,
    rows: Any,
    since: Any,
    history: Any,
    adam: bool,
    may_rest: bool,
    steady: bool,
    zeros: Any,
    before: Any,
    first: int,
    last: int,
) -> None:
    """Move each distinct row through the steps ``history[since[i]:]``, in none of which it had a gradient.

    Each missed step is run with its own constants. Once ``_QUIET`` steps in a row have left the weights unchanged, and
    no later one can move them either, only moments and decoupled decay continue: the rest would change no bit.
    ``steady`` means no such decay and moments' constants that never change: then it stops once a step leaves the
    moments unchanged too.
    """
    wide, step = U(width), U(stride)
    until = len(history)
    for i in range(first, last):
        base = U(rows[i]) * step
        quiet, resting = 0, False
        for k in range(since[i], until):
            c = history[k]
            if resting:
                if not _decay_moments(adam, storage, base, wide, c) and steady:
                    break
            elif may_rest:
                keep = number(storage, c[7] if adam else 1.0)
                for j in range(wide):
                    before[j] = load(storage, base + j) * keep
                _row(adam, storage, base, wide, step > wide, zeros, c)
                moved = False
                for j in range(wide):
                    moved |= load(storage, base + j) != before[j]
                quiet = 0 if moved else quiet + 1
                if quiet and quiet % _QUIET == 0:
                    resting = _stays_quiet(adam, history, k - _QUIET + 1, k, until) or _stays_quiet(
                        adam, history, k - quiet + 1, k, until
                    )
            else:
                _row(adam, storage, base, wide, step > wide, zeros, c)

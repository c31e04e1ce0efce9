"""Numbers of all kernels: instructions without a Python equivalent, half types, and a mix of 64 bits.

Half types are kept as integers, because Numba has neither: float16 as ``int16``, bfloat16 as ``uint16``. Arithmetic on
them is float32. ``error_model="numpy"`` because a test for zero divisors stops vectorising; ``parallel=False`` because
Numba's own thread layers abort when two threads enter a kernel, or after a fork. Offsets are unsigned, so that no index
is tested for "counts from the end" and loops vectorise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from anabranch.tables.kernels._compiling import compiled

Function = Callable[..., Any]
U = np.uint64
kernel = compiled


def inline(function: Function) -> Function:
    """Return a function that becomes part of the kernels that call it."""
    return cast(Function, numba.njit(nogil=True, error_model="numpy", forceinline=True)(function))


def _instruction(function: Function) -> Function:
    return cast(Function, intrinsic(function))


def _overload(function: Function) -> Callable[[Function], Function]:
    return cast(Callable[[Function], Function], overload(function, strict=False))


@_instruction
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return ``a * b + c`` in one rounding."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return a(a, a, a), generate


def _conversion(source: Any, target: Any, emit: Callable[[Any, Any], Any]) -> Function:
    def convert(typing: Any, value: Any) -> Any:
        return target(source), lambda context, builder, signature, args: emit(builder, args[0])

    return _instruction(convert)


_FLOAT, _HALF, _WORD, _SHORT = ir.FloatType(), ir.HalfType(), ir.IntType(32), ir.IntType(16)
_bits_to_float = _conversion(types.uint32, types.float32, lambda code, bits: code.bitcast(bits, _FLOAT))
_float_to_bits = _conversion(types.float32, types.uint32, lambda code, value: code.bitcast(value, _WORD))
# Without F16C these call functions that Numba does not link; ``Arena`` refuses such a processor.
_widen = _conversion(types.int16, types.float32, lambda code, bits: code.fpext(code.bitcast(bits, _HALF), _FLOAT))
_narrow = _conversion(types.float32, types.int16, lambda code, value: code.bitcast(code.fptrunc(value, _HALF), _SHORT))


@_instruction
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Fetch the cache line that holds ``array[index]``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, args[0])
        byte, word, name = ir.IntType(8).as_pointer(), ir.IntType(32), "llvm.prefetch.p0i8"
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        builder.call(function, [builder.bitcast(builder.gep(view.data, [args[1]]), byte), word(1), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(array, index), generate


@inline
def share(starts: Any, thread: int, threads: int) -> Any:
    """Return the first of the lookups that a thread does, of as many as ``starts`` has, and the one behind its last."""
    first, count = starts[0], starts[-1] - starts[0]
    return first + count * thread // threads, first + count * (thread + 1) // threads


def number(memory: Any, value: Any) -> Any:
    """``value`` in the type that ``memory`` computes in."""


@_overload(number)
def _number(memory: Any, value: Any) -> Any:
    if memory.dtype == types.float64:
        return lambda memory, value: np.float64(value)
    return lambda memory, value: np.float32(value)


def load(memory: Any, at: Any) -> Any:
    """Return the number at ``at``, in the type that ``memory`` computes in."""


@_overload(load)
def _load(memory: Any, at: Any) -> Any:
    if memory.dtype == types.uint16:
        return lambda memory, at: _bits_to_float(np.uint32(memory[at]) << np.uint32(16))
    if memory.dtype == types.int16:
        return lambda memory, at: _widen(memory[at])
    return lambda memory, at: memory[at]


@inline
def _to_bfloat16(value: Any) -> Any:
    bits = _float_to_bits(value)
    if value != value:
        return np.uint16(0x7FC0)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


def rounded(memory: Any, value: Any) -> Any:
    """``value`` as ``memory`` holds it, rounded half to even."""


@_overload(rounded)
def _rounded(memory: Any, value: Any) -> Any:
    if memory.dtype == types.uint16:
        return lambda memory, value: _to_bfloat16(np.float32(value))
    if memory.dtype == types.int16:
        return lambda memory, value: _narrow(np.float32(value))
    return lambda memory, value: number(memory, value)


def room_for(totals: Any, memory: Any) -> Any:
    """Return where ``totals`` go in the type of ``memory``: they themselves, if they are of that type."""


@_overload(room_for)
def _room_for(totals: Any, memory: Any) -> Any:
    if totals.dtype == memory.dtype:
        return lambda totals, memory: totals
    return lambda totals, memory: np.empty(totals.size, memory.dtype)


def coarse(memory: Any, value: Any) -> Any:
    """``value`` rounded to bfloat16 if ``memory`` is of it, in the type that ``memory`` computes in."""


@_overload(coarse)
def _coarse(memory: Any, value: Any) -> Any:
    if memory.dtype == types.uint16:

        def of_bfloat16(memory: Any, value: Any) -> Any:
            return _bits_to_float(np.uint32(_to_bfloat16(np.float32(value))) << np.uint32(16))

        return of_bfloat16
    return lambda memory, value: number(memory, value)


@inline
def mix(x: Any) -> Any:
    """Return a bijection of 64 bits in which every bit of ``x`` reaches every bit of the result (Stafford's mix 13)."""
    x = (x ^ (x >> U(30))) * U(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U(27))) * U(0x94D049BB133111EB)
    return x ^ (x >> U(31))


@inline
def permuted(value: Any, size: Any, half: Any, key: Any) -> Any:
    """Return the place of ``value`` in a keyed permutation of ``range(size)``.

    It is one of the next power of four, of ``2 * half`` bits: four rounds, in each of which one half is mixed into the
    other. A value outside the range follows its cycle until it is inside.
    """
    mask = (U(1) << half) - U(1)
    while True:
        left, right = value >> half, value & mask
        for turn in range(4):
            left, right = right, left ^ (mix(right + key + U(turn) * U(0x9E3779B97F4A7C15)) & mask)
        value = (left << half) | right
        if value < size:
            return value

"""Kernels over located rows: a row is one run of bytes, ``id | stamp | weights | states``.

``words`` is an arena's memory as 64-bit words, ``w`` the same memory as weights and ``x`` as states, which may have
another type. A stamp is 0 for a row that is not initialised, else 1 + the step of its table that it is up to date with.
Lookups of several tables come together: those of table ``which[k]`` are ``starts[k]:starts[k + 1]``. Each of several
threads does a share of them. Rows of -1 are ids without a row.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.tables.kernels import rules
from anabranch.tables.kernels.numbers import U, inline, kernel, load, mix, number, prefetch, room_for, rounded, share
from anabranch.tables.kernels.vocabulary import AHEAD, BLOCK, LAGS, SIZE, STEP

_KERNEL_SECONDS = 600.0  # a kernel only touches memory; one that runs longer is a bug
_SMALL = 16_000  # rows below which waking a thread costs more than it saves
_HALVES = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}  # which Numba does not know


# A shape is (weights, words of a row, weights from a row to the next, and before its weights, the same of states).


# --- first values -----------------------------------------------------------------------------------------------------


# Coefficients of Wichura's algorithm AS 241 (PPND16), for the normal distribution's quantile function. Rows: numerator
# and denominator near the median, in the middle of the tail, and far out; lowest power first.
QUANTILE: NDArray[np.float64] = np.array(
    [
        [
            3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
            4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3,
        ],
        [
            1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
            2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3,
        ],
        [
            1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
            1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4,
        ],
        [
            1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
            1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9,
        ],
        [
            6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
            2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7,
        ],
        [
            1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
            7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15,
        ],
    ]
)  # fmt: skip


@inline
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


@inline
def _polynomial(x: float, row: int) -> Any:
    total = QUANTILE[row, 7]
    for k in range(6, -1, -1):
        total = total * x + QUANTILE[row, k]
    return total


@inline
def quantile(p: float) -> Any:
    """Return the normal distribution's quantile function, after Wichura's algorithm AS 241 (1988)."""
    q = p - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        return q * _polynomial(r, 0) / _polynomial(r, 1)
    r = math.sqrt(-_logarithm(p if q < 0 else 1.0 - p))
    if r <= 5.0:
        value = _polynomial(r - 1.6, 2) / _polynomial(r - 1.6, 3)
    else:
        value = _polynomial(r - 5.0, 4) / _polynomial(r - 5.0, 5)
    return -value if q < 0 else value


@kernel
def first_values(out: Any, at: Any, wide: Any, id_: Any, key: Any, kind: Any) -> None:
    """Return the first weights of an id: ``kind`` is 0 for ``kind[1]``, 1 for uniform, 2 for normal numbers.

    They depend on ``(key, id, column)`` only.
    """
    word = mix(U(key) ^ mix(U(id_) + U(0x9E3779B97F4A7C15)))
    low, high = kind[1], kind[2]
    for j in range(wide):
        value = low
        if kind[0] != 0:
            bits = mix(word + (j + U(1)) * U(0x9E3779B97F4A7C15))
            uniform = (np.float64(bits >> U(12)) + 0.5) * 2.0**-52
            value = low + (high - low) * uniform if kind[0] == 1 else low + high * quantile(uniform)
        out[at + j] = rounded(out, number(out, value))


# --- reading ----------------------------------------------------------------------------------------------------------


@kernel
def visit(
    which: Any, facts: Any, keys: Any, firsts: Any, owner: Any, words: Any, w: Any, shape: Any, training: bool,
    ids: Any, rows: Any, starts: Any, out: Any, versions: Any, unready: Any, thread: int, threads: int,
) -> None:  # fmt: skip
    """Copy rows to ``out`` and the steps at which they changed to ``versions``, where these have room.

    Marks in ``unready`` the tables with a row that is not begun, not up to date, or another id's; in training also
    those with ids without a row, which are read as their first values.
    """
    wide, pitch, pw, ow, _, _ = shape
    first, last = share(starts, thread, threads)
    for k in range(which.size):
        t = which[k]
        dynamic, lacking = facts[t, SIZE] < 0, False
        needed = facts[t, STEP] + 1 if facts[t, LAGS] else 1
        end = U(min(last, starts[k + 1]))
        for j in range(U(max(first, starts[k])), end):
            if j + AHEAD < end:
                ahead = U(max(rows[j + AHEAD], 0)) * pitch
                prefetch(words, ahead)
                prefetch(words, ahead + U(8))
            if rows[j] < 0:
                lacking |= training
                if out.size:
                    first_values(out, j * wide, wide, ids[j], keys[t], firsts[t])
                if versions.size:
                    versions[j] = 0
                continue
            row = U(rows[j])
            stamp = words[row * pitch + U(1)]
            lacking |= stamp < needed
            if dynamic:
                lacking |= words[row * pitch] != ids[j] or owner[row // U(BLOCK)] != t
            if out.size:
                for i in range(wide):
                    out[j * wide + i] = w[row * pw + ow + i]
            if versions.size:
                versions[j] = max(stamp - 1, 0)
        if lacking:
            unready[k] = True


@kernel
def prepare(
    rule: int, t: int, facts: Any, keys: Any, firsts: Any, words: Any, w: Any, x: Any, shape: Any, states: int,
    history: Any, may_rest: bool, steady: bool, zeros: Any, before: Any, row_before: Any, ids: Any, rows: Any,
    thread: int, threads: int,
) -> None:  # fmt: skip
    """Begin rows of table ``t`` that are used for the first time, and take the steps that others have missed."""
    wide, pitch, pw, ow, px, ox = shape
    step = facts[t, STEP]
    for j in range(rows.size * thread // threads, rows.size * (thread + 1) // threads):
        if rows[j] < 0:
            continue
        row = U(rows[j])
        base, a, s = row * pitch, row * pw + ow, row * px + ox
        since = words[base + U(1)] - 1
        if since < 0:
            first_values(w, a, wide, ids[j], keys[t], firsts[t])
            for i in range(s, s + U(states)):
                x[i] = rounded(x, firsts[t, 3])
            words[base], words[base + U(1)] = ids[j], 1
            since = 0
        if facts[t, LAGS] and since < step:
            rules.replay(
                rule, words, base, pitch, w, a, x, s, wide, history, since, may_rest, steady, zeros, before, row_before
            )
            words[base + U(1)] = step + 1


@kernel
def states(
    keys: Any, firsts: Any, w: Any, x: Any, shape: Any, count: int, t: int, ids: Any, rows: Any, out: Any
) -> None:
    """Copy weights and ``count`` numbers of state of each row; of an id without a row the first ones."""
    wide, _, pw, ow, px, ox = shape
    whole, first = wide + U(count), np.empty(wide, w.dtype)
    for j in range(U(rows.size)):
        if rows[j] < 0:
            first_values(first, U(0), wide, ids[j], keys[t], firsts[t])
            for i in range(wide):
                out[j * whole + i] = rounded(out, load(first, i))
            for i in range(wide, whole):
                out[j * whole + i] = rounded(out, firsts[t, 3])
        else:
            row = U(rows[j])
            for i in range(wide):
                out[j * whole + i] = rounded(out, load(w, row * pw + ow + i))
            for i in range(U(count)):
                out[j * whole + wide + i] = rounded(out, load(x, row * px + ox + i))


# --- moving -----------------------------------------------------------------------------------------------------------


@inline
def _scattered(row: Any) -> Any:
    return U(row) * U(0x9E3779B97F4A7C15)


@inline
def _thread_of(row: Any, threads: int) -> Any:
    return np.int64((_scattered(row) >> U(32)) * U(threads) >> U(32))


@inline
def _walk(
    move: Any, words: Any, w: Any, x: Any, shape: Any, c: Any, stamp: int, rows: Any, grads: Any, begin: Any, end: Any
) -> None:  # fmt: skip
    """Move and stamp rows by one rule: a branch a row, and all rules in one loop, take twice as long."""
    wide, pitch, pw, ow, px, ox = shape
    for j in range(begin, end):
        if j + AHEAD < end:
            at = U(max(rows[j + AHEAD], 0)) * pitch
            for line in range(at, at + pitch, U(8)):
                prefetch(words, line)
            prefetch(words, at + pitch - U(1))
        if rows[j] >= 0:
            row = U(rows[j])
            move(w, row * pw + ow, x, row * px + ox, wide, grads, j * wide, c)
            words[row * pitch + U(1)] = stamp


@kernel
def step(
    rule: int, which: Any, facts: Any, words: Any, w: Any, x: Any, shape: Any, constants: Any, floor: float,
    rows: Any, starts: Any, grads: Any, squares: Any, thread: int, threads: int,
) -> None:  # fmt: skip
    """Move distinct rows by their gradients, and stamp them with the step; ``squares`` may be empty."""
    wide, _, pw, ow, px, ox = shape
    first, last = share(starts, thread, threads)
    for k in range(which.size):
        stamp, c = facts[which[k], STEP] + 2, constants[k]
        begin, end = U(max(first, starts[k])), U(min(last, starts[k + 1]))
        for j in range(begin, end if squares.size else begin):
            if rows[j] >= 0 and squares[j] != 1:
                row = U(rows[j])
                rules.correct(rule, w, row * pw + ow, x, row * px + ox, wide, grads, j * wide, c, squares[j], floor)
        if rule == rules.SGD:
            _walk(rules.sgd, words, w, x, shape, c, stamp, rows, grads, begin, end)
        elif rule == rules.MOMENTUM:
            _walk(rules.momentum, words, w, x, shape, c, stamp, rows, grads, begin, end)
        elif rule == rules.ADAGRAD:
            _walk(rules.adagrad, words, w, x, shape, c, stamp, rows, grads, begin, end)
        elif rule == rules.ROW_WISE:
            _walk(rules.row_wise, words, w, x, shape, c, stamp, rows, grads, begin, end)
        elif rule == rules.ADAM:
            _walk(rules.adam, words, w, x, shape, c, stamp, rows, grads, begin, end)
        elif rule == rules.AMSGRAD:
            _walk(rules.amsgrad, words, w, x, shape, c, stamp, rows, grads, begin, end)
        elif rule == rules.RMSPROP:
            _walk(rules.rmsprop, words, w, x, shape, c, stamp, rows, grads, begin, end)
        elif rule == rules.ADAMAX:
            _walk(rules.adamax, words, w, x, shape, c, stamp, rows, grads, begin, end)
        else:
            _walk(rules.ftrl, words, w, x, shape, c, stamp, rows, grads, begin, end)


@kernel
def merge(
    wide: Any, most: float, rows: Any, starts: Any, grads: Any, squares: Any, working: Any, thread: int, threads: int
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Add up the gradients of each of this thread's rows, in the order of the lookups.

    A row's number decides whose it is, so that its lookups come to one thread, wherever they are. ``squares`` are those
    of each lookup, or none. Sums are of the type of ``working``, and clamped to ``most``.

    Returns distinct rows, where each table's begin, and their gradients and squares.
    """
    mine, begins, end = np.empty(rows.size, np.uint32), np.zeros_like(starts), U(0)
    for k in range(starts.size - 1):
        for n in range(U(starts[k]), U(starts[k + 1])):
            mine[end] = n  # a branch would be mispredicted for every other lookup of two threads
            end += U((rows[n] >= 0) & (_thread_of(rows[n], threads) == thread))
        begins[k + 1] = end
    lookups, count, size = np.int64(end), 0, 16
    while size <= 2 * (begins[1:] - begins[:-1]).max():
        size *= 2
    buckets = np.empty(size, np.int32)
    out_rows, out_starts = np.empty(lookups, np.int64), np.empty_like(starts)
    totals = np.empty(lookups * np.int64(wide), working.dtype)
    summed = lookups if squares.size else 0
    out_squares, every, own = np.empty(summed, squares.dtype), np.zeros(summed), np.zeros(summed)
    for k in range(starts.size - 1):
        out_starts[k], size = count, 16
        while size <= 2 * (begins[k + 1] - begins[k]):  # no two tables share a row: a table of few stays in the cache
            size *= 2
        mask = U(size - 1)
        buckets[:size] = -1
        for n in range(U(begins[k]), U(begins[k + 1])):
            j = U(mine[n])
            row = rows[j]
            at = (_scattered(row) >> U(20)) & mask
            while buckets[at] >= 0 and out_rows[buckets[at]] != row:
                at = (at + U(1)) & mask
            if buckets[at] < 0:
                buckets[at] = count
                out_rows[count] = row
                for i in range(U(count) * wide, U(count + 1) * wide):
                    totals[i] = 0
                count += 1
            target = U(buckets[at])
            for i in range(wide):
                totals[target * wide + i] += load(grads, j * wide + i)
            if squares.size:  # in a loop of its own: the one above is vectorised
                energy = 0.0
                for i in range(wide):
                    value = np.float64(load(grads, j * wide + i))
                    energy += value * value
                every[target] += energy
                own[target] += energy * np.float64(squares[j])
    out_starts[starts.size - 1] = count
    out = room_for(totals, grads)
    for i in range(U(count) * wide):
        out[i] = rounded(out, min(max(totals[i], number(out, -most)), number(out, most)))
    for i in range(U(count) if squares.size else U(0)):
        out_squares[i] = own[i] / every[i] if every[i] > 0 else 1.0
    return out_rows, out_starts, out, out_squares


@kernel
def move_all(rule: int, w: Any, x: Any, rows: int, constants: Any, grads: Any) -> None:
    """Move rows that lie one after the other, as do their states, by one gradient each."""
    wide, apart = U(w.size // rows), U(x.size // rows)
    for j in range(U(rows)):
        rules.move_row(rule, w, j * wide, x, j * apart, wide, grads, j * wide, constants)


# --- snapshots --------------------------------------------------------------------------------------------------------


@kernel
def keep(
    rows: Any, limit: int, written: Any, owner: Any, words: Any, pitch: Any, usage: Any, out: Any, marks: Any,
    count: int,
) -> tuple[int, int]:  # fmt: skip
    """Copy those of ``rows`` that are not written yet behind the ``count`` in ``out``, while there is room.

    ``marks`` gets each one's table and usage. Returns how many of ``rows`` are done, and how many ``out`` has by then.
    """
    for i in range(rows.size):
        if i + AHEAD < rows.size:
            prefetch(words, U(max(rows[i + AHEAD], 0)) * pitch)
        row = rows[i]
        if row < 0 or row >= limit or written[row >> 3] >> (row & 7) & 1:
            continue
        if count == marks.shape[0]:
            return i, count
        written[row >> 3] |= 1 << (row & 7)
        at, to = U(row) * pitch, U(count) * pitch
        if owner[row // BLOCK] > 0 and words[at + U(1)] > 0:  # else nobody's, or not begun
            for j in range(pitch):
                out[to + j] = words[at + j]
            marks[count, 0], marks[count, 1], marks[count, 2] = owner[row // BLOCK], 0, 0
            if usage.shape[0]:
                marks[count, 1], marks[count, 2] = usage[row, 0], usage[row, 1]
            count += 1
    return rows.size, count


# --- tensors as the kernels take them, and the threads that run these


def as_array(tensor: Tensor) -> NDArray[Any]:
    """Return the memory of a contiguous CPU tensor as a flat array: bfloat16 as ``uint16``, float16 as ``int16``."""
    flat = tensor.detach().reshape(-1)
    return flat.view(_HALVES.get(flat.dtype, flat.dtype)).numpy()


def as_tensor(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Return a copy of an array as ``as_array`` gives it, in the form of its tensor."""
    # With its own strides: those of an empty array cannot be viewed as bytes.
    return torch.from_numpy(array).clone(memory_format=torch.contiguous_format).view(dtype)


class KernelThreads:
    """Threads that divide the rows of one message; a context manager that ends them.

    >>> with KernelThreads(2) as threads:
    ...     parts = []
    ...     threads.run(lambda number, count: parts.append((number, count)), rows=100_000)
    >>> sorted(parts)
    [(0, 2), (1, 2)]

    Each has kernels do its share of all rows, whichever table they are of. The kernels release the GIL, so the shares
    are done at once. Numba's own threads are not used: its layers abort the process when two threads enter a kernel
    together, or after a fork.

    Args:
        threads: the most threads that work, the caller's among them; at least 1.
    """

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._workers: list[threading.Thread] = []
        self._lock = threading.Lock()
        if threads < 1:
            raise ValueError(f"at least 1 thread is needed, got {threads}")

    def run(self, part: Callable[[int, int], None], rows: int) -> None:
        """Call ``part(number, count)`` on each of ``count`` threads: on this one alone if there are few ``rows``."""
        if rows < _SMALL or self.threads == 1:
            part(0, 1)
            return
        self._start()
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        for thread in range(1, self.threads):
            self._jobs.put((part, thread, self.threads, done))
        try:
            part(0, self.threads)
        finally:
            errors = [done.get(timeout=_KERNEL_SECONDS) for _ in range(1, self.threads)]
        for error in filter(None, errors):
            raise error

    def _start(self) -> None:
        with self._lock:
            while len(self._workers) < self.threads - 1:
                worker = threading.Thread(target=_work, args=[self._jobs], name="anabranch-table", daemon=True)
                worker.start()
                self._workers.append(worker)

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            workers, self._workers = self._workers, []
        for _ in workers:
            self._jobs.put(None)
        for worker in workers:
            worker.join(timeout=_KERNEL_SECONDS)

    def __del__(self) -> None:
        for _ in self._workers:
            self._jobs.put(None)

    def __enter__(self) -> KernelThreads:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Not a ``ThreadPoolExecutor``, whose futures cost a tenth of a millisecond a call more, of one for 26,000 rows.
_Job = tuple[Callable[[int, int], None], int, int, SimpleQueue[BaseException | None]]


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get(timeout=None)) is not None:  # idle until there is work, or the pool ends
        part, thread, threads, done = job
        try:
            part(thread, threads)
        except BaseException as error:  # noqa: BLE001 - raised by ``run``
            done.put(error)
        else:
            done.put(None)
        del job, part  # the arrays that it holds

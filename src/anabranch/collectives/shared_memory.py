"""Sums over workers of one host, in memory that all of them map: no byte goes through a socket or another thread.

The memory is a memfd. It has no name, so the kernel frees it with the last process that maps it, however that ends. It
holds a row of each rank for every sum::

    header       who gave up first
    lines        phase | arrived | sleepers                one of each for every sum
    sum 0        rank 0's row | rank 1's row | ...         page-aligned; the other sums follow

A sum is two barriers, and a barrier is one word, ``phase``, that the last rank to arrive moves on::

    rank 0   gradients in row 0 ─┐ arrive         sum of chunk 0 of all rows, into all rows ─┐ arrive
    rank 1   gradients in row 1 ─┴──> 2n - 1      sum of chunk 1 of all rows, into all rows ─┴──> 2n

Each chunk is summed by one rank, in the order of ranks, so all ranks hold the same bits. A wait is some pauses, since a
peer on another core may come soon, then sleep on a futex: many pauses, or few for the next waits where many were in
vain, as on a busy machine.

A rank that gives up sets a bit in every phase word. A phase is moved by compare-and-swap: either it moved before the
bit was set, and every rank sees the sum complete, or it never moves, and none does. So ranks agree, without a message,
on what was complete when one of them was lost, and a frozen rank that wakes completes nothing.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import platform
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from anabranch.collectives.workers import Pending, Workers
from anabranch.errors import BoundaryError
from anabranch.liveness.group import RankLeft
from anabranch.tables.kernels.numbers import inline, kernel

if TYPE_CHECKING:
    _Memory: TypeAlias = ctypes.Array[ctypes.c_char]

_log = logging.getLogger("anabranch.executor")
NUMBERS: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}
_LINE = 32  # words of 4 bytes: two cache lines, since processors prefetch them in pairs
_PAGE = mmap.PAGESIZE
_NUMBER, _GIVEN_UP = 0x7FFFFFFF, 0x80000000  # the two parts of a phase word
_FEW, _MANY, _TURNS = 40, 1600, 16  # pauses: 1 and 40 microseconds; how often the many are tried where they are in vain
_BLOCK = 1024  # numbers of a row that are summed at a time and stay in the processor's first cache
_BEGUN, _ARRIVED, _SUMMED, _DONE, _LOST = range(5)  # progress of a sum on one rank
# Seconds and nanoseconds of a sleep, after which Python runs signal handlers and a wait checks that its peers live;
# then the waits that pause a little before one pauses long.
_WAITING = np.array([0, 50_000_000, 0])


# Atomic operations on words of the segment: Numba has none for the CPU, and LLVM may move a plain load out of a loop.


def _instruction(function: Callable[..., Any]) -> Callable[..., Any]:
    return cast("Callable[..., Any]", intrinsic(function))


def _pointer(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.gep(context.make_array(signature.args[0])(context, builder, args[0]).data, [args[1]])


@_instruction
def _load(typing: Any, words: Any, at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, signature, args), "seq_cst", 4)

    return types.uint32(words, at), generate


@_instruction
def _add(typing: Any, words: Any, at: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(context, builder, signature, args), args[2], "seq_cst")

    return types.uint32(words, at, types.uint32), generate


@_instruction
def _set_bits(typing: Any, words: Any, at: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("or", _pointer(context, builder, signature, args), args[2], "seq_cst")

    return types.uint32(words, at, types.uint32), generate


@_instruction
def _compare_and_swap(typing: Any, words: Any, at: Any, old: Any, new: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pair = builder.cmpxchg(_pointer(context, builder, signature, args), args[2], args[3], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 1)

    return types.boolean(words, at, types.uint32, types.uint32), generate


@_instruction
def _address(typing: Any, words: Any, at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(_pointer(context, builder, signature, args), ir.IntType(64))

    return types.int64(words, at), generate


@_instruction
def _pause(typing: Any) -> Any:
    """Tell the core that this is a spin; by LLVM's own functions, since Numba aborts on inline assembly."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        arm = platform.machine() == "aarch64"
        name, values = ("llvm.aarch64.hint", [ir.Constant(ir.IntType(32), 1)]) if arm else ("llvm.x86.sse2.pause", [])
        form = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        function = cgutils.get_or_insert_function(builder.module, form, name)  # type: ignore[no-untyped-call]
        builder.call(function, values)
        return context.get_dummy_value()

    return types.void(), generate


_FUTEX = 98 if platform.machine() == "aarch64" else 202
_WAIT, _WAKE, _EVERYBODY = 0, 1, 0x7FFFFFFF  # without the flag "private": the waiters are processes
_syscall: Any = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))


@inline
def _wake(words: Any, phase: int) -> None:
    if _load(words, phase + 2 * _LINE):
        _syscall(_FUTEX, _address(words, phase), _WAKE, _EVERYBODY, 0, 0, 0)


@inline
def _arrive(words: Any, phase: int, number: int, ranks: int) -> Any:
    """Count this rank in; the last one moves the phase on. False if it cannot, because a rank gave up."""
    if _add(words, phase + _LINE, 1) + 1 < ranks:
        return True
    words[phase + _LINE] = 0  # nobody arrives at the next barrier before the phase has moved
    if not _compare_and_swap(words, phase, (number - 1) & _NUMBER, number):
        return False
    _wake(words, phase)
    return True


@inline
def _has_moved(word: Any, number: int) -> Any:
    """1 if the phase is at ``number``, -1 if it will never be, else 0."""
    if word & _NUMBER == number:  # first: what is complete stays so after a rank gave up
        return 1
    return -1 if word & _GIVEN_UP else 0


@inline
def _wait(words: Any, phase: int, number: int, waiting: Any, waits: int) -> Any:
    """Wait until the phase has moved, or one sleep is over; only look if not ``waits``."""
    for _ in range(_MANY if waiting[2] == 0 else _FEW):
        moved = _has_moved(_load(words, phase), number)
        if moved != 0 or not waits:
            return moved
        _pause()
    waiting[2] = (waiting[2] + _TURNS - 1) % _TURNS
    _add(words, phase + 2 * _LINE, 1)  # before the futex looks at the phase; `_wake` looks after moving it
    word = _load(words, phase)
    if _has_moved(word, number) == 0:
        _syscall(_FUTEX, _address(words, phase), _WAIT, np.int64(word), _address(waiting, 0), 0, 0)
    _add(words, phase + 2 * _LINE, 0xFFFFFFFF)  # -1
    return _has_moved(_load(words, phase), number)


@inline
def _sum(rows: Any, start: int, stop: int) -> None:
    """Sum a chunk in the order of ranks, and store it into every row.

    Loops run over slices from 0: one from ``start`` to ``stop`` might have negative indices for all that Numba knows,
    is not vectorised, and takes four times as long.
    """
    others = rows[1:-1]
    for low in range(start, stop, _BLOCK):
        high = min(low + _BLOCK, stop)
        first, last = rows[0, low:high], rows[-1, low:high]
        for rank in range(len(others)):
            row = others[rank, low:high]
            for i in range(len(first)):
                first[i] += row[i]
        for i in range(len(first)):
            value = first[i] + last[i]
            first[i] = value
            last[i] = value
        for rank in range(len(others)):
            row = others[rank, low:high]
            for i in range(len(first)):
                row[i] = first[i]


@kernel
def _advance(words: Any, phase: int, rows: Any, rank: int, number: int, stage: int, waiting: Any, waits: int) -> Any:
    """Take the ``number``-th sum on from ``stage`` as far as it goes within one sleep, and return its stage."""
    ranks, size = rows.shape
    first, second = (2 * number - 1) & _NUMBER, (2 * number) & _NUMBER
    if stage == _BEGUN:
        if not _arrive(words, phase, first, ranks):
            return _LOST
        stage = _ARRIVED
    if stage == _ARRIVED:
        moved = _wait(words, phase, first, waiting, waits)
        if moved != 1:
            return _ARRIVED if moved == 0 else _LOST
        part = ranks * _LINE  # chunks are whole lines, so that no two ranks write to one
        chunk = (size + part - 1) // part * _LINE
        _sum(rows, min(rank * chunk, size), min((rank + 1) * chunk, size))
        if not _arrive(words, phase, second, ranks):
            return _LOST
    moved = _wait(words, phase, second, waiting, waits)
    return _DONE if moved == 1 else _SUMMED if moved == 0 else _LOST


@kernel
def _give_up(words: Any, phases: Any, rank: int) -> None:
    """Let no phase move any more; the first rank to do so is everybody's reason."""
    _compare_and_swap(words, 0, 0, rank + 1)
    for phase in phases:
        _set_bits(words, phase, _GIVEN_UP)
        _wake(words, phase)


@cache
def load_kernels(dtype: torch.dtype) -> None:
    """Compile the kernels for ``dtype``, or load them from the disk, by the sum of a single rank.

    >>> load_kernels(torch.float32)
    """
    words = np.zeros(4 * _LINE, np.uint32)
    _advance(words, _LINE, np.zeros((1, 1), NUMBERS[dtype]), 0, 1, _BEGUN, _WAITING, 0)
    _give_up(words, np.array([_LINE]), 0)


class SharedSum:
    """A tensor of each worker in shared memory, and their sum in its place.

    Attributes:
        flat: this worker's.
    """

    def __init__(self, segment: Segment, number: int, rows: np.ndarray[Any, Any], size: int, workers: Workers) -> None:
        self.segment, self._phase, self._rows, self._workers = segment, segment.phases[number].item(), rows, workers
        self.flat = torch.from_numpy(rows[workers.rank])[:size]
        self._number, self._stage = 0, _DONE

    def start(self, *, operation: str, step: int | None) -> Pending:
        """Start summing what is in ``flat``, which is the other workers' too until the sum is finished."""
        self._number, self._stage = self._number + 1, _BEGUN
        self._workers.bytes_sent += self.flat.nbytes
        self._go_on(0)
        return _PendingSum(self, self._workers, operation, step)

    def ended_within(self, seconds: float) -> bool:
        """Wait for one sleep at most, and return whether the sum is complete.

        Raises:
            RankLeft: it never will be.
        """
        self._go_on(1)
        if self._stage == _LOST:
            raise RankLeft(self._workers.ranks[self.segment.gave_up()], "sum")
        return self._stage == _DONE

    def give_up(self) -> bool:
        """Let no other sum of the segment complete, and return whether this one was complete before."""
        self.segment.give_up(self._workers.rank)
        self._go_on(0)
        return self._stage == _DONE

    def _go_on(self, waits: int) -> None:
        if self._stage < _DONE:
            place = self.segment.words, self._phase, self._rows, self._workers.rank
            self._stage = _advance(*place, self._number, self._stage, _WAITING, waits)


class _PendingSum(Pending):
    """A sum in progress; who does not wait for it to the end leaves the others without it."""

    def __init__(self, shared: SharedSum, workers: Workers, operation: str, step: int | None) -> None:
        super().__init__(shared.ended_within, workers, operation, step, shared.flat)
        self._shared = shared

    def finish(self) -> None:
        try:
            super().finish()
        except BaseException as error:  # Ctrl-C too
            complete = self._shared.give_up()
            if not (complete and isinstance(error, BoundaryError)):  # else the others, who live on, have it
                raise


class Segment:
    """The words of a segment's header and lines."""

    def __init__(self, words: np.ndarray[Any, Any], sums: int) -> None:
        self.words = words
        self.phases = _LINE * (1 + 3 * np.arange(sums))

    def give_up(self, rank: int) -> None:
        """Let no sum complete any more."""
        _give_up(self.words, self.phases, rank)

    def gave_up(self) -> int:
        """Return the rank that did so first."""
        return int(self.words[0]) - 1


class FlatForm(NamedTuple):
    """A flat tensor to be summed."""

    size: int
    dtype: torch.dtype
    device: torch.device


def shared_sums(workers: Workers, forms: Sequence[FlatForm]) -> list[SharedSum | None]:
    """Return a sum in shared memory for each form that has one: numbers of 32 or 64 bits of workers on one host.

    All workers call it alike, and one segment holds all sums.
    """
    sums: list[SharedSum | None] = [None] * len(forms)
    fitting = [n for n, form in enumerate(forms) if form.device.type == "cpu" and form.dtype in NUMBERS]
    if not fitting or not workers.on_one_host:
        return sums
    for number in fitting:
        load_kernels(forms[number].dtype)  # before the others wait for this rank
    control = _pages(4 * _LINE * (1 + 3 * len(fitting)))
    lengths = [_pages(forms[number].size * forms[number].dtype.itemsize) for number in fitting]  # of a row, in bytes
    *starts, end = accumulate((workers.size * length for length in lengths), initial=control)
    memory = _meet(workers, end)
    if memory is None:
        workers.on_one_host = False
        return sums
    view = memoryview(memory)
    segment = Segment(np.frombuffer(view, np.uint32, control // 4), len(fitting))
    workers.segments.add(segment)
    for line, (number, length, start) in enumerate(zip(fitting, lengths, starts, strict=True)):
        size, dtype, _ = forms[number]
        numbers = np.frombuffer(view, NUMBERS[dtype], workers.size * length // dtype.itemsize, start)
        sums[number] = SharedSum(segment, line, numbers.reshape(workers.size, -1), size, workers)
    return sums


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


# The memory.

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # a mapped file that shrinks means SIGBUS


def _meet(workers: Workers, size: int) -> _Memory | None:
    """Map memory that rank 0 makes and the others open through /proc, as processes of the same user may."""
    descriptor, memory, problem = -1, None, ""
    try:
        if workers.rank == 0:
            try:
                descriptor = _create(size)
            except OSError as error:
                problem = str(error)
        place = workers.all_gather_bytes(f"{os.getpid()} {descriptor}".encode(), operation="place of shared memory")[0]
        try:
            if workers.rank > 0:
                descriptor = _open(place.decode(), size)
            if descriptor >= 0:
                memory = _map(descriptor, size)
        except OSError as error:
            problem = str(error)
        everyone = workers.all_gather_bytes(problem.encode(), operation="mapping of shared memory")
    finally:
        if descriptor >= 0:
            os.close(descriptor)  # the mapping keeps the memory
    for rank, why in zip(workers.ranks, everyone, strict=True):
        if why:
            _log.info("gradients go through gloo's sockets: rank %d has no shared memory: %s", rank, why.decode())
            return None
    return memory


def _create(size: int) -> int:
    descriptor = os.memfd_create("anabranch-sums", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)  # too little memory is an error here, and SIGBUS later
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _open(place: str, size: int) -> int:
    pid, number = place.split()
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) != _SEALS or os.fstat(descriptor).st_size != size:
        os.close(descriptor)
        raise OSError(f"descriptor {number} of process {pid} is not memory of {size} bytes")
    return descriptor


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_mapped: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()


def _map(descriptor: int, size: int) -> _Memory:
    """Map the memory until the last tensor in it is freed.

    Not by the module mmap, which has its own copy of the descriptor: forked children would keep the memory alive.
    """
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    _mapped[address] = memory
    return memory


def _shield_child() -> None:
    """Put private pages over the memory in a forked child, such as a loader's process, which must not write there.

    Nor keep it. With ``MADV_DONTFORK`` there would be a hole in its place, and freeing the tensors would unmap whatever
    the child has mapped there since.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
    for address, memory in _mapped.items():
        _libc.mmap(address, len(memory), mmap.PROT_READ | mmap.PROT_WRITE, private, -1, 0)


os.register_at_fork(after_in_child=_shield_child)

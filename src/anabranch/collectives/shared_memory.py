"""Sums over workers of one host, in memory that all of them map: no byte goes through a socket or another thread.

The memory is a memfd. It has no name, so the kernel frees it with the last process that maps it, however that ends. It
holds a row of each rank for every sum::

    header       who gave up first
    lines        phase | arrived | sleepers                one of each for every sum
    sum 0        rank 0's row | rank 1's row | ...         page-aligned; the other sums follow

A sum is two barriers, and a barrier is one word, ``phase``, that the last rank to arrive moves on::

    rank 0   gradients in row 0 ─┐ arrive         sum of chunk 0 of all rows, into all rows ─┐ arrive
    rank 1   gradients in row 1 ─┴──> 2n - 1      sum of chunk 1 of all rows, into all rows ─┴──> 2n

Each chunk is summed by one rank, in the order of ranks, so all ranks hold the same bits. A small sum is one barrier,
after which each rank sums all rows itself, in the same order, into numbers of its own::

    rank 0   own numbers to row 0 ─┐ arrive      sum of all rows
    rank 1   own numbers to row 1 ─┴──> n        sum of all rows

A rank may write to its row for the next sum while another still reads for this one, so each row is there twice. Rows
that are gathered, not summed, are such a sum of nothing.

A wait is some pauses, since a peer on another core may come soon, then sleep on a futex: many pauses, or few for the
next waits where many were in vain, as on a busy machine. Many, because a rank that has slept comes late to the next
sum: waking an idle core of a virtual machine may take longer than a small step.

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
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numba
import numpy as np
import torch
import torch.distributed as dist
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from anabranch.collectives.workers import Pending, Workers
from anabranch.errors import BoundaryError, PeerLost
from anabranch.liveness.group import RankLeft, rank_names
from anabranch.tables.kernels.numbers import inline, kernel

if TYPE_CHECKING:
    _Memory: TypeAlias = ctypes.Array[ctypes.c_char]

_log = logging.getLogger("anabranch.executor")
NUMBERS: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}
_LINE = 32  # words of 4 bytes: two cache lines, since processors prefetch them in pairs
_PAGE = mmap.PAGESIZE
_NUMBER, _GIVEN_UP = 0x7FFFFFFF, 0x80000000  # the two parts of a phase word
_FEW, _MANY = 40, 10_000  # pauses: 1 and 250 microseconds
_TURNS = 4  # how often the many are tried where they are in vain
_SMALL = 1 << 19  # bytes of all ranks' rows up to which a sum is one barrier
_BLOCK = 1024  # numbers of a row that are summed at a time and stay in the processor's first cache
_BEGUN, _ARRIVED, _SUMMED, _DONE, _NONFINITE, _LOST, _UNLIKE = range(7)  # progress of a sum on one rank
_COUNT_BITS = 7  # of the word that counts arrivals, up to 64; the others add up numbers of the sizes
_PIECE = 4_194_301  # numbers of a group's tensor summed at once; a prime: none of another size ends with a piece


# Atomic operations on words of the segment: Numba has none for the CPU, and LLVM may move a plain load out of a loop.


def _instruction(function: Callable[..., Any]) -> Callable[..., Any]:
    return cast("Callable[..., Any]", intrinsic(function))


def _reassociating(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that becomes part of kernels, and may add numbers in another order, several at a time."""
    compiled = numba.njit(nogil=True, error_model="numpy", forceinline=True, fastmath={"reassoc"})(function)
    return cast("Callable[..., Any]", compiled)


def _pointer(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.gep(context.make_array(signature.args[0])(context, builder, args[0]).data, [args[1]])


@_instruction
def _load(typing: Any, words: Any, at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, signature, args), "seq_cst", 4)

    return types.uint32(words, at), generate


def _changing(operation: str) -> Callable[..., Any]:
    """Return a function that changes a word by ``operation`` and returns what it was before."""

    @_instruction
    def change(typing: Any, words: Any, at: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.atomic_rmw(operation, _pointer(context, builder, signature, args), args[2], "seq_cst")

        return types.uint32(words, at, types.uint32), generate

    return change


_add, _set_bits = _changing("add"), _changing("or")


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
def _arrive(words: Any, phase: int, number: int, ranks: int, size: int) -> Any:
    """Count this rank in, with a number of its tensor's size; the last one moves the phase on.

    It cannot if a rank gave up, or the sizes are not equal: ``_LOST`` or ``_UNLIKE`` then, else ``_BEGUN``. The number
    is not linear in the size: 3, 4 and 5 must not add up to three times 4.
    """
    mine = np.uint32(1 | (size * (1 + size + (size >> 13)) << _COUNT_BITS))
    every = np.uint32(_add(words, phase + _LINE, mine) + mine)
    if every & np.uint32((1 << _COUNT_BITS) - 1) < ranks:
        return _BEGUN
    words[phase + _LINE] = 0  # nobody arrives at the next barrier before the phase has moved
    if every != np.uint32(ranks * np.int64(mine)):
        return _UNLIKE
    if not _compare_and_swap(words, phase, (number - 1) & _NUMBER, number):
        return _LOST
    _wake(words, phase)
    return _BEGUN


@inline
def _has_moved(word: Any, number: int) -> Any:
    """1 if the phase is at ``number``, -1 if it will never be, else 0."""
    if word & _NUMBER == number:  # first: what is complete stays so after a rank gave up
        return 1
    return -1 if word & _GIVEN_UP else 0


@inline
def _wait(words: Any, phase: int, number: int, waiting: Any, waits: int) -> Any:
    """Wait until the phase has moved, or one sleep is over; only look if not ``waits``."""
    for _ in range(waiting[3] if waiting[2] == 0 else _FEW):
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


@_reassociating
def _divide(numbers: Any, divisor: Any) -> Any:
    """Divide the numbers, and return 0, or NaN if one is not finite."""
    zero = divisor - divisor
    look = zero
    for i in range(len(numbers)):
        quotient = numbers[i] / divisor
        numbers[i] = quotient
        look += quotient * zero
    return look


@inline
def _sum(rows: Any, start: int, stop: int, into: Any, elements: int, divisor: Any) -> Any:
    """Sum the rows in the order of ranks, and divide the first ``elements``; return 0, or NaN if one is not finite.

    Loops run over slices from 0: one from ``start`` to ``stop`` might have negative indices for all that Numba knows,
    is not vectorised, and takes four times as long.

    Args:
        rows: one a rank.
        start: the first number of each that is summed.
        stop: the first behind them.
        into: gets the sums; if it is of size 0, all rows do.
        elements: the numbers of a row that are divided.
        divisor: of the rows' type.
    """
    look = divisor - divisor
    for low in range(start, stop, _BLOCK):
        high = min(low + _BLOCK, stop)
        total = rows[0, low:high]
        if len(into) > 0:
            total = into[low:high]
            first = rows[0, low:high]
            for i in range(len(total)):
                total[i] = first[i]
        for rank in range(1, len(rows)):
            row = rows[rank, low:high]
            for i in range(len(total)):
                total[i] += row[i]
        look += _divide(total[: max(0, elements - low)], divisor)
        for rank in range(1, len(rows) if len(into) == 0 else 0):
            row = rows[rank, low:high]
            for i in range(len(total)):
                row[i] = total[i]
    return look


@kernel
def _advance(
    words: Any, phase: int, copies: Any, own: Any, rank: int, number: int, stage: int, elements: int, divisor: Any,
    waiting: Any, waits: int,
) -> Any:  # fmt: skip
    """Take the ``number``-th sum on from ``stage`` as far as it goes within one sleep, and return its stage."""
    rows = copies[number % len(copies)]
    ranks, size = len(rows), len(own)
    barriers = 3 - len(copies)
    first, second = (barriers * (number - 1) + 1) & _NUMBER, (2 * number) & _NUMBER
    nonfinite = phase + _LINE + 1  # the number of the last sum with one
    if stage == _BEGUN:
        if barriers == 1:
            row = rows[rank, : len(own)]
            for i in range(len(row)):
                row[i] = own[i]
        arrived = _arrive(words, phase, first, ranks, size)
        if arrived != _BEGUN:
            return arrived
        stage = _ARRIVED
    if stage == _ARRIVED:
        moved = _wait(words, phase, first, waiting, waits)
        if moved != 1:
            return _ARRIVED if moved == 0 else _LOST
        if barriers == 1:
            look = _sum(rows, 0, len(own), own, elements, divisor)
            return _DONE if look == 0 else _NONFINITE
        part = ranks * _LINE  # chunks are whole lines, so that no two ranks write to one
        chunk = (size + part - 1) // part * _LINE
        start, stop = min(rank * chunk, size), min((rank + 1) * chunk, size)
        if _sum(rows, start, stop, own[:0], elements, divisor) != 0:
            words[nonfinite] = second
        arrived = _arrive(words, phase, second, ranks, size)
        if arrived != _BEGUN:
            return arrived
    moved = _wait(words, phase, second, waiting, waits)
    if moved == 1:
        return _NONFINITE if words[nonfinite] == second else _DONE
    return _SUMMED if moved == 0 else _LOST


@kernel
def _give_up(words: Any, phases: Any, rank: int) -> None:
    """Let no phase move any more; the first rank to do so is everybody's reason."""
    _compare_and_swap(words, 0, 0, rank + 1)
    for phase in phases:
        _set_bits(words, phase, _GIVEN_UP)
        _wake(words, phase)


def _waiting(ranks: int) -> np.ndarray[Any, Any]:
    """Return how to wait: seconds and nanoseconds of a sleep, after which Python runs signal handlers and peers are
    looked at; the waits that pause a little before one pauses long; and how long that is.
    """
    many = _MANY if ranks <= len(os.sched_getaffinity(0)) else _FEW
    return np.array([0, 50_000_000, 0, many])


@cache
def load_kernels(dtype: torch.dtype) -> None:
    """Compile the kernels for ``dtype``, or load them from the disk, by the sum of a single rank.

    >>> load_kernels(torch.float32)
    """
    words = np.zeros(4 * _LINE, np.uint32)
    rows = np.zeros((1, 1, 1), NUMBERS[dtype])
    _advance(words, _LINE, rows, rows[0, 0], 0, 1, _BEGUN, 0, rows.dtype.type(1), _waiting(1), 0)
    _give_up(words, np.array([_LINE]), 0)


class SharedSum:
    """A tensor of each worker, and their sum in its place; or all of them gathered, if it is of size 0.

    Attributes:
        flat: this worker's.
        room: the numbers that there is room for.
    """

    def __init__(self, segment: Segment, number: int, rows: np.ndarray[Any, Any], size: int, workers: Workers) -> None:
        self.segment, self._phase, self._rows, self._workers = segment, segment.phases[number].item(), rows, workers
        self._row, self._over_hosts = segment.ranks.index(workers.rank), len(workers.hosts) > 1
        self._own = rows[0, self._row, :size] if len(rows) == 1 else np.zeros(size, rows.dtype)
        self.flat, self.room = torch.from_numpy(self._own), rows.shape[2]
        self._number, self._stage, self._waiting = 0, _DONE, _waiting(len(segment.ranks))
        self._elements, self._divisor = 0, rows.dtype.type(1)

    @property
    def complete(self) -> bool:
        """True once ``flat`` holds the sum."""
        return _DONE <= self._stage <= _NONFINITE

    @property
    def finite(self) -> bool:
        """True if all numbers of the sum that were divided are finite."""
        return self._stage == _DONE

    def place(self, size: int) -> Tensor:
        """Return where this worker's numbers go that are gathered next."""
        self.flat = torch.from_numpy(self._rows[(self._number + 1) % 2, self._row, :size])
        return self.flat

    def sum(self, tensor: Tensor, operation: str) -> None:
        """Sum a contiguous tensor of at most ``room`` numbers, of any size, in its place."""
        small = len(self._rows) == 2
        flat = tensor.view(-1)
        if small:
            self.flat, self._own = flat, flat.numpy()
        else:
            self._own = self._rows[0, self._row, : len(flat)]
            self.flat = torch.from_numpy(self._own).copy_(flat)
        self.start(operation=operation, step=None).finish()
        if not small:
            flat.copy_(self.flat)

    def gathered(self) -> Tensor:
        """Return what all workers had there when it was gathered last, in rows, until the next is started."""
        return torch.from_numpy(self._rows[self._number % 2])

    def start(self, *, operation: str, step: int | None, elements: int = 0, divisor: float = 1.0) -> Pending:
        """Start summing what is in ``flat``, which is the other workers' too until the sum is finished.

        On several hosts the sum of each is summed between their first workers, through gloo. Then it comes back to the
        others as one more sum, to which these add zeros.

        Args:
            operation: names it in errors.
            step: of the caller.
            elements: so many of its first numbers are divided, the same on all workers.
            divisor: by this.
        """
        if not self._over_hosts:
            return self._start(operation, step, elements, divisor)
        workers = self._workers

        def between_hosts() -> None:
            if group := workers.between_hosts:
                workers.start_all_reduce(self.flat, operation=operation, step=step, group=group).finish()
            else:
                workers.started += 1
                self.flat.zero_()
            self._start(operation, step, elements, divisor).finish()

        return self._start(operation, step, 0, 1.0, between_hosts)

    def _start(
        self, operation: str, step: int | None, elements: int, divisor: float, then: Callable[[], object] | None = None
    ) -> Pending:
        self._number, self._stage = self._number + 1, _BEGUN
        self._elements, self._divisor = elements, self._own.dtype.type(divisor)
        self._workers.bytes_sent += self.flat.nbytes
        pending = _PendingSum(self, self._workers, operation, step, then)
        self._go_on(0)
        return pending

    def ended_within(self, seconds: float) -> bool:
        """Wait for one sleep at most, and return whether the sum is complete.

        Raises:
            RankLeft: it never will be.
            BoundaryError: nor this one, of tensors that differ in size.
        """
        self._go_on(1)
        if self._stage == _UNLIKE:
            raise BoundaryError(f"the workers' tensors are not all of {self.flat.numel()} numbers, as this rank's is")
        if self._stage == _LOST:
            raise RankLeft(self._workers.ranks[self.segment.ranks[self.segment.gave_up()]], "sum")
        return self.complete

    def give_up(self) -> bool:
        """Let no other sum of the segment complete, and return whether this one was complete before."""
        self.segment.give_up()
        self._go_on(0)
        return self.complete

    def _go_on(self, waits: int) -> None:
        if self._stage < _DONE:
            place = self.segment.words, self._phase, self._rows, self._own, self._row
            what = self._number, self._stage, self._elements, self._divisor
            self._stage = _advance(*place, *what, self._waiting, waits)


class _PendingSum(Pending):
    """A sum in progress, and what comes then; who does not wait for it to the end leaves the others without it."""

    def __init__(
        self, shared: SharedSum, workers: Workers, operation: str, step: int | None, then: Callable[[], object] | None
    ) -> None:
        super().__init__(shared.ended_within, workers, operation, step, shared.flat)
        self._shared, self._then = shared, then

    def finish(self) -> None:
        try:
            if self.began or not self._shared.complete:  # else this rank came last
                super().finish()
            if self._then is not None:
                self._then()
        except BaseException as error:  # Ctrl-C too
            complete = self._shared.give_up() and self._then is None
            if not (complete and isinstance(error, BoundaryError)):  # else the others, who live on, have it
                raise


class Segment:
    """The words of a segment's header and lines; ``ranks`` are the workers that have it, and this one is ``rank``."""

    def __init__(self, words: np.ndarray[Any, Any], sums: int, ranks: Sequence[int], rank: int) -> None:
        self.words, self.ranks, self._row = words, ranks, ranks.index(rank)
        self.phases = _LINE * (1 + 3 * np.arange(sums))

    def give_up(self) -> None:
        """Let no sum complete any more."""
        _give_up(self.words, self.phases, self._row)

    def gave_up(self) -> int:
        """Return the row of the worker that did so first."""
        return int(self.words[0]) - 1


class FlatForm(NamedTuple):
    """A flat tensor to be summed, or gathered."""

    size: int
    dtype: torch.dtype
    device: torch.device
    gathers: bool = False


def shared_sums(workers: Workers, forms: Sequence[FlatForm]) -> list[SharedSum | None]:
    """Return a sum in shared memory for each form that has one: numbers of 32 or 64 bits of workers that share a host.

    All workers call it alike, and one segment on each host holds all sums. Nothing is gathered from several hosts.
    """
    sums: list[SharedSum | None] = [None] * len(forms)
    fitting = [n for n, form in enumerate(forms) if form.device.type == "cpu" and form.dtype in NUMBERS]
    hosts = workers.hosts if fitting else []
    if len(hosts) > 1:
        fitting = [number for number in fitting if not forms[number].gathers]
    if not hosts or not fitting:
        return sums
    ranks = next(ranks for ranks in hosts if workers.rank in ranks)
    for number in fitting:
        load_kernels(forms[number].dtype)  # before the others wait for this rank
    control = _pages(4 * _LINE * (1 + 3 * len(fitting)))
    lengths = [_pages(forms[number].size * forms[number].dtype.itemsize) for number in fitting]  # of a row, in bytes
    copies = [
        2 if forms[number].gathers or len(ranks) * length <= _SMALL else 1
        for number, length in zip(fitting, lengths, strict=True)
    ]
    *starts, end = accumulate(map(mul, copies, (len(ranks) * length for length in lengths)), initial=control)
    memory = _meet(workers, ranks[0], end)
    if memory is None:
        workers.hosts = []
        return sums
    view = memoryview(memory)
    segment = Segment(np.frombuffer(view, np.uint32, control // 4), len(fitting), ranks, workers.rank)
    workers.segments.add(segment)
    for line, (number, count, length, start) in enumerate(zip(fitting, copies, lengths, starts, strict=True)):
        size, dtype = 0 if forms[number].gathers else forms[number].size, forms[number].dtype
        numbers = np.frombuffer(view, NUMBERS[dtype], count * len(ranks) * length // dtype.itemsize, start)
        sums[number] = SharedSum(segment, line, numbers.reshape(count, len(ranks), -1), size, workers)
    return sums


_made = Counter[str]()


class GroupSums:
    """Sums of tensors of any size over the ranks of one process group, in memory that grows with them up to a piece.

    Args:
        group: the ranks, all of which are here; they call ``sum`` alike.
        timeout: seconds that this may take.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        ranks = dist.get_process_group_ranks(group)
        name = f"all_reduce {group.group_name} {','.join(map(str, ranks))}"
        _made[name] += 1  # a default group that is made again has the old one's name, and may have its store
        self._workers = Workers(ranks=ranks, name=f"{name}/{_made[name]}", timeout=timeout)
        self._sums: dict[torch.dtype, SharedSum] = {}
        weakref.finalize(group, self._workers.close).atexit = False

    @property
    def over(self) -> bool:
        """True once the job has other members."""
        return self._workers.membership != self._workers.peers.membership

    def sum(self, tensor: Tensor, operation: str, timeout: float) -> bool:
        """Sum a contiguous tensor in its place; False if these ranks have no shared memory for it.

        Raises:
            DeadlineExceeded, PeerLost: not every rank came.
            BoundaryError: the ranks' tensors differ in size.
        """
        workers, size, dtype = self._workers, min(tensor.numel(), _PIECE), tensor.dtype
        workers.timeout = timeout
        shared = self._sums.get(dtype)
        try:
            if shared is None or shared.room < size:
                if workers.has_left_work or any(one.segment.gave_up() >= 0 for one in self._sums.values()):
                    raise PeerLost("an earlier sum of this group has failed", peer=rank_names(workers.others))
                room = 1 << max(size - 1, 1).bit_length()
                (shared,) = shared_sums(workers, [FlatForm(room, dtype, tensor.device)])
                if shared is None:
                    return False
                self._sums[dtype] = shared
            try:
                for piece in torch.split(tensor.view(-1), _PIECE):
                    shared.sum(piece, f"{operation} of {dtype}")  # a wait compares the names
            except BoundaryError:
                workers.has_left_work = len(workers.hosts) > 1  # else nothing of gloo's goes on
                raise
        except BaseException as error:
            for one in self._sums.values():
                one.give_up()  # the other ranks make no more memory, either
            if isinstance(error, BoundaryError):
                error.operation = operation  # also where memory is made for it
            raise
        return True


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


# The memory.


def _meet(workers: Workers, first: int, size: int) -> _Memory | None:
    """Map memory that the ``first`` rank makes and its host's others open through /proc, as those of one user may."""
    descriptor, memory, problem = -1, None, ""
    try:
        if workers.rank == first:
            try:
                descriptor = _create(size)
            except OSError as error:
                problem = str(error)
        place = f"/proc/{os.getpid()}/fd/{descriptor}".encode()
        places = workers.all_gather_bytes(place, operation="place of shared memory")
        try:
            if workers.rank != first:
                descriptor = os.open(places[first], os.O_RDWR | os.O_CLOEXEC)
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
        # Whoever may open it could shrink it under all ranks, which SIGBUS would end.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(descriptor)
        raise
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

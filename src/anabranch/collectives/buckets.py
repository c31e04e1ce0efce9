"""A step's gradients, weighted by rows and averaged over the workers, by gloo and NCCL while backward still runs.

Gradients become final one by one, in an order that may differ between ranks; collectives must start in one order on
all of them. So parameters are laid out in buckets, in reverse order of the model (backward's order, more or less), the
same on every rank, and a bucket is launched once it *and its predecessors* are complete::

    backward, rank 0      c ready   b ready            a ready           finish
                             │         │                  │                 │
    bucket 0 [c b | flags]   └────┬────┘ launch ═════════════════════> wait, divide
    bucket 1 [a   | flags]        │                       └ launch ══> wait, divide
    backward, rank 1        b ready, c unused: zeros with the flag "no gradient", launched at the finish

In shared memory a launched bucket is there for the others, and the ranks sum it at the finish: no thread sums beside
backward. A single bucket is copied at the end of backward, with nothing to be gained before.

A bucket is one flat tensor: each parameter's gradient times the weight of its run, then a flag a parameter. The flags
are summed like everything else, so afterwards every rank knows which parameters received a gradient from anyone: the
others keep ``.grad`` at ``None``, as in the plain loop. ``.grad`` is a view of the bucket, and the bucket is also the
accumulator over several runs: nothing is copied twice.

A table whose gradients are known to be sparse has a ``SparseGradient`` in place of a bucket, and moves to one if its
gradient turns out dense on any rank. What is sparse elsewhere, as of a functional lookup, is made dense.

The first bucket can carry a *header*, a few more numbers to be summed over the workers: on small models the latency of
its own message would cost more than all the gradients do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from anabranch.collectives.shared_memory import FlatForm, SharedSum, shared_sums
from anabranch.collectives.sparse_rows import COUNT, SparseGradient, summing_dtype
from anabranch.collectives.workers import Pending, Workers
from anabranch.record.spans import mark

_BUCKET_BYTES = 8 << 20
HEADER = "all_reduce of rows and loss"
"""The operation of a header that goes ahead of the buckets."""


def in_buckets(parameters: Mapping[str, Tensor], close_at: int = _BUCKET_BYTES) -> list[list[tuple[str, Tensor]]]:
    """Return the buckets of dense gradients: parameters of one dtype and device, the model's last ones first.

    A bucket has half of ``close_at`` bytes to all of it, and more only with a parameter of more than half.

    >>> [[name for name, _ in some] for some in in_buckets({"a": torch.ones(2), "b": torch.ones(2)}, close_at=8)]
    [['b'], ['a']]
    """
    closed: list[list[tuple[str, Tensor]]] = []
    still_open: dict[tuple[torch.dtype, torch.device], list[tuple[str, Tensor]]] = {}
    for name, parameter in reversed(list(parameters.items())):
        members = still_open.setdefault((parameter.dtype, parameter.device), [])
        size = sum(member.nbytes for _, member in members)
        if size >= close_at / 2 and size + parameter.nbytes > close_at:  # no message of a bias alone
            closed.append(list(members))
            members.clear()
        members.append((name, parameter))
    return [*closed, *(members for members in still_open.values() if members)]


def carries_header(buckets: list[list[tuple[str, Tensor]]]) -> bool:
    """Return True if the first bucket takes the header's numbers without rounding them."""
    return bool(buckets) and buckets[0][0][1].dtype in (torch.float32, torch.float64)


def _form(members: list[tuple[str, Tensor]], header: int) -> FlatForm:
    """Return the form of the flat tensor: the gradients, a flag each, and the header."""
    first = members[0][1]
    size = sum(parameter.numel() for _, parameter in members) + len(members) + header
    return FlatForm(size, summing_dtype(first), first.device)


class _DenseBucket:
    """Some parameters' gradients in one flat tensor, and the all-reduce that sums it, in shared memory if it can."""

    def __init__(
        self, members: list[tuple[str, Tensor]], form: FlatForm, workers: Workers | None, shared: SharedSum | None
    ) -> None:
        self._workers, self._shared = workers, shared
        self.names = [name for name, _ in members]
        self.parameters = [parameter for _, parameter in members]
        count = len(members)
        elements = sum(parameter.numel() for parameter in self.parameters)
        self.flat = torch.zeros(form.size, dtype=form.dtype, device=form.device) if shared is None else shared.flat
        self.widened = form.dtype is not self.parameters[0].dtype
        self.slots: list[Tensor] = []
        at = 0
        for parameter in self.parameters:
            # Laid out in memory like the parameter, as autograd's own gradients are: fused optimizers rely on it.
            strides = torch.empty_like(parameter, device="meta").stride()
            self.slots.append(self.flat.as_strided(parameter.shape, strides, at))
            at += parameter.numel()
        self.gradients = self.flat[:elements]
        self._flags = self.flat[elements : elements + count]
        self.header = self.flat[elements + count :]
        self.taken: list[tuple[int, Tensor]] = []
        self.written: set[int] = set()
        self.arrived: set[int] = set()
        self.pending: Pending | None = None
        self.divided = 1.0

    def clear(self) -> None:
        self.written.clear()

    def start_run(self) -> None:
        self.taken.clear()
        self.arrived.clear()
        self.pending = None

    @property
    def complete(self) -> bool:
        return len(self.arrived) == len(self.parameters)

    def put(self, index: int, gradient: Tensor) -> Tensor | None:
        """Take a gradient, to be copied with the bucket's others: a few operations a bucket, not one per parameter."""
        self.taken.append((index, gradient if gradient.layout is torch.strided else gradient.to_dense()))
        return None if self.widened else self.slots[index]

    def copy(self, weight: float) -> None:
        """Add the collected gradients, times ``weight``, to the window's sums."""
        if not self.taken:
            return
        new: tuple[list[Tensor], list[Tensor]] = ([], [])  # slots, and gradients for them
        added: tuple[list[Tensor], list[Tensor]] = ([], [])
        for index, gradient in self.taken:
            slots, gradients = added if index in self.written else new
            slots.append(self.slots[index])
            gradients.append(gradient)
            self.written.add(index)
        if new[0]:
            torch._foreach_copy_(*new)
            if weight != 1.0 and len(new[0]) == len(self.slots):
                self.gradients.mul_(weight)
            elif weight != 1.0:
                torch._foreach_mul_(new[0], weight)
        if added[0]:
            torch._foreach_add_(*added, alpha=weight)
        self.taken.clear()

    def launch(self, step: int | None, divisor: float) -> None:
        """Fill missing gradients with zeros, set the flags and start the all-reduce, which divides if it can."""
        assert self._workers is not None
        self._flags.fill_(1.0)
        for index in set(range(len(self.parameters))) - self.written:
            self.slots[index].zero_()
            self._flags[index] = 0.0
        operation = "all_reduce of gradients"
        if self._shared is None:
            self.pending = self._workers.start_all_reduce(self.flat, operation=operation, step=step)
        else:
            elements, self.divided = len(self.gradients), divisor
            self.pending = self._shared.start(operation=operation, step=step, elements=elements, divisor=divisor)

    def arrive(self) -> None:
        """Return when the sums over the workers have arrived."""
        if self.pending is not None:
            self.pending.finish()
            self.pending = None

    def divide(self, divisor: float) -> bool:
        """Divide what has arrived; return True if it is known to be finite."""
        rest, self.divided = divisor / self.divided, 1.0
        if rest != 1.0:
            self.gradients.div_(rest)
        return rest == 1.0 and self._shared is not None and self._shared.finite and not self.widened

    def present(self) -> list[bool]:
        """Return for each parameter whether any worker has a gradient."""
        if self._workers is None:
            return [index in self.written for index in range(len(self.parameters))]
        return [flag > 0 for flag in self._flags.real.tolist()]


_Member: TypeAlias = tuple[_DenseBucket, int] | SparseGradient


class GradientBuckets:
    """Takes gradients as they become final and leaves their sum over runs and workers in ``.grad``.

    A *window* is the runs that one optimizer step accumulates; only the last of them communicates.

    Args:
        parameters: name and parameter, in the model's order, the same on every worker.
        workers: the group to sum over; ``None`` accumulates over runs only.
        sparse: names of the parameters known to have sparse gradients.
        header: the number of extra values of the caller in the first bucket.
        bucket_bytes: the size of a bucket, as ``in_buckets`` closes it.

    Attributes:
        parameters: those of the last ``lay_out``.
        carries_header: whether there is a bucket for them: of float32 or float64, so that they are not rounded.
        finite: every ``.grad`` is known to be finite; behind ``finish``.
        at_end: they are taken out of ``.grad`` when backward has ended, since nothing would be sent before.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        workers: Workers | None,
        *,
        sparse: Iterable[str] = (),
        header: int = 0,
        bucket_bytes: int = _BUCKET_BYTES,
    ) -> None:
        self._workers = workers
        self._header = header
        self._bucket_bytes = bucket_bytes
        self._weight = self._divisor = 1.0
        self.finite = False
        self._launching = True
        self._step: int | None = None
        self.lay_out(parameters, sparse)

    def lay_out(self, parameters: Mapping[str, Tensor], sparse: Iterable[str] = ()) -> None:
        """Take the gradients of these parameters from the next window on."""
        self.parameters, self._sparse_names = dict(parameters), set(sparse)
        self._buckets: list[_DenseBucket] = []
        self._tables: list[SparseGradient] = []
        self._where: dict[Tensor, _Member] = {}
        dense = {name: value for name, value in self.parameters.items() if name not in self._sparse_names}
        for name, parameter in reversed(self.parameters.items()):
            if name in self._sparse_names:
                table = SparseGradient(name, parameter, self._workers)
                self._tables.append(table)
                self._where[parameter] = table
        buckets = in_buckets(dense, self._bucket_bytes)
        first = self._header if carries_header(buckets) else 0
        forms = [_form(members, 0 if number else first) for number, members in enumerate(buckets)]
        forms += [FlatForm(2, COUNT, table.parameter.device, gathers=True) for table in self._tables]
        shared = [None] * len(forms) if self._workers is None else shared_sums(self._workers, forms)
        for table, one in zip(self._tables, shared[len(buckets) :], strict=True):
            table.shared = one
        for members, form, one in zip(buckets, forms, shared, strict=False):
            bucket = _DenseBucket(members, form, self._workers, one)
            self._buckets.append(bucket)
            self._where |= {parameter: (bucket, index) for index, parameter in enumerate(bucket.parameters)}
        self.carries_header = bool(self._buckets) and len(self._buckets[0].header) > 0
        self.at_end = len(self._buckets) == len(shared) == 1 and shared[0] is not None
        # Launched in this order: the dense buckets, then the tables: as first layers, they get their gradients last.
        self._parts: list[_DenseBucket | SparseGradient] = [*self._buckets, *self._tables]
        self._launched = 0
        self._ahead: list[SharedSum | None] | None = None  # the workers may be others than before

    @property
    def empty(self) -> bool:
        """True if no parameter's gradient is summed here."""
        return not self.parameters

    def start_window(self) -> None:
        """Begins a new sum."""
        for part in self._parts:
            part.clear()

    def start_run(
        self, weight: float, *, last: bool, header: Tensor | None = None, step: int | None = None, divisor: float = 1.0
    ) -> None:
        """Begins one run, whose gradients count ``weight`` times; the ``last`` of a window launches its buckets.

        ``divisor`` is what ``finish`` will most likely divide by, the same on all workers.
        """
        if header is not None:
            self._buckets[0].header.copy_(header)
        self._weight = weight
        self._launching = last and self._workers is not None
        self._divisor = divisor
        self._step = step
        self._launched = 0
        for part in self._parts:
            part.start_run()

    def ready(self, parameter: Tensor, gradient: Tensor) -> Tensor | None:
        """Take a final gradient; the callback to attach to every parameter."""
        where = self._where[parameter]
        slot = None
        if isinstance(where, SparseGradient):
            where.add(gradient, self._weight)
        else:
            bucket, index = where
            slot = bucket.put(index, gradient)
            bucket.arrived.add(index)
            if not bucket.complete:
                return slot
            bucket.copy(self._weight)
        while self._launching and self._launched < len(self._parts) and self._parts[self._launched].complete:
            self._launch()
        return slot

    def take_rest(self) -> None:
        """Take the run's gradients that are in ``.grad`` and have not been passed to ``ready``."""
        for bucket in self._buckets if self.at_end else ():
            for index, parameter in enumerate(bucket.parameters):
                if (gradient := parameter.grad) is not None and index not in bucket.arrived:
                    slot = bucket.put(index, gradient)
                    if slot is not None and not self._launching:
                        parameter.grad = slot  # the window's sum so far, as a hook leaves it

    def _launch(self) -> None:
        part = self._parts[self._launched]
        if isinstance(part, _DenseBucket):
            part.copy(self._weight)
            part.launch(self._step, self._divisor)
        else:
            part.launch(self._step)
        mark("bucket.launched", index=self._launched, step=self._step)
        self._launched += 1

    def header(self) -> Tensor:
        """Return the header's sums over the workers; launches the bucket that carries it if backward has not."""
        if self._launched == 0:
            self._launch()
        self._buckets[0].arrive()
        return self._buckets[0].header

    def send_header(self, share: Tensor, step: int) -> Callable[[], Tensor]:
        """Start summing a header ahead of the buckets, and return what waits for the sums."""
        workers = self._workers
        if workers is None:
            return lambda: share
        if self._ahead is None:  # all workers send their first one here at the same time
            self._ahead = shared_sums(workers, [FlatForm(len(share), share.dtype, share.device)])
        (shared,) = self._ahead
        if shared is None:
            pending = workers.start_all_reduce(share, operation=HEADER, step=step)
        else:
            share = shared.flat.copy_(share)
            pending = shared.start(operation=HEADER, step=step)

        def arrived() -> Tensor:
            pending.finish()
            return share

        return arrived

    def launch_rest(self) -> None:
        """Launch the buckets that backward has not completed; called when backward has ended."""
        for bucket in self._buckets:
            bucket.copy(self._weight)
        while self._launching and self._launched < len(self._parts):
            self._launch()

    def finish(self, divisor: float) -> None:
        """End the window: every ``.grad`` is the sum over runs and workers divided by ``divisor``, or ``None``."""
        self.finite = not self._tables
        for bucket in self._buckets:
            bucket.arrive()
            self.finite = bucket.divide(divisor) and self.finite
            for parameter, slot, is_present in zip(bucket.parameters, bucket.slots, bucket.present(), strict=True):
                slot = slot.to(parameter.dtype) if bucket.widened else slot
                parameter.grad = slot if is_present else None
        dense: set[str] = set()
        for table in self._tables:
            if self._workers is None:
                table.launch(self._step)
            table.parameter.grad = gradient = table.finish(divisor, self._step)
            if gradient is not None and gradient.layout is torch.strided:
                dense.add(table.name)
        if dense:
            self.lay_out(self.parameters, self._sparse_names - dense)

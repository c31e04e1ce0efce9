"""Sums over the workers, and tensors sent between them, as operations that can be differentiated to any order.

Every rank has its own loss; what is differentiated is their sum. So the gradient of a sum over ranks is the sum
over ranks of the gradients, and the gradient of what was sent comes back from where it went::

    rank 0   x ──> send ──(token)          forward: a header, then the tensor ──>
                    :                                                            rank 1
    rank 1         recv ──> y ──> loss     backward: a header, then the gradient <──

A header travels before each message: shape, dtype, and whether there is anything to send, so a gradient that does not
exist is told from one of zeros, and leaves nobody waiting. Sessions of ``anabranch.autodiff`` start their sweeps from
the tokens as well, so a rank without a loss, or one that does not use what it received, takes part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from anabranch.autodiff import boundary_exit
from anabranch.autodiff.boundary.crossing import Boundary, Crossed, Form, Tensors, cross
from anabranch.collectives.messages import move_message, wait_until_reduced
from anabranch.collectives.shared_memory import NUMBERS, GroupSums
from anabranch.errors import CaptureError, ProtocolError
from anabranch.job import job
from anabranch.tensors.dtypes import DTYPE_CODES, DTYPES, as_bytes

_TIMEOUT = 600.0
messages_begun = 0
"""Calls of ``send`` and ``recv`` in this process: a step with some is not done again."""
_sums: WeakKeyDictionary[dist.ProcessGroup, GroupSums] = WeakKeyDictionary()


def all_reduce(
    tensor: Tensor,
    op: Literal["sum", "mean"] = "sum",
    group: dist.ProcessGroup | None = None,
    *,
    timeout: float = _TIMEOUT,
) -> Tensor:
    """Return the sum or the mean of every rank's ``tensor``, differentiable to any order.

    >>> all_reduce(torch.tensor([1.0, 2.0]))  # a job of one worker
    tensor([1., 2.])

    Args:
        tensor: of one shape, dtype and ``requires_grad`` on all ranks; every rank calls this in the same order.
        op: ``"sum"`` or ``"mean"``.
        group: a process group; the job's by default.
        timeout: seconds that the operation may take, and its backward.

    Returns:
        A new tensor, equal on all ranks.

    Raises:
        ValueError: another ``op``.
        RuntimeError: a job of several workers without ``torch.distributed.init_process_group``.
        DeadlineExceeded, PeerLost: not every rank came, or one has left an earlier sum that others may have completed.
        BoundaryError: the ranks' tensors differ in size or dtype.
    """
    if op not in ("sum", "mean"):
        raise ValueError(f"op is 'sum' or 'mean', got {op!r}")
    if group is None and not dist.is_initialized() and (job().world_size == 1 or job().joined):
        return tensor.clone()
    _check_initialized("all_reduce")
    form = Form(tuple(tensor.shape), tensor.dtype, tensor.device)
    return _reduce(tensor, _Reduction(op, group, timeout, form))


def send(tensor: Tensor, rank: int, *, timeout: float = _TIMEOUT) -> Tensor:
    """Send ``tensor`` to ``rank``, which calls ``recv``; returns a token from which this rank's backward can start.

    Args:
        tensor: of any shape of at most 8 dimensions. The other rank learns shape and dtype with it, and sends a
            gradient back in its backward if ``tensor`` requires one.
        rank: a rank of the job other than this one. It must receive in the order in which this rank sends.
        timeout: seconds that the operation may take, and its backward.

    Returns:
        A 0-dim token: a root of the backward of every session of ``anabranch.autodiff`` that records; without a
        session give it to the next ``recv``, or to ``torch.autograd.backward`` as a root.

    Raises:
        ValueError: ``rank`` is this rank or none of the job; ``tensor`` has more than 8 dimensions or an odd dtype.
        RuntimeError: ``torch.distributed`` is not initialised.
        DeadlineExceeded, PeerLost: the other rank did not receive.
    """
    _check_peer("send", rank)
    if tensor.ndim > _MOST_DIMENSIONS or tensor.dtype not in DTYPE_CODES:
        raise ValueError(
            f"a tensor of at most {_MOST_DIMENSIONS} dimensions and a plain dtype can be sent, got shape "
            f"{tuple(tensor.shape)} and {tensor.dtype}"
        )
    return _send(tensor, _PeerChannel(rank, timeout))


def recv(rank: int, token: Tensor | None = None, *, timeout: float = _TIMEOUT) -> Tensor:
    """Receives the tensor that ``rank`` sent; its gradient goes back there in this rank's backward.

    Args:
        rank: a rank of the job other than this one.
        token: the result of an earlier ``send``: then a backward that reaches this one reaches that too.
        timeout: seconds that the operation may take, and its backward.

    Returns:
        A tensor of the shape and dtype sent, on the CPU with gloo, else on the current device. It requires a gradient
        if the one sent does; then both ranks must run a backward. One that is not used sends "no gradient" back if a
        session of ``anabranch.autodiff`` records.

    Raises:
        ValueError: ``rank`` is this rank or none of the job.
        RuntimeError: ``torch.distributed`` is not initialised.
        ProtocolError: what arrived was not sent by ``send``.
        DeadlineExceeded, PeerLost: nothing came.
    """
    _check_peer("recv", rank)
    received = _receive(_PeerChannel(rank, timeout), token)
    if received is None:
        raise ProtocolError("received 'no gradient' where a tensor was expected", peer=f"rank {rank}", operation="recv")
    return received


def _check_initialized(operation: str) -> None:
    if not dist.is_initialized():
        raise RuntimeError(
            f"{operation} needs the job's process group; call torch.distributed.init_process_group first"
        )


def _check_peer(operation: str, rank: int) -> None:
    global messages_begun
    _check_initialized(operation)
    mine, count = dist.get_rank(), dist.get_world_size()
    if not 0 <= rank < count or rank == mine:
        raise ValueError(
            f"{operation} needs another one of the {count} ranks; this is rank {mine}, the other was {rank}"
        )
    messages_begun += 1


class _Exchange:
    """A boundary to other workers, whose gradient crosses by the same operations, to any order.

    Its last output is a token, from which a rank without a loss starts its backward.
    """

    kind = "operation"

    def forms(self, inputs: Tensors) -> Sequence[Form]:
        raise CaptureError("all_reduce, send and recv of anabranch cannot be in a graph; use engine='tape'")

    def outputs(self, *inputs: Tensor | None, recorded: bool = True) -> tuple[Tensor, ...]:
        """Cross, and give the token to every recording session."""
        with torch.set_grad_enabled(recorded and torch.is_grad_enabled()):
            outputs = cross(cast(Boundary, self), *inputs)
        if outputs[-1].requires_grad:
            boundary_exit(outputs[-1])
        return outputs


def _crossed(*outputs: Tensor, differentiable: bool = True) -> Crossed:
    """Return the outputs and a token."""
    outputs = (*outputs, torch.zeros((), device="cpu"))
    none = () if differentiable else range(len(outputs))
    return Crossed(outputs, None, none, fresh=True, reads_inputs=False, differentiable_again=True)


# The sum over the ranks.


@dataclass(frozen=True, slots=True)
class _Reduction(_Exchange):
    """A sum or a mean over the ranks of a group."""

    op: str
    group: dist.ProcessGroup | None
    timeout: float
    form: Form

    name = "all_reduce"

    def forward(self, inputs: Tensors, wants: Sequence[bool] | None) -> Crossed:
        (tensor,) = cast(Sequence[Tensor], inputs)
        return _crossed(self._scale(self._run(tensor.detach().clone(memory_format=torch.contiguous_format))))

    def backward(self, state: object, inputs: Tensors, gradients: Tensors, *, updates: bool) -> list[Tensor | None]:
        gradient, form = gradients[0], self.form
        if torch.is_grad_enabled():
            if gradient is None:
                gradient = torch.zeros(form.shape, dtype=form.dtype, device=form.device, requires_grad=True)
            return [_reduce(gradient, self)]
        # One more element counts the ranks that have a gradient: if none has, there is none.
        flat = torch.zeros(math.prod(form.shape) + 1, dtype=form.dtype, device=form.device)
        if gradient is not None:
            flat[:-1] = gradient.reshape(-1)
            flat[-1] = 1
        self._run(flat)
        return [None if flat[-1] == 0 else self._scale(flat[:-1]).view(form.shape)]

    def _run(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over the ranks in place: in the memory of their hosts, once they have met in a first sum."""
        group = self.group or dist.group.WORLD
        assert group is not None
        sums, backend = _sums.get(group), group._get_backend(tensor.device)
        shares = tensor.is_cpu and tensor.dtype in NUMBERS and isinstance(backend, dist.ProcessGroupGloo)
        if shares and sums is not None:
            own = backend.options._timeout.total_seconds()  # which ``Rowless`` shortens
            if sums.sum(tensor, "all_reduce", min(self.timeout, own)):
                return tensor
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None  # this rank is a member of the group
        wait_until_reduced(work, group, "all_reduce", self.timeout, on_host=not tensor.is_cuda)
        if shares and sums is None and group.size() > 1:
            for other in [other for other, its in _sums.items() if its.over]:
                del _sums[other]  # with its memory: a group that was the default one lives on
            _sums[group] = GroupSums(group, self.timeout)
        return tensor

    def _scale(self, tensor: Tensor) -> Tensor:
        """Turn the sum into the mean in place, if requested."""
        return tensor.div_(dist.get_world_size(self.group)) if self.op == "mean" else tensor


def _reduce(tensor: Tensor, reduction: _Reduction) -> Tensor:
    return reduction.outputs(tensor, recorded=tensor.requires_grad)[0]


# A tensor from one rank to another.

_MAGIC = 0x616E6162
_NOTHING = 0  # in place of a dtype's number
_MOST_DIMENSIONS = 8
_HEADER = 4 + _MOST_DIMENSIONS
"""Numbers in a header: magic, dtype, whether a gradient is wanted back, dimensions; then the sizes."""


@dataclass(frozen=True, slots=True)
class _PeerChannel:
    """To or from which rank, and how long to wait for it."""

    rank: int
    timeout: float

    def post(self, tensor: Tensor | None, *, wants_gradient: bool, operation: str) -> None:
        """Send a header, and the tensor if there is one."""
        fields = [_MAGIC, _NOTHING]
        if tensor is not None:
            fields = [_MAGIC, DTYPE_CODES[tensor.dtype], int(wants_gradient), tensor.ndim, *tensor.shape]
        fields += [0] * (_HEADER - len(fields))
        parts = [torch.tensor(fields, device=_device())]
        if tensor is not None and tensor.numel():
            # A conjugate is computed before its bytes are read.
            values = tensor.detach().resolve_conj().resolve_neg()
            parts.append(as_bytes(values.to(_device()).contiguous()))

        def move() -> None:
            for part in parts:
                self._complete(dist.isend(part, self.rank))

        move_message(move, self.rank, operation, self.timeout)

    def take(self, operation: str) -> tuple[Tensor, bool] | None:
        """Return the next message, and whether its gradient is to go back; ``None`` if it is empty."""
        return move_message(lambda: self._take(operation), self.rank, operation, self.timeout)

    def _take(self, operation: str) -> tuple[Tensor, bool] | None:
        header = torch.empty(_HEADER, dtype=torch.int64, device=_device())
        self._complete(dist.irecv(header, self.rank))
        magic, dtype, wants_gradient, ndim, *sizes = fields = header.tolist()
        if magic != _MAGIC or dtype not in (_NOTHING, *DTYPES) or not 0 <= ndim <= _MOST_DIMENSIONS:
            raise ProtocolError(f"not the header of a tensor: {fields}", peer=f"rank {self.rank}", operation=operation)
        if dtype == _NOTHING:
            return None
        tensor = torch.empty(sizes[:ndim], dtype=DTYPES[dtype], device=_device())
        if tensor.numel():
            self._complete(dist.irecv(as_bytes(tensor), self.rank))
        return tensor, bool(wants_gradient)

    def _complete(self, work: dist.Work | None) -> None:
        assert work is not None  # this rank is a member of the group
        work.wait(timedelta(seconds=self.timeout))


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Sending(_Exchange):
    """A message to another rank, with which the gradient for it comes back."""

    line: _PeerChannel
    device: torch.device

    name = "send"

    def forward(self, inputs: Tensors, wants: Sequence[bool] | None) -> Crossed:
        self.line.post(inputs[0], wants_gradient=wants is not None, operation="send")
        return _crossed()

    def backward(self, state: object, inputs: Tensors, gradients: Tensors, *, updates: bool) -> list[Tensor | None]:
        gradient = _receive(self.line)
        return [None if gradient is None else gradient.to(self.device)]


@dataclass(frozen=True, slots=True)
class _Receiving(_Exchange):
    """A message from another rank, to which the gradient for it goes back."""

    line: _PeerChannel

    name = "recv"

    def forward(self, inputs: Tensors, wants: Sequence[bool] | None) -> Crossed:
        message = self.line.take("recv")
        if message is None:
            return _crossed(differentiable=False)
        tensor, wants_gradient = message
        return _crossed(tensor, differentiable=wants_gradient)

    def backward(self, state: object, inputs: Tensors, gradients: Tensors, *, updates: bool) -> list[Tensor | None]:
        if gradients[0] is None:
            self.line.post(None, wants_gradient=False, operation="recv.backward")
        else:
            _send(gradients[0], self.line)
        return [torch.zeros((), device="cpu")]  # for the token


def _send(tensor: Tensor, line: _PeerChannel) -> Tensor:
    return _Sending(line, tensor.device).outputs(tensor, recorded=tensor.requires_grad)[0]


def _receive(line: _PeerChannel, token: Tensor | None = None) -> Tensor | None:
    *received, _ = _Receiving(line).outputs(token)
    return received[0] if received else None

"""CUDA: a program recorded as one CUDA graph, whose kernels are then launched all at once.

On small steps a GPU waits for Python to launch the next kernel. The graph of one kind of batch has static shapes, so
its kernels and their memory are the same at every run: recorded once, replayed with one call. Values that change
between runs are in tensors: inputs are copied into the recorded ones, state is the user's own, random numbers
come from the generator that the recording has registered.

The optimizers are not part of it: their learning rates and step counts are read by the CPU.
"""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from anabranch.graph.operation_graph import OperationGraph
from anabranch.graph.run.codegen import Program

_log = logging.getLogger("anabranch")

_WARM_UP = 3
"""Runs before the recording, in which kernels choose their algorithms and a kind of batch shows that it recurs."""

_WAITING = {
    *("_ctc_loss", "_linalg_check_errors", "_linalg_eigh", "_linalg_eigvals", "_linalg_svd", "linalg_eig"),
    *("bincount", "equal", "histc"),
}
"""Operations that wait for the device. A recording would fail there, and PyTorch's random numbers with it from then on:
they would still be thought to be recorded."""

_BROKEN: list[torch.cuda.CUDAGraph] = []
"""Recordings that could not be ended: PyTorch's allocator of host memory may still ask which streams are theirs."""

_RECORDING = threading.Lock()
"""Held by the thread that records: a process may record one CUDA graph at a time."""

_Recording: TypeAlias = "tuple[Callable[[], None], tuple[object, ...]]"
"""A function that replays, and the results, which it overwrites in place."""


def can_replay(graph: OperationGraph) -> bool:
    """Return True if the whole graph runs on one CUDA device, in kernels that need no Python."""
    devices: set[torch.device] = set()
    for node in graph.fx.nodes:
        if node.op == "output":
            continue
        value = node.meta.get("val")
        if node.op == "call_function" and not _is_kernel(node):
            return False
        if node.op == "placeholder" and not isinstance(value, Tensor):
            return False
        tensors = value if isinstance(value, (tuple, list)) else [value]
        devices.update(tensor.device for tensor in tensors if isinstance(tensor, Tensor))
    devices.update(tensor.device for _, tensor in graph.shared())
    return len(devices) == 1 and devices.pop().type == "cuda"


def _is_kernel(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return False
    return node.target is not torch.ops.aten._local_scalar_dense.default


def _waiting(graph: OperationGraph) -> str | None:
    """Return the name of an operation that waits for the device."""
    names = (node.target.overloadpacket.__name__ for node in graph.fx.nodes if isinstance(node.target, OpOverload))
    return next((name for name in names if name in _WAITING), None)


class Replayed(Program):
    """A program that is recorded once it has run a few times, and replayed from then on.

    Args:
        program: the program to record.
        graph: its graph.
        lent: the results that are read before the next run, so that they need not be copied out of recorded memory.
    """

    __slots__ = ("_bound", "_inputs", "_lent", "_program", "_recording", "_refused", "_runs", "_where")

    def __init__(self, program: Program, graph: OperationGraph, lent: Sequence[bool]) -> None:
        super().__init__(program.source, self._run)
        self._program = program
        self._lent = list(lent)
        self._bound = [tensor for _, tensor in graph.shared()]
        self._where: list[int] = []
        self._inputs: list[Tensor] = []
        self._recording: _Recording | None = None
        self._runs, self._refused = 0, False
        if (waiting := _waiting(graph)) is not None:
            self._refuse(f"{waiting} waits for the device")

    def _run(self, *inputs: Tensor) -> tuple[object, ...]:
        places = list(map(Tensor.data_ptr, self._bound))
        if places != self._where:  # at first, and where ``parameter.data = ...`` has moved the memory
            self._where, self._recording, self._runs = places, None, 0
        if self._recording is None and not self._refused:
            self._runs += 1
            if self._runs > _WARM_UP and _RECORDING.acquire(blocking=False):  # while others record, a later run tries
                try:
                    self._record(inputs)
                finally:
                    _RECORDING.release()
        if self._recording is None:
            return self._program.run(*inputs)
        for mine, given in zip(self._inputs, inputs, strict=True):
            mine.copy_(given)
        replay, results = self._recording
        replay()
        return tuple(
            result if lent or not isinstance(result, Tensor) else result.clone()
            for result, lent in zip(results, self._lent, strict=True)
        )

    def _record(self, inputs: Sequence[Tensor]) -> None:
        self._inputs = [value.clone() for value in inputs]
        try:
            self._recording = _record(self._program, self._inputs)
        except RuntimeError as error:  # too little memory, or an operation that waits after all
            self._inputs = []
            self._refuse(str(error).strip().split("\n")[0])

    def _refuse(self, reason: str) -> None:
        self._refused = True
        _log.info("a step cannot be a CUDA graph and is launched kernel by kernel: %s", reason)


def _record(program: Program, inputs: Sequence[Tensor]) -> _Recording:
    graph, stream, pool = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
    try:
        # Other threads (a loader's, a connection's) may use the device at the same time.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            results = program.run(*inputs)
    except BaseException:
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError):  # a recording that was ended has closed its memory, and gives it back itself
            torch._C._cuda_endAllocateToPool(stream.device_index, pool)
            torch._C._cuda_releasePool(stream.device_index, pool)
            _BROKEN.append(graph)
        raise
    return graph.replay, results

"""Everything that depends on ``make_fx``: a Python function becomes a ``Graph`` of ATen operations.

One module, because the tracer changes between versions of PyTorch. What it adds to ``make_fx``:

- Python numbers stay Python numbers. A float is traced as the ``.item()`` of a float64 tensor, whose arithmetic the
  tracer records; the replay then computes it in Python doubles, exactly as eager code does.
- Boundaries become nodes that cross when the graph runs.
- Reading a traced value raises.
"""

from __future__ import annotations

import gc
import logging
import operator
import re
import threading
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    PythonKeyTracer,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.fx.proxy import TracerBase
from torch.overrides import TorchFunctionMode

from anabranch.autodiff.boundary.crossing import Boundary, Crossed, Tensors, Tracer, traced_by
from anabranch.autodiff.hooks import watch_node
from anabranch.errors import AnabranchError, CaptureError, NotFound
from anabranch.graph.crossings import BackwardCrossing, ForwardCrossing
from anabranch.graph.graph import Graph
from anabranch.graph.operation_graph import Input, InputKind
from anabranch.graph.passes import drop_dead_nodes, drop_handles

one_at_a_time = threading.RLock()
"""Torch's tracer patches modules for the whole process: another thread must neither trace nor capture meanwhile."""

Interceptor = Callable[[Callable[..., object], tuple[object, ...], dict[str, object]], object]
"""Called before each torch function; anything but ``NotImplemented`` replaces its result."""


@dataclass(frozen=True, slots=True)
class TraceSource:
    """One input of a trace: a name, an example, and its kind; all but arguments are bound to the example."""

    name: str
    value: Tensor | float | int
    kind: InputKind = "argument"

    @property
    def state(self) -> bool:
        """True if it is bound."""
        return self.kind != "argument"


def free_name(name: str, sources: Sequence[TraceSource]) -> str:
    """``name``, or the next one like it that no source has."""
    taken = {source.name for source in sources}
    while name in taken:
        name += "_"
    return name


class TraceRecorder:
    """Marks each node with the module and the line of user code that it comes from, backward nodes included."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, str]] = []
        self.scope = ""
        self.stops_gradients = False
        self.differentiable: bool | None = None
        self.phase = "forward"
        self.is_checkpointed = False
        """The operations in progress are recomputed in backward instead of kept."""
        self.line = ""
        """The place of the operations in progress in the user's code, followed by a colon."""
        self.entries: list[Tensor] = []
        """Leaves at the boundaries that were crossed: a backward that is to reach them sweeps towards these too."""

    def attach(self, tracer: TracerBase) -> None:
        create_node = tracer.create_node

        def create(*args: object, **kwargs: object) -> fx.Node:
            node = create_node(*args, **kwargs)  # type: ignore[arg-type]
            node.meta["scope"] = self.scope
            node.meta["phase"] = self.phase
            node.meta["stop"] = self.stops_gradients
            recorded = torch.is_grad_enabled() if self.differentiable is None else self.differentiable
            node.meta["recorded"] = recorded
            if self.is_checkpointed:
                node.meta["checkpointed"] = True
            return node

        tracer.create_node = create  # type: ignore[method-assign]

    def switch(self, scope: str) -> None:
        """Attributes the operations that follow to the module of this name."""
        if scope != self.scope:
            self.scope = scope
            self._spans.append((torch._C._autograd._get_sequence_nr(), scope))

    def follow_backward(self, root: Tensor) -> None:
        """Make each backward node of ``root`` mark its operations with the scope of its forward."""
        self.phase = "backward"
        self.scope = ""
        self.is_checkpointed = False
        seen: set[object] = set()
        waiting = [root.grad_fn]
        while waiting:
            edge = waiting.pop()
            if edge is None or edge in seen:
                continue
            seen.add(edge)
            watch_node(edge, self._entering(self._scope_at(edge._sequence_nr())))
            waiting.extend(following for following, _ in edge.next_functions)

    def _entering(self, scope: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            self.scope = scope

        return hook

    def _scope_at(self, sequence: int) -> str:
        index = bisect_right(self._spans, sequence, key=operator.itemgetter(0))
        return self._spans[index - 1][1] if index else ""


_READS = {Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__, Tensor.__index__}
_READS |= {Tensor.__int__, Tensor.__float__, Tensor.__complex__}

# Users call it to stop gradients; autograd's own detached handles do not pass here.
_STOPS = {Tensor.detach, Tensor.detach_, torch.detach, Tensor.data.__get__}  # type: ignore[attr-defined]


class _Faithful(TorchFunctionMode):
    """Refuses to read values that do not exist yet, and lets an interceptor replace calls."""

    def __init__(self, may_read: bool, interceptor: Interceptor | None, recorder: TraceRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._may_read = may_read
        self._interceptor = interceptor

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if not self._may_read and func in _READS:
            raise CaptureError(
                f"{self._recorder.line}{func.__name__}() reads a value while the step is captured; a graph cannot "
                "branch on what it computes: use torch.where, return the tensor, or use engine='tape'"
            )
        if self._interceptor is not None and (result := self._interceptor(func, args, kwargs)) is not NotImplemented:
            return result
        self._recorder.stops_gradients = func in _STOPS
        result = func(*args, **kwargs)
        self._recorder.stops_gradients = False  # an exception ends the trace
        return result


class _Crossings(Tracer):
    """Writes boundaries into the graph: two nodes each, which cross when the graph runs."""

    def __init__(self, mode: FakeTensorMode, recorder: TraceRecorder) -> None:
        proxies = get_proxy_mode()
        assert proxies is not None
        assert isinstance(proxies.tracer, PythonKeyTracer)
        self._tracer, self._mode, self._recorder = proxies.tracer, mode, recorder

    def entry(self) -> Tensor:
        with self.outside():
            entry = super().entry()
        self._recorder.entries.append(entry)
        return entry

    def forward(self, boundary: Boundary, inputs: Tensors, wants: Sequence[bool] | None) -> Crossed:
        with self.outside():
            forms = boundary.forms(inputs)
        target = ForwardCrossing(boundary, wants, forms)
        proxy = self._tracer.create_proxy("call_function", target, (self._proxies(inputs),), {})
        proxy.node.meta["recorded"] = wants is not None
        with disable_proxy_modes_tracing(), self._mode:
            outputs = [torch.empty(form.shape, dtype=form.dtype, device=form.device) for form in forms]
        track_tensor_tree((*outputs, None), proxy, constant=None, tracer=self._tracer)
        state = self._tracer.create_proxy("call_function", operator.getitem, (proxy, len(outputs)), {})
        state.node.meta["val"] = None
        return Crossed(outputs, state, [i for i, form in enumerate(forms) if not form.differentiable])

    def backward(
        self,
        boundary: Boundary,
        state: object,
        inputs: Tensors,
        gradients: Tensors,
        wants: Sequence[bool],
        updates: bool,
    ) -> Tensors:
        target = BackwardCrossing(boundary, wants, updates=updates)
        arguments = (state, self._proxies(inputs), self._proxies(gradients))
        proxy = self._tracer.create_proxy("call_function", target, arguments, {})
        with disable_proxy_modes_tracing(), self._mode:
            answer = [
                torch.empty(value.shape, dtype=value.dtype, device=value.device) if want and value is not None else None
                for value, want in zip(inputs, wants, strict=True)
            ]
        answered = tuple(gradient for gradient in answer if gradient is not None)
        track_tensor_tree(answered, proxy, constant=None, tracer=self._tracer)
        return answer

    def _proxies(self, values: Sequence[Tensor | None]) -> list[object]:
        proxies = [None if value is None else self._tracer.unwrap_proxy(value) for value in values]
        # Those that are not traced yet, tensors that the forward has created, are traced by their handles.
        return [self._tracer.unwrap_proxy(one.detach()) if isinstance(one, Tensor) else one for one in proxies]


def build(
    body: Callable[..., Sequence[object]],
    sources: Sequence[TraceSource],
    outputs: Sequence[str],
    *,
    may_read: bool = False,
    interceptor: Interceptor | None = None,
) -> Graph:
    """Return the operations that ``body`` performs on its inputs as a graph, ``sources`` as inputs in their order.

    Args:
        body: takes the traced inputs, as tensors and floats, and the recorder; returns flat outputs.
        sources: the inputs. Further tensors that ``body`` uses become bound inputs behind them.
        outputs: names of the results, to which ``body`` may add while it runs.
        may_read: allows ``.item()``, whose value stays symbolic: for optimizers, not for users' code.
        interceptor: see ``Interceptor``.

    Raises:
        CaptureError: naming the line of user code that cannot be captured.
    """
    # Imported here: it takes a third of a second, only in processes that capture (not servers or launchers).
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fakes_of = FakeTensorMode(
        shape_env=ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=False),
        static_shapes=True,
        allow_non_fake_inputs=True,
    )
    fakes = [_fake(fakes_of, source.value) for source in sources]
    recorder = TraceRecorder()
    caches = torch.is_autocast_cache_enabled()

    def run(*values: Tensor) -> list[object]:
        proxies = get_proxy_mode()
        assert proxies is not None
        recorder.attach(proxies.tracer)
        inputs = [
            value.item() if isinstance(source.value, (float, int)) else value
            for source, value in zip(sources, values, strict=True)
        ]
        with (
            _Faithful(may_read, interceptor, recorder),
            traced_by(_Crossings(fakes_of, recorder)),
            _casts_cached(caches),
            _kernels_for_lists(sources),
        ):
            return list(body(inputs, recorder))

    with (
        one_at_a_time,
        undisturbed(),
        silent(),
        fakes_of,
        torch.autograd.set_multithreading_enabled(False),
        _explained(),
    ):
        module = make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)
    _name_placeholders(module, sources)
    inputs = [*map(_input, sources), *_lifted_constants(module)]
    output = module.graph.output_node()
    output.args = (tuple(output.args[0]),)  # type: ignore[arg-type]
    return drop_dead_nodes(drop_handles(Graph(module.graph, inputs, list(outputs))))


@contextmanager
def _kernels_for_lists(sources: Sequence[TraceSource]) -> Iterator[None]:
    """Let optimizers and clipping use kernels for lists of tensors where they do so for ``sources``, as on CUDA.

    They do so only for types of tensors that they know; the other kernels round differently.
    """
    if any(isinstance(source.value, nn.Parameter) and type(source.value) is not nn.Parameter for source in sources):
        yield
        return
    from torch.optim.optimizer import _foreach_supported_types as in_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as elsewhere

    known = [cast("list[type]", types) for types in (in_optimizers, elsewhere)]
    for types in known:
        types.append(FakeTensor)
    try:
        yield
    finally:
        for types in known:
            types.remove(FakeTensor)


def _fake(mode: FakeTensorMode, value: Tensor | float | int) -> Tensor:
    """Return a fresh placeholder, because the tracer's own memo would keep an earlier ``requires_grad``."""
    with mode, torch.no_grad():
        if not isinstance(value, Tensor):
            return torch.empty((), dtype=torch.float64 if isinstance(value, float) else torch.int64, device="cpu")
        if value.layout != torch.strided:
            return mode.from_tensor(value)
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    fake.requires_grad_(value.requires_grad)
    if isinstance(value, nn.Parameter):
        fake._is_param = True
    return fake


@contextmanager
def _casts_cached(enabled: bool) -> Iterator[None]:
    """Let autocast cast a parameter once per block, as in eager mode, so that sums round equally."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()


@contextmanager
def _explained() -> Iterator[None]:
    """Turn any exception of the tracer into a ``CaptureError``; the code that runs here has no line of the user's."""
    try:
        yield
    except (AnabranchError, NotFound):
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise CaptureError(f"the code cannot be captured as a graph ({type(error).__name__}: {reason})") from error


def _name_placeholders(module: fx.GraphModule, sources: Sequence[TraceSource]) -> None:
    placeholders = module.graph.find_nodes(op="placeholder")
    for node, source in zip(placeholders, sources, strict=True):
        node._rename(re.sub(r"\W", "_", source.name) or "input")
        node.target = node.name
        if isinstance(source.value, (float, int)):
            _use_number_itself(node)


def _use_number_itself(node: fx.Node) -> None:
    """Drop the ``.item()`` through which a float was traced: the replay is given the number."""
    for item in list(node.users):
        node.meta["val"] = item.meta["val"]
        item.replace_all_uses_with(node)
        item.graph.erase_node(item)


def _lifted_constants(module: fx.GraphModule) -> Iterator[Input]:
    """Make inputs of the tensors that the traced function used without receiving them, and yield these."""
    graph = module.graph
    last = next(iter(reversed(graph.find_nodes(op="placeholder"))), None)
    for index, node in enumerate(graph.find_nodes(op="get_attr")):
        value = getattr(module, str(node.target))
        if isinstance(value, torch.ScriptObject):
            raise CaptureError(
                f"{node.meta.get('scope') or 'the loss'} calls torch.distributed, whose collectives do not work in a "
                "graph; use engine='tape'"
            )
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            raise CaptureError(f"the function makes {str(node.target)!r}, which a graph cannot keep: {type(value)}")
        with graph.inserting_before(node) if last is None else graph.inserting_after(last):
            last = graph.placeholder(f"constant_{index}")
        last.meta.update({**node.meta, "val": value.detach()})
        node.replace_all_uses_with(last)
        graph.erase_node(node)
        yield Input(f"constant.{index}", "constant", value)


def _input(source: TraceSource) -> Input:
    if not isinstance(source.value, Tensor) or not source.state:
        return Input(source.name)
    return Input(source.name, "parameter" if isinstance(source.value, nn.Parameter) else source.kind, source.value)


# What a capture leaves alone: the random states of GPUs, and the user's log.
#
# - PyTorch's tracer sets the state of a GPU's generator to what it was before, though a capture draws nothing. Whoever
#   sets it makes cuDNN's dropout, which ``nn.LSTM`` and ``nn.GRU`` have between layers, start anew with a seed from
#   that generator: later steps on the tape would draw other numbers than the plain loop.
# - PyTorch logs code that it cannot trace: the caller gets one error, from this package.


_LOUD = (
    "torch._dynamo",
    "torch._guards",
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.sym_node",
    "torch.fx.experimental.symbolic_shapes",
)


@contextmanager
def random_states_untouched() -> Iterator[None]:
    """Run a block in which setting a GPU's random state to what it is does nothing; for one thread at a time."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield
        return
    usual, own = torch.cuda.set_rng_state, threading.get_ident()

    def set_if_other(new_state: Tensor, device: int | str | torch.device = "cuda") -> None:
        if threading.get_ident() != own or not torch.equal(new_state, torch.cuda.get_rng_state(device)):
            usual(new_state, device)

    torch.cuda.set_rng_state = set_if_other
    try:
        yield
    finally:
        torch.cuda.set_rng_state = usual


@contextmanager
def silent() -> Iterator[None]:
    """Run a block without warnings, and without records of PyTorch's tracers."""
    # Each separately: a disabled logger still propagates records of its children.
    known = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith(_LOUD)]
    loggers = [*known, *map(logging.getLogger, _LOUD)]
    before = [logger.disabled for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.disabled = True
        try:
            yield
        finally:
            for logger, disabled in zip(loggers, before, strict=True):
                logger.disabled = disabled


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run a block without Python's collector, which would search the many new objects hundreds of times."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()

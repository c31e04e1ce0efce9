"""Everything that depends on ``make_fx``: a Python function becomes a flat ``torch.fx`` graph of ATen operations.

One module, because the tracer is a moving part of PyTorch. What it adds to ``make_fx`` is faithfulness:

- State stands for itself. Tensors that the function closes over (parameters, buffers, plain tensors) are replaced
  by traced ones while the function runs: in the modules' own dicts, and by a ``TorchFunctionMode`` wherever else a
  reference is held (the flat weights of an RNN, a closure).
- Python numbers stay Python numbers. A float is traced as the ``.item()`` of a float64 tensor, whose arithmetic the
  tracer records; the replay then computes it in Python doubles, exactly as eager code does.
- What would be lost raises. Reading a traced value, hooks, and changes of Python state are refused with the line of
  user code that does it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import operator
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import optree
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
from torch.utils._python_dispatch import _disable_current_modes

from anabranch.autodiff.boundary import Boundary, Crossed, traced_by
from anabranch.autodiff.hooks import watch_calls, watch_node
from anabranch.errors import BoundaryError, CaptureError, NotFound, SchemaError
from anabranch.graph.crossings import BackwardCrossing, ForwardCrossing

__all__ = [
    "Interceptor",
    "Recorder",
    "Source",
    "TracedModules",
    "UserMistake",
    "WrongType",
    "bytes_of",
    "constants",
    "free_name",
    "is_library",
    "trace",
    "undisturbed",
    "user_line",
]

_LIBRARIES = (
    str(Path(torch.__file__).parent),
    str(Path(optree.__file__).parent),
    str(Path(__file__).parents[1]),
    str(Path(contextlib.__file__).parent) + "/contextlib",
    str(Path(contextlib.__file__).parent) + "/functools",
    "<eval_with_key>",
    "<string>",
)

_one_at_a_time = threading.RLock()
"""Torch's tracer patches modules for the whole process; two threads at once get in each other's way."""

_FAKES = logging.getLogger("torch._subclasses.fake_tensor")
"""Prints the traceback of every mistake in a shape, whoever may catch it."""

Interceptor = Callable[[Callable[..., object], tuple[object, ...], dict[str, object]], object]
"""Called before each torch function; anything but ``NotImplemented`` replaces its result."""


class UserMistake(ValueError):
    """A mistake found while tracing that no engine would forgive; it reaches the caller as it is."""


class WrongType(TypeError):
    """The same, of a type."""


@dataclass(frozen=True, slots=True)
class Source:
    """What one input of a trace stands for: a name, an example, and whether that very tensor is state.

    One that is only ``within_reach`` is no input of the graph unless something reads it.
    """

    name: str
    value: Tensor | float
    state: bool = False
    within_reach: bool = False


def free_name(name: str, sources: Sequence[Source]) -> str:
    """``name``, or the next one like it that no source has."""
    taken = {source.name for source in sources}
    while name in taken:
        name += "_"
    return name


class TracedModules:
    """The modules whose calls name the nodes, and whose state is swapped for traced tensors."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.names: dict[nn.Module, str] = {}
        for prefix, root in modules.items():
            for name, module in root.named_modules():
                self.names.setdefault(module, ".".join(part for part in (prefix, name) if part))

    @contextmanager
    def swapped(self, stand_ins: dict[int, Tensor]) -> Iterator[None]:
        """Every parameter and buffer replaced by its traced tensor until the block ends.

        A buffer that the forward rebinds (``self.mean = ...``) is copied into the traced one on the way out: the
        tensor that the user holds receives the new value.
        """
        kept = [(entries, dict(entries)) for entries in self._entries()]
        try:
            for entries, values in kept:
                for name, value in values.items():
                    if value is not None and id(value) in stand_ins:
                        entries[name] = stand_ins[id(value)]
            yield
            for entries, values in kept:
                self._write_back(entries, values, stand_ins)
        finally:
            for entries, values in kept:
                entries.clear()
                entries.update(values)

    def _entries(self) -> Iterator[dict[str, Tensor | None]]:
        for module in self.names:
            yield module._parameters  # type: ignore[misc]
            yield module._buffers

    @staticmethod
    def _write_back(
        entries: dict[str, Tensor | None], values: dict[str, Tensor | None], stand_ins: dict[int, Tensor]
    ) -> None:
        if entries.keys() != values.keys():
            name = next(iter(entries.keys() ^ values.keys()))
            raise CaptureError(
                f"the forward adds or removes the parameter or buffer {name!r}, which a graph would do once and for "
                "all; make it in __init__, or use engine='tape'"
            )
        for name, value in values.items():
            traced, now = stand_ins.get(id(value)), entries.get(name)
            if traced is None or now is traced:
                continue
            if not isinstance(now, Tensor) or now.shape != traced.shape or now.dtype != traced.dtype:
                raise CaptureError(
                    f"the forward replaces {name!r} by something of another shape or dtype, which the graph, whose "
                    "state is bound once, would lose; change it in place, or use engine='tape'"
                )
            with torch.no_grad():
                traced.copy_(now)


class Recorder:
    """Marks each node with the module and the line of user code that it comes from, backward nodes included."""

    def __init__(self, keep: frozenset[str]) -> None:
        self._stack: list[str] = []
        self._spans: list[tuple[int, str]] = []
        self._keep = keep
        self.scope = ""
        self.stops_gradients = False
        self.casts = torch._C._is_any_autocast_enabled()
        self.differentiable: bool | None = None
        self.phase = "forward"
        self.outputs: dict[str, object] = {}
        self.entries: list[Tensor] = []
        """Leaves at the boundaries that were crossed: a backward that is to reach them sweeps towards these too."""

    def attach(self, tracer: TracerBase) -> None:
        create_node = tracer.create_node

        def create(*args: object, **kwargs: object) -> fx.Node:
            node = create_node(*args, **kwargs)  # type: ignore[arg-type]
            node.meta["scope"] = self.scope
            node.meta["phase"] = self.phase
            node.meta["stop"] = self.stops_gradients
            node.meta["autocast"] = self.casts
            recorded = torch.is_grad_enabled() if self.differentiable is None else self.differentiable
            node.meta["recorded"] = recorded
            return node

        tracer.create_node = create  # type: ignore[method-assign]

    def enter(self, name: str) -> None:
        """The module of this name begins."""
        self._stack.append(self.scope)
        self._switch(name)

    def leave(self, name: str, output: object) -> None:
        """The module of this name has returned ``output``."""
        if name in self._keep:
            self.outputs[name] = output
        self._switch(self._stack.pop() if self._stack else "")

    def _switch(self, scope: str) -> None:
        self.scope = scope
        self._spans.append((torch._C._autograd._get_sequence_nr(), scope))

    def follow_backward(self, root: Tensor) -> None:
        """Makes each backward node of ``root`` mark its operations with the scope of its forward."""
        self.phase = "backward"
        self.scope = ""
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
        low, high = 0, len(self._spans)
        while low < high:
            middle = (low + high) // 2
            if self._spans[middle][0] <= sequence:
                low = middle + 1
            else:
                high = middle
        return self._spans[low - 1][1] if low else ""


_READS = {
    Tensor.item: "item()",
    Tensor.tolist: "tolist()",
    Tensor.numpy: "numpy()",
    Tensor.__array__: "conversion to numpy",
    Tensor.__bool__: "bool() of a tensor, as in `if tensor:`",
    Tensor.__float__: "float() of a tensor",
    Tensor.__int__: "int() of a tensor",
    Tensor.__index__: "a tensor as an index of Python",
    Tensor.__complex__: "complex() of a tensor",
}


# What would be done to a stand-in, and lost with it.
_LOST = {
    Tensor.backward: "backward() in the middle of the step",
    Tensor.data.__set__: "an assignment to the .data of a tensor",  # type: ignore[attr-defined]
    Tensor.set_: "set_(), which changes a tensor's memory",
}

# What a user calls to stop gradients; autograd's own detached handles do not come this way.
_STOPS = {Tensor.detach, Tensor.detach_, torch.detach, Tensor.data.__get__}  # type: ignore[attr-defined]


class _Faithful(TorchFunctionMode):
    """Puts traced tensors in place of the state they stand for, and refuses to read values that do not exist yet."""

    def __init__(
        self,
        stand_ins: dict[int, Tensor],
        may_read: bool,
        interceptors: Sequence[Interceptor],
        recorder: Recorder,
    ) -> None:
        super().__init__()
        self._stand_ins = stand_ins
        self._recorder = recorder
        self._may_read = may_read
        self._interceptors = interceptors

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if not self._may_read and func in _READS:
            raise CaptureError(
                f"{user_line()}: {_READS[func]} reads a value while the step is captured; a graph cannot branch on "
                "what it computes: use torch.where, return the tensor, or use engine='tape'"
            )
        if func in _LOST:
            raise CaptureError(
                f"{user_line()}: {_LOST[func]} is nothing that a graph can hold; do it outside of the step, or use "
                "engine='tape'"
            )
        if isinstance((kwargs or {}).get("generator"), torch.Generator):
            raise CaptureError(
                f"{user_line()}: the step draws from a torch.Generator of its own, which a graph cannot hold; draw "
                "from torch's default one, pass the numbers in the batch, or use engine='tape'"
            )
        args = tuple(self._replace(value) for value in args)
        kwargs = {name: self._replace(value) for name, value in (kwargs or {}).items()}
        for interceptor in self._interceptors:
            result = interceptor(func, args, kwargs)
            if result is not NotImplemented:
                return result
        self._recorder.stops_gradients = func in _STOPS
        self._recorder.casts = torch._C._is_any_autocast_enabled()
        try:
            return func(*args, **kwargs)
        finally:
            self._recorder.stops_gradients = False

    def _replace(self, value: object) -> object:
        if isinstance(value, Tensor):
            return self._stand_ins.get(id(value), value)
        if type(value) is list or type(value) is tuple:
            return type(value)(self._replace(item) for item in value)
        return value


class _Crossings:
    """Writes boundaries into the graph: two nodes each, which cross when the graph runs."""

    def __init__(self, mode: FakeTensorMode, recorder: Recorder, replace: Callable[[object], object]) -> None:
        proxies = get_proxy_mode()
        assert proxies is not None
        assert isinstance(proxies.tracer, PythonKeyTracer)
        self._tracer = proxies.tracer
        self._mode = mode
        self._recorder = recorder
        self._replace = replace

    @contextmanager
    def outside(self) -> Iterator[None]:
        with _disable_current_modes(), torch._C.DisableTorchFunction(), traced_by(None):
            yield

    def entry(self) -> Tensor:
        with self.outside():
            entry = torch.empty((), requires_grad=True)
        self._recorder.entries.append(entry)
        return entry

    def forward(self, boundary: Boundary, inputs: Sequence[Tensor | None], wants: Sequence[bool] | None) -> Crossed:
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
        inputs: Sequence[Tensor | None],
        gradients: Sequence[Tensor | None],
        wants: Sequence[bool],
    ) -> list[Tensor | None]:
        target = BackwardCrossing(boundary, wants)
        arguments = (state, self._proxies(inputs), self._proxies(gradients))
        proxy = self._tracer.create_proxy("call_function", target, arguments, {})
        wanted = [value for value, want in zip(inputs, wants, strict=True) if want and value is not None]
        with disable_proxy_modes_tracing(), self._mode:
            found = [torch.empty(value.shape, dtype=value.dtype, device=value.device) for value in wanted]
        track_tensor_tree(tuple(found), proxy, constant=None, tracer=self._tracer)
        given = iter(found)
        return [next(given) if want else None for want in wants]

    def _proxies(self, values: Sequence[Tensor | None]) -> list[object]:
        return [None if value is None else self._proxy(value) for value in values]

    def _proxy(self, value: Tensor) -> object:
        value = self._replace(value)  # type: ignore[assignment]
        found = self._tracer.unwrap_proxy(value)
        if isinstance(found, Tensor):  # not traced yet: a tensor that the forward has made from nothing
            found = self._tracer.unwrap_proxy(value.detach())
        return found


def trace(
    body: Callable[[list[Tensor | float], Recorder], Sequence[object]],
    sources: Sequence[Source],
    modules: dict[str, nn.Module] | None = None,
    *,
    may_read: bool = False,
    keep: frozenset[str] = frozenset(),
    interceptors: Sequence[Interceptor] = (),
) -> fx.GraphModule:
    """The operations that ``body`` performs on its inputs, one node each, ``sources`` as placeholders in their order.

    Args:
        body: takes the traced inputs, as tensors and floats, and the recorder; returns flat outputs.
        sources: the inputs. Those that are state are substituted wherever ``body`` meets them.
        modules: roots, by the prefix of their names, whose state is swapped and whose calls name the nodes.
        may_read: allows ``.item()``, whose value stays symbolic: for optimizers, not for users' code.
        keep: names of modules whose outputs the recorder keeps.
        interceptors: see ``Interceptor``.

    Raises:
        CaptureError: naming the line of user code that cannot be captured.
    """
    # A third of a second, which processes that capture nothing (servers, launchers) need not spend.
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fakes_of = FakeTensorMode(
        shape_env=ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=False),
        static_shapes=True,
        allow_non_fake_inputs=True,
    )
    fakes = [_fake(fakes_of, source.value) for source in sources]
    stand_ins = {id(s.value): fake for s, fake in zip(sources, fakes, strict=True) if s.state}
    traced_modules = TracedModules(modules or {})
    recorder = Recorder(keep)
    caches = torch.is_autocast_cache_enabled()

    def run(*values: Tensor) -> list[object]:
        proxies = get_proxy_mode()
        assert proxies is not None
        recorder.attach(proxies.tracer)
        inputs = [
            value.item() if isinstance(source.value, float) else value
            for source, value in zip(sources, values, strict=True)
        ]
        faithful = _Faithful(stand_ins, may_read, interceptors, recorder)
        with (
            faithful,
            traced_by(_Crossings(fakes_of, recorder, faithful._replace)),
            traced_modules.swapped(stand_ins),
            watch_calls(traced_modules.names, recorder.enter, recorder.leave),
            _generator_left_alone(),
            _casts_cached(caches),
        ):
            results = list(body(inputs, recorder))
        if not may_read and any(fake.grad is not None for fake in stand_ins.values()):
            raise CaptureError(
                "the step calls torch.autograd.backward, whose gradients a graph would lose; use torch.autograd.grad, "
                "or engine='tape'"
            )
        return results

    with _one_at_a_time, undisturbed(), fakes_of, torch.autograd.set_multithreading_enabled(False), _explained():
        module = make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)
    _refuse_casts_within(module.graph)
    _name_placeholders(module, sources)
    return module


def _refuse_casts_within(graph: fx.Graph) -> None:
    """Raises for kernels within which autocast casts: a graph holds the casts around them alone."""
    for node in graph.nodes:
        if node.op != "call_function" or not node.meta.get("autocast"):
            continue
        values = [node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes)]
        sparse = any(isinstance(value, Tensor) and value.layout is not torch.strided for value in values)
        if sparse or node.target is torch.ops.aten._trilinear.default:
            raise CaptureError(
                f"{node.meta['scope'] or 'the step'} runs {node.target} under autocast, which casts within it; switch "
                "autocast off around it, or use engine='tape'"
            )


def _fake(mode: FakeTensorMode, value: Tensor | float) -> Tensor:
    """A fresh stand-in, for the tracer's own memo would remember an earlier ``requires_grad``."""
    with mode, torch.no_grad():
        if not isinstance(value, Tensor):
            return torch.empty((), dtype=torch.float64)
        if value.layout != torch.strided:
            return mode.from_tensor(value)
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    fake.requires_grad_(value.requires_grad)
    if isinstance(value, nn.Parameter):
        fake._is_param = True
    return fake


class _LeftAlone:
    """Stands for the default generator in ``torch.random``: what its state is, or is to be, no graph knows."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.threads: list[int] = []

    def __getattr__(self, name: str) -> object:
        if threading.get_ident() in self.threads:
            raise CaptureError(
                f"{user_line()}: the step seeds torch's random number generator, or keeps its state to draw the same "
                "numbers again (as torch.utils.checkpoint does), which a graph would do once and for all; use "
                "Graph.recompute in place of checkpoint, or engine='tape'"
            )
        return getattr(self.generator, name)


_left_alone = _LeftAlone(torch.default_generator)
_tracing = threading.Lock()
_GENERATOR = "default_generator"


@contextmanager
def _generator_left_alone() -> Iterator[None]:
    """A block in which this thread may draw, and neither read nor set what state torch's generator is in."""
    with _tracing:
        _left_alone.threads.append(threading.get_ident())
        setattr(torch.random, _GENERATOR, _left_alone)
    try:
        yield
    finally:
        with _tracing:
            _left_alone.threads.remove(threading.get_ident())
            if not _left_alone.threads:
                setattr(torch.random, _GENERATOR, _left_alone.generator)


@contextmanager
def _casts_cached(enabled: bool) -> Iterator[None]:
    """Autocast casts a parameter once, however often it is used, as it does where nobody traces: sums round alike."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()


@contextmanager
def undisturbed() -> Iterator[None]:
    """A block in which Python's collector does not look, hundreds of times, through the many objects that are made."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def _explained() -> Iterator[None]:
    """Turns whatever the tracer raises into a ``CaptureError`` that names the user's line, and is all that is said."""
    silent = _FAKES.disabled
    _FAKES.disabled = True
    try:
        yield
    except (CaptureError, UserMistake, WrongType):
        raise
    except (BoundaryError, NotFound, SchemaError):  # from a far side that was asked what it takes and gives
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise CaptureError(
            f"{_line_of_error(error)}: cannot be captured as a graph ({type(error).__name__}: {reason})"
        ) from error
    finally:
        _FAKES.disabled = silent


def is_library(filename: str) -> bool:
    """Whether a file is torch's or ours, not the user's."""
    return filename.startswith(_LIBRARIES)


def user_line() -> str:
    """``file:line`` of the innermost running frame that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch's own code"


def _line_of_error(error: BaseException) -> str:
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        if not is_library(frame.f_code.co_filename):
            line = f"{frame.f_code.co_filename}:{number}"
    return line or user_line()


def _name_placeholders(module: fx.GraphModule, sources: Sequence[Source]) -> None:
    placeholders = module.graph.find_nodes(op="placeholder")
    for node, source in zip(placeholders, sources, strict=True):
        node._rename(re.sub(r"\W", "_", source.name) or "input")
        node.target = node.name
        if isinstance(source.value, float):
            _use_number_itself(node)


def _use_number_itself(node: fx.Node) -> None:
    """Drops the ``.item()`` behind which a float was traced: the replay is given the number."""
    for item in list(node.users):
        node.meta["val"] = item.meta["val"]
        item.replace_all_uses_with(node)
        item.graph.erase_node(item)


def constants(module: fx.GraphModule) -> dict[fx.Node, Tensor]:
    """The tensors that the traced function met without being given them, by the node that reads them."""
    found = {}
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target))
        if isinstance(value, torch.ScriptObject):
            raise CaptureError(
                f"{node.meta.get('scope') or 'the loss'} calls torch.distributed, whose collectives work outside of a "
                "graph; use engine='tape'"
            )
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            raise CaptureError(f"the function makes {str(node.target)!r}, which a graph cannot keep: {type(value)}")
        found[node] = value
    return found


def bytes_of(value: object) -> int:
    """The bytes that a traced value occupies when it is computed for real."""
    if isinstance(value, Tensor):
        return math.prod(value.shape) * value.element_size()
    if isinstance(value, (tuple, list)):
        return sum(map(bytes_of, value))
    return 0

"""Everything that depends on ``make_fx``: a Python function becomes a flat ``torch.fx`` graph of ATen operations.

One module, because the tracer changes between versions of PyTorch. What it adds to ``make_fx``:

- Python numbers stay Python numbers. A float is traced as the ``.item()`` of a float64 tensor, whose arithmetic the
  tracer records; the replay then computes it in Python doubles, exactly as eager code does.
- Boundaries become nodes that cross when the graph runs.
- Code whose effect would be lost raises: reading a traced value, a random generator that is not torch's default.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import operator
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import cast

import optree
import torch
import torch.nn.functional as F
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

from anabranch.autodiff.boundary.crossing import Boundary, Crossed, traced_by
from anabranch.autodiff.hooks import watch_node
from anabranch.errors import BoundaryError, CaptureError, NotFound, SchemaError
from anabranch.graph.crossings import BackwardCrossing, ForwardCrossing

__all__ = [
    "OURS",
    "Interceptor",
    "TraceRecorder",
    "TraceSource",
    "UserMistake",
    "WrongType",
    "constants",
    "free_name",
    "is_library",
    "one_at_a_time",
    "trace",
    "undisturbed",
    "user_line",
]

# With the separator: torch_geometric is not torch.
OURS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[2]}{os.sep}")
"""Prefixes of the files of torch and of this package: their lines are not the user's."""

_LIBRARIES = (
    *OURS,
    str(Path(optree.__file__).parent),
    str(Path(contextlib.__file__).parent) + "/contextlib",
    str(Path(contextlib.__file__).parent) + "/functools",
    "<eval_with_key>",
    "<string>",
)

one_at_a_time = threading.RLock()
"""Torch's tracer patches modules for the whole process: another thread must neither trace nor capture meanwhile."""

_FAKES = logging.getLogger("torch._subclasses.fake_tensor")
"""Torch's logger that prints the traceback of every mistake in a shape, even of a caught one."""

Interceptor = Callable[[Callable[..., object], tuple[object, ...], dict[str, object]], object]
"""Called before each torch function; anything but ``NotImplemented`` replaces its result."""


class UserMistake(ValueError):
    """A user's mistake found while tracing, wrong on every engine; it reaches the caller unchanged."""


class WrongType(TypeError):
    """The same, of a type."""


@dataclass(frozen=True, slots=True)
class TraceSource:
    """One input of a trace: a name, an example, and whether it is state, bound to that tensor."""

    name: str
    value: Tensor | float | int
    state: bool = False


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
        self.casts = torch._C._is_any_autocast_enabled()
        self.differentiable: bool | None = None
        self.phase = "forward"
        self.is_checkpointed = False
        self.line: Callable[[], str] = user_line
        """The place of the operations in progress in the user's code."""
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
            if self.is_checkpointed:
                node.meta["checkpointed"] = True
            return node

        tracer.create_node = create  # type: ignore[method-assign]

    def switch(self, scope: str) -> None:
        """Attributes the operations that follow to the module of this name."""
        if scope != self.scope:
            self.scope = scope
            self._spans.append((torch._C._autograd._get_sequence_nr(), scope))

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        """Mark a block whose values are recomputed in backward instead of kept."""
        before, self.is_checkpointed = self.is_checkpointed, True
        try:
            yield
        finally:
            self.is_checkpointed = before

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
    Tensor.__index__: "a tensor used as a Python index",
    Tensor.__complex__: "complex() of a tensor",
}


# These would be applied to a placeholder, and lost with it.
_LOST = {
    Tensor.backward: "backward() in the middle of the step",
    Tensor.data.__set__: "an assignment to the .data of a tensor",  # type: ignore[attr-defined]
    Tensor.set_: "set_(), which changes a tensor's memory",
}

# Users call it to stop gradients; autograd's own detached handles do not pass here.
_STOPS = {Tensor.detach, Tensor.detach_, torch.detach, Tensor.data.__get__}  # type: ignore[attr-defined]


class _Faithful(TorchFunctionMode):
    """Refuses to read values that do not exist yet, and lets interceptors replace calls."""

    def __init__(self, may_read: bool, interceptors: Sequence[Interceptor], recorder: TraceRecorder) -> None:
        super().__init__()
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
        kwargs = kwargs or {}
        if not self._may_read and func in _READS:
            raise CaptureError(
                f"{self._recorder.line()}: {_READS[func]} reads a value while the step is captured; a graph cannot "
                "branch on what it computes: use torch.where, return the tensor, or use engine='tape'"
            )
        if func in _LOST:
            raise CaptureError(
                f"{self._recorder.line()}: {_LOST[func]} cannot be part of a graph; do it outside the step, "
                "or use engine='tape'"
            )
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise CaptureError(
                f"{self._recorder.line()}: it draws from its own torch.Generator, which a graph cannot hold; "
                "use torch's default generator, pass the numbers in the batch, or use engine='tape'"
            )
        for interceptor in self._interceptors:
            result = interceptor(func, args, kwargs)
            if result is not NotImplemented:
                return result
        if func is F.one_hot:
            _check_classes(*args, **kwargs)  # type: ignore[arg-type]
        self._recorder.stops_gradients = func in _STOPS
        self._recorder.casts = torch._C._is_any_autocast_enabled()
        try:
            return func(*args, **kwargs)
        finally:
            self._recorder.stops_gradients = False


def _check_classes(tensor: Tensor, num_classes: int = -1) -> None:
    """Add to the graph the check that PyTorch makes only on tensors with values."""
    if num_classes > 0:
        fits = ((tensor >= 0) & (tensor < num_classes)).all()
        torch._assert_async(fits, "Class values must be non-negative and smaller than num_classes.")


class _Crossings:
    """Writes boundaries into the graph: two nodes each, which cross when the graph runs."""

    captures = True
    failure: Exception | None = None

    def __init__(self, mode: FakeTensorMode, recorder: TraceRecorder) -> None:
        proxies = get_proxy_mode()
        assert proxies is not None
        assert isinstance(proxies.tracer, PythonKeyTracer)
        self._tracer = proxies.tracer
        self._mode = mode
        self._recorder = recorder

    @contextmanager
    def outside(self) -> Iterator[None]:
        with _disable_current_modes(), torch._C.DisableTorchFunction(), traced_by(None):
            yield

    def entry(self) -> Tensor:
        with self.outside():
            entry = torch.empty((), requires_grad=True, device="cpu")
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
        updates: bool,
    ) -> list[Tensor | None]:
        target = BackwardCrossing(boundary, wants, updates=updates)
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
        found = self._tracer.unwrap_proxy(value)
        if isinstance(found, Tensor):  # not traced yet: a tensor that the forward has created
            found = self._tracer.unwrap_proxy(value.detach())
        return found


def trace(
    body: Callable[[list[Tensor | float], TraceRecorder], Sequence[object]],
    sources: Sequence[TraceSource],
    *,
    may_read: bool = False,
    interceptors: Sequence[Interceptor] = (),
) -> fx.GraphModule:
    """Return the operations that ``body`` performs on its inputs, one node each, ``sources`` as placeholders in their
    order.

    Args:
        body: takes the traced inputs, as tensors and floats, and the recorder; returns flat outputs.
        sources: the inputs.
        may_read: allows ``.item()``, whose value stays symbolic: for optimizers, not for users' code.
        interceptors: see ``Interceptor``.

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
            _Faithful(may_read, interceptors, recorder),
            traced_by(_Crossings(fakes_of, recorder)),
            _casts_cached(caches),
            _kernels_for_lists(sources),
        ):
            return list(body(inputs, recorder))

    with one_at_a_time, undisturbed(), fakes_of, torch.autograd.set_multithreading_enabled(False), _explained():
        module = make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)
    _refuse_casts_within(module.graph)
    _name_placeholders(module, sources)
    return module


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


def _refuse_casts_within(graph: fx.Graph) -> None:
    """Raise for kernels within which autocast casts: a graph holds only the casts around them."""
    for node in graph.nodes:
        if node.op != "call_function" or not node.meta.get("autocast"):
            continue
        values = [node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes)]
        sparse = any(isinstance(value, Tensor) and value.layout is not torch.strided for value in values)
        if sparse or node.target is torch.ops.aten._trilinear.default:
            raise CaptureError(
                f"{node.meta['scope'] or 'the step'} runs {node.target} under autocast, which casts inside it; switch "
                "autocast off around it, or use engine='tape'"
            )


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
def undisturbed() -> Iterator[None]:
    """Run a block without Python's collector, which would search the many new objects hundreds of times."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def _explained() -> Iterator[None]:
    """Turn any exception of the tracer into a ``CaptureError`` that names the user's line, as the only message."""
    silent = _FAKES.disabled
    _FAKES.disabled = True
    try:
        yield
    except (CaptureError, UserMistake, WrongType):
        raise
    except (BoundaryError, NotFound, SchemaError):  # from a remote side whose schema was requested
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        said = f"{type(error).__name__}: {reason}"
        raise CaptureError(f"{_line_of_error(error)}the code cannot be captured as a graph ({said})") from error
    finally:
        _FAKES.disabled = silent


def is_library(filename: str) -> bool:
    """Return True if a file belongs to torch or to this package, not to the user."""
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
    """Return the user's line that raised it, followed by a colon; nothing for errors of autograd, which has no line."""
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        if not is_library(frame.f_code.co_filename):
            line = f"{frame.f_code.co_filename}:{number}: "
    return line


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


def constants(module: fx.GraphModule) -> dict[fx.Node, Tensor]:
    """Return the tensors that the traced function used without receiving them as inputs, by the node that reads
    them.
    """
    found = {}
    for node in module.graph.find_nodes(op="get_attr"):
        value = getattr(module, str(node.target))
        if isinstance(value, torch.ScriptObject):
            raise CaptureError(
                f"{node.meta.get('scope') or 'the loss'} calls torch.distributed, whose collectives do not work in a "
                "graph; use engine='tape'"
            )
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            raise CaptureError(f"the function makes {str(node.target)!r}, which a graph cannot keep: {type(value)}")
        found[node] = value
    return found

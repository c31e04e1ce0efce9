"""Straight-line Python for a graph: state bound as globals, the fastest callable of each operator, early frees.

A Python loop over nodes loses most of what a graph gains, so the graph becomes the source of one function, which
``torch.fx`` turns into code. Three things keep a node cheap:

- Operators are called through torch's own argument parser (``torch.mm``) rather than through their overload objects.
  Each replacement is verified: it is called once on fake tensors and must dispatch exactly the graph's overload with
  its arguments.
- State is never passed as arguments. Views of it, and values without inputs, are computed when it is bound.
- Multiple results are unpacked in the call's own statement, and step counters advance without a kernel each.
"""

from __future__ import annotations

import keyword
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.graph_module import _forward_from_src
from torch.utils._python_dispatch import TorchDispatchMode

from anabranch.graph.effects import Effects, is_view
from anabranch.graph.nodes import RECURRENT, call_recurrent, evaluate, resolved

_aten = torch.ops.aten


class Program:
    """A generated function over the inputs that are not bound, and its source.

    Args:
        source: the source of ``function``.
        function: takes the inputs that are not bound.
        anchors: bound tensors whose memory the function holds views of.
        remake: rebuilds the program after memory has moved, for example by ``parameter.data = ...``.
    """

    __slots__ = ("_anchors", "_places", "_remake", "function", "source")

    def __init__(
        self,
        source: str,
        function: Callable[..., tuple[object, ...]],
        anchors: Sequence[Tensor] = (),
        remake: Callable[[], Program] | None = None,
    ) -> None:
        self.source, self.function, self._remake = source, function, remake
        self._anchors, self._places = anchors, list(map(Tensor.data_ptr, anchors))

    def run(self, *inputs: object) -> tuple[object, ...]:
        """Run the function with autograd off, and autocast, whose casts are part of the graph."""
        if torch._C._is_any_autocast_enabled():
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                return self._call(inputs)
        return self._call(inputs)

    def _call(self, inputs: tuple[object, ...]) -> tuple[object, ...]:
        if list(map(Tensor.data_ptr, self._anchors)) != self._places:
            self._follow()
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            return self.function(*inputs)
        finally:
            torch._C._set_grad_enabled(before)

    def _follow(self) -> None:
        assert self._remake is not None
        again = self._remake()
        self.function, self._anchors, self._places = again.function, again._anchors, again._places


def generate(
    graph: fx.Graph,
    bound: Mapping[fx.Node, Tensor],
    reported: Mapping[str, fx.Node] | None = None,
    report: Callable[..., None] | None = None,
) -> Program:
    """Return the program of ``graph``, whose placeholders in ``bound`` are bound to those tensors.

    Args:
        graph: the graph to run.
        bound: the tensors of its state.
        reported: results by the names under which they are reported, at the lines where they are final.
        report: called with name and value.
    """
    writer = _Writer(graph, bound, reported or {}, report)
    source, names = writer.write()
    function = _forward_from_src(source, names)  # whose lines tracebacks show
    return Program(source, function, writer.viewed, lambda: generate(graph, bound, reported, report))


class _Writer:
    def __init__(
        self,
        graph: fx.Graph,
        bound: Mapping[fx.Node, Tensor],
        reported: Mapping[str, fx.Node],
        report: Callable[..., None] | None,
    ) -> None:
        self._graph = graph
        self._names: dict[str, object] = {"inf": math.inf, "nan": math.nan, "torch": torch, "device": torch.device}
        self._constants: dict[fx.Node, object] = dict(bound)
        self._fixed: set[fx.Node] = set()  # those that no state takes part in
        self._bound = bound
        self.viewed: list[Tensor] = []
        self._local: dict[fx.Node, str] = {}
        self._lines: list[str] = []
        self._globals: dict[int, str] = {}
        self._kept: list[object] = []
        self._effects = Effects(graph, bound.items())
        self._last_use = _last_uses(graph)
        self._report, self._reported = report, self._where_final(reported)
        self._returned = {self._effects.root[node] for node in graph.output_node().all_input_nodes}

    def write(self) -> tuple[str, dict[str, object]]:
        parameters = []
        for node in self._graph.nodes:
            if node.op == "placeholder":
                if node not in self._constants:
                    parameters.append(self._name(node))
            elif node.op == "output":
                self._lines.append(f"return {self._tuple(node.args[0])}")
            elif not self._hoist(node):
                self._statement(node)
            for name, value in self._reported.get(node, ()):
                self._lines.append(f"{self._global(self._report, 'report')}({name!r}, {self._name(value)})")
        body = "\n".join(f"    {line}" for line in self._lines)
        return f"def forward({', '.join(parameters)}):\n{body}\n", self._names

    def _where_final(self, reported: Mapping[str, fx.Node]) -> dict[fx.Node, list[tuple[str, fx.Node]]]:
        """Return the results to report, by the node after which they are final: the last write to their memory. None
        comes before the first.
        """
        places: dict[fx.Node, list[tuple[str, fx.Node]]] = {}
        order = {node: position for position, node in enumerate(self._graph.nodes)}
        nodes, earliest = list(order), None
        for name, value in reported.items():
            writers = self._effects.writers.get(self._effects.root[value], ())
            final = max(order[each] for each in (value, *writers))
            earliest = final if earliest is None else earliest
            places.setdefault(nodes[max(final, earliest)], []).append((name, value))
        return places

    # Nodes that do not depend on the inputs are computed once, here.

    def _hoist(self, node: fx.Node) -> bool:
        if node.target is operator.getitem and isinstance(parts := self._constants.get(node.args[0]), (tuple, list)):  # type: ignore[arg-type]
            self._constants[node] = parts[node.args[1]]  # type: ignore[index]
            return True
        if not isinstance(node.target, OpOverload) or self._effects.written_by(node):
            return False
        root = self._effects.root[node]
        known = all(source in self._constants for source in node.all_input_nodes)
        if is_view(node):
            hoisted = known and (root.op == "placeholder" or root in self._constants)
        else:
            hoisted = root not in self._effects.writers and root not in self._returned
            computed = bool(node.all_input_nodes) and self._fixed.issuperset(node.all_input_nodes)
            computed = computed and not self._effects.must_stay(node)
            hoisted = hoisted and ((node.target in _FILLED and known) or node.target in _FILLED_LIKE or computed)
        if hoisted:
            if self._fixed.issuperset(node.all_input_nodes) or node.target in _FILLED_LIKE:
                self._fixed.add(node)
            with torch.no_grad():
                self._constants[node] = evaluate(node, self._constant_or_alike)
            self.viewed += [self._bound[source] for source in node.all_input_nodes if source in self._bound]
        return hoisted

    def _constant_or_alike(self, node: fx.Node) -> object:
        """Return the constant, or a tensor of the same form for operators that do not read its values.

        Views are of a detached tensor, and hold its memory alone: ``swap_tensors`` refuses a tensor that has views.
        """
        if node in self._bound:
            return self._bound[node].detach()
        if node in self._constants:
            return self._constants[node]
        example = node.meta["val"]
        return torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=example.device)

    # --- a statement for each node

    def _statement(self, node: fx.Node) -> None:
        if node.target is operator.getitem and node in self._local:
            self._free(node)
            return
        call = self._call(node)
        parts = self._parts(node)
        if parts is not None:
            self._lines.append(f"{', '.join(parts)}{',' if len(parts) == 1 else ''} = {call}")
        elif node.users:
            self._lines.append(f"{self._name(node)} = {call}")
        else:
            self._lines.append(call)
        self._free(node)

    def _parts(self, node: fx.Node) -> list[str] | None:
        """Return the names to unpack the results into, if they are only taken apart; else ``None``."""
        value = node.meta.get("val")
        if not isinstance(value, (tuple, list)) or not node.users:
            return None
        if not all(user.target is operator.getitem for user in node.users):
            return None
        taken = {user.args[1]: user for user in node.users}
        if len(taken) < len(node.users):  # one part twice
            return None
        return [self._name(taken[index]) if index in taken else "_" for index in range(len(value))]

    def _call(self, node: fx.Node) -> str:
        if isinstance(node.target, OpOverload):
            return self._operator_call(node)
        symbol = _SYMBOLS.get(node.target)
        if symbol is not None and len(node.args) == 2:
            left, right = map(self._value, node.args)
            return f"{left} {symbol} {right}"
        if node.target is operator.getitem:
            return f"{self._value(node.args[0])}[{self._value(node.args[1])}]"
        function = self._global(node.target, getattr(node.target, "__name__", "function"))
        return f"{function}({self._listed(node.args, node.kwargs)})"

    def _operator_call(self, node: fx.Node) -> str:
        op = node.target
        assert isinstance(op, OpOverload)
        if op is _aten._local_scalar_dense.default:
            return f"{self._value(node.args[0])}.item()"
        counters = self._counters(node)
        if counters:
            self.viewed += counters
            views = [memoryview(counter.view(1).numpy()) for counter in counters]  # type: ignore[arg-type]
            return (
                f"{self._global(_advance, 'advance')}({self._global(views, 'counters')}, {self._value(node.args[1])})"
            )
        function = call_recurrent if op is RECURRENT else _fast_callable(node)
        name = op._schema.name.split("::")[1]
        return f"{self._global(function, name)}({self._listed(node.args, node.kwargs)})"

    def _counters(self, node: fx.Node) -> list[Tensor]:
        """Return the counters on the CPU, numbers of state, that the node only advances by a number; else empty."""
        if node.target is not _aten._foreach_add_.Scalar or node.users or not isinstance(node.args[1], (int, float)):
            return []
        counters = [self._bound.get(counter) for counter in node.args[0]]  # type: ignore[union-attr, arg-type]
        return [c for c in counters if c is not None] if all(map(_is_counter, counters)) else []

    def _listed(self, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
        shown = [self._value(value) for value in args]
        shown += [f"{name}={self._value(value)}" for name, value in kwargs.items()]
        return ", ".join(shown)

    def _value(self, value: object) -> str:
        if isinstance(value, fx.Node):
            return self._name(value)
        if isinstance(value, (tuple, list)):
            if value and all(isinstance(item, fx.Node) and item in self._constants for item in value):
                return self._global([self._constants[item] for item in value], "bound")
            shown = ", ".join(map(self._value, value))
            return f"[{shown}]"
        if value is None or isinstance(value, (bool, int, float, str)):
            return repr(value)
        return self._global(value, type(value).__name__)

    def _tuple(self, values: object) -> str:
        shown = [self._value(value) for value in values]  # type: ignore[attr-defined]
        return f"({', '.join(shown)}{',' if len(shown) == 1 else ''})"

    # --- names

    def _name(self, node: fx.Node) -> str:
        if node in self._constants:
            return self._global(self._constants[node], node.name)
        if node not in self._local:
            self._local[node] = f"{node.name}_" if keyword.iskeyword(node.name) else node.name
        return self._local[node]

    def _global(self, value: object, hint: str) -> str:
        if id(value) not in self._globals:
            name = f"g{len(self._globals)}_{''.join(c if c.isalnum() else '_' for c in hint)}"
            self._globals[id(value)] = name
            self._names[name] = value
            self._kept.append(value)
        return self._globals[id(value)]

    def _free(self, node: fx.Node) -> None:
        dead = [self._local[dying] for dying in self._last_use.get(node, ()) if dying in self._local]
        if dead:
            self._lines[-1] += "; " + " = ".join(dead) + " = None"


def _is_counter(tensor: Tensor | None) -> bool:
    if tensor is None or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    return tensor.numel() == 1 and tensor.dtype in (torch.float32, torch.float64)


def _advance(counters: list[memoryview], by: float) -> None:
    """Add ``by`` to each number as ``_foreach_add_`` would, without a kernel each; exact sums, so the same bits."""
    for counter in counters:
        counter[0] += by  # type: ignore[call-overload]


_SYMBOLS: dict[object, str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
}
_FILLED_LIKE = {_aten.ones_like.default, _aten.zeros_like.default, _aten.full_like.default}
_FILLED = {
    _aten.full.default,
    _aten.ones.default,
    _aten.zeros.default,
    _aten.scalar_tensor.default,
    _aten.arange.default,
    _aten.arange.start,
    _aten.arange.start_step,
    _aten.lift_fresh_copy.default,
}


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that no later node needs."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "output":
            for value in node.all_input_nodes:
                last.pop(value, None)
        else:
            for value in node.all_input_nodes:
                last[value] = node
    dying: dict[fx.Node, list[fx.Node]] = {}
    for value, node in last.items():
        dying.setdefault(node, []).append(value)
    return dying


class _Dispatched(Exception):
    def __init__(self, op: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self.op, self.args_, self.kwargs = op, args, kwargs


class _StopAtDispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: object, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        raise _Dispatched(func, args, kwargs or {})


_proved: dict[object, Callable[..., object]] = {}


def _fast_callable(node: fx.Node) -> Callable[..., object]:
    """Return the fastest function that, called with the node's unchanged arguments, dispatches the node's operator."""
    op = node.target
    assert isinstance(op, OpOverload)
    key = (op, _kinds(node.args), tuple((name, _kinds(value)) for name, value in node.kwargs.items()))
    if key not in _proved:
        _proved[key] = next((c for c in _candidates(op) if _dispatches(c, node)), _plain(op))
    return _proved[key]


def _plain(op: OpOverload) -> Callable[..., object]:
    return op._op if callable(getattr(op, "_op", None)) else op


def _candidates(op: OpOverload) -> Iterator[Callable[..., object]]:
    if op.namespace != "aten":
        return
    name = op._schema.name.removeprefix("aten::")
    for owner in (torch._C.TensorBase, torch._C._VariableFunctions, torch._C._nn):
        candidate = getattr(owner, name, None)
        if callable(candidate):
            yield candidate


def _kinds(value: object) -> object:
    if isinstance(value, fx.Node):
        example = value.meta.get("val")
        return (Tensor, example.ndim, example.dtype) if isinstance(example, Tensor) else type(example)
    if isinstance(value, (tuple, list)):
        return (list, *{_kinds(item) for item in value}) if len(value) > 4 else (list, *map(_kinds, value))
    return type(value)


def _dispatches(candidate: Callable[..., object], node: fx.Node) -> bool:
    op = node.target
    assert isinstance(op, OpOverload)
    resolved_args, kwargs = resolved(node, _example)
    args = tuple(list(a) if isinstance(a, tuple) else a for a in resolved_args)
    try:
        with torch.no_grad(), _StopAtDispatch():  # type: ignore[no-untyped-call]
            candidate(*args, **kwargs)
    except _Dispatched as seen:
        return seen.op is op and _same_arguments(op, seen, args, kwargs)
    except Exception:  # noqa: BLE001 - one that raises is not a replacement
        return False
    return False


def _example(node: fx.Node) -> object:
    value = node.meta["val"]
    return 0.5 if isinstance(value, torch.SymFloat) else value


def _same_arguments(op: OpOverload, seen: _Dispatched, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
    names = [argument.name for argument in op._schema.arguments]
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    expected = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    got = {**defaults, **dict(zip(names, seen.args_, strict=False)), **seen.kwargs}
    return all(_equal(expected.get(name), got.get(name)) for name in names)


def _equal(left: object, right: object) -> bool:
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return left is right
    if isinstance(left, (tuple, list)) and isinstance(right, (tuple, list)):
        return len(left) == len(right) and all(map(_equal, left, right))
    return left == right

"""``capture``: any function of tensors and numbers as a ``Graph``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, fx, nn

from anabranch.autodiff.boundary.whole_calls import learn_forms
from anabranch.errors import CaptureError
from anabranch.graph.dynamo.front import DynamoFront, TracedCall
from anabranch.graph.dynamo.refusals import refuse_hooks
from anabranch.graph.dynamo.traced_calls import run_calls
from anabranch.graph.graph import Graph
from anabranch.graph.operation_graph import Entries
from anabranch.graph.trace import TraceRecorder, TraceSource, build, free_name
from anabranch.tensors import Structure, flatten, map_structure, paths, unflatten

if TYPE_CHECKING:
    from optree import PyTreeSpec

_SETTINGS = {"side_effect_replay_policy": "error"}

_Run: TypeAlias = "tuple[TracedCall, tuple[object, ...], list[object]]"
"""Dynamo's calls, the values of its placeholders, and an object that stands for each result."""


def capture(fn: Callable[..., Structure], *example_inputs: Structure) -> Graph:
    """Return the graph of the computation of ``fn`` on inputs like these.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
    >>> graph = capture(model, torch.ones(4, 3))
    >>> graph.inputs, graph.outputs
    (['input', '0.weight', '0.bias'], ['output'])
    >>> x = torch.randn(4, 3)
    >>> bool((graph(x) == model(x)).all())
    True

    Args:
        fn: a function, or a module. Modules it closes over keep their state: parameters and buffers become inputs that
            are bound to the module's own tensors, under their qualified names (with the variable's name in front where
            ``fn`` closes over several modules). Other tensors it closes over are bound inputs too.
        example_inputs: nested structures of tensors, floats, ints and bools. The graph is for their shapes, dtypes and
            strides; floats may differ from call to call; ints and bools are part of the graph.

    Returns:
        A graph that takes inputs as ``fn`` does and returns its structure. Inputs are named after ``fn``'s parameters,
        nested leaves by path (``batch.ids``); a bare output is ``output``, others ``output.<path>``.

    Raises:
        TypeError: for an example input that is neither a tensor nor a number; names it.
        CaptureError: for code that a graph cannot do faithfully, with its line: reading a value (``if tensor:``,
            ``.item()``), hooks on gradients, changes of Python state.
    """
    leaves, structure = flatten(example_inputs)
    names = _input_names(fn, example_inputs)
    _check_examples(names, leaves)
    for root in _reachable(fn).values():
        if isinstance(root, nn.Module):
            refuse_hooks({module: name for name, module in root.named_modules()}, {})
            learn_forms(root.modules())
    runs: list[_Run] = []

    def make(call: TracedCall) -> Callable[..., Sequence[object]]:
        def run(*args: object) -> Sequence[object]:
            (results,) = call.module.graph.output_node().args
            # Dynamo puts the results into the function's own structure, where these are recognised by identity.
            stand_ins = [torch.empty(0, device="cpu") if isinstance(r, fx.Node) else r for r in results]  # type: ignore[union-attr]
            runs.append((call, args, stand_ins))
            return stand_ins

        return run

    inputs, seen = _numbers_as_tensors(fn, example_inputs)
    settings = _SETTINGS if seen is fn else {**_SETTINGS, "capture_scalar_outputs": True}
    result = DynamoFront(seen, make, what="the function", settings=settings).run((), *inputs)
    if not runs:
        raise CaptureError("the function computes nothing from tensors; there is no graph to capture")
    graph, treedef = _traced(fn, runs[-1], inputs, leaves, names, result)
    fixed = {name: leaf for name, leaf in zip(names, leaves, strict=True) if not isinstance(leaf, (Tensor, float))}
    entries = _entries(fn, {tensor for _, tensor in graph.shared()})
    bindings = [replace(one, fixed=fixed.get(one.name), entries=entries) for one in graph.bindings]
    graph = Graph(graph.fx, bindings, graph.outputs)
    graph.argument_structure, graph.output_structure = structure, treedef
    graph.origin = _recapture(fn, example_inputs)
    return graph


def _numbers_as_tensors(
    fn: Callable[..., Structure], inputs: tuple[Structure, ...]
) -> tuple[tuple[Structure, ...], Callable[..., Structure]]:
    """Return the inputs with floats as tensors, and ``fn`` for them: Dynamo would treat a float as a constant."""
    if not any(isinstance(leaf, float) for leaf in flatten(inputs)[0]):
        return inputs, fn
    numbers = map_structure(lambda leaf: isinstance(leaf, float), inputs)

    def wrapped(leaf: object) -> object:
        return torch.tensor(leaf, dtype=torch.float64, device="cpu") if isinstance(leaf, float) else leaf

    def with_numbers(*given: Structure) -> Structure:
        return fn(*map_structure(lambda value, number: value.item() if number else value, given, numbers))

    return map_structure(wrapped, inputs), with_numbers


def _traced(
    fn: Callable[..., Structure],
    run: _Run,
    inputs: tuple[Structure, ...],
    leaves: Sequence[object],
    names: Sequence[str],
    result: Structure,
) -> tuple[Graph, PyTreeSpec]:
    """Return the graph, and the nesting of its outputs.

    It takes the function's own inputs, then the state that it reads, each tensor once.
    """
    call, args, stand_ins = run
    state = _named_state(fn)
    sources = [
        TraceSource(name, leaf if isinstance(leaf, Tensor) else float(leaf))  # type: ignore[arg-type]
        for name, leaf in zip(names, leaves, strict=True)
    ]
    at = {id(leaf): index for index, leaf in enumerate(flatten(inputs)[0]) if isinstance(leaf, Tensor)}

    def source_of(shown: str, value: object) -> int | None:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in at:
            name = free_name(state.get(value, shown), sources)
            if value.is_conj():  # a trace shows it as a tensor like others
                raise CaptureError(f"{name} is a conjugate that was never computed; keep tensor.conj().resolve_conj()")
            at[id(value)] = len(sources)
            sources.append(TraceSource(name, value, "buffer" if value in state else "constant"))
        return at[id(value)]

    read = set(map(id, args))
    for tensor in state:  # in the modules' own order
        if id(tensor) in read:
            source_of("", tensor)
    place = list(map(source_of, call.names, args))
    floats = {index for index, leaf in enumerate(leaves) if isinstance(leaf, float)}
    call = replace(call, numbers=frozenset(i for i, index in enumerate(place) if index in floats))
    refuse_hooks({}, {source.name: source.value for source in sources if isinstance(source.value, Tensor)})
    order, treedef = flatten(result)
    of_result = {id(value): index for index, value in enumerate(stand_ins)}

    def body(values: Sequence[Tensor | float], recorder: TraceRecorder) -> Sequence[object]:
        traced = [args[i] if index is None else values[index] for i, index in enumerate(place)]
        results, _ = run_calls(call, traced, recorder)
        outputs: list[object] = []
        for leaf in order:
            if id(leaf) in of_result:
                outputs.append(results[of_result[id(leaf)]])
            else:  # an input that is returned unchanged, or a constant
                outputs.append(values[at[id(leaf)]] if id(leaf) in at else leaf)
        return outputs

    named = [f"output.{path}" if path else "output" for path in paths(result)]
    return build(body, sources, named), treedef


def _named_state(fn: Callable[..., Structure]) -> dict[Tensor, str]:
    """Parameters and buffers of the modules that ``fn`` names, by the names that a user knows."""
    modules = {name: module for name, module in _reachable(fn).items() if isinstance(module, nn.Module)}
    found: dict[Tensor, str] = {}
    for variable, module in modules.items():
        prefix = f"{variable}." if len({id(m) for m in modules.values()}) > 1 and variable else ""
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            found.setdefault(tensor, prefix + name)
    for name, value in _reachable(fn).items():
        if isinstance(value, Tensor):
            found.setdefault(value, name)
    return found


def _entries(fn: Callable[..., Structure], bound: set[Tensor]) -> Entries:
    """Return the entries of modules' dicts on the ways to the tensors ``bound``."""
    roots = [root for root in _reachable(fn).values() if isinstance(root, nn.Module)]
    return [
        (f"{prefix}.{key}" if prefix else key, mapping, key, value)
        for root in roots
        for prefix, module in root.named_modules()
        for mapping in (module._parameters, module._buffers, module._modules)
        for key, value in mapping.items()
        if bound.intersection((*value.parameters(), *value.buffers()) if isinstance(value, nn.Module) else (value,))
    ]


def _reachable(fn: object) -> dict[str, object]:
    """Return the values that a function closes over, by their names in it; for a module, the module."""
    if isinstance(fn, nn.Module):
        return {"": fn}
    if isinstance(fn, functools.partial):
        given = {f"args.{i}": value for i, value in enumerate(fn.args)} | dict(fn.keywords)
        return _reachable(fn.func) | given
    if inspect.ismethod(fn):
        return ({"self": fn.__self__} | getattr(fn.__self__, "__dict__", {})) | _reachable(fn.__func__)
    if not inspect.isfunction(fn):
        return getattr(fn, "__dict__", {})
    variables = inspect.getclosurevars(fn)
    defaults = {name: of.default for name, of in inspect.signature(fn).parameters.items()}
    found: dict[str, object] = {**variables.globals, **variables.nonlocals, **defaults}
    for value in list(found.values()):
        if inspect.isfunction(value) and not value.__module__.startswith("torch"):
            found = {**inspect.getclosurevars(value).nonlocals, **found}
    return found


def _recapture(fn: Callable[..., Structure], inputs: tuple[Structure, ...]) -> Callable[[Sequence[torch.Size]], Graph]:
    """Return a function that captures ``fn`` for other shapes of its tensor inputs."""
    leaves, structure = flatten(inputs)
    forms = [torch.empty(0, dtype=v.dtype, device=v.device) if isinstance(v, Tensor) else v for v in leaves]

    def capture_for(shapes: Sequence[torch.Size]) -> Graph:
        wanted = iter(shapes)
        examples = [f.new_empty(next(wanted, f.shape)) if isinstance(f, Tensor) else f for f in forms]
        return capture(fn, *unflatten(structure, examples))

    return capture_for


def _input_names(fn: Callable[..., Structure], inputs: tuple[Structure, ...]) -> list[str]:
    signature = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [name for name, parameter in signature.parameters.items() if parameter.kind in kinds]
    rest = next((n for n, p in signature.parameters.items() if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
    if len(inputs) > len(positional) and rest is None:
        raise TypeError(f"capture got {len(inputs)} example inputs for a function of {len(positional)}: {signature}")
    heads = [*positional[: len(inputs)], *(f"{rest}.{i}" for i in range(len(inputs) - len(positional)))]
    return [
        f"{head}.{path}" if path else head for head, value in zip(heads, inputs, strict=True) for path in paths(value)
    ]


def _check_examples(names: Sequence[str], leaves: Sequence[object]) -> None:
    for name, leaf in zip(names, leaves, strict=True):
        if not isinstance(leaf, (Tensor, float, int)):
            raise TypeError(
                f"the example input {name} is a {type(leaf).__name__} ({leaf!r}), neither a tensor nor a number; close "
                "over it instead of passing it"
            )

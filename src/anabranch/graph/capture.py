"""``capture``: any function of tensors and numbers as a ``Graph``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from anabranch.graph.build import build
from anabranch.graph.faithful import PythonState, captured_tensors, reachable_modules, refuse_hooks
from anabranch.graph.graph import Graph, InputKind
from anabranch.graph.tracing import Recorder, Source, TracedModules, free_name
from anabranch.tensors import Structure, flatten, paths, unflatten

if TYPE_CHECKING:
    from optree import PyTreeSpec

__all__ = ["capture"]


def capture(fn: Callable[..., Structure], *example_inputs: Structure) -> Graph:
    """The graph of what ``fn`` computes on inputs like these.

    >>> import torch
    >>> model = torch.nn.Linear(3, 2)
    >>> graph = capture(lambda x: model(x).relu(), torch.ones(4, 3))
    >>> graph.inputs, graph.outputs
    (['x', 'weight', 'bias'], ['output'])
    >>> x = torch.randn(4, 3)
    >>> bool((graph(x) == model(x).relu()).all())
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
        CaptureError: for what a graph cannot do faithfully, with the line of code: reading a value (``if tensor:``,
            ``.item()``), hooks on gradients, changes of Python state.
    """
    leaves, structure = flatten(example_inputs)
    names = _input_names(fn, example_inputs)
    _check_examples(names, leaves)
    modules = reachable_modules(fn)
    roots = {name if len(modules) > 1 else "": module for name, module in modules.items()}
    sources = [Source(name, _as_source(leaf)) for name, leaf in zip(names, leaves, strict=True)]
    known = TracedModules(roots).names
    state = PythonState(fn, known)
    state.refuse_iterators()
    kinds = _add_state(sources, roots, captured_tensors(fn), leaves)
    held = {id(source.value) for source in sources}
    for name, tensor in state.tensors.items():
        if id(tensor) not in held:
            sources.append(Source(free_name(name, sources), tensor, state=True, within_reach=True))
            kinds[sources[-1].name] = "constant"
    refuse_hooks(known, {source.name: source.value for source in sources if isinstance(source.value, Tensor)})
    outputs: list[str] = []
    found: list[PyTreeSpec] = []

    def body(values: Sequence[Tensor | float], _recorder: Recorder) -> Sequence[object]:
        given = [
            value if isinstance(leaf, (Tensor, float)) else leaf for leaf, value in zip(leaves, values, strict=False)
        ]
        result = fn(*unflatten(structure, given))  # type: ignore[misc]
        flat, treedef = flatten(result)
        outputs[:] = [f"output.{path}" if path else "output" for path in paths(result)]
        found[:] = [treedef]
        return flat

    try:
        graph = build(body, sources, outputs, roots, kinds=kinds)
    finally:
        changed = state.undo_changes()
    if changed is not None:
        raise changed
    fixed = {name: leaf for name, leaf in zip(names, leaves, strict=True) if not isinstance(leaf, (Tensor, float))}
    graph = graph.with_structure(structure, found[0], fixed)
    graph.origin = _recapture(fn, example_inputs)
    return graph


def _recapture(fn: Callable[..., Structure], inputs: tuple[Structure, ...]) -> Callable[[Sequence[torch.Size]], Graph]:
    """What captures ``fn`` for other shapes of its tensor inputs."""
    leaves, structure = flatten(inputs)
    forms = [torch.empty(0, dtype=v.dtype, device=v.device) if isinstance(v, Tensor) else v for v in leaves]

    def capture_for(shapes: Sequence[torch.Size]) -> Graph:
        wanted = iter(shapes)
        examples = [f.new_empty(next(wanted, f.shape)) if isinstance(f, Tensor) else f for f in forms]
        return capture(fn, *unflatten(structure, examples))  # type: ignore[misc]

    return capture_for


def _as_source(leaf: object) -> Tensor | float:
    return leaf if isinstance(leaf, Tensor) else float(leaf)  # type: ignore[arg-type]


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


def _add_state(
    sources: list[Source], roots: dict[str, nn.Module], tensors: dict[str, Tensor], leaves: Sequence[object]
) -> dict[str, InputKind]:
    """Appends a source for each tensor of the modules and the closure; returns what kind of state each is."""
    kinds: dict[str, InputKind] = {}
    seen = {id(leaf) for leaf in leaves}

    def add(name: str, tensor: Tensor, kind: InputKind) -> None:
        if id(tensor) in seen:
            return
        seen.add(id(tensor))
        name = free_name(name, sources)
        sources.append(Source(name, tensor, state=True))
        kinds[name] = kind

    for prefix, module in roots.items():
        head = f"{prefix}." if prefix else ""
        for name, parameter in module.named_parameters():
            add(head + name, parameter, "parameter")
        for name, buffer in module.named_buffers():
            add(head + name, buffer, "buffer")
    for name, tensor in tensors.items():
        add(name, tensor, "constant")
    return kinds

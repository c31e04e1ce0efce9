"""A graph as one file: its state as safetensors, its operations as JSON in that file's metadata. Nothing is unpickled.

Operations are written by their names in PyTorch's registry, and looked up there; examples of their results are not
written but recomputed, without data. So a file can contain operators and numbers, but no code.
"""

from __future__ import annotations

import math
import operator
import os
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from anabranch.errors import CheckpointError
from anabranch.graph.nodes import evaluate
from anabranch.graph.operation_graph import AnyGraph, Input, OperationGraph
from anabranch.tensors import flatten, unflatten
from anabranch.tensors.dtypes import dtype_name, dtype_named
from anabranch.tensors.tree_codec import Path as TreePath
from anabranch.tensors.tree_codec import decode, encode

if TYPE_CHECKING:
    from optree import PyTreeSpec

_FORMAT = "anabranch graph 3"
_KEY = "graph"
_PYTHON: dict[str, Callable[..., Any]] = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module, names in (
        (operator, ("getitem", "add", "sub", "mul", "truediv", "floordiv", "mod", "neg", "pow")),
        (math, ("floor", "ceil", "trunc", "sqrt")),
    )
    for name in names
}
_PYTHON_NAMES = {function: name for name, function in _PYTHON.items()}
_SETTINGS: dict[str, Any] = {
    str(value).removeprefix("torch."): value
    for value in (
        torch.strided, torch.sparse_coo, torch.sparse_csr, torch.contiguous_format, torch.preserve_format,
        torch.channels_last, torch.channels_last_3d,
    )
}  # fmt: skip


def save(graph: OperationGraph, path: Path) -> None:
    """See ``Graph.save``."""
    places: dict[Tensor, str] = {}
    for node, tensor in graph.shared():
        places.setdefault(tensor, node.name)
    storages = [tensor.untyped_storage().data_ptr() for tensor in places if tensor.numel()]
    if len(set(storages)) < len(storages):
        raise ValueError(
            "tensors of the graph's state share memory, which a file does not record; capture the graph of a model "
            "whose tensors do not overlap"
        )
    nodes = []
    bindings = iter(graph.bindings)
    for node in graph.fx.nodes:
        if node.op == "placeholder":
            nodes.append(_placeholder(node, next(bindings), places))
        elif node.op == "call_function":
            if not isinstance(node.meta.get("val"), (Tensor, tuple, list, type(None))):
                raise ValueError(
                    f"operation {node.name!r} ({node.target}) reads a number out of a tensor, which is known only "
                    "during a run; save a graph without it, such as the graph of forward and backward"
                )
            meta = {key: value for key, value in node.meta.items() if isinstance(value, (str, bool, int))}
            target, args = _target_name(node), encode((node.args, dict(node.kwargs)), partial(_stand_in, node))
            nodes.append({"name": node.name, "target": target, "args": args, "meta": meta})
    described = {
        "format": _FORMAT,
        "nodes": nodes,
        "results": encode(list(graph.results), partial(_stand_in, None)),
        "outputs": graph.outputs,
        "arguments": _structure(graph.argument_structure),
        "returned": _structure(graph.output_structure),
    }
    state = {name: tensor.detach().contiguous() for tensor, name in places.items()}
    _write(path, state, msgspec.json.encode(described).decode())


def _write(path: Path, tensors: dict[str, Tensor], text: str) -> None:
    """Write a temporary file and rename it to ``path``: completely or not at all."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        save_file(tensors, beside, metadata={_KEY: text})
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _placeholder(node: fx.Node, binding: Input, places: Mapping[Tensor, str]) -> dict[str, object]:
    example, bound, parts = node.meta.get("val"), binding.bound, list[object]()
    if bound is not None:
        parts = [bound.shape, torch.empty_like(bound, device="meta").stride(), bound.dtype, "cpu"]
    elif isinstance(example, Tensor):
        parts = [example.shape, example.stride(), example.dtype, example.device]
    return {
        "name": node.name,
        "input": binding.name,
        "kind": binding.kind,
        "fixed": encode(binding.fixed),
        "bound": None if bound is None else [places[bound], bound.requires_grad],
        "example": encode(parts or _hint(example), partial(_stand_in, node)),
    }


def _hint(value: object) -> object:
    """Return ``value``, or the example of a number that is known only during a run."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value
    kind = int if isinstance(value, torch.SymInt) else float
    return kind(1 if value.node.hint is None else value.node.hint)


def _target_name(node: fx.Node) -> str:
    if isinstance(node.target, OpOverload):
        return str(node.target)
    if node.target in _PYTHON_NAMES:
        return _PYTHON_NAMES[node.target]
    raise ValueError(
        f"operation {node.name!r} ({getattr(node.target, '__name__', node.target)}) belongs to this process (a "
        "boundary, a group of workers, a Python function), which a file cannot hold; save the graph of the local "
        "computation"
    )


def _stand_in(node: fx.Node | None, value: Any, path: TreePath) -> object:
    """Return what stands for an argument of ``node``, or for a result, that the tree codec does not know."""
    if isinstance(value, fx.Node):
        return {"$node": value.name}
    if isinstance(value, (list, tuple)):  # fx's own, and sizes
        return list(value) if isinstance(value, list) else tuple(value)
    if isinstance(value, dict):
        return {"$dict": list(value.items())}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return _hint(value)
    if isinstance(value, complex):
        return {"$complex": [value.real, value.imag]}
    for name, setting in _SETTINGS.items():
        if value is setting:
            return {"$setting": name}
    where = "a result" if node is None else f"operation {node.name!r} has an argument"
    raise ValueError(f"{where} of type {type(value).__name__}, which no file can hold")


def _structure(structure: PyTreeSpec | None) -> object:
    """Return the containers with the numbers of their leaves."""
    if structure is None:
        return None
    try:
        return encode(unflatten(structure, list(range(structure.num_leaves))))
    except ValueError as error:
        raise ValueError(f"the graph takes or returns a structure that no file can hold: {error}") from error


def load(path: Path, kind: type[AnyGraph]) -> AnyGraph:
    """See ``Graph.load``."""
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_KEY, "")
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a dict
        described = msgspec.json.decode(text, type=dict[str, Any])
        if described.get("format") != _FORMAT:
            raise CheckpointError(f"{path} holds {described.get('format')!r}; this version reads {_FORMAT!r}")
        return _made(described, state, kind)
    except (CheckpointError, FileNotFoundError):
        raise
    except Exception as error:
        raise CheckpointError(f"{path} does not hold a complete graph: {type(error).__name__}: {error}") from error


def _made(described: Mapping[str, Any], state: Mapping[str, Tensor], kind: type[AnyGraph]) -> AnyGraph:
    graph, known = fx.Graph(), dict[str, fx.Node]()
    bound: dict[str, Tensor] = {}
    inputs = [_input(one, state, bound) for one in described["nodes"] if "target" not in one]
    # An operator without a form for fake tensors would run in earnest, on zeros.
    with FakeTensorMode(allow_fallback_kernels=False), torch.no_grad():
        for one in described["nodes"]:
            if "target" in one:
                args, kwargs = _arguments(one["args"], known)
                node = graph.create_node("call_function", _target(one["target"]), args, kwargs, one["name"])
                node.meta.update(one["meta"])
                node.meta["val"] = evaluate(node, lambda source: source.meta["val"])
            else:
                node = graph.placeholder(one["name"])
                node.meta["val"] = _example(one)
            known[one["name"]] = node
    graph.output(tuple(_arguments(described["results"], known)))
    made = kind(graph, inputs, described["outputs"])
    made.argument_structure, made.output_structure = _treedef(described["arguments"]), _treedef(described["returned"])
    return made


def _target(name: str) -> Callable[..., Any]:
    if name in _PYTHON:
        return _PYTHON[name]
    namespace, _, rest = name.partition(".")
    operation, _, overload = rest.partition(".")
    try:
        operator_ = getattr(getattr(getattr(torch.ops, namespace), operation), overload)
    except (AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"no operator {name!r} is registered in this process; import the package that has it, or use a PyTorch "
            "that does"
        ) from error
    if not isinstance(operator_, OpOverload):
        raise CheckpointError(f"{name!r} is not an operator")
    return operator_


def _input(one: Mapping[str, Any], state: Mapping[str, Tensor], bound: dict[str, Tensor]) -> Input:
    tensor = None
    if one["bound"] is not None:
        place, trains = one["bound"]
        if place not in bound:
            empty = cast(Tensor, _example(one))
            with torch.no_grad():
                empty.copy_(state[place])
            bound[place] = nn.Parameter(empty, requires_grad=trains) if one["kind"] == "parameter" else empty
        tensor = bound[place]
    return Input(one["input"], one["kind"], tensor, decode(one["fixed"]))


def _example(one: Mapping[str, Any]) -> object:
    example = _arguments(one["example"], {})
    if not isinstance(example, list):
        return example
    shape, stride, dtype, device = example
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _arguments(encoded: object, known: Mapping[str, fx.Node]) -> Any:
    """Return the arguments of an operation, or the results of a graph."""
    makers: dict[str, Callable[[Any], object]] = {
        "$node": known.__getitem__,
        "$dtype": dtype_named,
        "$device": torch.device,
        "$complex": lambda parts: complex(*parts),
        "$setting": _SETTINGS.__getitem__,
    }
    return decode(encoded, makers)


def _treedef(saved: object) -> PyTreeSpec | None:
    return None if saved is None else flatten(decode(saved))[1]

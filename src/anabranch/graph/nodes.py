"""One node of a graph: copied, recreated, run by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true


def copy_node(graph: fx.Graph, node: fx.Node, look: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """Return a copy of ``node`` at the end of ``graph``, of the arguments that ``look`` gives; ``fx`` takes twice as
    long.
    """
    if node.op == "placeholder":
        return graph.node_copy(node, look)
    copied = graph.create_node(node.op, node.target, (), {}, node.name, node.type)
    copied.args, copied.kwargs = fx.map_arg(node.args, look), fx.map_arg(node.kwargs, look)
    copied.meta = dict(node.meta)
    return copied


def resolved(node: fx.Node, look: Callable[[fx.Node], object]) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return the node's arguments, with ``look(source)`` in place of each node that they name."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), look)  # type: ignore[arg-type]
    return args, kwargs  # type: ignore[return-value]


def same_layout(one: Tensor, other: Tensor) -> bool:
    """Return True if dtypes, shapes and strides are known to be equal; False for sizes that depend on an input."""
    if one.dtype != other.dtype or one.dim() != other.dim():
        return False
    pairs = zip((*one.shape, *one.stride()), (*other.shape, *other.stride()), strict=True)
    return all(statically_known_true(left == right) for left, right in pairs)


RECURRENT = torch.ops.aten.mkldnn_rnn_layer.default


def call_recurrent(*args: object, **kwargs: object) -> object:
    """Return a layer of ``nn.LSTM`` on a CPU, which makes the workspace for its backward only where gradients are
    enabled.
    """
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(True)
    try:
        with torch._C._AutoDispatchBelowAutograd():
            return RECURRENT(*args, **kwargs)
    finally:
        torch._C._set_grad_enabled(before)


def evaluate(node: fx.Node, look: Callable[[fx.Node], object]) -> object:
    """Run the node's operation on the values that ``look`` gives for its arguments."""
    assert callable(node.target)
    args, kwargs = resolved(node, look)
    if node.target is RECURRENT:
        return call_recurrent(*args, **kwargs)
    return node.target(*args, **kwargs)


def made(graph: fx.Graph, like: fx.Node, target: object, *args: object, **kwargs: object) -> fx.Node:
    """Return a new node where ``graph`` inserts now, in the place of ``like``, with the example of its operation's
    result.
    """
    node = graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
    node.meta.update({key: like.meta[key] for key in ("scope", "phase", "recorded", "stop") if key in like.meta})
    examples = [like.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes)]
    modes = [example.fake_mode for example in examples if isinstance(example, FakeTensor)]
    with torch.no_grad(), modes[0] if modes else nullcontext():
        node.meta["val"] = evaluate(node, lambda source: source.meta["val"])
    return node


def bytes_of(value: object) -> int:
    """Return the bytes that an operation allocates for this result."""
    if isinstance(value, (tuple, list)):
        return sum(map(bytes_of, value))
    if not isinstance(value, Tensor) or not value.numel():
        return 0
    if value.layout is not torch.strided:
        return math.prod(value.shape) * value.element_size()
    reach = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return reach * value.element_size()

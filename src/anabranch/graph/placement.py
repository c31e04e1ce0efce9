"""Places a graph's operations on devices by module, with a transfer wherever a value changes device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from anabranch.graph.effects import Effects
from anabranch.graph.graph import Graph

__all__ = ["place_nodes"]

_aten = torch.ops.aten


def place_nodes(graph: Graph, devices: Mapping[str, str | torch.device]) -> Graph:
    """``graph`` with the operations of each module in ``devices`` on that device.

    Args:
        graph: the state of the modules must be on their devices already.
        devices: device by the module's qualified name; the longest matching name counts. Other operations run where
            their first input is, and one that writes in place where the tensor that it writes to is.

    Raises:
        ValueError: for a name that no operation of the graph belongs to.
    """
    graph = graph.copy()
    wanted = {name: torch.device(device) for name, device in devices.items()}
    scopes = {node.meta.get("scope", "") for node in graph.fx.nodes}
    for name in wanted:
        if not any(_is_within(scope, name) for scope in scopes):
            raise ValueError(
                f"devices names {name!r}, but no operation belongs to it; modules: {sorted(scopes - {''})}"
            )
    effects = graph.effects()
    at: dict[fx.Node, torch.device] = {}
    moved: dict[tuple[fx.Node, torch.device], fx.Node] = {}
    for node, binding in zip(graph.placeholders, graph.bindings, strict=True):
        value = binding.bound if binding.bound is not None else node.meta.get("val")
        if isinstance(value, Tensor):
            at[node] = value.device
    for node in list(graph.fx.nodes):
        if node.op == "call_function":
            _place(graph, node, _device(node, wanted, at, effects), at, moved)
    return graph


def _is_within(scope: str, name: str) -> bool:
    return scope == name or scope.startswith(f"{name}.")


def _device(
    node: fx.Node, wanted: Mapping[str, torch.device], at: Mapping[fx.Node, torch.device], effects: Effects
) -> torch.device | None:
    for written in effects.written_by(node):
        return at.get(written)
    scope = node.meta.get("scope", "")
    names = [name for name in wanted if _is_within(scope, name)]
    if names:
        return wanted[max(names, key=len)]
    return next((at[source] for source in node.all_input_nodes if source in at), None)


def _place(
    graph: Graph,
    node: fx.Node,
    device: torch.device | None,
    at: dict[fx.Node, torch.device],
    moved: dict[tuple[fx.Node, torch.device], fx.Node],
) -> None:
    if device is None:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            at[node] = value.device
        return
    at[node] = device
    if "device" in node.kwargs and isinstance(node.target, OpOverload):
        node.kwargs = {**node.kwargs, "device": device}
    for source in node.all_input_nodes:
        if at.get(source, device) == device or _is_number(source):
            continue
        if (source, device) not in moved:
            with graph.fx.inserting_before(node):
                transfer = graph.fx.call_function(_aten._to_copy.default, (source,), {"device": device})
            transfer.meta.update(source.meta)
            transfer.meta["transfer"] = f"{at[source]} -> {device}"
            moved[source, device] = transfer
            at[transfer] = device
        node.replace_input_with(source, moved[source, device])


def _is_number(source: fx.Node) -> bool:
    """True for an input of no dimensions, which on the CPU combines with tensors of any device."""
    value = source.meta.get("val")
    return isinstance(value, Tensor) and value.ndim == 0 and source.op == "placeholder"

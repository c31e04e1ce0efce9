"""Weak references to tensors left behind by Dynamo: ``torch.utils.swap_tensors`` refuses a tensor that has any."""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensor

from anabranch.graph.dynamo.front import TracedCall

__all__ = ["release_tensors"]


def release_tensors(call: TracedCall) -> None:
    """Drop the table of tensors that were faked for ``call``; to be called once it is compiled."""
    values = (node.meta.get("example_value") for node in call.module.graph.nodes)
    for mode in {id(value.fake_mode): value.fake_mode for value in values if isinstance(value, FakeTensor)}.values():
        mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()

"""Hands a graph to Inductor, PyTorch's compiler of kernels. Optional: it rounds differently and takes seconds.

Loaded at first use, because it needs a C++ compiler (or Triton) that only those who ask for it have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from anabranch.errors import CaptureError
from anabranch.graph.codegen import Program
from anabranch.graph.dead_nodes import drop_handles

if TYPE_CHECKING:
    from anabranch.graph.graph import Graph

__all__ = ["compile_graph"]


def compile_graph(graph: Graph, leaves: list[object]) -> Program:
    """The program of ``graph`` with kernels made by Inductor.

    Args:
        graph: without optimizer nodes, which Inductor refuses in their fused form.
        leaves: the free inputs of a run, as examples.

    Raises:
        CaptureError: if Inductor refuses; carries its reason.
    """
    import torch._inductor
    import torch._inductor.config

    lowered = drop_handles(graph, stops=True)
    bound = [binding.bound for binding in lowered.bindings]
    given = iter(leaves)
    examples = [next(given) if tensor is None else tensor for tensor in bound]
    module = fx.GraphModule(torch.nn.Module(), lowered.fx)
    # Random numbers are drawn by eager's own kernels, so that dropout draws what it draws without the compiler.
    options = {"config_patches": {"fallback_random": True}}
    try:
        with torch.no_grad():
            compiled = torch._inductor.standalone_compile(
                module,
                examples,  # type: ignore[arg-type]
                dynamic_shapes="from_example_inputs",
                options=options,
            )
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise CaptureError(
            f"Inductor refuses the step ({type(error).__name__}: {reason}); use compile=False"
        ) from error
    slots = [index for index, tensor in enumerate(bound) if tensor is None]
    state = list(bound)

    def run(*free: object) -> tuple[object, ...]:
        arguments: list[object] = list(state)
        for slot, value in zip(slots, free, strict=True):
            arguments[slot] = value
        return tuple(compiled(*arguments))

    return Program("compiled by Inductor", run)

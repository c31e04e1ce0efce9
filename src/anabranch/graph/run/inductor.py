"""Compiles a graph with Inductor, PyTorch's compiler of kernels. Optional: it rounds differently and takes seconds.

Loaded at first use, because it needs a C++ compiler (or Triton) that only its users have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, fx

from anabranch.errors import CaptureError
from anabranch.graph.crossings import crossing_of
from anabranch.graph.nodes import RECURRENT
from anabranch.graph.operation_graph import OperationGraph
from anabranch.graph.passes import drop_handles
from anabranch.graph.run.codegen import Program

_MOST_KERNELS = 2  # of a graph, for other numbers


def compiled(graph: OperationGraph, plain: Callable[[], Program]) -> Program:
    """Return the program of ``graph`` with kernels that Inductor makes at the first run.

    Inductor writes Python numbers into its kernels. So there are kernels for each of the first numbers that the program
    is given, and with others the graph runs without the compiler.

    Args:
        graph: without optimizer nodes, which Inductor refuses in their fused form.
        plain: returns its program without the compiler.

    Raises:
        CaptureError: for a graph that crosses a boundary; from the first run, before it computes anything, if Inductor
            refuses: carries its reason.
    """
    crossing = next((found for node in graph.fx.nodes if (found := crossing_of(node)) is not None), None)
    if crossing is not None:
        raise CaptureError(f"Inductor compiles no step that crosses to {crossing.label}; use compile=False")
    made: dict[tuple[str, ...], Callable[..., tuple[object, ...]]] = {}

    def run(*leaves: object) -> tuple[object, ...]:
        # By their texts, in which zeros differ by their sign, and NaN does not.
        numbers = tuple(repr(leaf) for leaf in leaves if not isinstance(leaf, Tensor))
        kernels = made.get(numbers)
        if kernels is None and len(made) < _MOST_KERNELS:
            kernels = made[numbers] = _compile(graph, leaves)
        return plain().run(*leaves) if kernels is None else kernels(*leaves)

    return Program("compiled by Inductor", run)


def _compile(graph: OperationGraph, leaves: Sequence[object]) -> Callable[..., tuple[object, ...]]:
    import torch._inductor
    import torch._inductor.config

    if any(node.target is RECURRENT for node in graph.fx.nodes):
        raise CaptureError(
            "Inductor refuses the step: it runs nn.LSTM without the values its backward needs; use compile=False"
        )
    lowered = drop_handles(graph, stops=True)
    bound = [binding.bound for binding in lowered.bindings]
    given = iter(leaves)
    examples = [next(given) if tensor is None else tensor for tensor in bound]
    module = fx.GraphModule(torch.nn.Module(), lowered.fx)
    # Random numbers are drawn by eager's own kernels, so that dropout draws the same numbers as without the compiler.
    # One thread compiles, so that no pool of threads or processes is left behind.
    settings = torch._inductor.config.patch(fallback_random=True, compile_threads=1)
    try:
        with torch.no_grad(), settings:
            kernels = torch._inductor.standalone_compile(
                module,
                examples,  # type: ignore[arg-type]
                dynamic_shapes="from_example_inputs",
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
        return tuple(kernels(*arguments))

    return run

"""Whole training steps with fused Adam: a hand-written PyTorch loop, the graph engine, and the graph with Inductor.

``torch.compile(module)`` is the loop around a module that PyTorch compiles, the peer of the Inductor side; on a GPU in
its mode ``reduce-overhead``, which replays CUDA graphs as the graph engine does.
``executor`` is the same graph run by ``ab.Executor``, which also looks at the batch, the fetches, the schedulers and
whether gradients are finite; with ``skip_nonfinite=None`` it does not look at those, as the loop does not.
``kernels`` is what no engine that calls PyTorch's kernels can go below: those of the step, one after the other, with
their arguments at hand, and nothing between them: no views, no memory to free, no loss to return.

::

    python benchmarks/step_graph.py [--only NAME ...] [--compile] [--floor] [--rounds N] [--device cuda] [--out DIR]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measure import alternate, compare, machine, options_of, report, waiting_for

import anabranch as ab
from anabranch.graph import StepProgram
from anabranch.graph.effects import is_view
from anabranch.graph.nodes import evaluate, resolved
from anabranch.graph.passes import lower
from anabranch.graph.run.codegen import _fast_callable
from models import CASES, TRANSFORMERS, Case

ALL = CASES | TRANSFORMERS


def eager(case: Case, *, compiled: bool = False) -> Callable[[], object]:
    torch.manual_seed(0)
    model, batch = case.model(), case.batch()
    if compiled:
        model.compile(mode="reduce-overhead" if batch[0].is_cuda else None)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)

    def loop() -> None:
        optimizer.zero_grad()
        case.loss(model, batch).backward()
        optimizer.step()

    return loop


def graph(case: Case, compiled: bool) -> Callable[[], object]:
    torch.manual_seed(0)
    model, batch = case.model(), case.batch()
    program = StepProgram(
        model,
        case.loss,  # type: ignore[arg-type]
        [torch.optim.Adam(model.parameters(), fused=True)],
        compile=compiled,
    )
    for _ in range(2):
        program.run(batch)
    return lambda: program.run(batch)


def kernels(case: Case) -> Callable[[], object]:
    torch.manual_seed(0)
    model, batch = case.model(), case.batch()
    program = StepProgram(model, case.loss, [torch.optim.Adam(model.parameters(), fused=True)])  # type: ignore[arg-type]
    for _ in range(2):
        program.run(batch)
    graph = lower(program.graph)
    values: dict[object, object] = {}
    calls: list[Callable[[], object]] = []
    leaves = iter(batch)
    with torch.no_grad():
        for node, binding in zip(graph.placeholders, graph.bindings, strict=True):
            values[node] = next(leaves) if binding.bound is None else binding.bound
        for node in graph.fx.nodes:
            if node.op != "call_function":
                continue
            args, kwargs = resolved(node, values.__getitem__)
            values[node] = evaluate(node, values.__getitem__)
            if isinstance(node.target, torch._ops.OpOverload) and not is_view(node):
                calls.append(partial(_fast_callable(node), *args, **kwargs))

    def run() -> None:
        with torch.no_grad():
            for call in calls:
                call()

    return run


def executor(case: Case, **options: Any) -> Callable[[], object]:
    torch.manual_seed(0)
    batch = case.batch()
    made = ab.Executor(case.step(**options), engine="graph")
    for _ in range(3):
        made.run(batch=batch)
    assert made.engine() == "graph"
    return lambda: made.run(batch=batch)


def main() -> None:
    parser = options_of(__doc__, rounds=25)
    parser.add_argument("--only", nargs="+", choices=list(ALL), default=list(CASES))
    parser.add_argument("--compile", action="store_true", help="measure the Inductor side too")
    parser.add_argument("--floor", action="store_true", help="measure the bare kernels too")
    parser.add_argument("--device", default="cpu", help="where the model and its batches are")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = machine()
    results = {}
    for name in options.only:
        case = ALL[name].on(options.device)
        sides = {"eager": eager(case), "graph": graph(case, False)}
        sides["executor"] = executor(case)
        sides["executor, skip_nonfinite=None"] = executor(case, skip_nonfinite=None)
        if options.compile:
            sides["compiled"] = graph(case, True)
            sides["torch.compile(module)"] = eager(case, compiled=True)
        if options.floor:
            sides["kernels"] = kernels(case)
        seconds = alternate(sides, rounds=options.rounds, calls=case.calls, after=waiting_for(options.device))
        results[name] = compare(seconds, "eager")
    report("step_graph_compiled" if options.compile else "step_graph", before, results, options.out)


if __name__ == "__main__":
    main()

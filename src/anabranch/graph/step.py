"""``StepProgram``: a training step as graphs, keyed by everything that is baked into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anabranch.errors import CaptureError
from anabranch.graph.build import build
from anabranch.graph.codegen import Program
from anabranch.graph.graph import Graph
from anabranch.graph.join import join
from anabranch.graph.tracing import Source, user_line
from anabranch.graph.update import LearningRates, capture_update, group_numbers
from anabranch.tensors import Structure, flatten, paths, unflatten

__all__ = ["StepProgram"]

Loss = Callable[[nn.Module, Structure], object]


class StepProgram:
    def __init__(self, model: nn.Module, loss: Loss, optimizers: Sequence[Optimizer]) -> None:
        self.model = model
        self.loss = loss
        self.optimizers = list(optimizers)
        self._rates = LearningRates(self.optimizers)
        self._modules = list(model.modules())
        self._parameters = dict(model.named_parameters())
        self._buffers = dict(model.named_buffers())
        self._names = {p: n for n, p in self._parameters.items()}
        self._programs: dict[object, tuple[Graph, Program]] = {}
        self._updates: dict[object, Graph] = {}

    def __call__(self, batch: Structure) -> dict[str, object]:
        leaves, structure = flatten(batch)
        key = self._key(leaves, structure)
        found = self._programs.get(key)
        if found is None:
            return self._first(leaves, structure, key)
        graph, program = found
        self._rates.refresh()
        for optimizer in self.optimizers:
            optimizer._opt_called = True
        results = program.run(*leaves)
        return dict(zip(graph.outputs, results))

    def _key(self, leaves, structure):
        return (
            structure,
            tuple((l.shape, l.stride(), l.dtype, l.device) for l in leaves),
            tuple([m.training for m in self._modules]),
            tuple([p.requires_grad for p in self._names]),
            group_numbers(self.optimizers),
        )

    def capture_backward(self, leaves, structure) -> Graph:
        names = [f"batch.{p}" if p else "batch" for p in paths(unflatten(structure, leaves))]
        sources = [Source(n, l) for n, l in zip(names, leaves, strict=True)]
        wrt = {n: p for n, p in self._parameters.items() if p.requires_grad}
        sources += [Source(n, p, True) for n, p in {**self._parameters, **self._buffers}.items()]
        outputs: list[str] = []

        def body(values, recorder):
            batch = unflatten(structure, values[: len(leaves)])
            traced = {s.name: v for s, v in zip(sources, values, strict=True)}
            result = self.loss(self.model, batch)
            loss, extras = result if isinstance(result, tuple) else (result, {})
            recorder.follow_backward(loss)
            grads = torch.autograd.grad(loss, [traced[n] for n in wrt], allow_unused=True)
            kept = {}
            for name, g in zip(wrt, grads, strict=True):
                if g is not None:
                    p = traced[name]
                    if g.stride() != p.stride():
                        with torch.no_grad():
                            g = torch.empty_like(p).copy_(g)
                    kept[f"{name}.grad"] = g
            outputs[:] = ["loss", *extras, *kept]
            return [loss, *extras.values(), *kept.values()]

        graph = build(body, sources, outputs, {"": self.model}, kinds={"": "buffer"})
        graph.outputs = outputs
        return graph

    def _first(self, leaves, structure, key):
        backward = self.capture_backward(leaves, structure)
        names = [n[:-5] for n in backward.outputs if n.endswith(".grad")]
        run = None
        if any(p not in o.state for o in self.optimizers for g in o.param_groups for p in g["params"]):
            run = dict(zip(backward.outputs, backward.program().run(*leaves)))
            for n in names:
                self._parameters[n].grad = run[n + ".grad"]
            for o in self.optimizers:
                o.step()
                o.zero_grad()
        examples = {n: torch.zeros_like(self._parameters[n]) for n in names}
        update = capture_update(self.optimizers, examples, self._rates, self._names)
        joint = join(backward, update, [n for n in backward.outputs if not n.endswith(".grad")])
        self._programs[key] = (joint, joint.program())
        if run is None:
            return self([*leaves] and unflatten(structure, leaves))
        return run

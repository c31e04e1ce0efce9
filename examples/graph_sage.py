"""GraphSAGE on sampled mini-batches: which of eight blocks a node belongs to, from its features and its neighbours'.

    python examples/graph_sage.py                                                 # one process
    anabranch run --workers 2 --servers 2 examples/graph_sage.py                  # the features on two servers

The graph is a stochastic block model: nodes of a block are linked more often. Features are a faint hint of the block
under much noise, so that a node alone says little and its neighbourhood much::

    seeds ──sample──> neighbours ──sample──> their neighbours      ids of all of them, each once, and two lists of edges
      ids ──> table of features ──> mean over edges ──> layer ──> mean over edges ──> layer ──> block of each seed

How many nodes a batch reaches depends on the sample. It is padded to one of a few sizes, so that a step is captured as
a graph a few times and not at every batch: what is padding reaches no seed, and changes no result. Nodes come as ids,
and their features from a table with a row a node, which may live on servers and is trained, too. Which neighbours a
node shows in a step depends on the node and the step alone, so any number of workers with a part of the seeds each do
what one does.

``_run.py`` is what all examples do alike. Shapes: S seeds, R nodes near them (seeds included), F nodes further away, V
nodes of a batch, E edges, D width of a layer.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
from _run import Team, add_usual, at_least_one, prepare, present, reported, save_or_stop, stopped_by_signals, team_of
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import anabranch as ab
from anabranch.loaders import NeighborSampler

BLOCKS = 8
FEATURES = 16
WIDTH = 64
FAN_OUTS = (10, 5)  # neighbours that a seed shows, and that each of these shows
NOISE = 3.0

Ints = NDArray[np.int64]
Batch = dict[str, Tensor]


# The graph. -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes and whom they are linked to: those of node v are ``neighbours[first[v] : first[v + 1]]``."""

    block: Ints
    features: NDArray[np.float64]
    centres: NDArray[np.float64]
    first: Ints
    neighbours: Ints

    @property
    def nodes(self) -> int:
        return len(self.block)

    def best_without_edges(self, nodes: Ints) -> float:
        """How often the nearest centre is the block: nobody who sees features alone is right more often."""
        distances = ((self.features[nodes, None] - self.centres) ** 2).sum(2)
        return float((distances.argmin(1) == self.block[nodes]).mean())


def stochastic_block_model(nodes: int, seed: int, *, within: float = 8.0, between: float = 4.0) -> Graph:
    """Return a graph whose nodes have ``within`` neighbours in their block and ``between`` outside it, on average.

    Each pair inside a block is linked with one probability, each other pair with a smaller one. How many pairs are
    linked is drawn first, then which; the few that are drawn twice are one link.
    """
    draw = np.random.default_rng(seed)
    block = draw.integers(0, BLOCKS, nodes)
    members = [np.flatnonzero(block == number) for number in range(BLOCKS)]
    pairs = []
    for one in range(BLOCKS):
        for other in range(one, BLOCKS):
            sizes = len(members[one]), len(members[other])
            possible = sizes[0] * (sizes[0] - 1) // 2 if one == other else sizes[0] * sizes[1]
            chance = within * BLOCKS if one == other else between * BLOCKS / (BLOCKS - 1)
            count = draw.binomial(possible, min(1.0, chance / nodes))
            if count:
                ends = [members[kind][draw.integers(0, len(members[kind]), count)] for kind in (one, other)]
                pairs.append(np.stack(ends))
    links = np.concatenate(pairs, 1) if pairs else np.empty((2, 0), np.int64)
    links = np.unique(np.sort(links[:, links[0] != links[1]], 0), axis=1)
    sources, targets = np.concatenate([links, links[::-1]], 1)
    order = np.argsort(sources, kind="stable")
    first = np.searchsorted(sources[order], np.arange(nodes + 1))
    centres = draw.normal(size=(BLOCKS, FEATURES))
    features = centres[block] + NOISE * draw.normal(size=(nodes, FEATURES))
    return Graph(block, features, centres, first, targets[order])


# Sampling. ------------------------------------------------------------------------------------------------------------


def sampler_of(graph: Graph, seed: int) -> NeighborSampler:
    return NeighborSampler(graph.first, graph.neighbours, FAN_OUTS, batch_size=1, seed=seed)


def sampled(graph: Graph, sampler: NeighborSampler, seeds: Ints, key: int, *, padded: bool = True) -> Batch:
    """Return the seeds' surroundings: ``near`` (R,), seeds first; ``far`` (F,); ``blocks`` (S,); edges (2, E) into each
    layer.

    ``outer`` edges lead into the near nodes, ``inner`` edges into the seeds; they name places among all nodes, near
    before far, from and to. Padding is the first seed over again, and edges from it to the place behind the last.
    """
    found = sampler.sample(seeds, key=key)
    nodes = found.nodes.numpy()
    inner, outer = (_edges(*block) for block in found.blocks)
    reached = len(found.blocks[1][0]) - 1
    near, far = nodes[:reached], nodes[reached:]
    if padded and len(seeds):
        near, far = _filled(near, seeds[0], roomy(reached)), _filled(far, seeds[0], roomy(len(far)))
        outer[0] += (outer[0] >= reached) * (len(near) - reached)
    if padded:
        inner = _filled_edges(inner, len(seeds), FAN_OUTS[0])
        outer = _filled_edges(outer, len(near), FAN_OUTS[1])
    batch = {"near": near, "far": far, "inner": inner, "outer": outer, "blocks": graph.block[seeds]}
    return {name: torch.as_tensor(values) for name, values in batch.items()}


def _edges(indptr: Tensor, indices: Tensor) -> Ints:
    """Return the edges (2, E) of a block, from and to."""
    counts = np.diff(indptr.numpy())
    return np.stack([indices.numpy(), np.repeat(np.arange(len(counts)), counts)])


def roomy(count: int) -> int:
    """Return the next size up of which there are four between two powers of two."""
    unit = max(16, 2 ** max(0, count.bit_length() - 3))
    return -(-count // unit) * unit


def _filled(nodes: Ints, filler: int, size: int) -> Ints:
    return np.concatenate([nodes, np.full(size - len(nodes), filler)])


def _filled_edges(edges: Ints, targets: int, fan_out: int) -> Ints:
    """As many edges as ``targets`` nodes have; those that lead to place ``targets`` lead nowhere."""
    missing = targets * fan_out - edges.shape[1]
    return np.concatenate([edges, np.stack([np.zeros(missing, np.int64), np.full(missing, targets)])], 1)


class Samples:
    """The batches of training: a worker's part of each step's seeds, with their surroundings.

    Every epoch takes the seeds in another order. A part depends on the step and on who shares it, and on nothing that
    was read before: a run resumes anywhere, and if a worker is lost, the others share its step out anew.
    """

    def __init__(self, graph: Graph, seeds: Ints, batch: int, seed: int) -> None:
        self._graph, self._seeds, self._batch, self._seed = graph, seeds, batch, seed
        self._sampler = sampler_of(graph, seed)

    def part(self, step: int, rank: int, workers: int) -> Batch:
        """Return the part of worker ``rank`` of the batch behind the first ``step`` ones."""
        epoch, number = divmod(step, len(self._seeds) // self._batch)
        order = np.random.default_rng([self._seed, epoch]).permutation(self._seeds)
        seeds = order[number * self._batch : (number + 1) * self._batch]
        return sampled(self._graph, self._sampler, np.array_split(seeds, workers)[rank], step + 1)


# The model. -----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A node and the mean of those with an edge to it: (V, D), (2, E) -> (the first ``count``, D).

    An edge to ``count`` is padding. Hamilton et al., "Inductive Representation Learning on Large Graphs" (2017).
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own = nn.Linear(inputs, outputs)
        self.others = nn.Linear(inputs, outputs, bias=False)

    def forward(self, hidden_VD: Tensor, edges_2E: Tensor, count: int) -> Tensor:
        source, target = edges_2E
        arriving = hidden_VD.index_select(0, source)
        summed = hidden_VD.new_zeros(count + 1, hidden_VD.shape[1]).index_add(0, target, arriving)
        degree = hidden_VD.new_zeros(count + 1).index_add(0, target, hidden_VD.new_ones(len(target))).clamp(min=1)
        return self.own(hidden_VD[:count]) + self.others((summed / degree[:, None])[:count])


class GraphSage(nn.Module):
    """A batch -> scores of the blocks, (S, BLOCKS)."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.features = nn.Embedding.from_pretrained(features.clone(), freeze=False, sparse=True)
        self.outer = Layer(FEATURES, WIDTH)
        self.inner = Layer(WIDTH, BLOCKS)

    def forward(self, batch: Batch) -> Tensor:
        hidden_VD = self.features(torch.cat([batch["near"], batch["far"]]))
        hidden_RD = F.relu(self.outer(hidden_VD, batch["outer"], len(batch["near"])))
        return self.inner(hidden_RD, batch["inner"], len(batch["blocks"]))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch), batch["blocks"])


def right(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return {"right": (model(batch).argmax(1) == batch["blocks"]).sum().double()}


def seeds_in(batch: Batch) -> int:
    """Return what a batch weighs: its tensors have no common dimension to count by."""
    return len(batch["blocks"])


def training_step(model: GraphSage) -> ab.TrainStep:
    layers = [*model.outer.parameters(), *model.inner.parameters()]
    optimizers = [torch.optim.Adagrad([model.features.weight], lr=0.01), torch.optim.Adam(layers, lr=0.01, fused=True)]
    return ab.TrainStep(model, loss, optimizers, rows=seeds_in)


def accuracy(executor: ab.Executor, graph: Graph, nodes: Ints, team: Team) -> float:
    """Return the share of nodes whose block is found; each worker looks at its part of them."""
    mine, sampler = np.array_split(nodes, team.workers)[team.rank], sampler_of(graph, 0)
    total = torch.zeros((), dtype=torch.float64)
    for number, seeds in enumerate(np.array_split(mine, max(1, len(mine) // 1000))):
        total += executor.run("validate", sampled(graph, sampler, seeds, -1 - number))["right"]
    if team.workers > 1:
        total = ab.all_reduce(total)
    return total.item() / len(nodes)


# The run. -------------------------------------------------------------------------------------------------------------


def parse_options(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains GraphSAGE on a stochastic block model.", allow_abbrev=False)
    add_usual(parser, steps=200, out="runs/graph_sage")
    parser.add_argument("--nodes", type=at_least_one, default=20_000, help="of the graph (%(default)s)")
    parser.add_argument("--batch", type=at_least_one, default=256, help="seeds a step, of all workers (%(default)s)")
    parser.add_argument("--double", action="store_true", help="compute in float64")
    options = parser.parse_args(given)
    if options.nodes * 4 // 5 < options.batch:
        parser.error(f"--nodes {options.nodes} leave fewer than --batch {options.batch} to train on; give more of them")
    return options


def run(options: argparse.Namespace, job: ab.Job) -> dict[str, object]:
    """Trains, measures and reports; returns what the last line says."""
    began = time.monotonic()
    team = team_of(options.comm_mode, options.out, job)
    prepare(
        team, {name: getattr(options, name) for name in ("steps", "batch", "seed", "nodes", "double")},
        fresh=options.fresh,
    )  # fmt: skip
    graph = stochastic_block_model(options.nodes, options.seed)
    shuffled = np.random.default_rng([options.seed, 1]).permutation(graph.nodes)
    train, held_out = np.split(shuffled, [graph.nodes * 4 // 5])
    torch.manual_seed(options.seed)
    kind = torch.float64 if options.double else torch.float32
    model = GraphSage(torch.from_numpy(graph.features).to(kind)).to(kind)
    samples = Samples(graph, train, options.batch, options.seed)

    def part(job: ab.Job) -> Batch:
        team = team_of(options.comm_mode, options.out, job)
        return samples.part(executor.step, team.rank, team.workers)

    evaluate_every = options.evaluate_every or max(1, options.steps // 5)
    with (
        ab.Executor(
            {"train": training_step(model), "validate": ab.EvalStep(model, right)},
            comm_mode=team.comm_mode,
            engine=options.engine,
        ) as executor,
        stopped_by_signals(executor),
    ):
        done, losses, seconds, moved = 0, [], 0.0, 0
        if not options.fresh and executor.resume(team.out / "checkpoint"):
            done = executor.step
        while executor.step < options.steps:
            before, at = executor.statistics().bytes, time.monotonic()
            losses.append(executor.run("train", part)["loss"].item())
            step, team = executor.step, present(team, options)
            seconds += time.monotonic() - at
            moved += executor.statistics().bytes - before
            if step % evaluate_every == 0 and step < options.steps:
                found = accuracy(executor, graph, held_out, team)
                if team.rank == 0:
                    print(
                        f"step {step}/{options.steps}  loss {losses[-1]:.4f}  held out: {found:.1%} right", flush=True
                    )
            save_or_stop(executor, team, options)
        found = accuracy(executor, graph, held_out, team)
        engine = executor.engine("train")
    steps = max(1, options.steps - done)
    return {
        "steps": options.steps,
        "seed": options.seed,
        "comm_mode": executor.comm_mode or "None",
        "workers": ab.job().world_size,
        "servers": len(job.servers),
        "engine": engine,
        "losses": losses,
        "accuracy": found,
        "best_without_edges": graph.best_without_edges(held_out),
        "nodes": graph.nodes,
        "links": len(graph.neighbours) // 2,
        "resumed_from": done,
        "bytes_per_step": moved // steps,
        "steps_per_second": round(len(losses) / max(1e-9, seconds), 2),
        "seconds": round(time.monotonic() - began, 2),
        "out": str(team.out),
    }


def main(given: list[str] | None = None) -> int:
    torch.sparse.check_sparse_tensor_invariants.disable()
    options, job = parse_options(given), ab.job()
    return reported(lambda: run(options, job))


if __name__ == "__main__":
    sys.exit(main())

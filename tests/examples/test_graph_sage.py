"""The GraphSAGE example: sampling that does not depend on who samples, and the one-process result on any job."""

from __future__ import annotations

import shlex
from functools import partial

import example_jobs
import numpy as np
import pytest
import torch
from example_jobs import EXAMPLES, run_example

import anabranch as ab
from anabranch.testing import LocalJob
from covering import slow_except

SCRIPT = EXAMPLES / "graph_sage.py"
SMALL = shlex.split("--steps 6 --nodes 600 --batch 32 --double --evaluate-every 3 --engine tape")


run_here = partial(example_jobs.run_here, "graph_sage")


@pytest.fixture
def graph():
    import graph_sage

    return graph_sage.stochastic_block_model(800, seed=1)


# The graph.


@pytest.mark.parametrize("seeds", slow_except([30, 1], 1))
def test_padding_makes_few_shapes_and_changes_nothing(graph, seeds):
    import graph_sage

    def run(engine, padded):
        torch.manual_seed(0)
        model = graph_sage.GraphSage(torch.from_numpy(graph.features)).double()
        sampled = partial(graph_sage.sampled, graph, graph_sage.sampler_of(graph, 0), padded=padded)
        batches = [sampled(np.arange(seeds) + key, key) for key in range(6)]
        with (
            torch.sparse.check_sparse_tensor_invariants(False),
            ab.Executor(graph_sage.training_step(model), engine=engine) as executor,
        ):
            losses = [executor.run(batch=batch)["loss"] for batch in batches]
        shapes = {tuple(value.shape for value in batch.values()) for batch in batches}
        return [*losses, *model.state_dict().values()], shapes

    mine, few = run("graph", padded=True)
    plain, many = run("tape", padded=False)
    for one, other in zip(mine, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    assert len(few) <= 3 < len(many)


# Runs.


def test_neighbours_tell_more_than_features_alone(tmp_path, capsys):
    result = run_here(capsys, "--steps", 60, "--nodes", 3000, "--batch", 128, "--out", tmp_path)
    assert result["accuracy"] > result["best_without_edges"] + 0.15
    assert result["losses"][-1] < 0.5 * result["losses"][0]
    assert len(result["losses"]) == 60


@pytest.mark.slow
def test_two_workers_have_the_losses_of_one(tmp_path, capsys):
    one = run_here(capsys, *SMALL, "--out", tmp_path / "one")
    job = LocalJob(workers=2, servers=2)
    two = run_example(job, SCRIPT, *SMALL, "--out", tmp_path / "two").check().results[0]
    assert two is not None
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=1e-10)
    assert two["accuracy"] == one["accuracy"]

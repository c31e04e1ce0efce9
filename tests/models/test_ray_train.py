"""Inside the workers of Ray Train's ``TorchTrainer``: its process group and restarts, our executor and servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from local_ray import ray_folder
from torch.nn import functional as F

ROOT = Path(__file__).parents[2]
LIMIT = 600.0
WARMED = """
from anabranch.tables.warming import compile_kernels
compile_kernels()
"""

# Rank 1 dies in the first attempt at step 3. The servers live on, and are then ahead of the checkpoint.
TRAIN = """
import json, os, pathlib, signal, sys
import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(config):
    import torch
    from torch.nn import functional as F
    import anabranch as ab

    job, context, out = ab.job(), ray.train.get_context(), pathlib.Path(config["out"])
    facts = [job.rank, job.world_size, job.local_rank]
    assert facts == [context.get_world_rank(), context.get_world_size(), context.get_local_rank()]
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(6)]
    found = {"servers": job.servers}
    for mode in ("AllReduce", "PS"):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        step = ab.TrainStep(
            model, lambda model, batch: F.mse_loss(model(batch[0]), batch[1]), torch.optim.Adam(model.parameters())
        )
        with ab.Executor(step, mode) as executor:
            executor.resume(out / mode)
            first = executor.step
            for x, y in batches[first:]:
                if mode == "PS" and executor.step == 4 and first == 0 and job.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                half = slice(4 * job.rank, 4 * job.rank + 4)
                executor.run(batch=(x[half], y[half]))
                if executor.step == 3:
                    executor.save(out / mode)
        found[mode] = [first, *model.weight.flatten().tolist()]
    (out / f"{job.rank}.json").write_text(json.dumps(found))


ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
TorchTrainer(
    train,
    train_loop_config={"out": sys.argv[1]},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=sys.argv[1], failure_config=FailureConfig(max_failures=1)),
).fit()
"""


def _trained_here() -> list[float]:
    """The same six steps as a plain loop."""
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(6)]
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    for x, y in batches:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    found: list[float] = model.weight.flatten().tolist()
    return found


@pytest.mark.slow
@pytest.mark.skipif(" " in sys.executable, reason="Ray gives a shell the path of Python with its space unquoted")
def test_workers_of_ray_train_are_a_job_on_servers_and_continue_when_one_dies(tmp_path: Path) -> None:
    keys, anabranch = tmp_path / "keys", [sys.executable, "-m", "anabranch.cli"]
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "ANABRANCH_KEYS": str(keys), "OMP_NUM_THREADS": "1"}
    subprocess.run([*anabranch, "keys", str(keys)], env=environment, check=True, timeout=LIMIT, capture_output=True)
    subprocess.run([sys.executable, "-c", WARMED], env=environment, check=True, timeout=LIMIT)
    serve = ["serve", "parameters", "--listen", "tcp://127.0.0.1:0"]
    with (
        ray_folder() as folder,
        subprocess.Popen([*anabranch, *serve], env=environment, stdout=subprocess.PIPE, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            endpoint = server.stdout.readline().removeprefix("listening on ").strip()
            environment |= {"ANABRANCH_SERVERS": endpoint, **folder}
            done = subprocess.run(
                [sys.executable, str(script), str(tmp_path)],
                env=environment, cwd=tmp_path, timeout=LIMIT, capture_output=True, text=True, check=False,
            )  # fmt: skip
        finally:
            server.terminate()
    assert done.returncode == 0, done.stderr
    expected = pytest.approx(_trained_here(), rel=1e-5)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["servers"] == [endpoint]
        for mode in ("AllReduce", "PS"):
            first, *weight = found[mode]
            assert first == 3, mode
            assert weight == expected, mode

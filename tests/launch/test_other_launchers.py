"""The same script under plain ``python`` and under ``torchrun``, restarts included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import Script, launch

from anabranch.job import JOB_VARIABLE, MEETING_VARIABLE
from anabranch.liveness.membership import MEMBER_VARIABLE, MEMBERS_VARIABLE
from anabranch.record.process import STATUS_VARIABLE

LIMIT = 200.0


def test_plain_python_is_a_job_of_one_worker(script: Script) -> None:
    path = script("import anabranch as ab; print(ab.job())")
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=LIMIT, check=True, env=environment
    )
    assert done.stdout.startswith("Job(rank=0, world_size=1, local_rank=0, role='worker'")


@pytest.mark.slow
def test_torchrun_restarts_the_same_script_and_sets_the_variables_that_our_launcher_sets(
    script: Script, tmp_path: Path
) -> None:
    # In the first attempt rank 1 dies; the second adds up the ranks and writes down what torchrun has set.
    path = script(
        """
        import json, os, pathlib, signal, sys
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        import torch, torch.distributed as dist
        import anabranch as ab

        job = ab.job()
        dist.init_process_group("gloo")
        total = torch.tensor([job.rank + 1])
        dist.all_reduce(total)
        dist.destroy_process_group()
        names = sorted(set(os.environ) - set(json.loads(os.environ["NAMES_BEFORE"])))
        record = {"total": total.item(), "world_size": job.world_size, "names": names}
        pathlib.Path(sys.argv[1], f"{job.rank}.json").write_text(json.dumps(record))
        """
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["NAMES_BEFORE"] = json.dumps(sorted([*environment, "NAMES_BEFORE"]))
    command = ["--nproc-per-node", "2", "--standalone", "--max-restarts", "1", str(path), str(tmp_path)]
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command],
        env=environment,
        timeout=LIMIT,
        check=True,
        capture_output=True,
    )
    path.write_text("import json, os; print(json.dumps([*os.environ]))")
    launch(path, workers=2, log_dir=tmp_path, environment=environment, spawn=True)
    ours = json.loads((tmp_path / "worker-1.log").read_text())
    for rank in range(2):
        record = json.loads((tmp_path / f"{rank}.json").read_text())
        assert record["total"] == 3
        assert record["world_size"] == 2
        # TORCHELASTIC_SIGNALS_TO_HANDLE is a setting of torchrun's own process that its workers inherit; our launcher
        # alone names one start of itself, by which checkpoints know their run.
        names = set(record["names"]) - {"TORCHELASTIC_SIGNALS_TO_HANDLE"}
        names |= {JOB_VARIABLE, MEETING_VARIABLE, MEMBER_VARIABLE, MEMBERS_VARIABLE}
        assert names == set(ours) - set(environment) - {STATUS_VARIABLE}


LOST = """
import json, os, signal, sys
import torch
import anabranch as ab

job = ab.job()
torch.manual_seed(0)
model = torch.nn.Sequential(ab.RemoteEmbedding("t", 50, 4, mode="sum"), torch.nn.Linear(4, 1))
step = ab.TrainStep(model, lambda m, ids: m(ids).square().mean(), torch.optim.Adam(model.parameters(), lr=0.1))
life, losses = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), []
with ab.Executor(step, comm_mode="Hybrid") as executor:
    executor.resume(sys.argv[1])
    first = executor.step
    while executor.step < 10:
        if executor.step == 7 and life == 0 and job.rank == 1 and sys.argv[2] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        ids = torch.arange(6).reshape(3, 2) * (executor.step + 1 + job.rank) % 50
        losses.append(executor.run(batch=ids)["loss"].item())
        if executor.step == 4:
            executor.save(sys.argv[1])
if job.rank == 0:
    print(json.dumps({"first": first, "life": life, "losses": losses}))
"""


@pytest.mark.slow
def test_workers_restarted_by_torchrun_continue_with_the_servers_at_their_addresses(
    script: Script, tmp_path: Path
) -> None:
    """The servers lived on and are three steps ahead of the checkpoint: resuming takes them back to it."""
    path = script(LOST)
    keys = tmp_path / "keys"
    anabranch = [sys.executable, "-m", "anabranch.cli"]
    subprocess.run([*anabranch, "keys", str(keys)], check=True, timeout=LIMIT, capture_output=True)
    found = []
    for name in ("quiet", "kill"):
        serve = ["serve", "parameters", "--listen", "tcp://127.0.0.1:0", "--keys", str(keys)]
        with subprocess.Popen([*anabranch, *serve], stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                endpoint = server.stdout.readline().removeprefix("listening on ").strip()
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "ANABRANCH_KEYS": str(keys)}
                environment["ANABRANCH_SERVERS"] = endpoint
                command = ["--nproc-per-node", "2", "--standalone", "--max-restarts", "1", str(path)]
                done = subprocess.run(
                    [sys.executable, "-m", "torch.distributed.run", *command, str(tmp_path / name), name],
                    env=environment, timeout=LIMIT, capture_output=True, text=True, check=False,
                )  # fmt: skip
            finally:
                server.terminate()
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    quiet, killed = found
    assert (quiet["first"], quiet["life"]) == (0, 0)
    assert (killed["first"], killed["life"]) == (4, 1)
    assert killed["losses"] == quiet["losses"][4:]

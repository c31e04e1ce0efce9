"""The same script under plain ``python`` and under ``torchrun``, restarts included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.launch.environment import worker_environment

Script = Callable[[str], Path]
LIMIT = 100.0


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
    ours = worker_environment(1, 2, run_id="x", store_port=1, error_file=tmp_path, base=environment)
    for rank in range(2):
        record = json.loads((tmp_path / f"{rank}.json").read_text())
        assert record["total"] == 3
        assert record["world_size"] == 2
        # TORCHELASTIC_SIGNALS_TO_HANDLE is a setting of torchrun's own process that its workers inherit.
        assert set(record["names"]) - {"TORCHELASTIC_SIGNALS_TO_HANDLE"} == set(ours) - set(environment)

"""Jobs on a real local cluster of three Ray nodes: one loses a node, one a server, two are interrupted, one
fails, one is traced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch.launch.job_status import status_of
from toys import plain_step

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(" " in sys.executable, reason="Ray gives a shell the path of Python with its space unquoted"),
]
LIMIT = 300.0

TRAIN = """
import json, os, pathlib, sys, time
import torch
import torch.nn.functional as F
import anabranch as ab

out, wait_at = pathlib.Path(sys.argv[1]), int(sys.argv[2])
job = ab.job()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
loss_of = lambda model, batch: F.mse_loss(model(batch[0]), batch[1])
step = ab.TrainStep(model, loss_of, torch.optim.Adam(model.parameters()))
generator = torch.Generator().manual_seed(1)
batches = [(torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(12)]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.distributed.init_process_group("gloo")
with ab.Executor(step, comm_mode=sys.argv[3]) as executor:
    executor.resume(out / "checkpoint")
    for number in range(executor.step, 12):
        if number == wait_at and attempt == 0:
            written = out / f"waits-{job.rank}.part"
            written.write_text(json.dumps([os.getpid(), os.getppid()]))
            written.rename(out / f"waits-{job.rank}.json")
            time.sleep(600)
        x, y = batches[number]
        half = slice(4 * job.rank, 4 * job.rank + 4)
        loss = executor.run(batch=(x[half], y[half]))["loss"].item()
        executor.save(out / "checkpoint")
torch.distributed.destroy_process_group()
print(json.dumps({"loss": loss, "attempt": attempt}), flush=True)
"""

# A table on the server and a layer on the expert.
ALL_ROLES = """
import torch
import anabranch as ab

job = ab.job()


def make_backends(index, count):
    layer = torch.nn.Linear(4, 4)
    return [ab.ExpertBackend("ffn.0", layer, torch.optim.Adam(layer.parameters()), args_schema=[ab.TensorSpec(4)])]


directory = job.serve(make_backends)
model = torch.nn.Sequential(torch.nn.EmbeddingBag(9, 4), ab.RemoteExpert("ffn.0", directory))
step = ab.TrainStep(model, lambda model, ids: model(ids).square().mean(), torch.optim.Adam(model.parameters()))
with ab.Executor(step, "Hybrid") as executor:
    for _ in range(3):
        executor.run(batch=torch.tensor([[1, 2], [3, 4]]))
"""


KILLS_ITS_SERVER = """
import json, os, pathlib, signal, sys
import torch
import anabranch as ab

job = ab.job()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
step = ab.TrainStep(model, lambda model, x: model(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.01))
with ab.Executor(step, "PS") as executor:
    for number in range(6):
        if number == 3 and job.rank == 0:
            roles = json.loads(pathlib.Path(sys.argv[1], "logs/job.json").read_text())["roles"]
            os.kill(next(role["pid"] for role in roles if role["role"] == "parameters"), signal.SIGKILL)
        loss = executor.run(batch=torch.full((2, 4), job.rank + 1.0))["loss"].item()
if job.rank == 0:
    print(json.dumps({"loss": loss}), flush=True)
"""


def _command(
    cluster: Any, folder: Path, *arguments: str, options: tuple[str, ...] = (), script: str = TRAIN
) -> list[str]:
    (folder / "train.py").write_text(script)
    head = ["--engine", "ray", "--address", cluster.address, "--workers", "2", "--log-dir", str(folder / "logs")]
    return [sys.executable, "-m", "anabranch.cli", "run", *head, *options, "train.py", str(folder), *arguments]


def _wait_until(condition: Callable[[], object]) -> None:
    """Ray and a job on it start in seconds, or in minutes where the machine is busy."""
    until = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < until, "what was waited for did not come"
        time.sleep(0.05)


def _wait_for_end_of_rank(folder: Path, rank: int) -> None:
    pid, _ = json.loads((folder / f"waits-{rank}.json").read_text())
    _wait_until(lambda: not Path(f"/proc/{pid}").exists())


def _run(command: list[str], folder: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == code, done.stderr
    return done


@contextmanager
def _started(command: list[str], folder: Path, code: int) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A command that runs, and ends with this exit code; behind the block its stdout and stderr are in the list."""
    pipe, said = subprocess.PIPE, list[str]()
    with subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            yield process, said
            said.extend(process.communicate(timeout=LIMIT))
        finally:
            process.kill()
    assert process.returncode == code, said


def _wait_for_workers(folder: Path) -> None:
    _wait_until(lambda: all((folder / f"waits-{rank}.json").exists() for rank in range(2)))


# In a process of its own: a driver of Ray keeps descriptors open after its end.
LEFT = """
import json, sys, ray
from ray._private.state import actors
from ray.util.placement_group import placement_group_table
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
groups = [group["state"] for group in placement_group_table().values()]
print(json.dumps([*groups, *(actor["State"] for actor in actors().values())]))
"""


def _states(cluster: Any) -> set[str]:
    command = [sys.executable, "-c", LEFT, cluster.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def _nothing_is_left(cluster: Any) -> None:
    assert _states(cluster)
    _wait_until(lambda: _states(cluster) <= {"REMOVED", "DEAD"})


def test_a_node_is_killed_and_training_ends_with_the_loss_of_an_undisturbed_run(cluster: Any, tmp_path: Path) -> None:
    quiet, hurt = tmp_path / "quiet", tmp_path / "hurt"
    for folder in (quiet, hurt):
        folder.mkdir()
    done = _run(_command(cluster, quiet, "-1", "PS", options=("--servers", "1")), quiet)
    undisturbed = json.loads(done.stdout.splitlines()[-1])
    assert undisturbed["attempt"] == 0
    # What the processes told on their nodes has come to the launcher's machine.
    status = status_of(quiet / "logs")
    assert {role.name: role.steps for role in status.roles} == {"worker 0": 12, "worker 1": 12, "parameters 0": None}
    assert {role.state for role in status.roles} == {"gone"}
    assert status.saved == str(quiet / "checkpoint")
    command = _command(cluster, hurt, "6", "PS", options=("--servers", "1", "--max-restarts", "1"))
    with _started(command, hurt, 0) as (_, said):
        _wait_for_workers(hurt)
        _kill_node_of_rank(cluster, hurt, 1)
    assert "restarting the job (1 of 1)" in said[1]
    disturbed = json.loads(said[0].splitlines()[-1])
    assert disturbed == {"loss": pytest.approx(undisturbed["loss"], rel=1e-6), "attempt": 1}
    for rank in range(2):
        _wait_for_end_of_rank(hurt, rank)
    _nothing_is_left(cluster)


def _kill_node_of_rank(cluster: Any, folder: Path, rank: int) -> None:
    """Kill the raylet of the worker, and the worker's actor, as the death of a machine does."""
    _, actor = json.loads((folder / f"waits-{rank}.json").read_text())
    raylet = int(Path(f"/proc/{actor}/stat").read_text().rpartition(")")[2].split()[1])
    node = next(node for node in cluster.list_all_nodes() if _raylet_of(node) == raylet)
    assert node is not cluster.head_node
    cluster.remove_node(node, allow_graceful=False)


def _raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def test_a_frozen_worker_is_shown_and_ctrl_c_ends_all_with_130_and_leaves_nothing(cluster: Any, tmp_path: Path) -> None:
    command = _command(cluster, tmp_path, "2", "AllReduce")
    with _started(command, tmp_path, 130) as (process, _):
        _wait_for_workers(tmp_path)
        _wait_until(lambda: _at_work(tmp_path) == {("worker 0", "running", 2), ("worker 1", "running", 2)})
        os.kill(json.loads((tmp_path / "waits-1.json").read_text())[0], signal.SIGSTOP)
        _wait_until(lambda: _at_work(tmp_path) == {("worker 0", "running", 2), ("worker 1", "stopped", 2)})
        os.kill(process.pid, signal.SIGINT)
    for rank in range(2):
        _wait_for_end_of_rank(tmp_path, rank)
    _nothing_is_left(cluster)


def _at_work(folder: Path) -> set[tuple[str, str, int | None]]:
    return {(role.name, role.state, role.steps) for role in status_of(folder / "logs").roles}


def test_a_trace_holds_the_spans_of_every_role_on_its_node(cluster: Any, tmp_path: Path) -> None:
    options = ("--servers", "1", "--experts", "1", "--trace", str(tmp_path / "trace.json"))
    _run(_command(cluster, tmp_path, options=options, script=ALL_ROLES), tmp_path)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"].split(" (")[0] for event in events if event["name"] == "process_name"}
    assert set(names.values()) == {"worker 0", "worker 1", "parameters 0", "expert 0", "rendezvous 0"}
    kinds = {(names[event["pid"]], event.get("cat")) for event in events}
    serve = {("parameters 0", "serve"), ("expert 0", "serve")}
    assert kinds >= {("worker 0", "crossing"), ("worker 1", "crossing")} | serve


def test_a_killed_server_restarts_with_its_log(cluster: Any, tmp_path: Path) -> None:
    options = ("--servers", "1", "--durability", "log")
    done = _run(_command(cluster, tmp_path, options=options, script=KILLS_ITS_SERVER), tmp_path)
    assert "was killed by SIGKILL" in done.stderr
    assert "restarted (1 of 3)" in done.stderr
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.tensor([1.0, 1.0, 2.0, 2.0])[:, None].expand(4, 4)
    losses = [plain_step(model, lambda model, x: model(x).square().mean(), optimizer, rows) for _ in range(6)]
    assert json.loads(done.stdout.splitlines()[-1])["loss"] == pytest.approx(losses[-1].item(), rel=1e-4)


def test_ctrl_c_while_ray_looks_for_room_leaves_no_placement_group(cluster: Any, tmp_path: Path) -> None:
    command = _command(cluster, tmp_path, "-1", "AllReduce", options=("--resources", '{"worker": {"CPU": 64}}'))
    with _started(command, tmp_path, 130) as (process, _):
        _wait_until(lambda: "PENDING" in _states(cluster))
        os.kill(process.pid, signal.SIGINT)
    _nothing_is_left(cluster)


def test_a_worker_of_a_module_that_fails_is_named_with_its_traceback(cluster: Any, tmp_path: Path) -> None:
    command = _command(cluster, tmp_path)[:-2]
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "steep.py").write_text(
        "import os, sys\nif os.environ['RANK'] == '1': raise ValueError(f'spilled {sys.argv[1]} in {__package__}')\n"
    )
    done = _run([*command, "-m", "recipes.steep", "tea"], tmp_path, 1)
    assert "rank 1" in done.stderr
    assert "ValueError: spilled tea in recipes" in done.stderr
    assert (tmp_path / "logs" / "worker-1.log").read_text().endswith("ValueError: spilled tea in recipes\n")

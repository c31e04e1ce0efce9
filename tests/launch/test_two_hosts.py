"""A job over two hosts with TLS on, at 20 ms and 200 Mbit/s, and through ten seconds without a network."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from anabranch.transport import make_keys
from two_hosts import Host, start_on, two_hosts, why_not

_WHY_NOT = why_not()
pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))]
LIMIT = 200.0
STEPS, CUT_AT = 8, 4

# Each rank has an expert of its own, so that the order of the ranks' updates does not matter.
TRAIN = """
import json, pathlib, sys, time
import torch
import anabranch as ab

folder, cut_at, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
job = ab.job()
torch.manual_seed(0)
model = torch.nn.Sequential(
    ab.RemoteEmbedding("t", 50, 8, mode="sum"),
    ab.RemoteExpert(f"expert.{job.rank}", ab.Directory(job.directory)),
    torch.nn.Linear(8, 1),
)
step = ab.TrainStep(model, lambda m, ids: m(ids).square().mean(), torch.optim.Adam(model.parameters(), lr=0.1))
losses = []
with ab.Executor(step, comm_mode="Hybrid", heartbeat=15.0) as executor:
    for number in range(steps):
        if number == cut_at and job.rank == 0:
            print("cut now", flush=True)
            while not (folder / "go").exists():
                time.sleep(0.01)
        ids = torch.arange(6).reshape(3, 2) * (number + 1 + job.rank) % 50
        losses.append(executor.run(batch=ids)["loss"].item())
(folder / f"losses-{job.rank}.json").write_text(json.dumps(losses))
"""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_keys(folder, job="two-hosts")
    return folder


def _serve(stack: ExitStack, host: Host, keys: Path, what: str, *options: object) -> str:
    """Serve something on a host, and return its endpoint; silence is a loss after 30 seconds."""
    words = ["serve", what, "--listen", f"tcp://{host.address}:0", "--keys", keys, "--heartbeat", 15, *options]
    serving = stack.enter_context(start_on(host, "-m", "anabranch.cli", *words))
    line = serving.stdout.readline()
    assert line.startswith("listening on "), line
    return line.removeprefix("listening on ").strip()


def _losses(
    folder: Path, keys: Path, workers: Host, services: Host, *, at_cut: Callable[[], object] = lambda: None
) -> list[list[float]]:
    """Run the job, and return the losses of both ranks; ``at_cut`` is called between two steps."""
    (folder / "train.py").write_text(TRAIN)
    with ExitStack() as stack:
        serve = partial(_serve, stack, services, keys)
        directory = serve("directory")
        servers = serve("parameters")
        expert = ["--module", "two_hosts:seeded_linear", "--optimizer", "sgd", "--lr", 0.1]
        serve("experts", "--uids", "expert.[0:2]", "--directory", directory, *expert)
        where = {"ANABRANCH_KEYS": str(keys), "ANABRANCH_SERVERS": servers, "ANABRANCH_DIRECTORY": directory}
        words = [folder / "train.py", folder, CUT_AT, STEPS]
        training = [
            stack.enter_context(start_on(workers, *words, environment={**where, **_environment_of(rank)}))
            for rank in range(2)
        ]
        assert training[0].stdout.readline() == "cut now\n"
        at_cut()
        (folder / "go").touch()
        assert [worker.wait(LIMIT) for worker in training] == [0, 0]
    return [json.loads((folder / f"losses-{rank}.json").read_text()) for rank in range(2)]


def _environment_of(rank: int) -> dict[str, str]:
    """What ``torchrun`` sets."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 29400}
    return {
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        **{name: str(value) for name, value in names.items()},
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, keys: Path) -> list[list[float]]:
    with two_hosts() as (workers, services, _):
        return _losses(tmp_path_factory.mktemp("undisturbed"), keys, workers, services)


def test_a_slow_and_late_network_changes_no_loss(tmp_path: Path, keys: Path, undisturbed: list[list[float]]) -> None:
    with two_hosts(delay=0.02, bits_per_second=200e6) as (workers, services, _):
        assert _losses(tmp_path, keys, workers, services) == undisturbed
    assert len(set(undisturbed[0])) == STEPS, "it learns"


def test_ten_seconds_without_a_network_change_no_loss(
    tmp_path: Path, keys: Path, undisturbed: list[list[float]]
) -> None:
    with two_hosts() as (workers, services, cable):

        def cut() -> None:
            cable.cut(10.0)

        assert _losses(tmp_path, keys, workers, services, at_cut=cut) == undisturbed
        assert cable.swallowed() > 0, "the job had nothing to say while the network was gone"

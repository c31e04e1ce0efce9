"""job(): the facts that a process reads from its environment, and the errors for a broken one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

import anabranch as ab
import anabranch.job
from anabranch.job import Job, job
from anabranch.launch import roles


def test_without_a_launcher_the_process_is_a_job_of_one_worker() -> None:
    assert job({}) == Job(rank=0, world_size=1, local_rank=0, role="worker", servers=(), experts=0, directory=None)


def test_services_are_named_in_the_environment() -> None:
    found = job(
        {
            "ANABRANCH_SERVERS": "unix:/run/a,tcp://ps:1",
            "ANABRANCH_DIRECTORY": "tcp://dir:2",
            "ANABRANCH_EXPERTS": "2",
            "ANABRANCH_ROLE": "expert",
        }
    )
    assert found.servers == ("unix:/run/a", "tcp://ps:1")
    assert found.directory == "tcp://dir:2"
    assert found.experts == 2
    assert found.role == "expert"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "two"}, "RANK='two' is not a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is out of range for WORLD_SIZE=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1 is out of range for WORLD_SIZE=2"),
        ({"RANK": "1"}, "RANK=1 is out of range for WORLD_SIZE=1"),
        ({"ANABRANCH_ROLE": "boss"}, "ANABRANCH_ROLE='boss' is not a role"),
    ],
)
def test_a_broken_environment_is_a_value_error_that_names_the_variable(
    environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        job(environment)


def test_an_expert_process_knows_how_many_workers_there_are() -> None:
    assert job({"ANABRANCH_ROLE": "expert", "WORLD_SIZE": "2", "ANABRANCH_WORKERS": "3"}).workers == 3
    assert job({"WORLD_SIZE": "2"}).workers == 2


# What a job can do.


def linear(index: int, count: int) -> list[ab.ExpertBackend]:
    return [ab.ExpertBackend(f"linear.{index}", torch.nn.Linear(2, 2), args_schema=[ab.TensorSpec(2)])]


def test_alone_a_process_serves_its_experts_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as until_the_end:  # of the process, elsewhere
        monkeypatch.setattr(roles, "_alone", until_the_end)
        directory = job({}).serve(linear)
        assert directory.active(["linear"]) == {"linear": [0]}
        assert ab.RemoteExpert("linear.0", directory)(torch.ones(3, 2)).shape == (3, 2)


def test_several_workers_without_servers_are_refused() -> None:
    with pytest.raises(ValueError, match="2 workers but no process that serves experts.*--experts N"):
        job({"WORLD_SIZE": "2"}).serve(linear)


def test_an_expert_process_without_a_directory_is_an_error() -> None:
    with pytest.raises(ValueError, match="ANABRANCH_DIRECTORY"):
        job({"ANABRANCH_ROLE": "expert"}).serve(linear)


def test_an_expert_process_that_serves_off_the_main_thread_is_an_error() -> None:
    expert = job({"ANABRANCH_ROLE": "expert", "ANABRANCH_DIRECTORY": "unix:/run/directory"})
    with ThreadPoolExecutor(1) as threads, pytest.raises(RuntimeError, match=r"call job\.serve in the main thread"):
        threads.submit(expert.serve, linear).result()


def test_a_worker_names_the_experts_that_did_not_come() -> None:
    with ab.DirectoryServer() as server:
        server.directory.announce(["anabranch-expert.1"], "unix:/nowhere", ttl=60.0)
        waiting = job({"ANABRANCH_DIRECTORY": server.endpoint, "ANABRANCH_EXPERTS": "3"})
        with pytest.raises(ab.DeadlineExceeded, match="2 of 3 expert processes") as raised:
            waiting.serve(linear, timeout=1.0)
        assert raised.value.peer == "expert 0, expert 2"
        server.directory.announce(["anabranch-expert.0", "anabranch-expert.2"], "unix:/nowhere", ttl=60.0)
        assert waiting.serve(linear, timeout=30.0).active(["anabranch-expert"]) == {"anabranch-expert": [0, 1, 2]}


@pytest.mark.parametrize(("data", "pipeline"), [(2, 2), (3, 1), (0, 2), (-1, -2)])
def test_a_grid_of_another_size_is_refused_with_the_numbers(data: int, pipeline: int) -> None:
    with pytest.raises(ValueError, match=f"data={data} times pipeline={pipeline} .* the job has 2 workers"):
        job({"WORLD_SIZE": "2"}).grid(data=data, pipeline=pipeline)


def test_a_single_process_is_a_grid() -> None:
    try:
        grid = job({}).grid()
        for group in (grid.data_group, grid.pipeline_group):
            value = torch.ones(1)
            torch.distributed.all_reduce(value, group=group)
            assert value.item() == 1.0
        assert (grid.data_rank, grid.pipeline_rank) == (0, 0)
    finally:
        torch.distributed.destroy_process_group()

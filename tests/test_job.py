"""job(): what a process learns about itself from its environment, and what it says about a broken one."""

from __future__ import annotations

import pytest

import anabranch as ab
import anabranch.job
from anabranch.job import Job, job


def test_the_module_and_the_function_share_a_name() -> None:
    assert ab.job is job
    assert anabranch.job is job
    assert ab.Job is Job


def test_without_a_launcher_the_process_is_a_job_of_one_worker() -> None:
    assert job({}) == Job(rank=0, world_size=1, local_rank=0, role="worker", servers=(), experts=0, directory=None)


def test_the_process_s_own_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert job() == Job(rank=3, world_size=4, local_rank=1)


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
        ({"RANK": "two"}, "RANK='two' is no whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 lies outside WORLD_SIZE=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1 lies outside WORLD_SIZE=2"),
        ({"RANK": "1"}, "RANK=1 lies outside WORLD_SIZE=1"),
        ({"ANABRANCH_ROLE": "boss"}, "ANABRANCH_ROLE='boss' is no role"),
    ],
)
def test_a_broken_environment_is_a_value_error_that_names_the_variable(
    environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        job(environment)

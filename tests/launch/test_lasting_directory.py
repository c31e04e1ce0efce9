"""``anabranch run --directory``: a job whose directory was there before it, and is there after it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from jobs import launch
from typer.testing import CliRunner

import anabranch as ab
from anabranch.cli.app import _app
from redis_servers import RealRedis, redis

__all__ = ["redis"]

Script = Callable[[str], Path]
LIMIT = 200.0

JOB = """
import json, os, pathlib, signal, sys, time
import torch
import anabranch as ab

here = pathlib.Path(sys.argv[1])
job = ab.job()

def make_backends(index, count):
    part = here / "part"
    part.write_text(str(os.getpid()))
    part.rename(here / f"pid-{index}")
    return [ab.ExpertBackend(f"ffn.{index}", torch.nn.Identity(), args_schema=[ab.TensorSpec(2)])]

directory = job.serve(make_backends)
x = torch.ones(1, 2)
expert = ab.RemoteExpert("ffn.0", directory)
expert(x)
"""

CALLS = (
    JOB
    + """
print(json.dumps({"listens": directory.lookup(["ffn.0"])["ffn.0"], "others": directory.active(["other"])["other"],
                  "directory": repr(directory)}))
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(("host", "listens", "others"), [(None, "unix:", [7]), ("127.0.0.1", "tcp://127.0.0.1:", [])])
def test_experts_are_announced_in_redis_and_those_of_others_found(
    script: Script, tmp_path: Path, redis: RealRedis, host: str | None, listens: str, others: list[int]
) -> None:
    backend = ab.ExpertBackend("other.7", torch.nn.Identity(), args_schema=[ab.TensorSpec(2)])
    # The mark of another job's expert process is not one of ours.
    ab.RedisDirectory(redis.url).announce(["anabranch-expert.0"], "unix:/nowhere", ttl=600.0)
    with ab.ExpertServer([backend], directory=redis.url):
        outcome = launch(
            script(CALLS), [str(tmp_path)], experts=1, host=host, log_dir=tmp_path, directory=redis.url, seconds=LIMIT
        )
        assert outcome.exit_code == 0, outcome
        assert ab.RedisDirectory(redis.url).active(["other"]) == {"other": [7]}
    told = json.loads((tmp_path / "worker-0.log").read_text())
    assert told["listens"].startswith(listens)
    assert told["others"] == others, "with certificates made for the job alone it sees nobody else"
    assert told["directory"] == f"RedisDirectory('{redis.url}')"
    assert ab.RedisDirectory(redis.url).active(["ffn"]) == {"ffn": []}, "withdrawn at the end"


def test_a_redis_that_does_not_answer_is_reported_before_anything_starts(script: Script) -> None:
    pytest.importorskip("redis")
    path = script("raise SystemExit(3)")
    found = CliRunner().invoke(_app, ["run", "--directory", "redis://:secret@127.0.0.1:1", str(path)])
    assert found.exit_code == 1
    assert "no Redis server answers there" in found.output
    assert "secret" not in found.output

"""``anabranch run --directory``: a job whose directory was there before it, and is there after it."""

from __future__ import annotations

import json

import pytest
import torch
from jobs import Ends, Script
from typer.testing import CliRunner

import anabranch as ab
from anabranch.cli.app import _app
from redis_servers import RealRedis, redis

__all__ = ["redis"]

LIMIT = 200.0

CALLS = """
import json
import torch
import anabranch as ab

def make_backends(index, count):
    return [ab.ExpertBackend(f"ffn.{index}", torch.nn.Identity(), args_schema=[ab.TensorSpec(2)])]

directory = ab.job().serve(make_backends)
ab.RemoteExpert("ffn.0", directory)(torch.ones(1, 2))
print(json.dumps({"listens": directory.lookup(["ffn.0"])["ffn.0"], "others": directory.active(["other"])["other"],
                  "directory": repr(directory)}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("host", "listens", "others"), [(None, "unix:", [7]), ("127.0.0.1", "tcp://127.0.0.1:", [])])
def test_experts_are_announced_in_redis_and_those_of_others_found(
    ended: Ends, redis: RealRedis, host: str | None, listens: str, others: list[int]
) -> None:
    backend = ab.ExpertBackend("other.7", torch.nn.Identity(), args_schema=[ab.TensorSpec(2)])
    # The mark of another job's expert process is not one of ours.
    ab.RedisDirectory(redis.url).announce(["anabranch-expert.0"], "unix:/nowhere", ttl=600.0)
    with ab.ExpertServer([backend], directory=redis.url):
        job = ended(CALLS, workers=1, experts=1, host=host, directory=redis.url, seconds=LIMIT)
        assert ab.RedisDirectory(redis.url).active(["other"]) == {"other": [7]}
    told = json.loads(job.texts[0])
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

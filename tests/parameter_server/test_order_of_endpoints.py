"""Clients that take a server for another shard: refused with each request, before anything is done."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from anabranch.errors import SchemaError
from anabranch.parameter_server import ParameterClient, ParameterServer, Worker
from anabranch.transport import MemoryTransport

SGD = functools.partial(torch.optim.SGD, lr=1.0)
NAMES = ["bias", "b2", "w"]  # not all on one shard


@pytest.fixture
def network() -> Iterator[MemoryTransport]:
    """Two shards of two, and a server that is alone."""
    with ExitStack() as stack:
        network = MemoryTransport()
        for listen, shard, shards in [("memory:s0", 0, 2), ("memory:s1", 1, 2), ("memory:alone", 0, 1)]:
            stack.enter_context(ParameterServer(shard, shards, listen, transport=network))
        yield network


@pytest.mark.parametrize(
    ("endpoints", "said"),
    [
        ("s1 s0", r"endpoint [01] \(memory:s[01]\) of the client's 2 is shard [01] of 2; name the .* in their order"),
        ("s0", r"endpoint 0 \(memory:s0\) of the client's 1 is shard 0 of 2; name the endpoints of all 2 shards"),
        ("s0 s1 alone", "client's 3 is shard . of .; .*or for 3 start each server with its --shard and --shards 3"),
        ("alone s1", r"endpoint 0 \(memory:alone\) of the client's 2 is shard 0 of 1"),
    ],
)
def test_endpoints_that_are_other_shards_are_refused_and_nothing_is_changed(
    endpoints: str, said: str, network: MemoryTransport
) -> None:
    """Clients with the endpoints in two orders each had parameters of their own under one name, unnoticed."""
    with ParameterClient(["memory:s0", "memory:s1"], transport=network, timeout=60) as right:
        for name in NAMES:
            right.init(name, (1,), optimizer=SGD)
        right.init("rows", (10, 1), kind="rows", optimizer=SGD)
        wrong_endpoints = [f"memory:{name}" for name in endpoints.split()]
        with ParameterClient(wrong_endpoints, transport=network, timeout=60) as wrong:
            refused = pytest.raises(SchemaError, match=said)
            for name in NAMES:
                with refused:
                    wrong.pull(name)
            with refused:
                wrong.init("rows", (10, 1), kind="rows", optimizer=SGD)
            with refused:
                wrong.drop("rows")
            with refused:
                wrong.statistics()
        assert right.pull("rows").flatten().tolist() == [0.0] * 10
    with pytest.raises(SchemaError, match=said):  # a job's worker, at its start
        ParameterClient(wrong_endpoints, worker=Worker(0, 1), transport=network, timeout=60)


def test_dense_parameters_are_made_only_on_the_shard_that_their_name_belongs_to(network: MemoryTransport) -> None:
    with ParameterClient(["memory:s1", "memory:s0"], transport=network, timeout=60) as client:
        for name in NAMES:
            with pytest.raises(SchemaError, match="name the endpoints of all 2 shards in their order"):
                client.init(name, (1,), optimizer=SGD)
    with ParameterClient(["memory:s0", "memory:s1"], transport=network, timeout=60) as client:
        assert [described["dense"] for described in client.calls.describe()] == [[], []]


def test_another_shard_at_a_known_address_is_noticed() -> None:
    network = MemoryTransport()
    with ParameterClient(["memory:here"], transport=network, timeout=60) as client:
        with ParameterServer(0, 1, "memory:here", transport=network):
            client.init("bias", (1,), optimizer=SGD)
            client.push("bias", torch.ones(1))
        with (
            ParameterServer(1, 2, "memory:here", transport=network),
            pytest.raises(SchemaError, match=r"endpoint 0 \(memory:here\) of the client's 1 is shard 1 of 2"),
        ):
            client.push("bias", torch.ones(1))


def test_an_endpoint_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="endpoints names memory:s0 more than once; name each shard once"):
        ParameterClient(["memory:s0", "memory:s0"])

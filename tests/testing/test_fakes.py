"""The fakes that are shipped for users' tests: they behave as documented, and refuse senseless arguments."""

from __future__ import annotations

import pytest

from anabranch.deadline import Deadline
from anabranch.record.spans import fault_point
from anabranch.testing import FakeClock, LossyTransport, MemoryTransport, faults
from anabranch.transport import Call, Client, Request, Server, Verb


def test_time_advances_only_when_moved_and_never_backwards() -> None:
    clock = FakeClock(5.0)
    deadline = Deadline.after(1.0, clock)
    assert clock() == 5.0
    assert not deadline.expired()
    clock.advance(1.0)
    assert deadline.expired()
    with pytest.raises(ValueError, match="forward"):
        clock.advance(-0.1)


def test_a_fault_strikes_at_its_passage_and_only_there() -> None:
    struck: list[int] = []
    with faults.at("here", 2, lambda: struck.append(1)) as fault:
        for _ in range(3):
            fault_point("here")
            fault_point("elsewhere")
        assert fault.passed == 3
    fault_point("here")
    assert struck == [1]
    with faults.at("here"), pytest.raises(faults.FaultInjected, match="here, passage 1"):
        fault_point("here")
    with pytest.raises(ValueError, match="counted from 1"), faults.at("here", 0):
        pass
    with faults.at("here"), pytest.raises(RuntimeError, match="already"), faults.at("there"):
        pass


@pytest.mark.parametrize("options", [{"drop": 1.5}, {"duplicate": -0.1}, {"delay": -1.0}, {"bandwidth": 0.0}])
def test_a_network_cannot_fail_more_than_always(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        LossyTransport(**options)  # type: ignore[arg-type]


def faults_of(seed: int) -> tuple[int, int, int]:
    network = MemoryTransport()
    lossy = LossyTransport(drop=0.3, duplicate=0.3, seed=seed, transport=network)
    served = [0]

    def count(call: Call) -> None:
        served[0] += 1
        call.reply()

    verb = Verb("count", count, once=True)
    with Server([verb], transport=network) as server, Client(transport=lossy, retries=100) as client:
        for _ in range(30):
            client.call(Request(server.endpoint, "count", once=True), Deadline.after(30.0))
    assert served[0] == 30
    return lossy.dropped, lossy.duplicated, served[0]


def test_the_same_seed_makes_the_same_faults() -> None:
    assert faults_of(7) == faults_of(7)
    assert faults_of(7) != faults_of(8)


def test_a_network_in_memory_takes_each_name_once() -> None:
    network = MemoryTransport()
    verb = Verb("nothing", lambda call: call.reply())
    with Server([verb], transport=network, listen="memory:here"), pytest.raises(ValueError, match="already served"):
        network.listen("memory:here")
    with pytest.raises(ValueError, match="memory:NAME"):
        network.listen("unix:/x")
    with Server([verb], transport=network, listen="memory:here") as server:
        assert server.endpoint == "memory:here"

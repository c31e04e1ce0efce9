"""The open sessions of a server: their time to live, their owners, and their memory."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from expert_modules import CausalBlock, causal_backend
from torch import Tensor, nn

from anabranch.deadline import Deadline
from anabranch.errors import SchemaError, SessionGone
from anabranch.experts import ExpertBackend
from anabranch.experts.server.sessions import LEAST_BYTES, Sessions, Step, bytes_held
from anabranch.experts.wire import StepHeader
from anabranch.tensors import TensorSpec
from anabranch.testing import FakeClock


def step_of(key: bytes, number: int = 0, *, rows: int = 1, length: int = 1, ttl: float = 10.0) -> Step:
    return Step(StepHeader(key, number, 8, ttl), rows, length, 0, 0)


def take(sessions: Sessions, backend: ExpertBackend, step: Step) -> None:
    sessions.take(step, backend, [torch.ones(step.rows, step.length, 8)])


def test_a_step_that_waits_for_the_device_longer_than_the_ttl_keeps_its_session() -> None:
    clock = FakeClock()
    sessions, backend = Sessions(1 << 30, clock), causal_backend()
    take(sessions, backend, step_of(b"a"))
    sessions.check(step_of(b"a", 1), backend, Deadline.after(30.0))
    clock.advance(29.0)
    take(sessions, backend, step_of(b"a", 1))
    clock.advance(9.0)
    sessions.check(step_of(b"a", 2), backend, Deadline.after(1.0))
    clock.advance(11.0)
    with pytest.raises(SessionGone, match="its time to live"):
        sessions.check(step_of(b"a", 2), backend, Deadline.after(1.0))


@pytest.mark.parametrize("number", [0, 1])
def test_a_step_that_is_computed_for_longer_than_the_ttl_keeps_its_session(number: int) -> None:
    clock = FakeClock()
    slow = 3

    class Passing(CausalBlock):
        def make_cache(self, rows: int, max_length: int) -> dict[str, Tensor]:
            clock.advance(11.0)
            sessions._sweep()
            return super().make_cache(rows, max_length)

        def forward(self, x: Tensor, cache: dict[str, Tensor] | None = None) -> Tensor:
            if x.shape[1] == slow:
                sessions.check(step_of(b"a", number, length=slow), backend, Deadline.after(1.0))  # asked for again
                clock.advance(11.0)
                sessions._sweep()
            return super().forward(x, cache)

    sessions = Sessions(1 << 30, clock)
    backend = ExpertBackend("block.0", Passing(), args_schema=[TensorSpec(None, 8)])
    for step in range(number):
        take(sessions, backend, step_of(b"a", step))
    take(sessions, backend, step_of(b"a", number, length=slow))
    take(sessions, backend, step_of(b"a", number + 1))
    clock.advance(11.0)
    with pytest.raises(SessionGone, match="its time to live"):
        sessions.check(step_of(b"a", number + 2), backend, Deadline.after(1.0))


def test_a_first_step_after_the_end_opens_nothing() -> None:
    sessions, backend = Sessions(1 << 30, FakeClock()), causal_backend()
    sessions.end(b"a", "the session was ended by its caller")
    with pytest.raises(SessionGone, match="ended by its caller"):
        take(sessions, backend, step_of(b"a"))
    assert not backend.open_sessions


def test_a_session_belongs_to_its_expert() -> None:
    sessions = Sessions(1 << 30, FakeClock())
    one, other = causal_backend("block.0"), causal_backend("block.1")
    take(sessions, one, step_of(b"a"))
    for number in (0, 1):
        with pytest.raises(SessionGone):
            take(sessions, other, step_of(b"a", number))
    assert (one.open_sessions, other.open_sessions, len(sessions)) == (1, 0, 1)


def test_counted_memory_is_released_on_every_path() -> None:
    class Refusing(CausalBlock):
        def make_cache(self, rows: int, max_length: int) -> dict[str, Tensor]:
            if rows == 2:
                raise ZeroDivisionError
            return {"room": torch.zeros(LEAST_BYTES if rows == 3 else 0)}

        def forward(self, x: Tensor, cache: dict[str, Tensor] | None = None) -> Tensor:
            if len(x) == 4:
                raise ZeroDivisionError
            return x * 1.0

    clock = FakeClock()
    backend = ExpertBackend("block.0", Refusing(), args_schema=[TensorSpec(None, 8)])
    sessions = Sessions(3 * LEAST_BYTES, clock)
    take(sessions, backend, step_of(b"ended"))
    sessions.end(b"ended", "")
    take(sessions, backend, step_of(b"expired"))
    for rows, error in ((2, ZeroDivisionError), (3, SchemaError), (4, ZeroDivisionError)):
        with pytest.raises(error):
            take(sessions, backend, step_of(bytes([rows]), rows=rows))
    clock.advance(11.0)
    take(sessions, backend, step_of(b"left"))
    assert backend.open_sessions == len(sessions) == 1
    sessions.close()
    assert (backend.open_sessions, len(sessions), sessions.nbytes) == (0, 0, 0)


@dataclass(slots=True)
class Layer:
    keys: Tensor
    module: nn.Module


class Cache:
    def __init__(self, *layers: Layer) -> None:
        self.layers = layers
        self.itself = self


def test_the_bytes_of_a_cache_are_those_of_its_tensors_wherever_they_are() -> None:
    keys = torch.zeros(10)
    cache = Cache(
        Layer(keys, nn.Linear(9, 9)), Layer(keys[2:], nn.Linear(9, 9)), Layer(torch.zeros(5), nn.Linear(9, 9))
    )
    assert (
        bytes_held(cache, [keys.view(2, 5)], {"more": (torch.zeros(1, dtype=torch.float64), None, "text", 3.0)}) == 68
    )

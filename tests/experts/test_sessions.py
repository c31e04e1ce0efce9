"""Inference sessions: a sequence continued on the server equals the one computed locally, and is private."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from expert_modules import CausalBlock, calling, causal_backend, expert_of, served, together
from torch import Tensor, nn

from anabranch.deadline import Deadline
from anabranch.errors import CaptureError, NonFinite, NotFound, Overloaded, RemoteError, SchemaError, SessionGone
from anabranch.executor import EvalStep, Executor
from anabranch.experts import Directory, ExpertBackend, InferenceSession, RemoteExpert
from anabranch.experts.server.sessions import LEAST_BYTES, Sessions, Step
from anabranch.experts.wire import StepHeader
from anabranch.observe import expert_metrics
from anabranch.tensors import TensorSpec
from anabranch.testing import FakeClock, LossyTransport, MemoryTransport
from anabranch.transport import Client
from toys import assert_same
from waiting import wait_until

ONE = torch.ones(1, 1, 8)


def locally(module: CausalBlock, pieces: list[Tensor]) -> list[Tensor]:
    """What the module here gives for a sequence that comes in pieces."""
    here = CausalBlock().to(pieces[0].dtype).eval()
    here.load_state_dict(module.state_dict())
    with torch.no_grad():
        cache = here.make_cache(len(pieces[0]), 100)
        return [here(piece, cache=cache) for piece in pieces]


def pieces_of(
    rows: int = 2, lengths: tuple[int, ...] = (3, 1, 1, 2, 1), dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    return [torch.randn(rows, length, 8, dtype=dtype) for length in lengths]


@contextmanager
def stepping(backend: ExpertBackend | None = None, *, ttl: float = 60.0) -> Iterator[InferenceSession]:
    """A session of 8 positions."""
    with calling(backend or causal_backend()) as expert, expert.session(8, ttl=ttl) as session:
        yield session


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sequence_continued_remotely_is_bit_for_bit_the_one_continued_here(dtype: torch.dtype) -> None:
    backend, pieces = causal_backend(dtype=dtype), pieces_of(dtype=dtype)
    with stepping(backend) as session:
        came = [session.step(piece) for piece in pieces]
    assert all(map(torch.equal, came, locally(backend.module, pieces)))
    with torch.no_grad():
        whole = backend.module.eval()(torch.cat(pieces, 1))
    exact = {"rtol": 1e-12, "atol": 1e-12} if dtype is torch.float64 else {}
    torch.testing.assert_close(torch.cat(came, 1), whole, **exact)


def test_sessions_of_several_callers_do_not_mix() -> None:
    backend = causal_backend()
    inputs = [pieces_of(rows=1 + index % 3) for index in range(8)]
    with served(backend) as server:

        def run(index: int) -> list[Tensor]:
            with RemoteExpert("block.0", server.endpoint).session(8) as session:
                return [session.step(piece) for piece in inputs[index]]

        outcomes = together(8, run)
    for outcome, pieces in zip(outcomes, inputs, strict=True):
        assert isinstance(outcome, list)
        assert all(map(torch.equal, outcome, locally(backend.module, pieces)))


def test_a_session_runs_in_eval_mode_without_gradients_and_changes_nothing_of_the_expert() -> None:
    backend = causal_backend()
    before = copy.deepcopy(backend.module.train())
    with stepping(backend) as session:
        x = torch.randn(2, 3, 8, requires_grad=True)
        y = session.step(x)
        assert torch.equal(y, locally(backend.module, [x])[0])
        assert not y.requires_grad
        assert all(not tensor.requires_grad for tensor in backend.module.made[-1].values())
    assert all(part.training for part in backend.module.modules())
    assert backend.updates == 0
    assert_same(backend.module, before)


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (torch.ones(3, 1, 8), "the session has 2 rows, step 1 brings 3"),
        (torch.ones(2, 0, 8), "at least one row and one position, got 2 and 0"),
        (torch.ones(0, 1, 8), "at least one row and one position, got 0 and 1"),
        (torch.ones(2, 6, 8), "3 positions; 6 more exceed its max_length, 8"),
        (torch.ones(2, 1, 7), r"expected \(rows, any, 8\) float32, got \(2, 1, 7\)"),
        (torch.ones(2, 8), r"expected \(rows, any, 8\)"),
        (torch.full((2, 1, 8), float("nan")), "holds NaN or Inf"),
        (None, "NoneType"),
    ],
    ids=["other-rows", "no-position", "no-row", "too-long", "width", "no-sequence", "nan", "nothing"],
)
def test_a_step_that_does_not_fit_is_refused_and_the_session_continues(x: Tensor, says: str) -> None:
    backend, pieces = causal_backend(), pieces_of()
    with stepping(backend) as session:
        with pytest.raises(SchemaError, match="0 positions; 9 more exceed its max_length, 8"):
            session.step(torch.ones(2, 9, 8))
        came = [session.step(pieces[0])]
        with pytest.raises((SchemaError, NonFinite), match=says):
            session.step(x)
        assert session.length == 3
        came += [session.step(piece) for piece in pieces[1:]]
    assert all(map(torch.equal, came, locally(backend.module, pieces)))


# --- ends


def test_the_end_frees_the_cache_at_once_and_a_later_step_is_an_error() -> None:
    backend = causal_backend()
    with served(backend) as server:
        with RemoteExpert("block.0", server.endpoint).session(8) as session:
            session.step(torch.ones(1, 2, 8))
            statistics = server.statistics()
            assert statistics.sessions == {"block.0": 1} == {"block.0": backend.open_sessions}
            assert statistics.session_bytes == LEAST_BYTES
            samples = [sample for family in expert_metrics(server) for sample in family.samples]
            metrics = {sample.name: (sample.labels, sample.value) for sample in samples if "session" in sample.name}
            assert metrics["anabranch_expert_sessions"] == ({"uid": "block.0"}, 1.0)
            assert metrics["anabranch_expert_session_bytes"] == ({}, LEAST_BYTES)
        assert backend.open_sessions == 0
        assert server.statistics().session_bytes == 0
        session.end()
        with pytest.raises(ValueError, match="was ended; open another"):
            session.step(ONE)
        assert repr(session) == "InferenceSession('block.0', ended)"


def test_a_session_without_a_step_for_its_ttl_is_freed_and_reported_as_gone() -> None:
    clock, backend = FakeClock(), causal_backend()
    with calling(backend, clock=clock) as expert:
        with expert.session(8, ttl=10.0) as session:
            for _ in range(3):  # each step renews it
                session.step(ONE)
                clock.advance(9.9)
            clock.advance(0.2)
            wait_until(lambda: not backend.open_sessions)  # nobody needs to ask
            with pytest.raises(SessionGone, match="no step for 10 s, its time to live"):
                session.step(ONE)
            assert isinstance(SessionGone(), NotFound)
        with expert.session(8, ttl=10.0) as another:
            another.step(ONE)
        with expert.session(8, ttl=3601.0) as long, pytest.raises(SchemaError, match="at most 3600 s, got ttl=3601"):
            long.step(ONE)


def test_a_restarted_server_reports_that_the_session_is_gone(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    endpoint = f"unix:{tmp_path}/experts"
    session = RemoteExpert("block.0", endpoint).session(8)
    with served(causal_backend(), listen=endpoint):
        session.step(ONE)
    with served(causal_backend(), listen=endpoint), pytest.raises(NotFound, match="has restarted since"):
        session.step(ONE)
    with served(causal_backend(dtype=torch.float64), listen=endpoint), session, pytest.raises(SessionGone):
        session.step(ONE)


def test_a_first_step_follows_its_expert_that_has_moved_or_changed_its_schema(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    directory, endpoint = Directory(), f"unix:{tmp_path}/experts"
    with Client(retries=1) as client:
        expert = RemoteExpert("block.0", directory, client=client)
        with served(causal_backend(), directory=directory):
            expert.get_info()
        with served(causal_backend(), directory=directory), expert.session(8) as session:
            assert session.step(ONE).shape == (1, 1, 8)
        expert = RemoteExpert("block.0", endpoint, client=client)
        with served(causal_backend(dtype=torch.float64), listen=endpoint):
            expert.get_info()
        with served(causal_backend(), listen=endpoint), expert.session(8) as session:
            with pytest.raises(SchemaError, match="float64"):
                session.step(ONE)
            with pytest.raises(SchemaError, match="expected .* float32"):
                session.step(ONE.double())
            assert session.step(ONE).dtype is torch.float32


# --- exactly once


def test_a_step_that_the_network_repeats_advances_its_sequence_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.experts.client.remote_expert._FAREWELL", 60.0)
    backend, network = causal_backend(), MemoryTransport()
    lossy = LossyTransport(drop=0.3, duplicate=0.3, seed=3, transport=network)
    pieces = pieces_of(lengths=(3,) + (1,) * 30)
    with served(backend, transport=network) as server, Client(transport=lossy, retries=50) as client:
        with RemoteExpert("block.0", server.endpoint, client=client).session(40) as session:
            came = [session.step(piece) for piece in pieces]
        assert lossy.dropped
        assert lossy.duplicated
        wait_until(lambda: not backend.open_sessions)
    assert all(map(torch.equal, came, locally(backend.module, pieces)))


def test_a_step_that_was_taken_is_not_answered_for_other_inputs() -> None:
    with stepping() as session:
        session.step(ONE)
        session.step(ONE)
        session._steps -= 1  # as if the answer had been lost
        session.length -= 1
        with pytest.raises(SchemaError, match="step 1 was already taken, with other inputs"):
            session.step(0 * ONE)
        session.step(ONE)
        session._steps += 3
        with pytest.raises(SchemaError, match="received step 5, but the session expects step 2"):
            session.step(0 * ONE)


class Failing(CausalBlock):
    def forward(self, x: Tensor, cache: dict[str, Tensor] | None = None) -> Tensor:
        y = super().forward(x, cache)
        if x.max() > 99:
            raise ZeroDivisionError("the module's own")
        return y


def backend_of(module: nn.Module, width: int = 8) -> ExpertBackend:
    return expert_of(module, uid="block.0", args_schema=[TensorSpec(None, width)], optimizer=None)


def test_a_step_that_fails_in_the_module_ends_its_session_alone() -> None:
    backend = backend_of(Failing())
    with calling(backend) as expert, expert.session(8) as failing, expert.session(8) as other:
        for session in (failing, other):
            session.step(ONE)
        with pytest.raises(RemoteError, match="the module's own"):
            failing.step(100 * ONE)
        with pytest.raises(SessionGone, match=r"step 1 failed in the module of block.0: ZeroDivisionError"):
            failing.step(ONE)
        assert backend.open_sessions == 1
        other.step(ONE)


# --- room


def test_a_server_without_room_says_so_until_another_session_has_ended() -> None:
    """However small its cache, a session counts 64 KiB."""
    says = r"1 sessions are open and count 65536 bytes; 65536 for this one exceed"
    with (
        calling(causal_backend(), session_bytes=2 * LEAST_BYTES - 1) as expert,
        expert.session(16) as first,
        expert.session(16) as second,
    ):
        first.step(torch.ones(1, 2, 8))
        with pytest.raises(Overloaded, match=says):
            second.step(ONE)
        first.end()
        assert second.step(ONE).shape == (1, 1, 8)


def test_a_step_counts_what_it_may_add_before_it_is_taken() -> None:
    width = LEAST_BYTES // 64  # a position of one row: 1/4 of 64 KiB in the cache, 1/16 as input
    with served(backend_of(CausalBlock(width), width), session_bytes=5 * LEAST_BYTES) as server:
        expert = RemoteExpert("block.0", server.endpoint)
        with expert.session(64) as first, expert.session(64) as second:
            first.step(torch.ones(1, 8, width))
            counted = server.statistics().session_bytes
            assert LEAST_BYTES < counted < 3 * LEAST_BYTES
            second.step(torch.ones(1, 1, width))
            with pytest.raises(Overloaded, match="2 sessions are open"):
                first.step(torch.ones(1, 8, width))
            assert server.statistics().session_bytes == counted + LEAST_BYTES
            second.end()
            with pytest.raises(SchemaError, match="the session alone needs"):
                first.step(torch.ones(1, 32, width))
            first.step(torch.ones(1, 1, width))


# --- what is not a session


def test_an_expert_without_sessions_names_the_missing_method() -> None:
    plain = ExpertBackend("plain.0", nn.Linear(8, 8), args_schema=[TensorSpec(None, 8)])
    fixed = ExpertBackend("fixed.0", CausalBlock(), args_schema=[TensorSpec(4, 8)])
    with served(plain, fixed) as server:
        for uid, x, says in (
            ("plain.0", ONE, r"a Linear, has no make_cache\(rows, max_length\)"),
            ("fixed.0", torch.ones(1, 4, 8), r"a dimension that varies, such as TensorSpec\(None, 512\)"),
        ):
            with RemoteExpert(uid, server.endpoint).session(8) as session, pytest.raises(SchemaError, match=says):
                session.step(x)


def test_a_session_is_not_part_of_a_graph() -> None:
    with stepping() as session:
        model = nn.Linear(8, 8)
        step = EvalStep(model, lambda model, batch: {"y": model(session.step(batch))})
        with (
            Executor({"evaluate": step}, engine="graph") as executor,
            pytest.raises(CaptureError, match="a session of block.0"),
        ):
            executor.run("evaluate", ONE)
        assert session.length == 0


def test_a_session_cannot_be_copied_or_pickled_but_its_expert_can() -> None:
    session = RemoteExpert("block.0", "unix:/nowhere").session(8)
    for carry in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="open another session there"):
            carry(session)


# --- the open sessions of a server: their time to live, their owners, and their memory


def step_of(key: bytes, number: int = 0, *, rows: int = 1, length: int = 1) -> Step:
    return Step(StepHeader(key, number, 8, 10.0), rows, length, 0, 0)


def take(sessions: Sessions, backend: ExpertBackend, step: Step) -> None:
    sessions.take(step, backend, [torch.ones(step.rows, step.length, 8)])


def test_a_step_that_waits_or_is_computed_for_longer_than_the_ttl_keeps_its_session() -> None:
    class Passing(CausalBlock):
        def make_cache(self, rows: int, max_length: int) -> dict[str, Tensor]:
            clock.advance(11.0)
            sessions.sweep()
            return super().make_cache(rows, max_length)

        def forward(self, x: Tensor, cache: dict[str, Tensor] | None = None) -> Tensor:
            if cache is not None:
                sessions.check(step_of(b"a", number), backend, Deadline.after(1.0))  # asked for again
                clock.advance(11.0)
                sessions.sweep()
            return super().forward(x, cache)

    clock, backend = FakeClock(), backend_of(Passing())
    sessions = Sessions(1 << 30, clock)
    for number in range(3):
        sessions.check(step_of(b"a", number), backend, Deadline.after(30.0))
        clock.advance(29.0)  # in the queue of the device
        take(sessions, backend, step_of(b"a", number))
    clock.advance(9.0)
    sessions.check(step_of(b"a", 3), backend, Deadline.after(1.0))
    clock.advance(11.0)
    with pytest.raises(SessionGone, match="its time to live"):
        sessions.check(step_of(b"a", 3), backend, Deadline.after(1.0))


def test_a_session_belongs_to_its_expert_and_an_end_before_its_first_step_is_its_end() -> None:
    sessions = Sessions(1 << 30, FakeClock())
    one, other = causal_backend("block.0"), causal_backend("block.1")
    take(sessions, one, step_of(b"a"))
    for number in (0, 1):
        with pytest.raises(SessionGone):
            take(sessions, other, step_of(b"a", number))
    sessions.end(b"b", "the session was ended by its caller")
    with pytest.raises(SessionGone, match="ended by its caller"):
        take(sessions, other, step_of(b"b"))
    assert (one.open_sessions, other.open_sessions) == (1, 0)


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

    clock, backend = FakeClock(), backend_of(Refusing())
    sessions = Sessions(3 * LEAST_BYTES, clock)
    take(sessions, backend, step_of(b"ended"))
    sessions.end(b"ended", "")
    take(sessions, backend, step_of(b"expired"))
    for rows, error in ((2, ZeroDivisionError), (3, SchemaError), (4, ZeroDivisionError)):
        with pytest.raises(error):
            take(sessions, backend, step_of(bytes([rows]), rows=rows))
    clock.advance(11.0)
    take(sessions, backend, step_of(b"left"))
    assert backend.open_sessions == 1
    sessions.close()
    assert (backend.open_sessions, sessions.nbytes) == (0, 0)

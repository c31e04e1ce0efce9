"""Mixtures: the manual sum over the responders, in outputs and gradients, whichever experts do not answer."""

from __future__ import annotations

import copy
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expert_modules import expert_of, four_servers, served, twins
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from anabranch.errors import BoundaryError, CheckpointError, DeadlineExceeded, NonFinite, NotFound, SchemaError
from anabranch.experts import (
    Directory,
    DirectoryServer,
    RemoteExpert,
    RemoteMixtureOfExperts,
    RemoteSwitchMixtureOfExperts,
)
from anabranch.experts.client.finder import FailureBackoff, beam_search
from anabranch.tensors import TensorSpec
from anabranch.testing import FakeClock
from anabranch.transport import Call, Client, Server, Verb
from programs import Program, Programs
from waiting import join


class Expert(nn.Module):
    """Linear, and as ill-behaved as a test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.fault: Exception | None = None
        self.factor = 1.0
        self.open = threading.Event()
        self.open.set()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.open.wait(timeout=60)
        if self.fault is not None:
            raise self.fault
        return self.linear(x) * self.factor


@contextmanager
def grid(*sizes: int, missing: Sequence[str] = (), servers: int = 1) -> Iterator[tuple[Directory, dict[str, Expert]]]:
    directory = Directory()
    uids = [f"ffn.{'.'.join(map(str, point))}" for point in itertools.product(*map(range, sizes))]
    experts = {uid: Expert() for uid in uids if uid not in missing}
    backends = {uid: expert_of(expert, uid=uid, optimizer=None) for uid, expert in experts.items()}
    for expert in experts.values():
        expert.calls = 0
    with ExitStack() as stack:
        for index in range(servers):
            mine = list(backends.values())[index::servers]
            stack.enter_context(served(*mine, directory=directory, drain_seconds=0.1))
        yield directory, experts


def mixture(directory: Directory, sizes: Sequence[int], **options: object) -> RemoteMixtureOfExperts:
    return RemoteMixtureOfExperts(4, sizes, directory, "ffn", **options).double()  # type: ignore[arg-type]


def by_hand(
    gate: nn.Linear, sizes: Sequence[int], experts: dict[str, Expert], x: Tensor, k: int, dead: Sequence[str] = ()
) -> Tensor:
    """Exhaustive search, then softmax over the responders, a row at a time."""
    rows = []
    for row in x:
        scores = gate(row).split(list(sizes))
        every = {
            f"ffn.{'.'.join(map(str, point))}": sum(grid[i] for grid, i in zip(scores, point, strict=True))
            for point in itertools.product(*map(range, sizes))
        }
        known = {uid: score for uid, score in every.items() if uid in experts}
        best = sorted(known, key=lambda uid: -float(known[uid].detach()))[:k]  # type: ignore[union-attr]
        responders = [uid for uid in best if uid not in dead]
        if not responders:
            rows.append(torch.zeros(4, dtype=x.dtype))
            continue
        weights = torch.softmax(torch.stack([known[uid] for uid in responders]), dim=0)  # type: ignore[arg-type]
        rows.append(
            sum(w * experts[uid].linear(row[None])[0] for w, uid in zip(weights, responders, strict=True))  # type: ignore[arg-type]
        )
    return torch.stack(rows)


def close(a: Tensor | None, b: Tensor | None) -> bool:
    assert a is not None
    assert b is not None
    return torch.allclose(a, b, rtol=0, atol=1e-12 * max(1.0, float(b.detach().abs().max())))


RAGGED = ("ffn.0.1", "ffn.0.2", "ffn.1.0", "ffn.1.1", "ffn.1.2", "ffn.2.2")


@pytest.mark.parametrize(
    ("sizes", "k", "missing", "dead", "options"),
    [
        ((5,), 2, (), {}, {}),
        ((3, 4), 4, (), {}, {}),
        ((2, 3, 2), 3, (), {}, {}),
        ((3,), 8, (), {}, {}),
        ((3, 3), 8, RAGGED, {}, {}),
        ((4,), 4, (), {"ffn.1": "RemoteError", "ffn.3": "NonFinite"}, {}),
        ((4,), 1, (), {"ffn.2": "RemoteError"}, {"allow_zero_outputs": True}),  # zeros for rows without responders
    ],
)
def test_a_mixture_is_the_manual_sum_over_the_responders_in_outputs_and_gradients(
    sizes: tuple[int, ...], k: int, missing: tuple[str, ...], dead: dict[str, str], options: dict[str, object]
) -> None:
    with grid(*sizes, missing=missing, servers=2) as (directory, experts):
        for uid, error in dead.items():
            experts[uid].fault = RuntimeError("broken") if error == "RemoteError" else None
            experts[uid].factor = float("nan")
        moe = mixture(directory, sizes, k_best=k, **options)
        twin = copy.deepcopy(moe.gate)
        near, far = twins(30, 4, dtype=torch.float64)
        output, expected = moe(far), by_hand(twin, sizes, experts, near, k, dead=list(dead))
        assert close(output, expected)
        assert (output == 0).all(dim=1).any() == bool(options)
        weights = torch.randn_like(output)
        (output * weights).sum().backward()
        (expected * weights).sum().backward()
        assert close(far.grad, near.grad)
        assert moe.statistics().failed == Counter(dead.values())
        assert close(moe.gate.weight.grad, twin.weight.grad)
        assert close(moe.gate.bias.grad, twin.bias.grad)
        # One call an expert, however many rows; what the second run in backward adds is put back.
        assert moe.statistics().calls == len(moe.statistics().rows)
        assert sum(moe.statistics().rows.values()) <= 30 * k
        assert all(expert.calls in (0, 1) for uid, expert in experts.items() if uid not in dead)


def test_stragglers_are_not_waited_for_once_every_row_has_its_answers() -> None:
    with grid(3, servers=3) as (directory, experts):
        moe = mixture(directory, (3,), k_best=3, k_min=2, timeout_after_k_min=0.05)
        x = torch.randn(4, 4, dtype=torch.float64)
        moe(x)
        before = moe.statistics().cancelled
        experts["ffn.1"].open.clear()
        output = moe(x)  # ends though the slow one does not
        experts["ffn.1"].open.set()
        assert close(output, by_hand(moe.gate, (3,), experts, x, 3, dead=["ffn.1"]))
        assert moe.statistics().cancelled == before + 1


def test_enough_is_counted_for_each_row_and_not_for_the_batch() -> None:
    with grid(2, servers=2) as (directory, experts):
        moe = mixture(directory, (2,), k_best=1, k_min=1, timeout_after_k_min=0.01)
        with torch.no_grad():  # each row asks one expert, of its own
            moe.gate.weight.copy_(torch.eye(2, 4))
            moe.gate.bias.zero_()
        x = torch.eye(2, 4, dtype=torch.float64)
        moe(x)
        experts["ffn.1"].open.clear()
        late = threading.Timer(0.1, experts["ffn.1"].open.set)  # long after the other row's answer
        late.start()
        assert close(moe(x), by_hand(moe.gate, (2,), experts, x, 1))
        join(late)
        assert moe.statistics().cancelled == 0


@pytest.mark.parametrize("fault", [RuntimeError("gone"), CheckpointError("gone"), NotFound("gone")])
def test_a_gradient_that_does_not_come_back_counts_against_backward_k_min(fault: Exception) -> None:
    with grid(2) as (directory, experts):
        for least in (2, 1):
            x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
            output = mixture(directory, (2,), k_best=2, backward_k_min=least)(x)
            experts["ffn.1"].fault = fault
            if least == 2:
                with pytest.raises(BoundaryError, match="gone") as caught:
                    output.sum().backward()
                assert caught.value.operation == "mixture.backward"
            else:
                output.sum().backward()
                assert x.grad is not None
                assert torch.isfinite(x.grad).all()
            experts["ffn.1"].fault = None


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"twice": 2 * x * mask[:, :, None]}


def test_inputs_with_dimensions_between_and_further_arguments() -> None:
    directory = Directory()
    schema = [TensorSpec(3, 4), TensorSpec(3, dtype=torch.bool)]
    experts = [expert_of(Masked(), uid=f"ffn.{i}", args_schema=schema) for i in range(3)]
    whole = expert_of(nn.Identity(), uid="whole.0", args_schema=[TensorSpec(4, dtype=torch.int64)])
    with served(*experts, whole, directory=directory):
        moe = RemoteMixtureOfExperts(4, [3], directory, "ffn", k_best=2)
        x, mask = torch.randn(5, 3, 4), torch.rand(5, 3) > 0.5
        assert torch.allclose(moe(x, mask)["twice"], 2 * x * mask[:, :, None], atol=1e-6)
        with pytest.raises(SchemaError, match="expected arguments"):
            moe(x)
        with pytest.raises(SchemaError, match="'whole' return .* int64, which has no mean"):
            RemoteMixtureOfExperts(4, [1], directory, "whole", k_best=1)(torch.randn(3, 4))


def test_a_gate_that_went_wrong_is_named() -> None:
    with grid(2) as (directory, _):
        moe = mixture(directory, (2,))
        nn.init.constant_(moe.gate.bias, float("nan"))
        with pytest.raises(NonFinite, match="gate"):
            moe(torch.randn(2, 4, dtype=torch.float64))


@pytest.mark.parametrize("kind", [RemoteMixtureOfExperts, RemoteSwitchMixtureOfExperts])
def test_an_input_that_the_gate_does_not_take_is_refused_before_anybody_is_asked(kind: Any) -> None:
    moe = kind(4, (2,), Directory(), "ffn").double()
    for x, says in (
        (torch.ones(2, 4), r"must be torch.float64, .* got torch.float32; give x.to\(torch.float64\)"),
        (torch.ones(2, 3, dtype=torch.float64), r"in_features=4, for its gate, got shape \(2, 3\)"),
        ([1.0], "the tensor for its gate, got a list"),
    ):
        with pytest.raises(SchemaError, match=says):
            moe(x)


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), k=st.integers(1, 6), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_beam_search_is_exhaustive_search_on_a_full_grid(sizes: list[int], k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    directory = Directory()
    uids = ["ffn." + ".".join(map(str, point)) for point in itertools.product(*map(range, sizes))]
    directory.announce(uids, "unix:/x", ttl=60.0)
    scores = [rng.normal(size=(3, size)) for size in sizes]
    found = beam_search(directory.active, "ffn", scores, k)
    for row in range(3):
        total = {
            uid: sum(grid[row, int(i)] for grid, i in zip(scores, uid.split(".")[1:], strict=True)) for uid in uids
        }
        best = sorted(total, key=lambda uid: -total[uid])[:k]
        assert [found.uids[slot] for slot in found.slots[row] if slot >= 0] == best
        for slot, point in zip(found.slots[row], found.coordinates[row], strict=True):
            if slot >= 0:
                assert found.uids[slot] == "ffn." + ".".join(map(str, point))


def test_switch_gives_the_best_expert_times_its_probability_and_a_balancing_loss() -> None:
    with grid(3, 2) as (directory, experts):
        moe = RemoteSwitchMixtureOfExperts(4, (3, 2), directory, "ffn", jitter=0.0).double()
        x = torch.randn(12, 4, dtype=torch.float64, requires_grad=True)
        output, loss = moe(x)
        near = x.detach().clone().requires_grad_()
        twin = copy.deepcopy(moe.gate)
        parts = [grid_.softmax(-1) for grid_ in twin(near).split((3, 2), dim=-1)]
        rows = []
        for row in range(12):
            i, j = (int(part[row].argmax()) for part in parts)
            rows.append(parts[0][row, i] * parts[1][row, j] * experts[f"ffn.{i}.{j}"].linear(near[row : row + 1])[0])
        expected = torch.stack(rows)
        assert close(output, expected)
        output.sum().backward()
        expected.sum().backward()
        assert close(x.grad, near.grad)
        assert close(moe.gate.weight.grad, twin.weight.grad)
        assert loss.requires_grad
        assert float(loss.detach()) > 0.5


@pytest.mark.parametrize(
    "make",
    [
        lambda names: RemoteExpert("ffn.0", names, forward_timeout=0.3),
        lambda names: RemoteMixtureOfExperts(4, [3], names, "ffn", forward_timeout=0.3),
    ],
    ids=["expert", "mixture"],
)
def test_the_deadline_of_a_call_covers_its_questions_to_the_directory(make: Callable[[Directory], nn.Module]) -> None:
    calls: list[Call] = []
    verbs = [Verb(f"directory.{name}", calls.append) for name in ("lookup", "active")]
    with Server(verbs, heartbeat=30.0, drain_seconds=0.01) as server:  # no beat is due before the deadline
        module = make(Directory(server.endpoint))
        with pytest.raises(DeadlineExceeded) as caught:
            module(torch.ones(1, 4))
        assert caught.value.peer == server.endpoint
        assert str(caught.value.operation).startswith("directory.")
        for call in calls:
            call.fail(RuntimeError("over"))


def test_an_expert_that_never_sends_its_schema_leaves_time_for_the_others() -> None:
    asked: list[Call] = []
    silent = Server([Verb("expert.info", asked.append)], heartbeat=30.0, drain_seconds=0.01)
    with grid(1) as (directory, experts), silent:
        directory.announce(["ffn.1"], silent.endpoint, ttl=60.0)
        moe = mixture(directory, (2,), k_best=2, k_min=1, forward_timeout=8.0)
        x = torch.randn(3, 4, dtype=torch.float64)
        assert close(moe(x), by_hand(moe.gate, (2,), experts, x, 2))
        for call in asked:
            call.fail(RuntimeError("over"))


VICTIM_PROCESS = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]}
import torch
from expert_modules import expert_of, four_servers, served, twins
from anabranch.experts import ExpertServer

torch.set_num_threads(1)
index, directory, saved = sys.argv[1:]
options = dict(ttl=60.0, checkpoint_seconds=0.1)
with ExpertServer(four_servers(int(index)), directory=directory, checkpoint_dir=saved, **options):
    print("up", flush=True)
    sys.stdin.read()
"""
STEPS = 60


def train(directory: Directory, seed: int, between: Callable[[int], None]) -> tuple[float, RemoteMixtureOfExperts]:
    """A mixture that learns a fixed map from noisy examples; the mean loss of its last steps."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    target = nn.Linear(8, 8)
    head = nn.Linear(8, 8)
    with Client(retries=2) as client:
        moe = RemoteMixtureOfExperts(8, (4, 2), directory, "ffn", k_best=4, k_min=1, client=client)
        optimizer = torch.optim.Adam([*moe.parameters(), *head.parameters()], lr=0.01)
        losses: list[float] = []
        for step in range(STEPS):
            between(step)
            generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
            x = torch.randn(32, 8, generator=generator)
            y = target(x).detach() + 0.5 * torch.randn(32, 8, generator=generator)
            loss = (head(x + moe(x)) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return sum(losses[-20:]) / 20, moe


@pytest.mark.slow  # ``test_a_forward_waits_for_experts_that_are_gone_and_says_so_once`` is the quick one
@pytest.mark.parametrize("seed", range(5))
def test_training_continues_when_one_of_four_servers_is_killed_and_restarted(
    tmp_path: Path, seed: int, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, victim = FakeClock(), seed % 4
    monkeypatch.setattr("anabranch.experts.client.finder.FailureBackoff", lambda: FailureBackoff(clock))
    directory = Directory()
    with ExitStack() as stack:
        for index in range(4):
            stack.enter_context(served(*four_servers(index), directory=directory))
        undisturbed = train(directory, seed, lambda step: None)[0]
    with ExitStack() as stack:
        names = stack.enter_context(DirectoryServer())

        def serve() -> Program:
            arguments = (str(victim), names.endpoint, str(tmp_path))
            process = stack.enter_context(programs.start(VICTIM_PROCESS, *arguments))
            assert process.stdout.readline() == "up\n"
            return process

        for index in {*range(4)} - {victim}:
            stack.enter_context(served(*four_servers(index), directory=names.endpoint))
        first = serve()

        def between(step: int) -> None:
            clock.advance(0.25)  # who fails is left alone for so many steps
            if step == STEPS // 3:
                first.kill()
            if step == STEPS // 2:
                serve()

        disturbed, moe = train(Directory(names.endpoint), seed, between)
    assert moe.statistics().failed.get("PeerLost", 0) > 0
    assert disturbed <= undisturbed * 1.02
    # The server that came back is used again.
    assert not moe.statistics().avoided


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_no_rows_give_no_rows(shape: tuple[int, ...]) -> None:
    directory = Directory()
    backends = [expert_of(nn.Linear(4, 3), uid=f"ffn.{i}") for i in range(2)]
    with served(*backends, directory=directory):
        x = torch.zeros(*shape, 4, requires_grad=True)
        answer = RemoteMixtureOfExperts(4, [2], directory, "ffn", k_best=2)(x)
        assert answer.shape == (*shape, 3)
        answer.sum().backward()
        assert x.grad is not None
        output, loss = RemoteSwitchMixtureOfExperts(4, [2], directory, "ffn")(x)
        assert output.shape == (*shape, 3)
        assert torch.isfinite(loss)
    assert [backend.updates for backend in backends] == [0, 0]


def test_beam_search_passes_over_prefixes_with_only_avoided_experts() -> None:
    directory = Directory()
    directory.announce([f"ffn.{i}.{j}" for i in range(3) for j in range(2)], "unix:/run/experts", ttl=30.0)
    scores = [np.array([[2.0, 1.0, 0.0]]), np.array([[0.5, 0.0]])]
    found = beam_search(directory.active, "ffn", scores, 1, {"ffn.0.0", "ffn.0.1"})
    assert [found.uids[slot] for slot in found.slots[0]] == ["ffn.1.0"]

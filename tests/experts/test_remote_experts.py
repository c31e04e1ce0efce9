"""An expert through the network is the module called here: outputs, gradients, updates."""

from __future__ import annotations

import copy
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from anabranch.autodiff import boundary
from anabranch.deadline import Deadline
from anabranch.errors import (
    DeadlineExceeded,
    NonFinite,
    NotFound,
    Overloaded,
    PeerLost,
    RemoteError,
    SchemaError,
)
from anabranch.experts import Directory, DirectoryServer, ExpertBackend, ExpertServer, RemoteExpert, Schema, wire
from anabranch.experts import backend as backend_module
from anabranch.experts import schema as schema_module
from anabranch.tensors import Structure, TensorSpec
from anabranch.testing import LossyTransport, MemoryTransport, faults
from anabranch.transport import Client, Request, RequestHeader
from anabranch.transport.frame import Hello, encode


class Feedforward(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Nested(nn.Module):
    """Positional and keyword inputs, nested, bool and int ones; a dict with an integer output and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.linear = nn.Linear(4, 4)

    def forward(self, pair: tuple[Tensor, Tensor], *, ids: Tensor, options: dict[str, Tensor]) -> dict[str, object]:
        x, y = pair
        hidden = self.linear(x) * y + self.table(ids)
        hidden = torch.where(options["mask"][:, None], hidden, torch.zeros_like(hidden))
        return {"hidden": hidden, "best": hidden.argmax(dim=1), "parts": (hidden.sum(1), None, [y * 2])}


NESTED_SCHEMA = {
    "args_schema": ((TensorSpec(4), TensorSpec(4)),),
    "kwargs_schema": {"ids": TensorSpec(dtype=torch.int64), "options": {"mask": TensorSpec(dtype=torch.bool)}},
}


def nested_inputs(rows: int) -> tuple[tuple[Tensor, Tensor], dict[str, Structure]]:
    pair = torch.randn(rows, 4, requires_grad=True), torch.randn(rows, 4, requires_grad=True)
    return pair, {"ids": torch.arange(rows) % 10, "options": {"mask": torch.arange(rows) % 3 != 0}}


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.01)


@contextmanager
def served(*backends: ExpertBackend, **options: object) -> Iterator[ExpertServer]:
    options.setdefault("drain_seconds", 0.5)
    with ExpertServer(backends, **options) as server:  # type: ignore[arg-type]
        yield server


def test_forward_gradients_and_updates_are_those_of_the_module_here() -> None:
    here = Feedforward()
    there = copy.deepcopy(here)
    optimizer = adam(here)
    with served(ExpertBackend("ffn.0", there, adam(there), args_schema=[TensorSpec(4)])) as server:
        expert = RemoteExpert("ffn.0", server.endpoint)
        for _ in range(4):
            x = torch.randn(5, 4)
            near, far = x.clone().requires_grad_(), x.clone().requires_grad_()
            expected, answer = here(near), expert(far)
            assert torch.equal(answer, expected)
            weights = torch.randn(5, 4)
            (expected * weights).sum().backward()
            (answer * weights).sum().backward()
            assert torch.equal(far.grad, near.grad)
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("keep", [0, 100])
def test_the_scheduler_steps_and_the_norm_is_clipped_at_each_update(keep: int) -> None:
    here = Feedforward()
    there = copy.deepcopy(here)
    near, far = (torch.optim.SGD(module.parameters(), lr=0.5) for module in (here, there))
    halving, theirs = (torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in (near, far))
    backend = ExpertBackend(
        "ffn.0", there, far, scheduler=theirs, clip_grad_norm=0.1, args_schema=[TensorSpec(4)], keep_activations=keep
    )
    with served(backend) as server:
        expert = RemoteExpert("ffn.0", server.endpoint)
        for _ in range(3):
            x = torch.randn(5, 4)
            here(x).sum().backward()
            assert nn.utils.clip_grad_norm_(here.parameters(), 0.1) > 0.1
            near.step()
            near.zero_grad()
            halving.step()
            expert(x).sum().backward()
    assert far.param_groups[0]["lr"] == near.param_groups[0]["lr"] == 0.5 / 8
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.equal(a, b)


def test_nested_keyword_bool_and_int_inputs_and_integer_outputs() -> None:
    here = Nested()
    there = copy.deepcopy(here)
    optimizer = adam(here)
    with served(ExpertBackend("nested.0", there, adam(there), **NESTED_SCHEMA)) as server:  # type: ignore[arg-type]
        expert = RemoteExpert("nested.0", server.endpoint)
        pair, keywords = nested_inputs(6)
        far = tuple(tensor.detach().clone().requires_grad_() for tensor in pair)
        expected, answer = here(pair, **keywords), expert(far, **keywords)
        assert isinstance(answer, dict)
        assert torch.equal(answer["hidden"], expected["hidden"])
        assert torch.equal(answer["best"], expected["best"])
        assert not answer["best"].requires_grad
        assert isinstance(answer["parts"], tuple)
        assert answer["parts"][1] is None
        assert isinstance(answer["parts"][2], list)
        for out in (expected, answer):
            (out["hidden"].square().sum() + out["parts"][2][0].sum()).backward()
        for near, remote in zip(pair, far, strict=True):
            assert torch.equal(near.grad, remote.grad)
        optimizer.step()
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.equal(a, b)


def test_one_tensor_in_and_out_is_nested_nowhere_and_refused_as_any_other_structure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    one, nested = (Schema((spec,), {}, spec) for spec in (TensorSpec(2), (TensorSpec(2),)))
    assert (one.takes_one, one.gives_one) == (True, True)
    assert (nested.takes_one, nested.gives_one) == (False, False)
    backend = ExpertBackend("one.0", nn.Linear(2, 3), args_schema=[TensorSpec(2)])
    x = torch.randn(4, 2)
    expected = backend.module(x).detach()
    assert one.flatten_inputs((x,), {})[0] is x  # works the schema out

    def no_flattening(*_: object, **__: object) -> object:
        raise AssertionError("one tensor has no structure")

    with monkeypatch.context() as patch:
        for module in (schema_module, backend_module):
            patch.setattr(module, "flatten", no_flattening)
        patch.setattr(backend_module, "unflatten", no_flattening)
        assert one.flatten_inputs((x,), {})[0] is x
        (answer,) = backend.forward(x)
    assert answer is not None
    assert torch.equal(answer, expected)
    for args, kwargs in (((x, x), {}), (([x],), {}), ((x,), {"by": x}), ((), {}), ((None,), {})):
        with pytest.raises(SchemaError, match="expected "):
            one.flatten_inputs(args, kwargs)
    backend.module = nn.Identity()
    with pytest.raises(SchemaError, match=r"one\.0's output 0: expected \(rows, 3\) float32, got \(4, 2\)"):
        backend.forward(x)
    backend.module = Fork()
    with pytest.raises(SchemaError, match="another structure"):
        backend.forward(x)


def test_an_answer_that_was_received_into_memory_of_its_own_is_not_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.ones(2, 2)
    with served(ExpertBackend("one.0", nn.Identity(), args_schema=[TensorSpec(2)])) as server:
        expert = RemoteExpert("one.0", server.endpoint)
        with monkeypatch.context() as patch:
            patch.setattr(boundary, "_owned", lambda tensor, taken: pytest.fail("nobody has to look"))
            first, second = expert(x), expert(x)
    first.detach().mul_(5.0)
    assert torch.equal(second.detach(), x)
    assert torch.equal(x, torch.ones(2, 2))


class Fork(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def test_an_expert_of_keywords_alone() -> None:
    class Scale(nn.Module):
        def forward(self, *, x: Tensor, by: Tensor) -> Tensor:
            return x * by

    schema = {"x": TensorSpec(2), "by": TensorSpec(2)}
    with served(ExpertBackend("scale.0", Scale(), kwargs_schema=schema)) as server:
        expert = RemoteExpert("scale.0", server.endpoint)
        assert torch.equal(expert(by=torch.full((3, 2), 2.0), x=torch.ones(3, 2)), torch.full((3, 2), 2.0))
        assert expert.get_info()["keyword_names"] == ("by", "x")
        with pytest.raises(SchemaError, match="expected "):
            expert(torch.ones(3, 2), by=torch.ones(3, 2))


def test_the_expert_learns_even_if_no_input_requires_grad() -> None:
    module = Feedforward()
    before = copy.deepcopy(module.state_dict())
    backend = ExpertBackend("ffn.0", module, adam(module), args_schema=[TensorSpec(4)])
    with served(backend) as server:
        expert = RemoteExpert("ffn.0", server.endpoint)
        output = expert(torch.randn(3, 4))
        assert output.requires_grad
        output.sum().backward()
        with torch.no_grad():
            assert not expert(torch.randn(3, 4)).requires_grad
    assert backend.updates == 1
    assert not torch.equal(before["inner.0.weight"], module.state_dict()["inner.0.weight"])


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 2)
        self.second = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


@pytest.mark.parametrize("keep", [0, 100])
def test_an_output_that_nobody_used_leaves_its_parameters_without_a_gradient(keep: int) -> None:
    module = TwoHeads()
    # Momentum would move a parameter whose gradient is zero, and does not move one without a gradient.
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    backend = ExpertBackend("heads.0", module, optimizer, args_schema=[TensorSpec(4)], keep_activations=keep)
    with served(backend) as server:
        expert = RemoteExpert("heads.0", server.endpoint)
        first, second = expert(torch.randn(3, 4))
        (first.sum() + second.sum()).backward()
        before = copy.deepcopy(module.state_dict())
        first, _ = expert(torch.randn(3, 4))
        first.sum().backward()
    assert backend.updates == 2
    assert torch.equal(module.second.weight, before["second.weight"])
    assert not torch.equal(module.first.weight, before["first.weight"])


def test_batch_norm_is_updated_once_and_as_it_would_be_here() -> None:
    here = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    there = copy.deepcopy(here)
    with served(ExpertBackend("bn.0", there, args_schema=[TensorSpec(4)])) as server:
        expert = RemoteExpert("bn.0", server.endpoint)
        for _ in range(3):
            x = torch.randn(6, 4)
            here(x).sum().backward()
            expert(x).sum().backward()
    for name, buffer in here.named_buffers():
        assert torch.equal(buffer, dict(there.named_buffers())[name])


def test_finding_the_outputs_leaves_the_module_and_the_random_numbers_as_they_were() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = copy.deepcopy(module.state_dict())
    state = torch.get_rng_state()
    backend = ExpertBackend("bn.0", module, args_schema=[TensorSpec(4)])
    assert torch.equal(state, torch.get_rng_state())
    assert module.training
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert backend.get_info()["outputs_schema"] == TensorSpec(4)


def test_empty_and_oversize_requests_are_answered() -> None:
    module = Feedforward()
    here = copy.deepcopy(module)
    backend = ExpertBackend("ffn.0", module, args_schema=[TensorSpec(4)], max_batch_size=4)
    with served(backend) as server:
        expert = RemoteExpert("ffn.0", server.endpoint)
        empty = torch.zeros(0, 4, requires_grad=True)
        expert(empty).sum().backward()
        assert empty.grad is not None
        assert empty.grad.shape == (0, 4)
        x = torch.randn(11, 4, requires_grad=True)
        answer = expert(x)
        assert torch.allclose(answer, here(x), atol=1e-6)
        answer.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == (11, 4)
    assert backend.forward_pool.statistics().batches == 3
    assert backend.forward_pool.statistics().rows == 11


def together(count: int, ask: Callable[[int], object]) -> list[object]:
    """What ``ask`` returned, or raised, on so many threads at once."""
    outcomes: list[object] = [None] * count
    barrier = threading.Barrier(count)

    def run(index: int) -> None:
        barrier.wait(timeout=20)
        try:
            outcomes[index] = ask(index)
        except Exception as error:  # noqa: BLE001 - what a caller gets is what is tested
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return outcomes


def test_sixteen_callers_get_the_answers_they_would_get_alone_in_fewer_module_calls() -> None:
    module = Feedforward().double()
    here = copy.deepcopy(module)
    backend = ExpertBackend(
        "ffn.0", module, args_schema=[TensorSpec(4, dtype=torch.float64)], min_batch_size=136, timeout=5.0
    )
    inputs = [torch.randn(rows, 4, dtype=torch.float64) for rows in range(1, 17)]
    with served(backend) as server:
        expert = RemoteExpert("ffn.0", server.endpoint)
        expert.get_info()
        outcomes = together(16, lambda index: expert(inputs[index]))
    for x, outcome in zip(inputs, outcomes, strict=True):
        assert isinstance(outcome, Tensor)
        assert torch.allclose(outcome, here(x), rtol=0, atol=1e-14)
    assert backend.forward_pool.statistics().tasks == 16
    assert backend.forward_pool.statistics().batches == 1


def test_a_batch_below_the_minimum_runs_after_its_timeout() -> None:
    backend = ExpertBackend("ffn.0", Feedforward(), args_schema=[TensorSpec(4)], min_batch_size=100, timeout=0.1)
    with served(backend) as server:
        start = time.monotonic()
        assert RemoteExpert("ffn.0", server.endpoint)(torch.ones(2, 4)).shape == (2, 4)
        assert 0.1 <= time.monotonic() - start < 5.0


def test_mean_reduction_moves_a_batch_of_requests_as_far_as_one() -> None:
    updates = []
    for reduction in ("sum", "mean"):
        module = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(module.weight)
        backend = ExpertBackend(
            "linear.0",
            module,
            torch.optim.SGD(module.parameters(), lr=1.0),
            args_schema=[TensorSpec(2)],
            gradient_reduction=reduction,  # type: ignore[arg-type]
            min_batch_size=4,
            timeout=5.0,
        )
        with served(backend) as server:
            expert = RemoteExpert("linear.0", server.endpoint)
            outputs = together(4, lambda _, expert=expert: expert(torch.ones(1, 2)))
            together(4, lambda index, outputs=outputs: outputs[index].sum().backward())
        assert backend.updates == 1
        updates.append(module.weight.detach().clone())
    assert torch.equal(updates[0], 4 * updates[1])


class Picky(nn.Module):
    """Fails on values: the kind of fault that no schema shows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 2)
        self.calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        return self.table(ids)


def test_one_request_that_fails_in_the_module_harms_none_of_its_batch() -> None:
    module = Picky()
    backend = ExpertBackend(
        "table.0", module, args_schema=[TensorSpec(dtype=torch.int64)], min_batch_size=8, timeout=5.0
    )
    with served(backend) as server:
        expert = RemoteExpert("table.0", server.endpoint)
        outcomes = together(8, lambda index: expert(torch.tensor([99 if index == 3 else index])))
        for index, outcome in enumerate(outcomes):
            if index == 3:
                assert isinstance(outcome, RemoteError)
                assert outcome.remote_type == "IndexError"
                assert "self.table(ids)" in outcome.remote_traceback
            else:
                assert torch.equal(outcome, module.table(torch.tensor([index])))  # type: ignore[arg-type]
        backend.forward_pool.min_batch_size = 1
        for _ in range(200):
            assert expert(torch.tensor([1])).shape == (1, 2)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: (torch.ones(2, 5),), r"args\.0: expected \(rows, 4\) float32, got \(2, 5\)"),
        (lambda: (torch.ones(2, 4, dtype=torch.float64),), "float64"),
        (lambda: (torch.ones(4),), r"got \(4\)"),
        (lambda: (torch.ones(2, 4), torch.ones(2, 4)), "expected arguments"),
        (lambda: ([torch.ones(2, 4)],), "expected arguments"),
        (lambda: ("text",), "got str"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_here_and_say_what_was_expected(
    make: Callable[[], tuple[object, ...]], says: str
) -> None:
    backend = ExpertBackend("ffn.0", Feedforward(), args_schema=[TensorSpec(4)])
    with served(backend) as server, pytest.raises(SchemaError, match=says):
        RemoteExpert("ffn.0", server.endpoint)(*make())


def test_rows_that_disagree_name_both_inputs() -> None:
    schema = [TensorSpec(2), TensorSpec(2)]
    backend = ExpertBackend("pair.0", nn.Bilinear(2, 2, 1), args_schema=schema)
    with served(backend) as server, pytest.raises(SchemaError, match=r"args\.0 has 2, args\.1 has 3"):
        RemoteExpert("pair.0", server.endpoint)(torch.ones(2, 2), torch.ones(3, 2))


def test_what_slips_past_the_caller_is_refused_by_the_server_before_it_is_queued() -> None:
    from anabranch.experts import wire
    from anabranch.transport import Request

    backend = ExpertBackend("ffn.0", Feedforward(), args_schema=[TensorSpec(4)])
    right = backend.schema.hash
    bad = [
        Request("", wire.FORWARD, "ffn.0", [torch.ones(2, 5)], schema=right),
        Request("", wire.FORWARD, "ffn.0", [torch.ones(2, 4).double()], schema=right),
        Request("", wire.FORWARD, "ffn.0", [], schema=right),
        Request("", wire.FORWARD, "ffn.0", [torch.tensor(1.0)], schema=right),
        Request("", wire.FORWARD, "ffn.0", [torch.ones(2, 4)] * 2, schema=right),
        Request("", wire.FORWARD, "ffn.0", [torch.ones(2, 4)], schema=b"other"),
        Request("", wire.FORWARD, "ffn.9", [torch.ones(2, 4)], schema=right),
        Request("", "expert.steal", "ffn.0", [torch.ones(2, 4)], schema=right),
        Request("", wire.BACKWARD, "ffn.0", [torch.ones(2, 4)], schema=right, payload=b"\xc1", once=True),
        Request(
            "", wire.BACKWARD, "ffn.0", [torch.ones(2, 4)], schema=right, payload=b"\x92\x91\xc3\xc4\x00", once=True
        ),
        Request(
            "", wire.BACKWARD, "ffn.0", [torch.ones(2, 4)], schema=right, payload=b"\x92\x92\xc3\xc3\xc4\x00", once=True
        ),
        Request(
            "",
            wire.BACKWARD,
            "ffn.0",
            [torch.ones(2, 4), torch.ones(3, 4)],
            schema=right,
            payload=b"\x92\x91\xc3\xc4\x00",
            once=True,
        ),
    ]
    with served(backend) as server, Client() as client:
        for request in bad:
            request = type(request)(
                server.endpoint,
                request.verb,
                request.target,
                request.tensors,
                request.payload,
                request.schema,
                request.once,
            )
            with pytest.raises((SchemaError, NotFound, Exception)) as caught:
                client.call(request, Deadline.after(10.0))
            assert isinstance(caught.value, (SchemaError, NotFound)) or "ProtocolError" in type(caught.value).__name__
        assert backend.forward_pool.statistics().tasks == 0
        assert backend.backward_pool.statistics().tasks == 0
        assert RemoteExpert("ffn.0", server.endpoint)(torch.ones(1, 4)).shape == (1, 4)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused_where_it_arrives_and_counted(poison: float) -> None:
    module = Feedforward()
    backend = ExpertBackend("ffn.0", module, adam(module), args_schema=[TensorSpec(4)])
    with served(backend) as server:
        expert = RemoteExpert("ffn.0", server.endpoint)
        x = torch.ones(2, 4)
        x[0, 0] = poison
        with pytest.raises(NonFinite, match=r"args\.0"):
            expert(x)
        good = torch.ones(2, 4, requires_grad=True)
        with pytest.raises(NonFinite, match="gradient of output 0"):
            expert(good).backward(x)
        expert(good).sum().backward()
        assert sum(server.statistics().not_finite.values()) == 2
    assert backend.updates == 1
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())


def test_a_gradient_that_overflows_inside_the_expert_updates_nothing() -> None:
    class Explode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight * 1e30

    module = Explode()
    backend = ExpertBackend("big.0", module, adam(module), args_schema=[TensorSpec(1)])
    with served(backend) as server:
        output = RemoteExpert("big.0", server.endpoint)(torch.full((1, 1), 1e5))
        with pytest.raises(NonFinite, match="nothing was updated"):
            output.backward(torch.full((1, 1), 1e30))
    assert torch.equal(module.weight, torch.ones(1))


class Slow(nn.Module):
    """Waits for the test before it answers."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.entered = threading.Event()
        self.threads: list[str] = []
        self.open.set()

    def forward(self, x: Tensor) -> Tensor:
        self.threads.append(threading.current_thread().name)
        self.entered.set()
        self.open.wait(timeout=20)
        return x * 1.0


def test_a_module_that_stalls_after_having_been_quick_holds_nobody_up_who_does_not_ask_for_it() -> None:
    module = Slow()
    backend = ExpertBackend("slow.0", module, args_schema=[TensorSpec(2)])
    with ExpertServer([backend], heartbeat=0.2) as server, Client() as client:
        expert = RemoteExpert("slow.0", server.endpoint)
        with torch.no_grad():
            for _ in range(50):  # until the thread that reads runs it
                module.threads.clear()
                expert(torch.ones(1, 2))
                if module.threads == ["anabranch-loop"]:
                    break
        assert module.threads == ["anabranch-loop"]
        module.open.clear()
        module.entered.clear()
        answers: list[Tensor] = []
        stalled = threading.Thread(target=lambda: answers.append(expert(torch.ones(1, 2))))
        stalled.start()
        assert module.entered.wait(timeout=10)
        for _ in range(3):
            client.call(Request(server.endpoint, wire.INFO, "slow.0"), Deadline.after(5.0))
        # As many beats as a server may owe, and more: who waits for the module is told that it lives.
        stalled.join(timeout=0.6)
        assert stalled.is_alive()
        module.open.set()
        stalled.join(timeout=10)
        assert len(answers) == 1
        assert torch.equal(expert(torch.ones(1, 2)), torch.ones(1, 2))


def test_a_queue_that_is_full_says_so_at_once_and_serves_again() -> None:
    module = Slow()
    backend = ExpertBackend("slow.0", module, args_schema=[TensorSpec(2)], max_batch_size=2, max_queue_rows=4)
    with served(backend) as server:
        expert = RemoteExpert("slow.0", server.endpoint)
        expert.get_info()
        module.open.clear()
        module.entered.clear()
        first = threading.Thread(target=lambda: expert(torch.ones(2, 2)))
        first.start()
        assert module.entered.wait(timeout=10)
        waiting = [threading.Thread(target=lambda: expert(torch.ones(2, 2))) for _ in range(2)]
        for thread in waiting:
            thread.start()
        until = time.monotonic() + 10
        while backend.forward_pool.statistics().waiting_rows < 4 and time.monotonic() < until:
            time.sleep(0.001)
        took = []
        for _ in range(30):
            start = time.monotonic()
            with pytest.raises(Overloaded, match="rows"):
                expert(torch.ones(1, 2))
            took.append(time.monotonic() - start)
        # The quickest, for a busy machine may be away at any moment.
        assert min(took) < 0.005
        # It is said of the header: the body has not been sent, nor has it a place.
        asked = RequestHeader(wire.FORWARD, "slow.0", seconds=30.0, schema=backend.schema.hash)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(server.endpoint.removeprefix("unix:"))
            sock.sendall(b"".join(bytes(part) for part in encode(Hello())) + encode(asked, [torch.ones(1, 2)])[0])
            told = sock.recv(1 << 16)
            while b"overloaded" not in told and (some := sock.recv(1 << 16)):
                told += some
        assert b"overloaded" in told
        module.open.set()
        for thread in [first, *waiting]:
            thread.join(timeout=10)
        assert expert(torch.ones(1, 2)).shape == (1, 2)


def test_expired_and_abandoned_requests_are_dropped_before_compute() -> None:
    module = Slow()
    backend = ExpertBackend("slow.0", module, args_schema=[TensorSpec(2)], max_batch_size=1)
    with served(backend) as server:
        expert = RemoteExpert("slow.0", server.endpoint)
        hasty = RemoteExpert("slow.0", server.endpoint, forward_timeout=0.3)
        expert.get_info()
        hasty.get_info()
        module.open.clear()
        module.entered.clear()
        first = threading.Thread(target=lambda: expert(torch.ones(1, 2)))
        first.start()
        assert module.entered.wait(timeout=10)
        with pytest.raises(DeadlineExceeded):
            hasty(torch.ones(1, 2))
        # The server's deadline began when the request arrived, which on a busy machine is a little later.
        until = time.monotonic() + 10
        while not all(task.deadline.expired() for task in backend.forward_pool._queue) and time.monotonic() < until:
            time.sleep(0.001)
        module.open.set()
        first.join(timeout=10)
        assert expert(torch.ones(1, 2)).shape == (1, 2)
    statistics = backend.forward_pool.statistics()
    assert statistics.dropped == 1
    assert statistics.batches == 2


def test_a_request_whose_caller_cancels_it_is_dropped_before_compute_however_long_it_had() -> None:
    module = Slow()
    backend = ExpertBackend("slow.0", module, args_schema=[TensorSpec(2)], max_batch_size=1)
    with served(backend) as server, Client() as client:
        expert = RemoteExpert("slow.0", server.endpoint)
        expert.get_info()
        module.open.clear()
        module.entered.clear()
        first = threading.Thread(target=lambda: expert(torch.ones(1, 2)))
        first.start()
        assert module.entered.wait(timeout=10)
        call = Request(server.endpoint, wire.FORWARD, "slow.0", [torch.ones(1, 2)], schema=backend.schema.hash)
        never = Request(server.endpoint, wire.FORWARD, "slow.9")

        def queued(_: object) -> bool:
            # The second says at once that there is no such expert; the first is in the queue soon after.
            until = time.monotonic() + 10
            while not backend.forward_pool.statistics().waiting_rows and time.monotonic() < until:
                time.sleep(0.001)
            return True

        outcomes = client.gather([call, never], Deadline.after(60.0), enough=queued)
        assert outcomes[0] is None
        assert isinstance(outcomes[1], NotFound)
        until = time.monotonic() + 10
        while server.statistics().transport.connections > 2 and time.monotonic() < until:
            time.sleep(0.001)
        module.open.set()
        first.join(timeout=10)
        assert expert(torch.ones(1, 2)).shape == (1, 2)
    assert backend.forward_pool.statistics().dropped == 1
    assert backend.forward_pool.statistics().batches == 2


def test_a_stuck_device_stops_the_beats_so_that_callers_learn_of_it() -> None:
    module = Slow()
    backend = ExpertBackend("slow.0", module, args_schema=[TensorSpec(2)], max_batch_size=1)
    with served(backend, heartbeat=0.5) as server:
        hasty = RemoteExpert("slow.0", server.endpoint, forward_timeout=0.3)
        patient = RemoteExpert("slow.0", server.endpoint)
        patient.get_info()
        hasty.get_info()
        module.open.clear()
        with pytest.raises(DeadlineExceeded):
            hasty(torch.ones(1, 2))
        start = time.monotonic()
        with pytest.raises(PeerLost, match="no beat"):
            patient(torch.ones(1, 2))
        assert time.monotonic() - start < 5.0
        module.open.set()


def test_backward_is_applied_once_however_often_the_network_cuts_it() -> None:
    network = MemoryTransport()
    lossy = LossyTransport(drop=0.3, duplicate=0.2, seed=2, transport=network)
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    backend = ExpertBackend(
        "count.0", module, torch.optim.SGD(module.parameters(), lr=1.0), args_schema=[TensorSpec(1)]
    )
    with served(backend, transport=network) as server, Client(transport=lossy, retries=100) as client:
        expert = RemoteExpert("count.0", server.endpoint, client=client)
        for _ in range(150):
            expert(torch.ones(1, 1)).sum().backward()
    assert lossy.dropped > 20
    assert backend.updates == 150
    assert float(module.weight.detach()) == -150.0


def test_leaving_finishes_what_is_in_flight_and_tells_newcomers() -> None:
    module = Slow()
    backend = ExpertBackend("slow.0", module, args_schema=[TensorSpec(2)])
    directory = Directory()
    answers: list[Tensor] = []
    with served(backend, directory=directory, drain_seconds=10.0) as server:
        expert = RemoteExpert("slow.0", server.endpoint)
        expert.get_info()
        assert directory.lookup(["slow.0"]) == {"slow.0": server.endpoint}
        module.open.clear()
        module.entered.clear()
        thread = threading.Thread(target=lambda: answers.append(expert(torch.ones(1, 2))))
        thread.start()
        assert module.entered.wait(timeout=10)
        opener = threading.Timer(0.2, module.open.set)
        opener.start()
    thread.join(timeout=10)
    opener.join(timeout=10)
    assert len(answers) == 1
    assert directory.lookup(["slow.0"]) == {}
    with pytest.raises(PeerLost):
        expert(torch.ones(1, 2))


def test_a_caller_with_a_directory_follows_its_expert_to_another_server() -> None:
    with DirectoryServer() as directory:
        backend = ExpertBackend("ffn.0", Feedforward(), args_schema=[TensorSpec(4)])
        expert = RemoteExpert("ffn.0", Directory(directory.endpoint))
        with pytest.raises(NotFound, match="nobody"):
            expert(torch.ones(1, 4))
        for _ in range(2):
            with served(backend, directory=directory.endpoint):
                for _ in range(2):
                    assert expert(torch.ones(1, 4)).shape == (1, 4)


def test_a_faulty_update_fails_its_callers_and_spares_the_server() -> None:
    class Broken(ExpertBackend):
        broken = True

        def apply_gradients(self) -> None:
            if self.broken:
                raise OSError("disk on fire")
            super().apply_gradients()

    module = Feedforward()
    backend = Broken("ffn.0", module, adam(module), args_schema=[TensorSpec(4)])
    with served(backend) as server:
        expert = RemoteExpert("ffn.0", server.endpoint)
        with pytest.raises(RemoteError, match="disk on fire"):
            expert(torch.ones(1, 4)).sum().backward()
        backend.broken = False
        expert(torch.ones(1, 4)).sum().backward()
    assert backend.updates == 1


def test_many_experts_share_a_server_and_its_device_thread() -> None:
    modules = [nn.Linear(2, 2) for _ in range(64)]
    backends = [ExpertBackend(f"ffn.{i}", module, args_schema=[TensorSpec(2)]) for i, module in enumerate(modules)]
    start = time.monotonic()
    with served(*backends) as server:
        assert time.monotonic() - start < 10.0
        x = torch.ones(3, 2)
        for index in (0, 31, 63):
            assert torch.equal(RemoteExpert(f"ffn.{index}", server.endpoint)(x), modules[index](x))


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: ExpertBackend("ffn", nn.Identity(), args_schema=[TensorSpec(1)]), ValueError, "no uid"),
        (lambda: ExpertBackend("ffn.01", nn.Identity(), args_schema=[TensorSpec(1)]), ValueError, "leading"),
        (lambda: ExpertBackend("ffn.0", nn.Identity()), ValueError, "without inputs"),
        (
            lambda: ExpertBackend("ffn.0", nn.Linear(1, 1), adam(nn.Linear(1, 1)), args_schema=[TensorSpec(1)]),
            ValueError,
            "another module",
        ),
        (lambda: ExpertBackend("ffn.0", nn.Linear(2, 1), args_schema=[TensorSpec(1)]), SchemaError, "does not take"),
        (lambda: ExpertBackend("ffn.0", nn.Flatten(0), args_schema=[TensorSpec(2)]), SchemaError, "as many rows"),
        (lambda: ExpertBackend("ffn.0", nn.Identity(), args_schema=["x"]), SchemaError, "TensorSpec"),
        (
            lambda: ExpertBackend("ffn.0", nn.Identity(), args_schema=[TensorSpec(1)], max_batch_size=0),
            ValueError,
            "batch sizes",
        ),
        (
            lambda: ExpertBackend("ffn.0", nn.Identity(), args_schema=[TensorSpec(1)], gradient_reduction="max"),  # type: ignore[arg-type]
            ValueError,
            "gradient_reduction",
        ),
        (lambda: ExpertServer([]), ValueError, "without experts"),
        (lambda: RemoteExpert("ffn", "unix:/nowhere"), ValueError, "no uid"),
        (lambda: RemoteExpert("ffn.0", "unix:/nowhere", forward_timeout=0), ValueError, "forward_timeout"),
    ],
)
def test_mistakes_say_what_is_wrong(make: Callable[[], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


def test_an_unknown_uid_is_not_found() -> None:
    backend = ExpertBackend("ffn.0", Feedforward(), args_schema=[TensorSpec(4)])
    with served(backend) as server, pytest.raises(NotFound, match=r"no expert 'ffn\.1' here"):
        RemoteExpert("ffn.1", server.endpoint)(torch.ones(1, 4))


@pytest.mark.parametrize(("compression", "tolerance"), [("float16", 2e-3), ("bfloat16", 2e-2), ("int8", 2e-2)], ids=str)
def test_compressed_activations_and_gradients_arrive_up_to_rounding(compression: str, tolerance: float) -> None:
    spec = TensorSpec(512, compression=compression)  # type: ignore[arg-type]
    module = nn.Identity()
    with served(ExpertBackend("same.0", module, args_schema=[spec], outputs_schema=spec)) as server:
        expert = RemoteExpert("same.0", server.endpoint)
        x = torch.randn(3, 512, requires_grad=True)
        weights = torch.randn(3, 512)
        answer = expert(x)
        assert torch.allclose(answer, x, atol=4 * tolerance, rtol=tolerance)
        assert not torch.equal(answer, x)
        (answer * weights).sum().backward()
        assert x.grad is not None
        assert torch.allclose(x.grad, weights, atol=8 * tolerance, rtol=2 * tolerance)


def test_a_lost_answer_of_a_backward_does_not_double_its_update() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    backend = ExpertBackend(
        "count.0", module, torch.optim.SGD(module.parameters(), lr=1.0), args_schema=[TensorSpec(1)]
    )
    network = MemoryTransport()

    with served(backend, transport=network) as server, Client(transport=network) as client:
        expert = RemoteExpert("count.0", server.endpoint, client=client)
        output = expert(torch.ones(1, 1))
        with faults.at("transport.before_reply", 1, lambda: cut(client)):
            output.sum().backward()
    assert backend.updates == 1
    assert float(module.weight.detach()) == -1.0


def cut(client: Client) -> None:
    """Cuts the client's busy connections: what was done is done, the answer does not arrive."""
    for channel in list(client._busy):
        channel.stream.abort()

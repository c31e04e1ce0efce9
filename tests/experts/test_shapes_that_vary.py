"""Sequences of any length: grouped by equal lengths, or padded with a mask; what comes back is the module's here."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from expert_modules import Slow, calling, in_the_module, served
from torch import Tensor, nn

from anabranch.deadline import Deadline
from anabranch.errors import SchemaError
from anabranch.experts import Directory, ExpertBackend, RemoteExpert, RemoteMixtureOfExperts, Task, TaskPool
from anabranch.tensors import TensorSpec
from waiting import join, wait_until

F64 = torch.float64


class Attention(nn.Module):
    """Every position sees all others of its row, and none that is padding."""

    def __init__(self, padded: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(4, 12, dtype=F64)
        self.padded = padded
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        assert (mask is not None) >= self.padded
        self.seen.append(tuple(x.shape))
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=torch.bool)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        weights = (q @ k.mT).masked_fill(~mask[:, None, :], float("-inf")).softmax(dim=-1)
        mean = (x * mask[..., None]).sum(1) / mask.sum(1)[:, None]
        return {"mean": mean, "y": weights @ v, "weights": weights}


def spec(padded: bool) -> TensorSpec:
    return TensorSpec(None, 4, dtype=F64, pad=padded)


def waiting_together(
    calls: Sequence[Callable[[], object]], server_expert: str, slow: Slow, pools: Sequence[object]
) -> None:
    """Make calls that find the device busy, so that all wait for one batch."""
    threads = [threading.Thread(target=call) for call in calls]
    with in_the_module(slow, lambda: RemoteExpert("slow.0", server_expert)(torch.ones(1, 1))):
        for thread in threads:
            thread.start()
        wait_until(lambda: sum(pool.statistics().waiting_tasks for pool in pools) == len(calls))  # type: ignore[attr-defined]
    join(*threads)


@pytest.mark.parametrize("keep", [0, 100])
@pytest.mark.parametrize("padded", [False, True])
def test_requests_of_different_lengths_get_the_results_of_the_local_module(padded: bool, keep: int) -> None:
    there, slow = Attention(padded), Slow()
    here = copy.deepcopy(there)
    # Unlike lengths are batches, and so updates, of their own, between which the module here does not move.
    optimizer = torch.optim.SGD(there.parameters(), lr=0.1 if padded else 0.0)
    backend = ExpertBackend("a.0", there, optimizer, args_schema=[spec(padded)], keep_activations=keep)
    assert backend.get_info()["outputs_schema"] == {
        "mean": TensorSpec(4, dtype=F64),
        "y": TensorSpec(None, 4, dtype=F64),
        "weights": TensorSpec(None, None, dtype=F64),
    }
    lengths = [5, 3, 5, 4, 3]
    xs = [torch.randn(index + 1, length, 4, dtype=F64) for index, length in enumerate(lengths)]
    nears, fars = ([x.clone().requires_grad_() for x in xs] for _ in range(2))
    there.seen.clear()
    answers: list[dict[str, Tensor]] = [{}] * len(xs)
    with served(backend, ExpertBackend("slow.0", slow, args_schema=[TensorSpec(1)])) as server:

        def ask(index: int) -> None:
            answers[index] = RemoteExpert("a.0", server.endpoint)(fars[index])  # type: ignore[assignment]

        waiting_together(
            [lambda index=index: ask(index) for index in range(len(xs))],  # type: ignore[misc]
            server.endpoint, slow, [backend.forward_pool],
        )  # fmt: skip
        assert [answer["y"].shape for answer in answers] == [x.shape for x in xs]
        here.padded = False
        expected = [here(near) for near in nears]
        assert sorted(there.seen) == ([(15, 5, 4)] if padded else [(4, 4, 4), (4, 5, 4), (7, 3, 4)])
        losses = [
            sum((value[name].square().sum() for name in ("mean", "y", "weights")), torch.zeros((), dtype=F64))
            for value in answers
        ]
        waiting_together([loss.backward for loss in losses], server.endpoint, slow, [backend.backward_pool])
    for value, known in zip(answers, expected, strict=True):
        assert list(value) == list(known)
        for name, tensor in known.items():
            assert torch.allclose(value[name], tensor, rtol=1e-12, atol=1e-13), name
            tensor.square().sum().backward(retain_graph=True)
    for near, far in zip(nears, fars, strict=True):
        assert torch.allclose(near.grad, far.grad, rtol=1e-12, atol=1e-12)  # type: ignore[arg-type]
    assert backend.updates == (1 if padded else 3)
    if padded:  # one update with the sum of the gradients
        torch.optim.SGD(here.parameters(), lr=0.1).step()
        for a, b in zip(here.parameters(), there.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_a_padded_batch_is_at_most_half_padding() -> None:
    pool = TaskPool(lambda x: [x])
    for length in (2, 3, 60, 50, 1):
        pool.submit(Task([torch.ones(2, length)], 2, Deadline.after(600.0), length=length))
    batches = []
    while batch := pool.take_batch():
        batches.append([task.length for task in batch])
    assert batches == [[2, 3, 1], [60, 50]]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shape", [(0, 5, 4), (2, 3, 5, 4), (2, 1, 4), (0, 3, 5, 4), (3, 40, 4)])
def test_any_number_of_rows_lengths_and_leading_dimensions(shape: tuple[int, ...], padded: bool) -> None:
    there = Attention(padded)
    with served(ExpertBackend("a.0", there, args_schema=[spec(padded)])) as server:
        x = torch.randn(*shape, dtype=F64)
        near, far = x.clone().requires_grad_(), x.clone().requires_grad_()
        answer = RemoteExpert("a.0", server.endpoint)(far)
        expected = Attention(False)(near.flatten(0, -3))
        assert isinstance(answer, dict)
        for name, tensor in expected.items():
            known = tensor.reshape(*shape[:-2], *tensor.shape[1:])
            assert answer[name].shape == known.shape
            assert torch.allclose(answer[name], known, rtol=1e-12)
        answer["y"].square().sum().backward()
        expected["y"].square().sum().backward()
        assert torch.allclose(far.grad, near.grad, rtol=1e-12, atol=1e-13)  # type: ignore[arg-type]


class Half(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x[:, ::2]


def test_mismatches_are_refused_by_name_and_affect_no_other_caller() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
            return (x + y) * mask[..., None]

    two = TensorSpec(None, 4, pad=True)
    backend = ExpertBackend("two.0", Two(), args_schema=[two, two])
    with calling(backend) as expert:
        with pytest.raises(SchemaError, match=r"args\.1 has length 3, args\.0 2; they share one mask"):
            expert(torch.ones(1, 2, 4), torch.ones(1, 3, 4))
        with pytest.raises(SchemaError, match=r"args\.0: expected \(rows, any, 4\) float32, got \(1, 2, 5\)"):
            expert(torch.ones(1, 2, 5), torch.ones(1, 2, 4))
        assert torch.equal(expert(torch.ones(1, 2, 4), torch.ones(1, 2, 4)), torch.full((1, 2, 4), 2.0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="input called mask"):
        ExpertBackend("two.0", Two(), args_schema=[two, two], kwargs_schema={"mask": TensorSpec(None)})
    with pytest.raises(ValueError, match="give both pad=True"):
        ExpertBackend("two.0", Two(), args_schema=[two, TensorSpec(None, 4)])
    with pytest.raises(SchemaError, match="mask"):
        ExpertBackend("one.0", nn.Identity(), args_schema=[two])
    half = ExpertBackend("half.0", Half(), args_schema=[two])
    with served(half) as server, pytest.raises(SchemaError, match="as its inputs were padded to"):
        RemoteExpert("half.0", server.endpoint)(torch.ones(1, 4, 4))
    for wrong in ({"pad": True}, {"shape": (None, None), "pad": True}):
        with pytest.raises(ValueError, match="needs one dimension that varies"):
            TensorSpec(*wrong.pop("shape", (4,)), **wrong)  # type: ignore[misc, arg-type]
    assert TensorSpec(None, 4) != TensorSpec(None, 4, pad=True)
    assert repr(two) == "TensorSpec(None, 4, dtype=torch.float32, pad=True)"


def test_an_output_may_be_of_another_length_than_the_input() -> None:
    with calling(ExpertBackend("half.0", Half(), args_schema=[TensorSpec(None, 4)])) as expert:
        for length in (0, 1, 6, 7):
            x = torch.randn(2, length, 4, requires_grad=True)
            answer = expert(x)
            assert torch.equal(answer, x[:, ::2])  # type: ignore[arg-type]
            answer.sum().backward()  # type: ignore[attr-defined]
            assert x.grad is not None
            assert float(x.grad.sum()) == 8 * ((length + 1) // 2)


@pytest.mark.parametrize("padded", [False, True])
def test_a_mixture_of_experts_of_sequences(padded: bool) -> None:
    directory = Directory()
    modules = [Attention(padded) for _ in range(2)]
    with torch.no_grad():
        modules[1].qkv.weight.mul_(2.0)
    backends = [
        ExpertBackend(f"a.{index}", copy.deepcopy(module), args_schema=[spec(padded)])
        for index, module in enumerate(modules)
    ]
    for module in modules:
        module.padded = False
    with served(*backends, directory=directory):
        mixture = RemoteMixtureOfExperts(4, [2], directory, "a", k_best=2).double()
        for length in (3, 6):
            x = torch.randn(5, length, 4, dtype=F64)
            near, far = x.clone().requires_grad_(), x.clone().requires_grad_()
            answer = mixture(far)
            weights = mixture.gate(near.mean(1)).softmax(dim=1)
            ys = [module(near) for module in modules]
            for name in ("mean", "y", "weights"):
                known = sum(weights[:, i].view(-1, *[1] * (y[name].ndim - 1)) * y[name] for i, y in enumerate(ys))
                assert torch.allclose(answer[name], known, rtol=1e-12)  # type: ignore[index, arg-type]
            answer["y"].square().sum().backward()  # type: ignore[index]
            (weights[:, 0, None, None] * ys[0]["y"] + weights[:, 1, None, None] * ys[1]["y"]).square().sum().backward()
            assert torch.allclose(far.grad, near.grad, rtol=1e-11, atol=1e-13)  # type: ignore[arg-type]


def test_none_among_outputs_crosses_beside_a_dimension_that_varies() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            return x * 2.0, None

    with served(ExpertBackend("block.0", Attention(), args_schema=[TensorSpec(None, 2)])) as server:
        out, weights = RemoteExpert("block.0", server.endpoint)(torch.ones(1, 3, 2))
    assert torch.equal(out, torch.full((1, 3, 2), 2.0))
    assert weights is None

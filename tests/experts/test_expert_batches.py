"""Requests that come together are computed together, and each gets the answer that it would get alone."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from expert_modules import Feedforward, calling, served, together
from torch import Tensor, nn

from anabranch.deadline import Deadline
from anabranch.experts import ExpertBackend, RemoteExpert, Runtime, Task
from anabranch.tensors import TensorSpec
from anabranch.testing import FakeClock


def test_empty_and_oversize_requests_are_answered() -> None:
    module = Feedforward()
    here = copy.deepcopy(module)
    backend = ExpertBackend("ffn.0", module, args_schema=[TensorSpec(4)], max_batch_size=4)
    with calling(backend) as expert:
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
    assert backend.forward_pool.statistics().batches == 4  # no rows are a row of zeros in eval mode


def test_a_backward_over_the_maximum_is_applied_as_a_whole_though_its_caller_goes_and_its_deadline_passes() -> None:
    """The first part was applied, the second dropped, and a retry applied the first again."""
    module, clock, healthy = nn.Linear(1, 1, bias=False), FakeClock(), list[bool]()
    nn.init.zeros_(module.weight)
    backend = ExpertBackend(
        "count.0", module, torch.optim.SGD(module.parameters(), lr=1.0), args_schema=[TensorSpec(1)], max_batch_size=2
    )
    x, pool = torch.ones(5, 1), backend.backward_pool

    def takes_long(*_: object) -> None:
        healthy.append(runtime.healthy())
        clock.advance(2.0)

    module.register_forward_hook(takes_long)
    with Runtime([pool]) as runtime:
        task = Task([x, x], 5, Deadline.after(1.0, clock), unwanted=lambda: backend.updates > 0)
        (gradient,) = pool.submit(task).result(timeout=60)
    assert healthy == [True] * 3
    assert backend.updates == pool.statistics().batches == 3
    assert module.weight.item() == -5.0
    assert gradient is not None
    assert gradient.shape == (5, 1)


def test_sixteen_callers_get_the_answers_they_would_get_alone_in_fewer_module_calls() -> None:
    module = Feedforward().double()
    here = copy.deepcopy(module)
    backend = ExpertBackend(
        "ffn.0", module, args_schema=[TensorSpec(4, dtype=torch.float64)], min_batch_size=136, timeout=60.0
    )
    inputs = [torch.randn(rows, 4, dtype=torch.float64) for rows in range(1, 17)]
    with calling(backend) as expert:
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
        assert time.monotonic() - start >= 0.1


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
            timeout=60.0,
        )
        with calling(backend) as expert:
            outputs = together(4, lambda _, expert=expert: expert(torch.ones(1, 2)))
            together(4, lambda index, outputs=outputs: outputs[index].sum().backward())
        assert backend.updates == 1
        updates.append(module.weight.detach().clone())
    assert torch.equal(updates[0], 4 * updates[1])


@pytest.mark.parametrize("keep", [0, 8])
def test_a_lazy_module_is_served_with_the_sizes_of_its_schema(keep: int) -> None:
    module = nn.Sequential(nn.LazyInstanceNorm1d(), nn.Flatten(), nn.LazyLinear(2))
    with calling(ExpertBackend("ffn.0", module, args_schema=[TensorSpec(3, 4)], keep_activations=keep)) as expert:
        x = torch.randn(2, 3, 4, requires_grad=True)
        expert(x).sum().backward()
    assert x.grad is not None
    assert (module[0].num_features, module[2].in_features) == (3, 12)

"""Callbacks that return the futures of ``torch.distributed``'s collectives: averages, compression, failures."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn

import anabranch as ab
from anabranch.testing import LocalJob

WORKERS = 2


def averaged(tensor: torch.Tensor, grad: torch.Tensor) -> torch._C.Future:
    return dist.all_reduce(grad.div_(WORKERS), async_op=True).get_future()


def compressed(tensor: torch.Tensor, grad: torch.Tensor) -> torch._C.Future:
    """As the guide has it: half the bytes on the wire, divided afterwards."""
    work = dist.all_reduce(grad.to(torch.bfloat16), async_op=True)
    return work.get_future().then(lambda future: future.value()[0].to(grad.dtype) / dist.get_world_size())


def failing(tensor: torch.Tensor, grad: torch.Tensor) -> torch._C.Future:
    def fail(future: torch._C.Future) -> torch.Tensor:
        raise ConnectionError("the codec is broken")

    return dist.all_reduce(grad, async_op=True).get_future().then(fail)


def gathered(tensor: torch.Tensor, grad: torch.Tensor) -> torch._C.Future:
    into = [torch.empty_like(grad) for _ in range(WORKERS)]
    return dist.all_gather(into, grad, async_op=True).get_future()


def trained(callback: object) -> list[list[float]]:
    torch.manual_seed(0)
    model, batch = nn.Linear(3, 2), torch.arange(12.0).reshape(4, 3)
    manager = ab.GradManager(timeout=30.0).attach(model.parameters(), callback)
    rank = dist.get_rank() if dist.is_initialized() else None
    with manager:
        manager.backward(model(batch if rank is None else batch[rank::WORKERS]).square().mean())
    return [parameter.grad.flatten().tolist() for parameter in model.parameters()]


def as_worker() -> None:
    ab.job()
    dist.init_process_group("gloo")
    found: dict[str, object] = {"averaged": trained(averaged), "compressed": trained(compressed)}
    for callback in (failing, gathered):
        try:
            trained(callback)
        except (RuntimeError, ConnectionError, TypeError) as error:
            found[callback.__name__] = f"{type(error).__name__}: {error}"
    found["after"] = trained(averaged)
    print(json.dumps(found))
    dist.destroy_process_group()


def test_a_collectives_future_is_a_callbacks_answer() -> None:
    source = "import sys; sys.path[:0] = sys.argv[1:]; import test_collective_futures as t; t.as_worker()"
    whole = [torch.tensor(values) for values in trained(lambda tensor, grad: None)]
    for log in LocalJob(WORKERS).run_source(source, *(p for p in sys.path if p.endswith("autodiff"))).check().logs:
        found = json.loads(log.strip().splitlines()[-1])
        for mean, rounded, again, wanted in zip(
            found["averaged"], found["compressed"], found["after"], whole, strict=True
        ):
            torch.testing.assert_close(torch.tensor(mean), wanted)
            torch.testing.assert_close(torch.tensor(again), wanted)
            torch.testing.assert_close(torch.tensor(rounded), wanted, rtol=2**-6, atol=1e-3)
        assert found["compressed"] != found["averaged"]
        assert "the codec is broken" in found["failing"]
        assert found["gathered"].startswith("TypeError: a callback's future returns a tensor, or a list of one")

"""Pipes on CUDA devices: the unsplit module's gradients, on the caller's streams."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pipeline_models import assert_same_gradients, close, reference, skipping_model

from anabranch import Pipe
from anabranch.testing import LocalJob

SCRIPT = Path(__file__).with_name("pipeline_ranks_job.py")

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZB1P"])
@pytest.mark.parametrize("devices", [["cuda:0", "cuda:0"], ["cpu", "cuda:0"], ["cuda:0", "cpu"]], ids=str)
def test_stages_on_cuda_are_the_unsplit_module(devices: list[str], schedule: str):
    model = skipping_model()
    if len({*devices}) == 2:  # where a weight that both stages use is refused
        model[9].weight = torch.nn.Parameter(model[9].weight.detach().clone())
    plain = reference(model)
    x, target = torch.randn(2, 7, 5, dtype=torch.float64)
    with Pipe(model, [6, 5], devices=devices, chunks=3, schedule=schedule) as pipe:
        result = pipe.step(x, target, loss=F.mse_loss)
        loss = F.mse_loss(plain(x), target)
        loss.backward()
        assert close(result.loss.cpu(), loss)
        pipe.cpu()
        for parameter in pipe.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad.cpu()
        assert_same_gradients(pipe, plain)


@pytest.mark.parametrize("schedule", ["GPipe", "ZB1P"])
def test_a_backward_of_the_callers_own_does_not_wait_for_itself(schedule: str):
    model = skipping_model()
    plain = reference(model)
    x, target = torch.randn(2, 7, 5, dtype=torch.float64)
    with Pipe(model, [6, 5], devices=["cuda:0", "cuda:0"], chunks=3, schedule=schedule, timeout=60.0) as pipe:
        F.mse_loss(pipe(x.cuda()), target.cuda()).backward()
        F.mse_loss(plain(x), target).backward()
        for mine, expected in zip(pipe.parameters(), plain.parameters(), strict=True):
            assert close(None if mine.grad is None else mine.grad.cpu(), expected.grad)


def test_a_pipe_computes_on_its_callers_streams():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).cuda()
    seen: list[torch.cuda.Stream] = []
    model[1].register_forward_hook(lambda *_: seen.append(torch.cuda.current_stream()))
    stream = torch.cuda.Stream()
    with Pipe(model, [1, 1], devices=["cuda", "cuda"], chunks=2, checkpoint="never") as pipe:
        pipe(torch.randn(4, 64, device="cuda"))
        seen.clear()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            x = torch.randn(4, 64, device="cuda")
            y = pipe(x)
        stream.synchronize()
    assert seen == [stream] * 2
    torch.testing.assert_close(y, model(x))


def test_two_ranks_on_one_device_are_the_unsplit_module():
    LocalJob(2).run(SCRIPT, "on_cuda").check()

"""Workers whose parameters become different while they train: told in `check_workers` steps, and before a save."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import anabranch as ab
from anabranch.executor.likeness import checksum
from anabranch.testing import LocalJob

HEAD = """
import json, logging, sys
import torch
import torch.distributed as dist
from torch import nn
import anabranch as ab

dist.init_process_group("gloo")
rank = dist.get_rank()
warnings = []
logging.getLogger("anabranch.executor").addHandler(type("H", (logging.Handler,), {
    "emit": lambda self, record: warnings.append(record.getMessage())})())


def layers():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))


def mean(model, batch):
    return model(batch).square().mean()


def train(make=layers, *, at_first=None, after=None, mode="AllReduce", every=5, runs=12, lr=0.1, **step):
    '''How a training of some runs ends on this worker, whose batches are its own.'''
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    try:
        one = ab.TrainStep(model, mean, optimizer, **step)
        with ab.Executor(one, mode, engine="tape", timeout=60, check_workers=every) as executor:
            if at_first is not None:
                at_first(model)
            for run in range(runs):
                torch.manual_seed(100 * run + rank)
                loss = executor.run(batch=torch.randn(4, 3))["loss"].item()
                if after is not None:
                    after(executor, model, optimizer, run, loss)
    except ab.WorkersDiffer as error:
        return [list(error.parameters), list(error.ranks), list(error.steps), str(error)]
    except ValueError as error:
        return str(error)
    return "trained"
"""

JOB = (
    HEAD
    + """
class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.codes = nn.Parameter(torch.ones(2, 4), requires_grad=False)

    def forward(self, x):
        hidden = self.layer(x)
        with torch.no_grad():
            self.codes.mul_(0.9).add_(0.1 * hidden.mean(0))
        return hidden - self.codes[0]


class Table(nn.Module):
    def __init__(self, max_norm):
        super().__init__()
        self.table = nn.Embedding(5, 3, max_norm=max_norm)

    def forward(self, x):
        return self.table(x[:, 0].abs().long() % 5)


def with_optimizer_in_a_hook(model):
    def step(parameter):
        with torch.no_grad():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)

    model[0].weight.register_post_accumulate_grad_hook(step)


def on_rank_1(change, at):
    return lambda executor, model, optimizer, run, loss: change(model, optimizer) if rank == 1 and run == at else None


def noise(gradients):
    for gradient in gradients.values():
        gradient.add_(torch.randn_like(gradient), alpha=0.01)


def load(model, optimizer):
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


found = {
    "nothing": train(),
    "batch norm": train(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))),
    "codebook": train(Codebook),
    "max_norm": train(lambda: Table(0.1)),
    "hook": train(at_first=with_optimizer_in_a_hook),
    "load_state_dict": train(after=on_rank_1(load, 6)),
    "rate": train(after=on_rank_1(lambda model, optimizer: optimizer.param_groups[0].update(lr=0.05), 6)),
    "noise": train(on_gradients=noise),
    "accumulated": train(Codebook, accumulate=2, runs=22),
    "never": train(Codebook, every=0),
    "too short": train(Codebook, runs=4),
}
dist.destroy_process_group()
print(json.dumps(found))
"""
)

WRITTEN = {"codebook": ["codes"], "hook": ["0.weight"], "accumulated": ["codes"]}
ONCE = {"load_state_dict": 4, "rate": 4}
RIGHT = ("nothing", "batch norm", "never", "too short")


def test_whatever_makes_parameters_differ_is_told_on_all_workers_with_names_ranks_and_steps() -> None:
    for found in LocalJob(2).run_source(JOB).check().results:
        assert found is not None
        for name in RIGHT:
            assert found[name] == "trained", name
        for name, parameters in WRITTEN.items():
            assert found[name][:3] == [parameters, [1], [0, 5]], name
        assert (len(found["noise"][0]), found["noise"][1:3]) == (4, [[1], [0, 5]])
        for name, count in ONCE.items():
            assert (len(found[name][0]), found[name][1:3]) == (count, [[1], [5, 10]]), name
        assert "lr=0.1 (rank 0), default: optimizer 0, group of 0.bias: lr=0.05 (rank 1)" in found["rate"][3]
        assert "max_norm=0.1 shrinks rows in place" in found["max_norm"]


AGAIN = (
    HEAD
    + """
import tempfile
folder = [tempfile.mkdtemp() if rank == 0 else ""]
dist.broadcast_object_list(folder)
path = folder[0] + "/run"

said = []


def save(executor, model, optimizer, run, loss):
    '''Saves at run 2, differs at run 3 and is not saved then, goes back to what was saved, and trains on.'''
    if run == 3 and rank == 1:
        model[1].bias.data.fill_(3.0)
    if run in (2, 3):
        try:
            executor.save(path)
        except ab.WorkersDiffer as error:
            said.append([list(error.parameters), list(error.steps)])
            executor.load(path)
            said.append(executor.step)


def in_a_run(executor, model, optimizer, run, loss):
    if run == 1:
        executor.save(path)
    if run == 2 and rank == 1:
        model[1].bias.data.fill_(3.0)


def by_rounding(executor, model, optimizer, run, loss):
    if run in (2, 7) and rank == 1:
        model[0].weight.data.mul_(1 + 2e-7)
        optimizer.state[model[0].weight]["momentum_buffer"].mul_(1 + 2e-7)
    if run == 9:
        everyone = [None, None]
        dist.all_gather_object(everyone, model[0].weight.tolist())
        said.append(everyone[0] == everyone[1])




found = {"saved": train(after=save, every=100), "rounding": train(after=by_rounding)}

torch.manual_seed(0)
model = layers()
step = ab.TrainStep(model, mean, torch.optim.SGD(model.parameters(), lr=0.1))
with ab.Executor(step, "AllReduce", engine="tape", timeout=60, check_workers=2) as executor:
    executor.run(batch=torch.ones(2, 3))
    executor.save(path + "-2")
    if rank == 1:
        model[1].bias.data.fill_(3.0)
    for run in range(3):
        try:
            executor.run(batch=torch.ones(2, 3))
        except ab.WorkersDiffer:
            executor.load(path + "-2")
            said.append("loaded")
    said.append(executor.step)
    if rank == 1:
        model[1].bias.data = torch.zeros(5)
    try:
        executor.save(path + "-2")
    except ab.WorkersDiffer as error:
        said.append(list(error.parameters))
dist.destroy_process_group()
print(json.dumps({"found": found, "said": said, "warnings": warnings}))
"""
)


def test_workers_that_differ_are_not_saved_and_rounding_is_said_once_and_mended() -> None:
    for rank, found in enumerate(LocalJob(2).run_source(AGAIN).check().results):
        assert found is not None
        assert found["found"] == {"saved": "trained", "rounding": "trained"}
        assert found["said"] == [[["1.bias"], [3, 4]], 3, True, "loaded", 2, ["1.bias"]]
        said = [text for text in found["warnings"] if "differed by rounding" in text]
        assert len(said) == len(found["warnings"]) == (rank == 0), found["warnings"]


PIPES = """
import json
import torch
import torch.distributed as dist
from torch import nn
import anabranch as ab

dist.init_process_group("gloo")
rank = dist.get_rank()
grid = ab.job().grid(data=2, pipeline=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
pipe = ab.Pipe(model, [1, 1], chunks=1, process_group=grid.pipeline_group)
step = ab.TrainStep(pipe, nn.functional.mse_loss, torch.optim.SGD(pipe.parameters(), lr=0.1))
said = "trained"
with ab.Executor(step, "AllReduce", process_group=grid.data_group, timeout=60, check_workers=3) as executor:
    if rank == 2:
        next(pipe.parameters()).data.add_(1.0)
    try:
        for run in range(6):
            torch.manual_seed(10 * run + rank // 2)
            executor.run(batch=(torch.randn(4, 3), torch.zeros(4, 2)))
    except ab.WorkersDiffer as error:
        said = [list(error.parameters), list(error.ranks), list(error.steps)]
print(json.dumps({"said": said}))
"""


@pytest.mark.slow
def test_a_stage_whose_workers_differ_ends_the_run_on_the_other_stages_ranks_too() -> None:
    for found in LocalJob(4).run_source(PIPES).check().results:
        assert found == {"said": [["0.weight"], [2], [0, 3]]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_a_checksum_sees_each_bit_and_its_place(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).reshape(4, 6).remainder(5).to(dtype)
    sums = [checksum(other) for other in (tensor, tensor.flip(0), torch.ones_like(tensor), torch.zeros_like(tensor))]
    assert len(set(sums)) == len(sums)
    assert checksum(tensor.t().contiguous().t()) == sums[0], "of the numbers, wherever they lie in memory"


def test_a_number_of_steps_that_is_none_is_refused() -> None:
    model = nn.Linear(1, 1)
    step = ab.TrainStep(model, lambda model, x: model(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="check_workers"):
        ab.Executor(step, check_workers=True)
    with pytest.raises(ValueError, match="check_workers"):
        ab.Executor(step, check_workers=-1)

"""Wrong arguments of the public names: each is refused at once, with its name, its value and what to give instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import anabranch as ab
from anabranch.testing import LocalJob
from toys import Kept

MODEL = nn.Linear(4, 3)


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD(MODEL.parameters(), lr=0.1)


SGD = sgd()


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean()


def made(optimizer: Any = SGD, **options: Any) -> ab.TrainStep:
    return ab.TrainStep(MODEL, loss, optimizer, **options)


def executor(step: ab.TrainStep | None = None, **options: Any) -> ab.Executor:
    return ab.Executor(made() if step is None else step, **options)


def looks() -> ab.Executor:
    return ab.Executor(ab.EvalStep(MODEL, lambda model, batch: {"y": model(batch)}))


@ab.skippable(stash=["first"])
class Stashes(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield ab.stash("first", x)
        return x


@ab.skippable(pop=["first"])
class Pops(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + ab.pop("first")  # type: ignore[operator,no-any-return]


def piped(loss: Any, *target: Tensor, last: nn.Module | None = None) -> object:
    """A step of a pipe."""
    layers = [Stashes(), nn.Linear(2, 2), Pops() if last is None else last]
    with ab.Pipe(nn.Sequential(*layers[last is not None :]), [1, 2 - (last is not None)]) as pipe:
        return pipe.step(torch.ones(2, 2), *target, loss=loss)


STEPS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: ab.TrainStep(MODEL, nn.MSELoss(), SGD), TypeError, "MSELoss takes an output and a target; write lambda"),
    (lambda: ab.TrainStep(MODEL, nn.functional.l1_loss, SGD), TypeError, "l1_loss takes an output and a target"),
    (lambda: ab.TrainStep(MODEL, lambda batch, model: model(batch), SGD), TypeError, r"takes batch and then model"),
    (
        lambda: piped(nn.functional.mse_loss, last=nn.Tanh()),
        AttributeError,
        r"loss\(output, target\); .* has no target",
    ),
    (lambda: piped(loss, torch.ones(2, 2), last=nn.Tanh()), TypeError, r"a Pipe's loss is called as loss\(output, tar"),
    (lambda: piped(nn.functional.mse_loss, torch.ones(2, 2)), RuntimeError, r"write value = yield ab.pop\(name\)"),
    *(
        (lambda use=use: use(ab.pop("first")), kind, r"write value = yield ab.pop\(name\)")
        for kind, use in [
            (AttributeError, lambda value: value.shape),
            (RuntimeError, lambda value: value * 2),
            (RuntimeError, lambda value: 2 - value),
            (RuntimeError, lambda value: value[0]),
            (RuntimeError, lambda value: [*value]),
        ]
    ),
    (lambda: executor().run(batch=[[1.0, 2.0]]), ValueError, "convert its numbers to tensors or arrays"),
    (lambda: made(None), TypeError, "optimizer is one Optimizer or a list of them, got None"),
    (lambda: made(torch.optim.SGD), TypeError, "optimizer is one Optimizer or a list of them, got <class"),
    (lambda: made(scheduler=3), TypeError, "scheduler is one LRScheduler or a list of them, got 3"),
    (lambda: made(clip_grad_norm="1"), TypeError, "clip_grad_norm is a finite number above 0, or None, got '1'"),
    (lambda: made(torch.optim.SGD(nn.Linear(4, 3).parameters(), lr=0.1)), ValueError, "not the model's"),
    (lambda: made([SGD, SGD]), ValueError, "both hold 'weight'"),
    (lambda: made(scheduler=torch.optim.lr_scheduler.ConstantLR(sgd())), ValueError, "none of this step's optimizers"),
    (lambda: made(torch.optim.LBFGS(MODEL.parameters())), ValueError, "LBFGS"),
    (lambda: made([MODEL]), TypeError, "optimizer 0"),
    (lambda: ab.EvalStep(loss, loss), TypeError, "nn.Module"),  # type: ignore[arg-type]
    *(
        (lambda wrong=wrong: made(**wrong), ValueError, next(iter(wrong)))
        for wrong in ({"accumulate": 0}, {"accumulate": True}, {"clip_grad_norm": 0.0}, {"reduction": "max"})
    ),
    (lambda: made(precision="fp16"), ValueError, "precision is None, 'bfloat16' or 'float16', got 'fp16'"),
    (lambda: made(skip_nonfinite="yes"), TypeError, "skip_nonfinite is True, False, or None"),
    (lambda: made(clip_grad_value=0), ValueError, "clip_grad_value is a finite number above 0"),
    (lambda: made(flush="yes"), ValueError, "flush is 'keep', 'step' or 'drop', got 'yes'"),
    *(
        (lambda size=size: made(activation_budget=size), ValueError, "activation_budget is a number of bytes above 0")
        for size in (0, -1, True, "much", "0GiB", "2 GiBs", 1.5)
    ),
    (lambda: executor(made(activation_budget=5)), ValueError, "activation_budget, which needs a graph"),
    (lambda: executor(check_workers=True), TypeError, "check_workers"),
    (lambda: executor(check_workers=-1), ValueError, "check_workers"),
    (lambda: executor(comm_mode="PS", routes={"nowhere": "PS"}), ValueError, "weight, bias"),
    (lambda: executor(comm_mode="PS", routes={"weight": "there"}), ValueError, "'AllReduce', 'PS' or 'Hybrid'"),
    (lambda: executor(comm_mode="PS", row_compression="int4"), ValueError, "'int8', not as 'int4'"),
    *((lambda sinks=sinks: executor(sinks=sinks), TypeError, "scalars, event and close") for sinks in ([Kept], "x", 3)),
    (lambda: executor().on("epoch", print), ValueError, "'peer_lost'"),
    (lambda: executor().on("step", None), TypeError, "function of one record"),
    (lambda: executor(engine="auto"), ValueError, "engine is 'tape' or 'graph', got 'auto'"),
    (lambda: executor(compile=True), ValueError, "the engine is 'tape'; give engine='graph'"),
    (lambda: executor(comm_mode="P2P"), ValueError, "'PS' or 'Hybrid', got 'P2P'"),
    (lambda: executor(consistency="ssp"), ValueError, "such as 'ssp:4', got 'ssp'"),
    (lambda: executor().run(torch.ones(2, 4)), TypeError, "the name of a step, such as 'default', got a Tensor"),
    (lambda: executor(seed="a"), TypeError, "seed is a whole number, or None, got 'a'"),
    (lambda: executor(dataloaders=5), TypeError, "dataloaders is a dict of loaders .* got 5"),
    (lambda: executor(timeout="x"), TypeError, "timeout is a number of seconds, got 'x'"),
    (lambda: executor(heartbeat=0), ValueError, "heartbeat .* above 0, got 0"),
    (lambda: executor(cache=3), TypeError, r"cache is an ab.Cache, such as ab.Cache\(capacity=1000\), .* got 3"),
    (lambda: executor(log_path=3), TypeError, "log_path is a string or a pathlib.Path, got 3"),
    (lambda: executor(devices={"zz": "cpu"}), ValueError, r"'zz'; the modules are: none; use model.to\(device\)"),
    (lambda: executor().run(batch=torch.ones(2, 4), fetch=[3]), TypeError, r"fetch is a list of names.* got \[3\]"),
    (lambda: executor().save(None), TypeError, "path is a string or a pathlib.Path, got None"),
    (lambda: executor().save("c", wait=3), TypeError, "wait is True or False, got 3"),
    (lambda: executor().export(3), TypeError, "folder is a string or a pathlib.Path, got 3"),
    (lambda: executor(state=[]), TypeError, "state is a dict of objects by name, got list"),
    (lambda: executor(state={1: "x"}), TypeError, "names in state are strings, got 1"),
    (lambda: executor().log(3.0), TypeError, "log takes a dict of numbers by name, .* got 3.0"),
    (lambda: executor().log({"score": torch.ones(2)}), TypeError, "got score=tensor"),
    *((lambda over=over: executor().track(over), TypeError, "track takes") for over in (1.5, True, None)),
    (lambda: executor().track(-1), ValueError, "track takes a number of rounds of at least 0, got -1"),
    *((lambda n=n: executor().trace("t.json", n), ValueError, "optimizer steps, at least 1, got") for n in (0, -3)),
    *((lambda n=n: executor().trace("t.json", n), TypeError, "number of optimizer steps, or") for n in (1.5, True)),
    (lambda: executor().evaluate("default", []), ValueError, "'default' trains; evaluate runs an EvalStep"),
    (lambda: looks().evaluate(), ValueError, "'default' has no loader"),
    (lambda: looks().plan("default"), ValueError, "step 'default' trains nothing"),
    (lambda: made(ids={"weight": torch.ones(1)}), TypeError, r"ids is called as ids\(batch\), got dict"),
    (lambda: executor(dataloaders={"default": 3}), TypeError, "a loader is an iterable of batches, got int"),
    (
        lambda: executor(dataloaders={"default": TensorDataset(torch.ones(2))}),
        TypeError,
        r"TensorDataset is a Dataset, whose items are samples; .*DataLoader\(dataset",
    ),
    (lambda: executor().run("tain"), ValueError, "'tain'"),
    (lambda: executor().graph("default"), RuntimeError, "engine='graph'"),
    (lambda: executor().run("default"), ValueError, "no loader"),
    (lambda: executor(dataloaders={"test": []}), ValueError, r"'test'; the steps are \['default'\]"),
    (lambda: made(precision="float16", activation_budget=5), ValueError, "precision='float16' runs without one"),
    (lambda: executor(made(precision="float16"), engine="graph"), ValueError, "or engine='tape'"),
    (lambda: ab.gradients(3, wrt=["x"]), TypeError, "graph must be a Graph, as capture returns, got int"),
    (lambda: LocalJob(workers=0), ValueError, "a job has at least 1 worker, got workers=0"),
]

SERVERS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: ab.ParameterServer(shard="0"), TypeError, "shard is a whole number, got '0'"),
    (lambda: ab.ParameterServer(checkpoint_seconds=1e10), ValueError, "checkpoint_seconds is at most .* got 100000000"),
    (
        lambda: ab.ParameterServer(durability="log", checkpoint_dir=3),
        TypeError,
        "checkpoint_dir is a string or .* got 3",
    ),
    (
        lambda: ab.ParameterServer(durability="log", checkpoint_dir="/dev/null"),
        ab.CheckpointError,
        "/dev/null/shard-0-of-1 cannot be used: .*; let user .* or give a directory on another local disk",
    ),
    (lambda: ab.ParameterClient("x"), TypeError, "endpoints is a list of strings .* got 'x'"),
    (lambda: ab.ParameterClient([3]), TypeError, r"endpoints is a list of strings .* got \[3\]"),
    (lambda: ab.ParameterClient([]), ValueError, "endpoints is empty; name the shards, or leave it out"),
]

CALLS: list[tuple[Callable[[ab.ParameterClient], object], type[Exception], str]] = [
    (lambda client: client.init("n", (-1,)), ValueError, r"shape is a tuple of sizes of at least 0, got \(-1,\)"),
    (lambda client: client.init(3, (3,)), TypeError, "name is a string, got 3"),
    (lambda client: client.init("n", (3,), dtype="f"), TypeError, "dtype is torch.float32.* got 'f'"),
    (lambda client: client.init("n", (3,), init="x"), TypeError, "init is a number.* got 'x'"),
    (lambda client: client.init("n", (3,), optimizer="sgd"), TypeError, "optimizer is called with .* got 'sgd'"),
    (
        lambda client: client.init("n", (10**15,)),
        ValueError,
        "not have enough memory for a parameter of shape .*kind='rows'",
    ),
    (lambda client: client.push("v", [1, 2, 3]), TypeError, "the gradient of v must be a tensor, got list"),
    (lambda client: client.push("v", torch.ones(3).long()), ab.SchemaError, "the gradient of v is torch.int64"),
    (lambda client: client.sparse_pull("r", [1]), TypeError, "the ids of r must be a tensor, got list"),
    (lambda client: client.save(None), TypeError, "path is a string or a pathlib.Path, got None"),
]


@pytest.mark.parametrize(("call", "kind", "words"), [*STEPS, *SERVERS])
def test_a_wrong_argument_is_named_with_its_value_and_the_cure(
    call: Callable[[], object], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        call()


@pytest.fixture(scope="module")
def client() -> Iterator[ab.ParameterClient]:
    with ab.ParameterClient() as made:
        made.init("v", (3,), init=1.0)
        made.init("r", (9, 4), kind="rows")
        yield made


@pytest.mark.parametrize(("call", "kind", "words"), CALLS)
def test_a_wrong_argument_of_a_parameter_client_is_named_and_changes_nothing(
    call: Callable[[ab.ParameterClient], object], kind: type[Exception], words: str, client: ab.ParameterClient
) -> None:
    with pytest.raises(kind, match=words):
        call(client)
    assert client.pull("v").tolist() == [1.0, 1.0, 1.0]


def test_a_log_in_a_missing_directory_is_refused_before_any_step(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="log_path=.*loads.jsonl.* is in a directory that does not exist; create .*/no"
    ):
        executor(log_path=tmp_path / "no" / "loads.jsonl")


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_lazy_layer_that_has_seen_no_batch_is_named(kind: str) -> None:
    """It was PyTorch's ``RuntimeError: Can't access the shape of an uninitialized parameter or buffer``."""
    lazy = nn.LazyLinear(3) if kind == "parameter" else nn.LazyBatchNorm1d(affine=False)
    model = nn.Sequential(nn.Linear(4, 4), lazy)
    name = "'1.weight'" if kind == "parameter" else "'1.running_mean'"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for make in (
        lambda: ab.TrainStep(model, loss, optimizer),
        lambda: ab.EvalStep(model, lambda model, batch: {"y": model(batch)}),
    ):
        with pytest.raises(ValueError, match=f"{name} of Sequential .*; run the model once on a batch"):
            make()
    model(torch.ones(2, 4))
    ab.Executor(ab.TrainStep(model, loss, optimizer)).run(batch=torch.ones(2, 4))


def test_words_may_be_written_in_any_case() -> None:
    two = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with executor(engine="Tape", comm_mode="allreduce", consistency="BSP") as made:
        assert made.comm_mode == "AllReduce"
        assert made.engine("default") == "tape"
    for name in ("gpipe", "1f1b", "zb1p"):
        pipe = ab.Pipe(two, balance=[1, 1], chunks=2, schedule=name, checkpoint="Never")  # type: ignore[arg-type]
        assert pipe(torch.ones(2, 4)).shape == (2, 4)
    assert ab.Cache(policy="lfuopt", capacity=3).policy == "LFUOpt"  # type: ignore[arg-type]
    assert ab.RemoteEmbedding("t", 3, 2, mode="SUM").mode == "sum"  # type: ignore[arg-type]

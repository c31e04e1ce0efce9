"""Run by every rank of a job: pipes across ranks against the unsplit module, and every way for one to fail.

The arguments name what to do, one after the other, each as ``name`` or ``name:argument``; each rank prints one line of
JSON with what it found, or dies with a traceback.
"""

from __future__ import annotations

import contextvars
import copy
import io
import json
import math
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pipeline_models import LAYERS, Computes, changing_model, close, reference, skipping_model, tied_table
from split_models import CHANGES, Change, Language, Reads
from torch import Tensor, nn

import anabranch as ab
from anabranch.pipeline import make_schedule, split
from anabranch.pipeline.links import connection
from anabranch.pipeline.pipe import PipeRanks
from anabranch.record.spans import Span, heard, on_fault_point
from anabranch.tensors import flatten

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
ALONE = False
"""One process has the stages of all ranks: no ``RANK`` is another's."""
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "ZB1P", "ZBV"]
Loss = Callable[[Tensor, Tensor], Tensor]


def balance_for(schedule: str) -> list[int]:
    stages = WORLD * (2 if schedule in ("Interleaved1F1B", "ZBV") else 1)
    sizes = [LAYERS // stages] * stages
    sizes[0] += LAYERS - sum(sizes)
    return sizes


def any_balance(schedule: str, chance: random.Random) -> list[int]:
    cuts = sorted(chance.sample(range(1, LAYERS), len(balance_for(schedule)) - 1))
    return [b - a for a, b in pairwise([0, *cuts, LAYERS])]


def make(model: nn.Sequential, schedule: str = "1F1B", **arguments: object) -> ab.Pipe:
    places = {"devices": ["cpu"] * WORLD} if ALONE else {"process_group": dist.group.WORLD}
    arguments = {**places, "chunks": 4, "schedule": schedule, **arguments}
    return ab.Pipe(model, arguments.pop("balance", balance_for(schedule)), **arguments)


def same_gradients(pipe: ab.Pipe, plain: nn.Module) -> None:
    """This rank's parameters have the unsplit module's gradients; a tied one under whichever of its names."""
    expected = {name: parameter.grad for name, parameter in plain.named_parameters(remove_duplicate=False)}
    for name, parameter in pipe.named_parameters():
        assert close(parameter.grad, expected[name]), name


def trains_alike(pipe: ab.Pipe, plain: nn.Module, x: Tensor, target: Tensor, loss: Loss = F.mse_loss) -> None:
    """A step adds the unsplit module's gradients."""
    result = pipe.step(x, target, loss=loss)
    expected = loss(plain(x), target)
    expected.backward()
    assert result.loss is None or close(result.loss, expected)
    same_gradients(pipe, plain)


def exact(cases: str = "") -> dict:
    """Every schedule under drawn splits, 1 to 8 microbatches; with the argument ``all`` each in every checkpoint mode.

    The weight is tied.
    """
    everything = cases == "all"
    chance = random.Random(WORLD)
    modes = ["always", "except_last", "never"]
    cases = list(product(SCHEDULES, modes)) if everything else list(zip(SCHEDULES, modes * 2, strict=False))
    sizes = (7, chance.randint(1, 6), 1, 8) if everything else (7, 1)
    for seed, (schedule, checkpoint) in enumerate(cases):
        torch.manual_seed(seed)
        width = chance.randint(1, 6)
        model = skipping_model(width)
        plain = reference(model)
        with make(model, schedule, checkpoint=checkpoint, balance=any_balance(schedule, chance)) as pipe:
            for rows in sizes:
                pipe.chunks = chance.randint(2, 8)
                x, target = torch.randn(2, rows, width, dtype=torch.float64)
                result = pipe.step(x if RANK == 0 else None, target, loss=F.mse_loss)
                output = plain(x)
                loss = F.mse_loss(output, target)
                loss.backward()
                here = result.loss is not None
                assert here == ("9" in dict(pipe.module.named_children()))
                assert not here or (close(result.loss, loss) and close(result.output, output))
                same_gradients(pipe, plain)
                ours = x.clone().requires_grad_()
                theirs = x.clone().requires_grad_()
                y = pipe(ours if RANK == 0 else None)
                (y**2).sum().backward()
                expected = plain(theirs)
                (expected**2).sum().backward()
                assert close(y, expected) if here else y.numel() == 0
                assert RANK != 0 or close(ours.grad, theirs.grad)
                same_gradients(pipe, plain)
                with torch.no_grad():
                    y = pipe(x if RANK == 0 else None)
                    assert not y.requires_grad
                    assert close(y, plain(x)) if here else y.numel() == 0
        assert pipe.calls == 3 * len(sizes), "every rank counts"
        lines = pipe.describe().splitlines()[2:]
        assert all(line.count(" ms") == 2 for line in lines), "every rank knows all times"
    checks = [keywords, output_on_all_ranks, padded, ties_of_some, changes_in_place, evaluates_first, sparse_gradients]
    checks += [split_model, every_value] if WORLD > 1 else []  # one rank has no cut
    checks += [what_only_others_train, changes_of_the_model] if WORLD > 1 and not ALONE else []
    for check in checks:
        check()
    return arrows()


def rows_of_layers() -> nn.Sequential:
    layers = [layer for _ in range(WORLD) for layer in (nn.Linear(3, 3), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(3, 3)).double()


def refused(
    call: Callable[[], object], message: str, at: int | None = None, error: type[Exception] = ValueError
) -> None:
    """The call raises the error on rank ``at``, or everywhere, and the others hear of it."""
    caught = raised_by(call)
    assert isinstance(caught, error if at in (None, RANK) else ab.PipelineError), caught
    assert message in str(caught), caught


def what_only_others_train() -> None:
    """A penalty on parameters is right on the last rank's own and those tied to it; others are refused by name."""
    x, target = torch.randn(2, 6, 3, dtype=torch.float64)
    model, last = rows_of_layers(), WORLD - 1
    model[2 * WORLD].weight = model[0].weight
    plain = reference(model)
    balance = [2] * last + [3]

    def penalty(of: nn.Module, *names: str, kept: bool = True) -> Callable[[Tensor, Tensor], Tensor]:
        values = [of.get_parameter(name) for name in names]
        read = (lambda: values) if kept else lambda: [of.get_parameter(name) for name in names]
        return lambda y, t: F.mse_loss(y, t) + sum(value.square().sum() for value in read())

    own = (f"{2 * last}.bias", f"{2 * WORLD}.weight")
    with make(model, balance=balance, chunks=3) as pipe:
        for kept in (True, False):
            pipe.step(x, target, loss=penalty(model, *own, kept=kept))
            penalty(plain, *own)(plain(x), target).backward()
            same_gradients(pipe, plain)
        grads = [parameter.grad.clone() for parameter in pipe.parameters()]
        for name in ("0.bias", f"{2 * last - 2}.bias"):
            loss = penalty(model, name, *own)
            refused(lambda loss=loss: pipe.step(x, target, loss=loss), f"{name} is on rank {int(name[0]) // 2}", last)
        assert all(torch.equal(p.grad, grad) for p, grad in zip(pipe.parameters(), grads, strict=True))
        model[2 * last].bias = model[2 * last - 2].bias
        tied = f"{2 * last - 2}.bias was tied or untied after Pipe(...); make a new Pipe"
        refused(lambda: step(pipe, x, target), tied, last)
    model = rows_of_layers()
    borrowed = [model[0]]
    model.append(Computes(lambda x: F.linear(x, borrowed[0].weight)))
    with make(model, balance=[*balance[:-1], 4], chunks=3) as pipe:
        for _ in range(2):
            refused(lambda: step(pipe, x, target), "0.weight is on rank 0, in stage 0 of its Pipe", last)
    of_the_whole_model(x, [*balance[:-1], 3])


def of_the_whole_model(x: Tensor, balance: list[int]) -> None:
    """Each rank has its own parameters alone, and refuses to run the whole model or to make another Pipe of it."""
    model = rows_of_layers()
    make(model, balance=balance).close()
    weights = [model[2 * rank].weight for rank in range(WORLD)]
    assert [type(weight) is nn.Parameter for weight in weights] == [rank == RANK for rank in range(WORLD)]
    with torch._C.DisableTorchFunctionSubclass():
        assert [weight.untyped_storage().nbytes() for weight in weights] == [
            72 if r == RANK else 8 for r in range(WORLD)
        ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)  # which passes over the others'
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert sum(p.numel() for p in copy.deepcopy(model.to("cpu")).parameters()) == 12 * (WORLD + 1)
    values = model.state_dict()
    for use in (
        lambda: model(x),
        lambda: model.eval()(x),
        lambda: torch.save(values, io.BytesIO()),
        lambda: sum(value.sum() for value in values.values()),
        lambda: nn.utils.get_total_norm(model.parameters()),
        lambda: model.load_state_dict(rows_of_layers().state_dict()),
    ):
        caught = raised_by(use)
        assert isinstance(caught, ValueError | RuntimeError), caught
        assert re.search(r"is on rank \d, in stage \d of its Pipe, and .*; call pipe\(x\)", str(caught)), caught
    with make(model, balance=balance) as pipe:  # as before
        pipe(x)
    another = partial(make, model, balance=[4, *[1] * (WORLD - 2), WORLD - 1])
    refused(another, "is on rank 1, in stage 1 of its Pipe")


def changes_of_the_model() -> None:
    """A layer replaced in the model or in this rank's part is refused; a tied weight that thaws is trained as one."""
    x, target = torch.randn(2, 6, 3, dtype=torch.float64)
    balance = [2] * (WORLD - 1) + [3]
    for part in (False, True):
        model = rows_of_layers()
        with make(model, balance=balance, chunks=3) as pipe:
            step(pipe, x, target)
            name = str(2 * RANK if part else 0)
            (pipe.module if part else model)._modules[name] = nn.Linear(3, 3).double()
            refused(lambda: step(pipe, x, target), f"{name!r} was replaced, hooked or wrapped after the Pipe was made")
    model = rows_of_layers()
    with make(model, balance=balance, chunks=3) as pipe:
        model.append(nn.Tanh()) if RANK == 1 else None
        refused(lambda: step(pipe, x, target), "was added after the Pipe was made", 1)
    model = rows_of_layers()
    model[2 * WORLD].weight = model[0].weight
    model[0].weight.requires_grad_(False)
    plain = reference(model)
    with make(model, balance=balance, chunks=3) as pipe:
        step(pipe, x, target)
        pipe.zero_grad()
        for one in (model, plain):
            one[0].weight.requires_grad_(True)
        trains_alike(pipe, plain, x, target)
        pipe.load_state_dict(plain.state_dict(), assign=True)
        caught = raised_by(partial(step, pipe, x, target))
        # The first and the last rank see it; either may hear of it from the other before it has looked.
        assert isinstance(caught, (ValueError, ab.PipelineError) if RANK in (0, WORLD - 1) else ab.PipelineError)
        assert "0.weight was tied or untied after Pipe(...); make a new Pipe" in str(caught), caught


def sparse_gradients() -> None:
    """A table on the first rank and what compares with its rows on the last: a sparse and a dense share, summed."""
    model = nn.Sequential(*tied_table(), *(nn.Identity() for _ in range(max(0, WORLD - 4))))
    plain = reference(model)
    ids = torch.tensor([1, 2, 1, 9, 0, 2])
    with make(model, balance=[len(model) - WORLD + 1] + [1] * (WORLD - 1), chunks=3) as pipe:
        trains_alike(pipe, plain, ids, ids.flip(0), F.cross_entropy)


def arrows() -> dict:
    """The ends of the messages of a step, in a trace."""
    spans: list[Span] = []
    x, target = torch.randn(2, 4, 5, dtype=torch.float64)
    with make(skipping_model(), chunks=2) as pipe, heard(spans.append):
        step(pipe, x, target)
    return {"arrows": [span[7] for span in spans if span[7] is not None]}


def everything(_: object = None) -> dict:
    """Values of each kind that may cross, one of them longer than a header."""
    x = torch.arange(15.0).view(3, 5)
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]
    tensors = [(y, y.t(), y[:0], y[0, 0]) for y in map(x.to, dtypes)]
    plain = [None, True, -(2**63), 2**80, math.inf, "ä", "x" * 4000, {}, (), {"a": [1, (None,)], 2: {None: 0.5}}]
    sparse = torch.sparse_coo_tensor([[0, 2, 2]], [1.0, 2.0, 3.0], (4,), check_invariants=True)
    return {"tensors": tensors, "plain": plain, "sparse": sparse}


def is_everything(value: dict) -> Tensor:
    (leaves, tree), (expected, expected_tree) = flatten(value), flatten(everything())
    assert tree == expected_tree
    for one, other in zip(leaves, expected, strict=True):
        assert type(one) is type(other)
        if isinstance(one, Tensor):
            assert (one.dtype, one.is_sparse) == (other.dtype, other.is_sparse)
            assert torch.equal(one.to_dense(), other.to_dense())
        else:
            assert one == other
    return torch.zeros(1)


def every_value() -> None:
    """Values arrive as they were sent."""
    layers = [Computes(everything), *(nn.Identity() for _ in range(WORLD - 2)), Computes(is_everything)]
    with make(nn.Sequential(*layers), balance=[1] * WORLD) as pipe, torch.no_grad():
        for _ in range(2):
            pipe(torch.zeros(1))


class Scale(nn.Module):
    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        return x * factor


def keywords() -> None:
    """A keyword input reaches the layers that name it on every rank; one that requires gradients is refused."""
    model = nn.Sequential(*(layer for _ in range(2 * WORLD) for layer in (nn.Linear(3, 3), Scale()))).double()
    plain = reference(model)
    x = torch.randn(5, 3, dtype=torch.float64)
    factor = torch.linspace(1, 2, 5, dtype=torch.float64)[:, None]
    trained = factor.clone().requires_grad_()
    with make(model, balance=[4] * WORLD, chunks=3) as pipe:
        pipe(x, factor=factor).sum().backward()
        if WORLD > 1 and not ALONE:
            last = WORLD - 1
            with_grad, without = (trained, {}) if last == RANK else (factor, {"factor": factor})
            refused(lambda: pipe(x, factor=with_grad), "'factor' requires gradients", last)
            with torch.no_grad():
                pipe(x, factor=trained)
            refused(lambda: pipe(x, **without), "takes the keyword input 'factor'", last)
    for layer in plain:
        x = layer(x, factor) if isinstance(layer, Scale) else layer(x)
    x.sum().backward()
    same_gradients(pipe, plain)


def output_on_all_ranks() -> None:
    """Every rank evaluates, generates and trains by the same lines as one process."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(9, 4), *(nn.Linear(4, 4) for _ in range(2 * WORLD)), nn.Linear(4, 9)).double()
    plain = reference(model)
    ids = expected = torch.tensor([[1, 2], [3, 4], [5, 6]])
    with make(model, balance=[*[2] * (WORLD - 1), 4], chunks=2, output="all") as pipe:
        for _ in range(3):
            with torch.no_grad():
                ids = torch.cat([ids, pipe(ids)[:, -1:].argmax(-1)], 1)
                expected = torch.cat([expected, plain(expected)[:, -1:].argmax(-1)], 1)
        assert ids.tolist() == expected.tolist()
        loss = pipe(ids).square().sum()
        loss.backward()
        expected_loss = plain(ids).square().sum()
        expected_loss.backward()
        assert close(loss, expected_loss)
        same_gradients(pipe, plain)
        if WORLD > 1 and not ALONE:
            pipe.output = "all" if RANK == 0 else "last"
            assert "pipe.output is 'all' on the first" in str(raised_by(lambda: pipe(ids)))
        pipe.output = "last"
        assert pipe(ids).numel() == (ids.numel() * 9 if pipe.output_rank == RANK else 0)


def padded() -> None:
    """A mean over tokens: each microbatch weighs by its tokens, one of padding alone by none; a batch's mean is NaN."""
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Embedding(9, 4), *(nn.Linear(4, 4) for _ in range(2 * WORLD - 2)), nn.Linear(4, 9)
    ).double()
    plain = reference(model)
    ids = torch.randint(0, 9, (6, 4))
    target = ids.masked_fill(torch.arange(4) >= torch.tensor([4, 1, 0, 0, 2, 1])[:, None], -100)

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(y.flatten(0, 1), target.flatten())

    with make(model, balance=[2] * WORLD, chunks=3) as pipe:
        first = ids if RANK == 0 else None
        results = [pipe.step(first, target, loss=loss, rows=lambda x, target: (target >= 0).sum())]
        results += [pipe.step(input=ids, target=target, loss=loss, rows=lambda target: (target >= 0).sum())]
        for _ in results:
            loss(plain(ids), target).backward()
        same_gradients(pipe, plain)
        assert all(result.loss is None or close(result.loss, loss(plain(ids), target)) for result in results)
        result = pipe.step(first if first is None else first[2:4], target[2:4], loss=loss, rows=lambda x, target: 0)
        assert result.loss is None or result.loss.isnan()
        for weight in (-1, math.inf, math.nan):
            refused(
                lambda weight=weight: pipe.step(first, target, loss=loss, rows=lambda x, target: weight),
                "rows= gave",
                None if ALONE else WORLD - 1,
            )


def several(x: Tensor) -> dict:
    """What one message carries: tensors that lie side by side, one of them conjugated lazily."""
    return {"kept": x * 2, "changed": x + 1, "turned": torch.complex(x, x).conj()}


def change_one(parts: dict) -> Tensor:
    y = parts["kept"] ** 2  # saved for backward
    parts["changed"].add_(1.0)
    return y + parts["changed"] + parts["turned"].imag


def ties_of_some() -> None:
    """One weight is tied over the first and the last rank, another over the last two."""
    if WORLD < 3:
        return
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(2 * WORLD))).double()
    model[2 * WORLD - 1].weight = model[0].weight
    model[2 * WORLD - 2].weight = model[2 * WORLD - 3].weight
    plain = reference(model)
    x, target = torch.randn(2, 4, 3, dtype=torch.float64)
    with make(model, balance=[2] * WORLD) as pipe:
        trains_alike(pipe, plain, x, target)
        PipeRanks(pipe).align_ties()
        same_gradients(pipe, plain)


def split_model() -> None:
    """A model that is not an nn.Sequential, embeddings tied over the ranks, a mask and a skip that cross all cuts."""
    torch.manual_seed(1)
    model = Language(layers=2 * WORLD, dropout=0.0).double()
    plain = reference(model)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 2]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 1, 1]])
    for schedule, checkpoint in (("GPipe", "never"), ("1F1B", "always"), ("Interleaved1F1B", "except_last")):
        stages = len(balance_for(schedule))
        model = copy.deepcopy(plain)
        parts = split(model, [f"h.{i}" for i in range(2 * WORLD - stages + 1, 2 * WORLD)])
        with make(parts, schedule, checkpoint=checkpoint, balance=[1] * stages, chunks=3) as pipe:
            assert sorted({*pipe.state_dict(), *pipe.elsewhere}) == sorted(plain.state_dict())
            for chunks in (1, 3):
                pipe.chunks = chunks
                first = (ids,) if RANK == 0 else ()
                named = {"mask": mask, "labels": ids} if RANK == 0 else {}
                result = pipe.step(*first, target=None, loss=lambda y, _: y["loss"].mean(), **named)
                expected = plain(ids, mask, labels=ids)
                expected["loss"].mean().backward()
                assert result.loss is None or close(result.loss, expected["loss"].mean())
                assert result.loss is None or close(result.output["logits"], expected["logits"])
                same_gradients(pipe, plain)
                y = pipe(*first, **named)
                expected = plain(ids, mask, labels=ids)
                expected["loss"].sum().backward()
                (y["loss"] if isinstance(y, dict) else y).sum().backward()
                same_gradients(pipe, plain)
                pipe.eval()
                pipe.output = "all"
                with torch.no_grad():
                    assert close(pipe(*first)["logits"], plain(ids)["logits"])
                pipe.output = "last"
                pipe.train()
            for module in (model, plain):
                module.zero_grad()
    modes_differ(plain, ids)


def modes_differ(model: nn.Module, ids: Tensor) -> None:
    """A rank whose model would take another way says so."""
    if WORLD > 1 and not ALONE:
        model.dropout = 0.5 if RANK == WORLD - 1 else 0.0
        at = [f"h.{i}" for i in range(1, WORLD)]
        with make(split(model, at), balance=[1] * WORLD) as pipe:
            message = f"calls something else on rank {WORLD - 1} than"
            refused(lambda: pipe(ids), message, WORLD - 1, ab.CaptureError)


def code_between() -> None:
    """What the code between the modules reads is what it is at each call, and must be the same on all ranks."""
    for change in CHANGES.values():
        contextvars.copy_context().run(changed_code, change)


def code_of_the_last_two() -> None:
    """Of a pipe on some of the job's ranks, the rank whose code differs is named by its number in the job."""
    group = dist.new_group([WORLD - 2, WORLD - 1])
    if RANK >= WORLD - 2:
        model, x = Reads(), torch.randn(4, 3, dtype=torch.float64)
        with ab.Pipe(split(model, ["b"], example=x), [1, 1], process_group=group) as pipe:
            model.number = float(RANK)
            refused(partial(pipe, x), f"on rank {WORLD - 1} than", WORLD - 1, ab.CaptureError)


def changed_code(change: Change) -> None:
    torch.manual_seed(4)
    model = Reads()
    plain = copy.deepcopy(model)
    x = torch.randn(4, 3, dtype=torch.float64)
    parts = split(model, ["b", "c"][: WORLD - 1], example=x)
    with make(parts, balance=[1] * len(parts), chunks=2) as pipe, pytest.MonkeyPatch.context() as patch:
        for changes in (False, True):
            for one in (model, plain) if changes else ():
                change(one, patch)
            if ALONE:
                assert close(pipe(x), plain(x))
            result = pipe.step(x, target=None, loss=mean_square)
            expected = mean_square(plain(x), None)
            expected.backward()
            assert result.loss is None or close(result.loss, expected)
            same_gradients(pipe, plain)
            for one in (pipe, plain):
                one.zero_grad()
        if ALONE:
            return
        if RANK == WORLD - 1:
            patch.setattr(Reads, "factor", 3.0)
        call = partial(pipe.step, x, target=None, loss=mean_square)
        refused(call, f"on rank {WORLD - 1} than", WORLD - 1, ab.CaptureError)
        assert all(parameter.grad is None for parameter in pipe.parameters())


def mean_square(output: Tensor, _: object) -> Tensor:
    return output.square().mean()


def changes_in_place() -> None:
    """A change in place of one tensor that arrived leaves its neighbours alone; of one on two ways it is refused."""
    if WORLD == 1:
        return
    model = nn.Sequential(nn.Linear(4, 4), Computes(several), Computes(change_one)).double()
    plain = reference(model)
    x, target = torch.randn(2, 4, 4, dtype=torch.float64)
    layers = [*model, *(nn.Identity() for _ in range(WORLD - 2))]
    with make(nn.Sequential(*layers), balance=[2] + [1] * (WORLD - 1), checkpoint="never") as pipe:
        trains_alike(pipe, plain, x, target)
    model = changing_model()
    with make(model, balance={2: [2, 3], 3: [2, 1, 2], 4: [2, 1, 1, 1]}[WORLD]) as pipe:
        caught = raised_by(partial(step, pipe, x, target))
    assert "which is also sent to another stage" in str(caught)


def evaluates_first() -> None:
    """Memory for messages that an evaluation made in inference mode serves the training after it, too."""
    model = skipping_model()
    plain = reference(model)
    x, target = torch.randn(2, 6, 5, dtype=torch.float64)
    with torch.inference_mode():
        pipe = make(model, checkpoint="always")
        y = pipe(x if RANK == 0 else None)
        assert close(y, plain(x)) if y.numel() else pipe.output_rank != RANK
        pipe.step(x, target, loss=F.mse_loss)
    with pipe:
        trains_alike(pipe, plain, x, target)
        pipe(x).square().sum().backward()
    plain(x).square().sum().backward()
    same_gradients(pipe, plain)


def noisy(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5) + torch.rand_like(x)


def random_numbers() -> None:
    """The same numbers are drawn as in one process, in layers and between the modules of a split model."""
    torch.manual_seed(3)
    layers = nn.Linear(4, 4), Computes(noisy), nn.Linear(4, 4), nn.RReLU(), Computes(noisy)
    model, language = nn.Sequential(*layers).double(), Language(dropout=0.5).double()
    at = [f"h.{i}" for i in range(1, WORLD)]
    x, ids = torch.ones(6, 4, dtype=torch.float64), torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    sizes = [3, 2] if WORLD == 2 else [2, 1, 2]
    for one, balance, batch, cut in (
        (model, sizes, x, lambda model: model),
        (language, [1] * WORLD, ids, lambda model: split(model, at)),
    ):
        alone = reference(one)
        torch.manual_seed(100 + RANK)  # the first rank's seed holds for all
        with (
            make(cut(one), balance=balance, checkpoint="always") as pipe,
            ab.Pipe(cut(alone), balance, chunks=4, schedule="1F1B", seed=100) as other,
        ):
            for _ in range(3):
                for each in (pipe, other):
                    each.step(batch, loss=lambda y, _: (y["logits"] if isinstance(y, dict) else y).square().mean())
        same_gradients(pipe, alone)


def gathered(value: object) -> list:
    """The values of all ranks."""
    everyone: list = [value] if ALONE else [None] * WORLD
    if not ALONE:
        dist.all_gather_object(everyone, value)
    return everyone


def clipping_and_checkpoints() -> None:
    """Clipping over all stages; state saved under one split and loaded under another, optimizer's included."""
    torch.manual_seed(0)
    model = skipping_model()
    plain = reference(model)
    pipe = make(model)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
    expected = torch.optim.Adam(plain.parameters(), lr=0.01)

    def train(pipe: ab.Pipe, optimizer: torch.optim.Optimizer) -> None:
        x, target = torch.randn(2, 6, 5, dtype=torch.float64)
        optimizer.zero_grad()
        expected.zero_grad()
        pipe.step(x, target, loss=F.mse_loss)
        F.mse_loss(plain(x), target).backward()
        norm = pipe.clip_grad_norm(0.1)
        assert close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
        same_gradients(pipe, plain)
        optimizer.step()
        expected.step()

    train(pipe, optimizer)
    train(pipe, optimizer)
    shares = gathered((pipe.state_dict(), pipe.optimizer_state_dict(optimizer)))
    pipe.close()
    whole = {name: value for share, _ in shares for name, value in share.items()}
    states = {name: state for _, share in shares for name, state in share.items()}
    assert sorted(whole) == sorted(model.state_dict())

    torch.manual_seed(77)
    again = make(skipping_model(), "ZB1P", balance=[10, 1] if WORLD == 2 else [1, 5, 5])
    again.load_state_dict(whole)
    other = torch.optim.Adam(again.parameters(), lr=0.01)
    again.load_optimizer_state_dict(other, states)
    torch.manual_seed(5)
    train(again, other)
    expected_parameters = dict(plain.named_parameters(remove_duplicate=False))
    for name, parameter in again.named_parameters():
        assert close(parameter, expected_parameters[name]), name
    again.close()


def step(pipe: ab.Pipe, x: Tensor, target: Tensor) -> None:
    pipe.step(x, target, loss=F.mse_loss)


def call_and_backward(pipe: ab.Pipe, x: Tensor, _: Tensor) -> None:
    pipe(x).sum().backward()


def raised_by(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - looked at by the caller
        return error
    raise AssertionError("nothing was raised")


def on_cuda() -> None:
    """Every schedule, with both ranks' stages on one GPU: tensors go over the host."""
    for schedule in SCHEDULES:
        model = skipping_model()
        plain = reference(model)
        x, target = torch.randn(2, 7, 5, dtype=torch.float64)
        with make(model, schedule, devices=[torch.device("cuda", 0)] * WORLD, chunks=3) as pipe:
            step(pipe, x, target)
            F.mse_loss(plain(x), target).backward()
            expected = {name: p.grad for name, p in plain.named_parameters(remove_duplicate=False)}
            for name, parameter in pipe.named_parameters():
                assert close(None if parameter.grad is None else parameter.grad.cpu(), expected[name]), name


class Stop(BaseException):
    """Not even an Exception."""


def failures(schedules: str) -> dict:
    """A stage fails at every (stage, microbatch, phase): its rank raises the original, the others a PipelineError."""
    longest = 0.0
    tried = 0
    for schedule in schedules.split(","):
        torch.manual_seed(0)
        pipe = make(skipping_model(), schedule, chunks=2, checkpoint="always", timeout=30.0)
        x, target = torch.randn(2, 4, 5, dtype=torch.float64)
        pipe.step(x, target, loss=F.mse_loss)
        good = [parameter.grad.clone() for parameter in pipe.parameters()]
        rank_of = make_schedule(schedule, len(balance_for(schedule)), 2, ranks=WORLD).rank_of
        phases = ["forward", "recompute", "backward"] + (["weight"] if schedule.startswith("ZB") else [])
        for stage, microbatch, phase in product(range(len(rank_of)), range(2), phases):
            error = (ZeroDivisionError, Stop, KeyboardInterrupt)[tried % 3]

            def fail(name: str, point: str = f"pipeline.{phase}.{stage}.{microbatch}", error: type = error) -> None:
                if name == point:
                    raise error("here")

            pipe.zero_grad()
            for call in (partial(step, pipe), partial(call_and_backward, pipe)):
                gathered(None)  # all begin
                started = time.monotonic()
                with on_fault_point(fail):
                    caught = raised_by(partial(call, x, target))
                longest = max(longest, time.monotonic() - started)
                tried += 1
                if ALONE or rank_of[stage] == RANK:
                    assert isinstance(caught, error)
                    assert caught.__notes__ == [f"in stage {stage}, microbatch {microbatch}, {phase}"]
                else:
                    assert isinstance(caught, ab.PipelineError)
                    assert (caught.stage, caught.microbatch, caught.phase) == (stage, microbatch, phase)
                    assert caught.remote_type.endswith(error.__name__)
                    assert f"{error.__name__}: here" in caught.remote_traceback
                    assert "here" in str(caught)
            assert all(parameter.grad is None for parameter in pipe.parameters())
        pipe.step(x, target, loss=F.mse_loss)
        for parameter, grad in zip(pipe.parameters(), good, strict=True):
            assert torch.equal(parameter.grad, grad)
        pipe.close()
    return {"longest": longest, "tried": tried}


def mistakes() -> None:
    """Mistakes of one rank's caller reach the others too, and the pipe works afterwards."""
    pipe = make(skipping_model(), timeout=60.0)
    x, target = torch.randn(2, 4, 5, dtype=torch.float64)
    last = WORLD - 1

    def call_in_some_mode() -> None:
        with torch.set_grad_enabled(last != RANK):
            pipe(x)

    for call, message, at, error in (
        (lambda: pipe(torch.zeros(())), "have no rows", 0, ValueError),
        (lambda: step(pipe, x, target[: 4 - (last == RANK)]), "the target has 3 rows", last, ValueError),
        (lambda: pipe.step(x, target, loss=lambda y, t: y), "one number per microbatch", last, ValueError),
        (lambda: step(pipe, x, target) if last == RANK else pipe(x), "in the same order", last, RuntimeError),
        (call_in_some_mode, "call it in one mode on all", last, ValueError),
    ):
        refused(call, message, at, error)
        step(pipe, x, target)
    # Whoever sees it first says so itself, the others hear of it.
    caught = raised_by(partial(pipe.clip_grad_norm, 1.0) if last == RANK else partial(step, pipe, x, target))
    assert isinstance(caught, RuntimeError | ab.PipelineError)
    assert "in the same order" in str(caught)
    step(pipe, x, target)
    # As names of files on disk can be, and UTF-8 cannot; and one that no other rank may wait for in vain.
    for error, says in ((ValueError("the file \udc80"), "\\udc80"), (Unspeakable(), "<exception str() failed>")):

        def refuse(y: Tensor, target: Tensor, error: Exception = error) -> Tensor:
            raise error

        caught = raised_by(partial(pipe.step, x, target, loss=refuse))
        assert caught is error if last == RANK else says in str(caught)
        step(pipe, x, target)
    pipe.close()

    pipe = make(nn.Sequential(Computes(lambda x: {x}), *[nn.Identity() for _ in range(last)]), balance=[1] * WORLD)
    for _ in range(2):
        refused(partial(pipe, x), "a set cannot cross ranks", 0, TypeError)
    pipe.close()
    for arguments, message in (
        ({"balance": [LAYERS]}, "need 1 ranks, but the process group has"),
        ({"devices": ["cpu"] * (WORLD + 1)}, "name one for each rank"),
    ):
        refused(partial(make, skipping_model(), **arguments), message)
    usual = balance_for("1F1B")
    moved = [usual[0] - 1, *usual[1:-1], usual[-1] + 1]
    for unlike in ({"balance": moved}, {"schedule": "GPipe"}):
        shown = f"rank {last}: {unlike.get('balance', usual)} layers under {unlike.get('schedule', '1F1B')}"
        for message in ("the ranks make different pipes", shown):
            refused(partial(make, skipping_model(), **(unlike if last == RANK else {})), message)
    alone = dist.new_group([0])
    if RANK:
        of_another = partial(ab.Pipe, skipping_model(), [LAYERS], process_group=alone)
        refused(of_another, "this process is not a rank of process_group=")
    refused(partial(make, skipping_model(), balance="time", sample=x.float()), "", 0, RuntimeError)
    with make(skipping_model(), balance="size", sample=x) as pipe:
        step(pipe, x, target)
    leaves_at_once(x)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


def first_is_slow(x: Tensor) -> Tensor:
    if RANK == 0:
        time.sleep(0.2)
    return x


def refuse(x: Tensor) -> Tensor:
    raise ValueError("refused")


def leaves_at_once(x: Tensor) -> None:
    """A rank that fails, catches that and closes its pipe, while another is busy, still ends well."""
    layers = [Computes(first_is_slow), *(nn.Identity() for _ in range(WORLD - 2)), Computes(refuse)]
    with make(nn.Sequential(*layers), balance=[1] * WORLD, chunks=2) as pipe:
        assert "refused" in str(raised_by(partial(pipe, x)))


def kill_at(phase: str, number: signal.Signals, point: str) -> None:
    if point == f"pipeline.{phase}.{WORLD - 1}.1":
        os.kill(os.getpid(), number)


def stopped() -> dict:
    """The last rank stops in a step: the others name it within two heartbeats; going on, it learns what happened."""
    pids = gathered(os.getpid())
    pipe = make(skipping_model(), heartbeat=0.5, timeout=60.0)
    x, target = torch.randn(2, 4, 5, dtype=torch.float64)
    pipe.step(x, target, loss=F.mse_loss)
    last = WORLD - 1
    began = time.monotonic()
    found = {}
    try:
        with on_fault_point(partial(kill_at, "forward", signal.SIGSTOP)):
            pipe.step(x, target, loss=F.mse_loss)
    except ab.PeerLost as caught:
        found = {"seconds": time.monotonic() - began, "peer": caught.peer, "text": str(caught), "step": caught.step}
        assert last != RANK
    except ab.PipelineError as caught:
        found = {"text": str(caught), "type": caught.remote_type}
        assert WORLD > 2 or last == RANK
    if RANK == 0:
        os.kill(pids[last], signal.SIGCONT)
    pipe.step(x, target, loss=F.mse_loss)
    pipe.close()
    return found


def killed() -> dict:
    """The last rank dies in a step: the others name it at once."""
    pipe = make(skipping_model(), timeout=60.0)
    x, target = torch.randn(2, 4, 5, dtype=torch.float64)
    pipe.step(x, target, loss=F.mse_loss)
    began = time.monotonic()
    try:
        with on_fault_point(partial(kill_at, "backward", signal.SIGKILL)):
            pipe.step(x, target, loss=F.mse_loss)
    except ab.PeerLost as caught:
        return {"seconds": time.monotonic() - began, "peer": caught.peer}
    raise AssertionError("nothing was raised")


def left_open() -> None:
    """Ends without closing its pipes, one of them collected."""
    pipe = make(skipping_model())
    x, target = torch.randn(2, 4, 5, dtype=torch.float64)
    step(pipe, x, target)
    del pipe
    for schedule in SCHEDULES:
        _OPEN.append(make(skipping_model(), schedule))
        step(_OPEN[-1], x, target)


_OPEN: list[ab.Pipe] = []


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "PIPELINE_OVER_GLOO" in os.environ:
        connection.MessageMemory = lambda processes: None  # as between hosts
    dist.init_process_group("gloo")
    found = {"rank": RANK}
    for what in sys.argv[1:]:
        name, _, argument = what.partition(":")
        torch.manual_seed(0)
        found |= globals()[name](*filter(None, [argument])) or {}
    print(json.dumps(found), flush=True)
    if sys.argv[1:] != ["killed"]:
        dist.barrier()
        dist.destroy_process_group()

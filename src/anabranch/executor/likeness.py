"""``check_alike``: before the first step, refuses workers that would train differently or with other buckets.

Every worker steps its own optimizers with the averaged gradients, so the parameters stay equal only if the optimizers
are. Each worker describes its models and optimizers in lines of text; the lines are exchanged once and compared.

It compares everything that determines the update: the class of an optimizer, the names in each group, and the settings
of the group that are plain values. Left out are flags that choose among implementations of one update, and the learning
rates of later steps, which are the schedulers' business.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from itertools import zip_longest
from numbers import Real

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anabranch.autodiff.moved_parameter import Switch, parameters_here
from anabranch.collectives import Workers
from anabranch.executor.routes import Place, Routes
from anabranch.executor.steps import Step, TrainStep

# The group's parameters, flags that change how an update is computed but not which one, and a worker's own place.
_NOT_COMPARED = {"params", "param_names", "foreach", "fused", "capturable", "differentiable", "device", "rank"}
_MANY = 64  # numbers of a tensor that is compared by value


def check_alike(workers: Workers, steps: Mapping[str, Step], routes: Routes) -> None:
    """Exchange descriptions of every worker's steps, and compare them with rank 0's.

    Raises:
        ValueError: on every worker, if parameters differ (sums of unlike buckets crash), or optimizers of what is
            all-reduced, or if a forward writes each worker's own rows.
    """
    _check_tables(steps)
    reduced = {route.tensor for route in routes.at(Place.WORKERS)} if routes.all_reduces else set()
    models, optimizers = list(_model_lines(steps)), list(optimizer_lines(steps, reduced))
    mine = "\n".join(models) + "\n\n" + "\n".join(optimizers)
    everyone = [text.decode().partition("\n\n") for text in workers.all_gather_bytes(mine.encode(), operation="meet")]
    _compare(
        "models", [text[0] for text in everyone],
        "every worker makes the same steps and models and freezes the same parameters",
    )  # fmt: skip
    _compare(
        "optimizers", [text[2] for text in everyone],
        "each worker applies the averaged gradients itself, so make the same optimizers with the same groups and "
        "settings on all of them",
    )  # fmt: skip


def share_parameters(workers: Workers, steps: Mapping[str, Step], routes: Routes) -> None:
    """Copy rank 0's parameters to all workers, except for tables, whose rows come from the servers."""
    rows = {route.tensor for route in routes.at(Place.ROWS)}
    unique = dict.fromkeys(p for step in steps.values() for p in parameters_here(step.model).values() if p not in rows)
    send_first(workers, unique)


def send_first(workers: Workers, tensors: Collection[Tensor]) -> None:
    """Copy rank 0's tensors over everyone's."""
    with torch.no_grad():
        # Memory is sent, so a tensor with gaps, or in another order, is sent as a copy.
        sent = [tensor.detach().contiguous() for tensor in tensors]
        workers.broadcast(sent, operation="broadcast of parameters")
        for tensor, value in zip(tensors, sent, strict=True):
            if value.data_ptr() != tensor.data_ptr():
                tensor.copy_(value)


def _compare(what: str, everyone: list[str], cure: str) -> None:
    first = everyone[0].split("\n")
    for rank, text in enumerate(everyone):
        for here, there in zip_longest(first, text.split("\n"), fillvalue="nothing"):
            if here != there:
                raise ValueError(
                    f"the {what} of rank 0 and rank {rank} of the group differ: {here or 'nothing'!r} and "
                    f"{there or 'nothing'!r}; {cure}"
                )


def _check_tables(steps: Mapping[str, Step]) -> None:
    for step in steps.values():
        for name, module in step.model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
                raise ValueError(
                    f"{name}: max_norm={module.max_norm} shrinks rows in place whenever a worker looks them up, each "
                    "worker those of its own batch, so that several workers would train different tables; leave it "
                    "None and shrink the looked-up rows in the forward, or all rows after each step"
                )
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
                raise ValueError(
                    f"{name}: scale_grad_by_freq=True divides gradients by how often an id is in the batch, of which "
                    "each worker sees only its shard, so that several workers would train another table; leave it False"
                )


def _model_lines(steps: Mapping[str, Step]) -> Iterator[str]:
    for step_name, step in steps.items():
        for name, parameter in step.model.named_parameters():
            yield (
                f"{step_name}: {name} {'' if type(parameter) is Switch else tuple(parameter.shape)} {parameter.dtype} "
                f"requires_grad={parameter.requires_grad}"
            )


def optimizer_lines(steps: Mapping[str, Step], reduced: Container[Tensor | None]) -> Iterator[str]:
    """Describe the optimizers in lines of text, as far as they move the parameters in ``reduced``."""
    for step_name, step in steps.items():
        if isinstance(step, TrainStep):
            names: dict[Tensor, str] = {parameter: name for name, parameter in step.model.named_parameters()}
            shared = {parameter: name for parameter, name in names.items() if parameter in reduced}
            for number, optimizer in enumerate(step.optimizers):
                yield from _lines_of(f"{step_name}: optimizer {number}", optimizer, shared)


def _lines_of(label: str, optimizer: Optimizer, shared: Mapping[Tensor, str]) -> Iterator[str]:
    """Describe the optimizer in lines, as far as it moves parameters of ``shared``, which gives their names."""
    groups = sorted(
        (sorted(shared[p] for p in group["params"] if p in shared), list(_settings(group)))
        for group in optimizer.param_groups
    )  # in any order: groups made from a set or a dict are the same groups
    if any(names for names, _ in groups):
        yield f"{label} is {type(optimizer).__module__}.{type(optimizer).__qualname__}"
    for names, settings in groups:
        if names:
            group_label = f"{label}, group of {names[0]}"
            yield f"{group_label}: parameters={len(names)}"
            yield from (f"{group_label}: holds {name}" for name in names)
            yield from (f"{group_label}: {setting}" for setting in settings)


def _settings(group: Mapping[str, object]) -> Iterable[str]:
    return sorted(f"{key}={_in_words(value)}" for key, value in group.items() if key not in _NOT_COMPARED)


def _in_words(value: object) -> str:
    """``value`` as text: equal for equal numbers, whatever their types; of objects the type only."""
    if type(value) in (Tensor, nn.Parameter):
        return _tensor_in_words(value)  # type: ignore[arg-type]
    if value is None or isinstance(value, bool | str):
        return repr(value)
    if isinstance(value, Real):
        try:
            return repr(float(value))
        except OverflowError:
            return repr(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_in_words, value))})"
    if isinstance(value, complex):
        return repr(value)
    return f"<{type(value).__qualname__}>"


def _tensor_in_words(value: Tensor) -> str:
    if value.layout is torch.strided and not value.is_meta and value.numel() <= _MANY:
        return _in_words(value.tolist())
    return f"<Tensor {tuple(value.shape)}>"

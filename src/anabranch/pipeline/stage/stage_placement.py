"""The stages of a pipe on devices and ranks: where each is, what ranks share, which communicate; and their table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from anabranch.autodiff.moved_parameter import Elsewhere, Switch, put_elsewhere
from anabranch.choices import choice
from anabranch.errors import PipelineError
from anabranch.liveness.meeting import interruptible
from anabranch.pipeline.engine import Observed
from anabranch.pipeline.parts.model_part import ModelPart, PartedModel, container, join_parts
from anabranch.pipeline.pipe_call import Tie
from anabranch.pipeline.schedule import PipeSchedules, Schedule
from anabranch.pipeline.stage.balance import balance_by_size, balance_by_time
from anabranch.pipeline.stage.partition import Layer, Route, declarations, route_skips
from anabranch.pipeline.stage.random_streams import refuse_undrawable
from anabranch.pipeline.stage.stage import OUTSIDE, SHARED_CURE, Stage
from anabranch.tensors import Structure

_CURE = (
    "call pipe(x) and pipe.step, and save pipe.state_dict() of every rank; compute a term of the loss in a layer that "
    "has the parameter, or register it in each layer that uses it; for another Pipe make the model again"
)


def find_balance(
    by: str,
    module: nn.Module,
    sample: Structure,
    schedule: str | Schedule,
    places: int | None,
    group: dist.ProcessGroup | None,
) -> list[int]:
    """Return the number of layers of each stage, by their time or their size."""
    find = {"time": balance_by_time, "size": balance_by_size}[choice("balance", by, ("time", "size"))]
    if sample is None or places is None:
        raise ValueError(f"balance={by!r} needs sample= (a batch like a microbatch), and devices= or process_group=")
    name = schedule if isinstance(schedule, str) else schedule.name
    n = places * (2 if name in ("ZBV", "Interleaved1F1B") else 1)
    if group is None:
        return find(n, module, sample)
    # Measured on one rank, because all must split equally; zeros mean that it failed.
    sizes = torch.zeros(n, dtype=torch.int64, device="cpu")
    try:
        if dist.get_rank(group) == 0:
            sizes = torch.tensor(find(n, module, sample), device="cpu")
    finally:
        interruptible(partial(dist.broadcast, sizes, group=group, group_src=0))
    if not sizes.any():
        raise PipelineError(f"rank 0 of the group could not find a balance by {by}; see its error")
    return [int(size) for size in sizes]


def count_places(devices: Sequence[torch.device | str] | None, group: dist.ProcessGroup | None) -> int | None:
    """Return the number of ranks for the stages; ``None`` if neither argument is given."""
    if isinstance(devices, str):
        raise TypeError(f"devices= is a list with a device for each stage, got {devices!r}; use [{devices!r}, ...]")
    if group is None:
        return None if devices is None else len(devices)
    if not isinstance(group, dist.ProcessGroup):  # new_group gives a number to those that are not in it
        raise ValueError("this process is not a rank of process_group=; only its ranks make the pipe")
    size = dist.get_world_size(group)
    if devices is not None and len(devices) != size:
        raise ValueError(f"devices= names {len(devices)} devices for {size} ranks; name one for each rank")
    return size


def describe_split(split: Sequence[Sequence[Layer]], schedules: PipeSchedules, here: Sequence[int]) -> str:
    """Return the facts that must be equal on every rank: otherwise messages would be misrouted, or layers run twice or
    not at all.
    """
    for parameter in (parameter for j in here for layer in split[j] for parameter in layer.module.parameters()):
        if type(parameter) is Elsewhere:
            return f"{parameter.what}; {parameter.cure}"
    names = [[layer.name for layer in layers] for layers in split]
    return f"{list(map(len, split))} layers under {schedules.name}: {names} {schedules.rank_of} {schedules.schedule}"


def part_of(module: nn.Module, stages: Sequence[Sequence[Layer]]) -> nn.Module:
    """Return the layers of ``stages`` in nested ``nn.Sequential`` like those they come from, so that names stay."""
    layers = [layer for layers in stages for layer in layers]
    if isinstance(module, PartedModel):
        return join_parts([cast(ModelPart, layer.module) for layer in layers])
    trees: dict[str, nn.Module] = {"": nn.Sequential().train(module.training)}
    for layer in layers:
        path, _, name = layer.name.rpartition(".")
        container(trees, path, nn.Sequential)._modules[name] = layer.module
    return trees[""]


def find_ties(split: Sequence[Sequence[Layer]], rank_of: Sequence[int], group: dist.ProcessGroup) -> list[Tie]:
    """Return the parameters that this rank and others use, with a number of each, the same on all ranks, and those
    ranks; all get the first one's values.
    """
    rank = dist.get_rank(group)
    ranks: dict[nn.Parameter, set[int]] = {}
    for j, layer in ((j, layer) for j, layers in enumerate(split) for layer in layers):
        for parameter in layer.module.parameters():
            ranks.setdefault(parameter, set()).add(rank_of[j])
    tied = [(parameter, sorted(users)) for parameter, users in ranks.items() if len(users) > 1]
    for parameter, users in tied:
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        if not isinstance(parameter, Elsewhere):
            values.copy_(parameter.detach())
        interruptible(partial(dist.broadcast, values, group=group, group_src=users[0]))
        if rank in users:
            parameter.data.copy_(values)
    return [(index, parameter, users) for index, (parameter, users) in enumerate(tied) if rank in users]


def leave_to_others(
    split: Sequence[Sequence[Layer]],
    rank_of: Sequence[int],
    names: Mapping[torch.Tensor, str],
    group: dist.ProcessGroup,
) -> None:
    """Make the parameters in ``names``, which only other ranks train, ones whose numbers are there.

    Those here would stay at their first values; their memory is freed.
    """
    for j, layers in enumerate(split):
        place = f"on rank {dist.get_global_rank(group, rank_of[j])}, in stage {j} of its Pipe"
        for parameter in (parameter for layer in layers for parameter in layer.module.parameters()):
            has_nan = parameter.is_floating_point() or parameter.is_complex()
            if parameter in names and not isinstance(parameter, Elsewhere) and has_nan:
                put_elsewhere(parameter, Elsewhere, what=f"{names[parameter]} is {place}", cure=_CURE)


def place_stages(
    split: Sequence[Sequence[Layer]],
    rank_of: Sequence[int],
    devices: Sequence[torch.device | str] | None,
    here: Sequence[int],
) -> list[Stage]:
    """Return the stages, those of this process on their devices."""
    if devices is not None:
        # With an index: "cuda" is the current CUDA device, as tensors name it.
        places = [torch.empty(0, device=name).device for name in devices]
    elif len(here) < len(split):
        places = [_device_of([split[j] for j in here])] * (max(rank_of) + 1)
    else:
        places = _default_devices(split, max(rank_of) + 1)
    routes, common = route_skips(split), _common_tensors(split)
    declared = [declarations(layers) for layers in split]
    shared = frozenset(name for those in declared for one in those for name in one.shared)
    _check_devices({j: common[j] for j in here}, {j: places[rank_of[j]] for j in here})
    stages = []
    for j, layers in enumerate(split):
        device = places[rank_of[j]]
        for layer in layers if j in here else ():
            refuse_undrawable(layer.name, layer.module, device)
            layer.module.to(device)
        sources: dict[int, tuple[Route, ...]] = {source: names for (source, k), names in routes.items() if k == j}
        targets: dict[int, tuple[Route, ...]] = {target: names for (k, target), names in routes.items() if k == j}
        if j == 0:
            sources[OUTSIDE] = (None,)
        if j == len(split) - 1:
            targets[OUTSIDE] = (None,)
        stages.append(Stage(j, tuple(layers), device, sources, targets, shared, bool(declared[j]), common[j]))
    return stages


def _common_tensors(split: Sequence[Sequence[Layer]]) -> list[dict[str, torch.Tensor]]:
    """Return for each stage the parameters and buffers that others use too, by name."""
    tensors: list[dict[str, torch.Tensor]] = [{} for _ in split]
    for of_stage, layers in zip(tensors, split, strict=True):
        for layer in layers:
            of_stage.update(layer.module.named_parameters(layer.name))
            of_stage.update(layer.module.named_buffers(layer.name))
    uses = Counter(key for of_stage in tensors for key in set(map(id, of_stage.values())))
    return [{name: t for name, t in one.items() if uses[id(t)] > 1 and not t.is_inference()} for one in tensors]


def _check_devices(common: Mapping[int, Mapping[str, torch.Tensor]], devices: Mapping[int, torch.device]) -> None:
    """Refuse parameters that two of these stages use on different devices, of which they can be on one."""
    places: dict[int, torch.device] = {}
    for j, tensors in common.items():
        for name, tensor in tensors.items():
            place = places.setdefault(id(tensor), devices[j])
            if place != devices[j] and isinstance(tensor, nn.Parameter):
                raise ValueError(f"{name} is used by stages on {place} and {devices[j]}; {SHARED_CURE}")


def _device_of(stages: Sequence[Sequence[Layer]]) -> torch.device:
    parameters = (parameter for layers in stages for layer in layers for parameter in layer.module.parameters())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


def _default_devices(split: Sequence[Sequence[Layer]], count: int) -> list[torch.device]:
    if _device_of(split).type != "cuda":
        return [torch.device("cpu")] * count
    available = torch.cuda.device_count()
    if available < count:
        raise ValueError(f"{count} stages need as many CUDA devices, there are {available}; share them by devices=")
    return [torch.device("cuda", index) for index in range(count)]


_HEADINGS = ("stage", "rank", "device", "layers", "parameters", "forward", "backward", "to next", "skips")


def describe(stages: Sequence[Stage], rank_of: Sequence[int], observed: Observed, title: str) -> str:
    """Return the table; times and bytes are those of the last call, and missing before the first."""
    rows = [_row(stage, rank, observed) for stage, rank in zip(stages, rank_of, strict=True)]
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
    table = [_HEADINGS, *rows]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([title, *lines])


def _row(stage: Stage, rank: int, observed: Observed) -> tuple[str, ...]:
    names, j = [layer.name for layer in stage.layers], stage.index
    span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    unique = {id(parameter): parameter for layer in stage.layers for parameter in layer.module.parameters()}
    numbers = sum(parameter.numel() for parameter in unique.values() if type(parameter) is not Switch)
    cells = [str(j), str(rank), str(stage.device), span, f"{numbers:,}"]
    for phases in (("forward",), ("recompute", "backward", "weight")):
        seconds = [observed.seconds[j, phase] for phase in phases if (j, phase) in observed.seconds]
        cells.append(f"{1000 * sum(seconds):.1f} ms" if seconds else "-")
    sent = Counter(
        f"{route[1] if isinstance(route, tuple) else route} to stage {target}"
        for target, routes in stage.targets.items()
        for route in routes
        if target != OUTSIDE and route is not None
    )
    skips = [text if count == 1 else f"{count} x {text}" for text, count in sent.items()]
    size = observed.sent_bytes.get((j, j + 1))
    return *cells, f"{size:,} B" if size else "-", "; ".join(skips) or "-"

"""Assignment of layers to stages, and the skips that cross from stage to stage.

A model is a ``nn.Sequential``; nested ones count as the layers inside them, since they only run those in order.
Layers keep their qualified names, so a state dict does not depend on the split.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from torch import nn

from anabranch.autodiff.moved_parameter import Switch
from anabranch.pipeline.parts.model_part import ModelPart, PartedModel, accepted_keywords
from anabranch.pipeline.stage.skips import Declaration, SkipName, declaration_of


@dataclass(frozen=True, slots=True)
class Layer:
    """One module of the flattened sequence, under its name in the unsplit model."""

    name: str
    module: nn.Module


def flatten_layers(module: nn.Module) -> list[Layer]:
    """Return the layers of ``module`` in the order they run, nested ``nn.Sequential`` opened.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    >>> [layer.name for layer in flatten_layers(model)]
    ['0', '1.0', '1.1']

    Raises:
        TypeError: ``module`` is not a ``nn.Sequential``, overrides its ``forward`` or has hooks.
        ValueError: it is empty, or holds the same layer twice.
    """
    if isinstance(module, PartedModel):
        if has_hooks(module) or has_hooks(module.unsplit):
            raise TypeError("a model that was split has hooks that no stage runs; put them on modules within one part")
        layers = [Layer(part.name, part) for part in module.parts()]
    elif isinstance(module, nn.Sequential) and _is_plain(module):
        layers = list(_open(module, ""))
    else:
        raise TypeError(
            f"a pipeline splits a nn.Sequential, got {type(module).__name__}; make its layers the children of one with "
            "neither a forward nor hooks of its own (long skips by stash and pop), or use anabranch.pipeline.split"
        )
    if not layers:
        raise ValueError("the nn.Sequential is empty; there is nothing to split")
    _refuse_duplicates(layers)
    return layers


def _is_plain(module: nn.Sequential) -> bool:
    # On the instance, too: a replaced forward is code of its own.
    return getattr(module.forward, "__func__", None) is nn.Sequential.forward and not has_hooks(module)


def _open(module: nn.Sequential, prefix: str) -> Iterable[Layer]:
    # Not named_children(), which leaves out the second of two equal children.
    for name, child in module._modules.items():
        assert child is not None
        if isinstance(child, nn.Sequential) and _is_plain(child):
            yield from _open(child, f"{prefix}{name}.")
        else:
            yield Layer(prefix + name, child)


def _refuse_duplicates(layers: list[Layer]) -> None:
    first: dict[nn.Module, str] = {}
    for layer in layers:
        for path, child in layer.module.named_modules(prefix=layer.name):
            earlier = first.setdefault(child, path)
            tensors = [*(p for p in child._parameters.values() if type(p) is not Switch), *child._buffers]
            if earlier != path and (tensors or declaration_of(child) is not None):
                raise ValueError(
                    f"{earlier!r} and {path!r} are the same {type(child).__name__}, which two stages would run at "
                    "once; make two modules and tie their parameters: b.weight = a.weight"
                )


def split_layers(module: nn.Module, layers: Sequence[Layer], balance: Sequence[int]) -> list[list[Layer]]:
    """Return the layers of each stage.

    ``balance`` counts the children of ``module`` or the flattened layers, whichever number its sum equals.

    Raises:
        ValueError: an entry below 1, or a sum that equals neither number.
    """
    try:
        balance = [operator.index(size) for size in balance]
    except TypeError:
        raise TypeError(f"balance={balance!r} is not a list of the layers of each stage, 'time' or 'size'") from None
    if not balance or min(balance) < 1:
        raise ValueError(f"balance={balance!r} must give every stage at least 1 layer")
    children = [name for name, _ in module.named_children()]
    units = [[layer] for layer in layers]
    if sum(balance) != len(layers) and sum(balance) == len(children) and not isinstance(module, PartedModel):
        units = [[layer for layer in layers if layer.name.split(".")[0] == child] for child in children]
    if sum(balance) != len(units):
        n = len(layers)
        has = f"{n} parts" if isinstance(module, PartedModel) else f"{len(children)} children with {n} layers"
        raise ValueError(f"balance={balance!r} sums to {sum(balance)}, but the module has {has}")
    rest = iter(units)
    return [[layer for unit in islice(rest, size) for layer in unit] for size in balance]


def keywords_of(layer: Layer, names: Iterable[str], positional: int) -> tuple[str, ...]:
    """Return those of the keyword inputs ``names`` that the layer's ``forward`` has a parameter for.

    Its first ``positional`` parameters are taken: by the caller's positional inputs, or by the layer before.
    """
    if isinstance(layer.module, ModelPart):
        return layer.module.takes(names, positional)
    return accepted_keywords(layer.module.forward, names, positional)


Route = SkipName | str | None
"""A value that travels to a stage: the boundary's (``None``), a skip, or a keyword input from the caller."""

Routes = dict[tuple[int, int], tuple[Route, ...]]
"""For each pair of stages the values that travel from the first to the second, in a fixed order."""


def declarations(layers: Iterable[Layer]) -> list[Declaration]:
    """Return what the modules of ``layers`` stash and pop, in the order in which they run."""
    return list(filter(None, (declaration_of(child) for layer in layers for child in layer.module.modules())))


def route_skips(stages: Sequence[Sequence[Layer]]) -> Routes:
    """Routes between stages: boundaries to the next stage, skips straight to the stages that pop them."""
    routes: dict[tuple[int, int], list[Route]] = {(j, j + 1): [None] for j in range(len(stages) - 1)}
    source: dict[SkipName, int] = {}
    for j, layers in enumerate(stages):
        for declaration in declarations(layers):
            for name in declaration.pops:
                pair = (source[name], j)
                if source[name] != j and name not in routes.setdefault(pair, []):
                    routes[pair].append(name)
            source.update(dict.fromkeys(declaration.stashes, j))
    return {pair: tuple(names) for pair, names in routes.items()}


def has_hooks(module: nn.Module) -> bool:
    """Return True if a call of the module runs hooks."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def outline(module: nn.Module, inside: Collection[nn.Module], name: str = "") -> dict[str, object]:
    """Return by name the layers, which are ``inside``, and of the modules around them the code that does not run."""
    code: dict[str, object] = {name: (module.__dict__.get("forward"), has_hooks(module))}
    for key, child in module._modules.items():
        path = f"{name}.{key}" if name else key
        if child in inside:
            code[path] = child
        elif child is not None:
            code |= outline(child, inside, path)
    return code


def refuse_changes(before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raise ``ValueError`` with the name of the first module that differs."""
    if before != now:
        name = next(name for name in {**now, **before} if before.get(name) != now.get(name))
        how = "added" if name not in before else "removed" if name not in now else "replaced, hooked or wrapped"
        raise ValueError(
            f"{repr(name) if name else 'the model'} was {how} after the Pipe was made, which runs those of before; "
            "make a new Pipe of the model"
        )

"""A part of a model as a layer, and a model in parts as a ``nn.Sequential`` of them.

A part has its own tree, under the model's names: the model's own modules, and empty ones that hold the tensors read by
the code around these. The sequence has the model's tree, so a walk over it sees the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, cast

from torch import Tensor, nn

from anabranch.pipeline.parts.part_program import HeldTensor
from anabranch.pipeline.stage.skips import declaration_of


class ModelPart(nn.Module):
    """Some modules of a model, as one layer.

    Args:
        name: its name as a layer.
        model: the model.
        units: the names of its modules.
        held: the tensors of modules around them that it reads.
        shared: modules of which other parts read tensors too.

    Attributes:
        name: as given.
        holders: the modules made for this tree, by the names that they stand for.
    """

    name: str
    holders: dict[str, nn.Module]
    _model: nn.Module
    _units: Sequence[str]

    def __init__(
        self,
        name: str,
        model: nn.Module,
        units: Sequence[str],
        held: Iterable[HeldTensor] = (),
        shared: Collection[str] = (),
    ) -> None:
        super().__init__()
        # Past nn.Module's attributes, which would register the model as a child. No attribute hides a child: many a
        # model has one that is called "model".
        self.__dict__.update(name=name, _model=model, _units=units, _held=held, _shared=shared)

    def gather(self) -> None:
        """Adopt the model's current modules and tensors under this part's names."""
        own, model, shared = self.__dict__, self._model, self.__dict__["_shared"]
        self._modules.clear()
        own["holders"] = holders = cast("dict[str, nn.Module]", {"": self})
        own["_parameters"], own["_buffers"], own["_copied"] = {}, {}, []
        for unit in self._units:
            path, _, name = unit.rpartition(".")
            container(holders, path)._modules[name] = model.get_submodule(unit)
        for tensor in own["_held"]:
            module, holder = model.get_submodule(tensor.module), container(holders, tensor.module)
            for kind in ("_parameters", "_buffers"):
                if tensor.module not in shared:
                    # The module's own: moving or replacing a tensor there also does so here.
                    holder.__dict__[kind] = module.__dict__[kind]
                elif tensor.name in module.__dict__[kind]:
                    own["_copied"].append([module.__dict__[kind], holder.__dict__[kind], tensor.name, None, 0])
        self.training = model.training
        self.refresh()

    def refresh(self) -> None:
        """Take the tensors that other parts hold too from the model again, where they may have been replaced."""
        for place in self.__dict__["_copied"]:
            theirs, mine, name, seen, version = place
            tensor, before = theirs.get(name), mine.get(name)
            now = tensor._version if type(tensor) is Tensor and not tensor.is_inference() else 0
            if tensor is None or before is None or isinstance(tensor, nn.Parameter) or tensor.device == before.device:
                mine[name] = tensor
            elif tensor is not seen or now != version:  # else the part, on its device, may have changed its copy
                mine[name] = tensor.to(before.device)
            place[3:] = tensor, now

    def takes(self, names: Iterable[str], positional: int) -> tuple[str, ...]:
        """Return those of the keyword inputs ``names`` that this layer takes."""
        raise NotImplementedError  # abstract: a part of traced code and one of `glue=` learn it in other ways


class PartedModel(nn.Sequential):
    """A model whose layers are parts, under the model's names.

    Attributes:
        unsplit: the model.
        split_source: the ``SplitSource`` of parts that run the model's own code; ``None`` if the user has written
            theirs.
    """

    unsplit: nn.Module
    split_source: Any  # its module imports this one

    def __init__(self, model: nn.Module, parts: Sequence[ModelPart], source: Any = None) -> None:
        super().__init__()
        self.__dict__.update(unsplit=model, _parts=parts, split_source=source)
        for kind in ("_modules", "_parameters", "_buffers", "training"):
            self.__dict__[kind] = model.__dict__[kind]
        self.parts()

    def refresh(self) -> None:
        """See what the model holds now."""
        for part in self.__dict__["_parts"]:
            part.refresh()

    def parts(self) -> list[ModelPart]:
        """Return the parts, with the model's current modules."""
        layers: list[ModelPart] = self.__dict__["_parts"]
        for part in layers:
            part.gather()
        return layers

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the parts one after the other; keyword inputs go to the parts that take them."""
        if self.split_source is not None:
            return self.unsplit(*args, **kwargs)
        value: tuple[object, ...] = args
        for part in self.parts():
            taken = part.takes(kwargs, len(value))
            value = (part(*value, **{name: kwargs[name] for name in taken}),)
        return value[0]

    def train(self, mode: bool = True) -> PartedModel:
        """Set the mode of the model."""
        self.unsplit.train(mode)
        self.training = mode
        return self

    def __len__(self) -> int:
        return len(self.__dict__["_parts"])

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.__dict__["_parts"])

    def __getitem__(self, index: int) -> nn.Module:  # type: ignore[override]
        layers: list[nn.Module] = self.__dict__["_parts"]
        return layers[index]


def container(holders: dict[str, nn.Module], path: str, kind: type[nn.Module] = nn.Module) -> nn.Module:
    """Return the module under ``path`` in a tree; an empty one of this kind is created if there is none."""
    if path not in holders:
        above, _, name = path.rpartition(".")
        holders[path] = container(holders, above, kind)._modules[name] = kind()
    return holders[path]


def join_parts(parts: Sequence[ModelPart]) -> nn.Module:
    """Return the modules and tensors of some parts in one tree, under the model's names."""
    if len(parts) == 1:
        return parts[0]
    root = nn.Module().train(parts[0].training)
    for part in parts:
        _put_into(root, part)
    return root


def _put_into(into: nn.Module, part: nn.Module) -> None:
    for name, module in part._modules.items():
        assert module is not None
        there = into._modules.get(name)
        if type(module) is not nn.Module:
            into._modules[name] = module
            continue
        if there is None:
            into._modules[name] = there = nn.Module()
        if type(there) is nn.Module:
            _put_into(there, module)
    into._parameters.update(part._parameters)
    into._buffers.update(part._buffers)


def has_state(module: nn.Module) -> bool:
    """Return True if two stages cannot run ``module`` at once."""
    tensors = any(child._parameters or child._buffers for child in module.modules())
    return tensors or any(declaration_of(child) is not None for child in module.modules())


def is_within(path: str, unit: str) -> bool:
    """Return True if the module named ``path`` is ``unit`` or inside it."""
    return path == unit or path.startswith(f"{unit}.")


def accepted_keywords(
    forward: Callable[..., object], names: Iterable[str], positional: int, *, rest: bool = False
) -> tuple[str, ...]:
    """Return those of ``names`` that ``forward`` has a parameter for.

    Its first ``positional`` parameters are taken. ``rest``: one that takes any name takes all of them.
    """
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # written in C, or scripted
        return ()
    in_order = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    free = {p.name for p in in_order[positional:] if p.kind is p.POSITIONAL_OR_KEYWORD}
    free.update(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    if rest and any(p.kind is p.VAR_KEYWORD for p in parameters):
        bound = {p.name for p in in_order[:positional]}
        return tuple(name for name in names if name not in bound)
    return tuple(name for name in names if name in free)

"""A model in parts with code from the user: for each part its modules, and a function of them and its input."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from torch import nn

from anabranch.pipeline.parts.model_part import ModelPart, PartedModel, has_state, is_within
from anabranch.pipeline.stage.keywords import accepted_keywords

__all__ = ["Glue", "GluedModel"]

Glue: TypeAlias = tuple[Sequence[str], Callable[..., object]]
"""Names of modules, and a function of these modules and the part's input."""


class GluedModel(PartedModel):
    """A model in parts by functions of the user; see ``split``."""

    def __init__(self, model: nn.Module, glue: Sequence[Glue]) -> None:
        _check(model, glue)
        super().__init__(model, [_GluedPart(model, i, *pair) for i, pair in enumerate(glue)])


class _GluedPart(ModelPart):
    def __init__(self, model: nn.Module, index: int, names: Sequence[str], function: Callable[..., object]) -> None:
        super().__init__()
        self.__dict__["_model"] = model
        self.index = index
        self.names = list(names)
        self.function = function

    @property
    def name(self) -> str:
        return f"{getattr(self.function, '__name__', 'part')} {self.index}"

    def gather(self) -> None:
        self.take_up(self.__dict__["_model"], self.names, ())

    def takes(self, names: Iterable[str], positional: int) -> tuple[str, ...]:
        return accepted_keywords(self.function, names, len(self.names) + positional)

    def forward(self, *args: object, **kwargs: object) -> object:
        return functools.partial(self.function, *map(self.get_submodule, self.names))(*args, **kwargs)


def _check(model: nn.Module, glue: Sequence[Glue]) -> None:
    if not glue or not all(
        isinstance(pair, tuple) and len(pair) == 2 and not isinstance(pair[0], str) and callable(pair[1])
        for pair in glue
    ):
        raise TypeError(f"glue= is a list of pairs (names of modules, function), got {glue!r}")
    named = dict(model.named_modules(remove_duplicate=False))
    part_of: dict[str, int] = {}
    for part, (names, _) in enumerate(glue):
        for name in names:
            if name not in named or not name:
                raise ValueError(f"{type(model).__name__} has no submodule {name!r}; it has {[*named][1:9]}")
            twice = [other for other in part_of if is_within(name, other) or is_within(other, name)]
            if twice and has_state(named[name]):
                raise ValueError(f"glue= has {name!r} in part {part} and {twice[0]!r} in part {part_of[twice[0]]}")
            part_of[name] = part
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    missing = [name for name, _ in tensors if not any(is_within(name, unit) for unit in part_of)]
    if missing:
        raise ValueError(f"glue= leaves out {missing}; name the modules that hold them, each in one part")

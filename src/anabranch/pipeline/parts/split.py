"""``split``: a model as a ``nn.Sequential`` of parts that begin at named modules.

The result holds the model's own modules in the model's own tree, so that names, state dicts, ``train`` and optimizers
are the model's. Its layers are the parts. Each part has its own tree, of the modules that it calls and of the
tensors that the code between them reads, under the same names::

    model                        part "start"             part "h.1"
    ├── embed  Embedding         ├── embed                ├── h
    ├── h      ModuleList        └── h                    │   └── 1
    │   ├── 0  Block                 └── 0                ├── norm
    │   └── 1  Block                                      └── head
    ├── norm   LayerNorm
    └── head   Linear

The code between the modules runs at every call, on tensors without memory, and the parts run their share of what it
called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, cast

from torch import Tensor, nn

from anabranch.autodiff.thread_modes import ThreadModes
from anabranch.errors import CaptureError
from anabranch.pipeline.parts.model_part import ModelPart, PartedModel, accepted_keywords, has_state, is_within
from anabranch.pipeline.parts.part_program import HeldTensor, PartProgram, Signature, current_program, signature_of
from anabranch.pipeline.parts.tracing import Form, Uses, opened_by, trace
from anabranch.tensors import flatten

Example = tuple[object, ...] | Mapping[str, object] | Tensor
"""Inputs of a model: a tuple of positional ones, a mapping of keyword ones, or one tensor."""

Glue: TypeAlias = tuple[Sequence[str], Callable[..., object]]
"""Names of modules, and a function of these modules and the part's input."""

_Inputs = tuple[tuple[object, ...], dict[str, object]]


def split(
    model: nn.Module, at: Sequence[str] = (), *, example: Example | None = None, glue: Sequence[Glue] | None = None
) -> nn.Sequential:
    """Return ``model`` as a ``nn.Sequential`` whose layers begin where the named modules are called.

    >>> import torch
    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embed = nn.Embedding(10, 8)
    ...         self.h = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
    ...     def forward(self, ids, scale=1.0):
    ...         x = embedded = self.embed(ids)
    ...         for layer in self.h:
    ...             x = torch.tanh(layer(x)) * scale
    ...         return x + embedded
    >>> model = Model()
    >>> parts = split(model, at=["h.1", "h.2"])
    >>> list(parts.state_dict()) == list(model.state_dict()), len(parts)
    (True, 3)
    >>> from anabranch.pipeline import Pipe
    >>> with Pipe(parts, balance=[1, 2], chunks=2) as pipe:
    ...     y = pipe(torch.tensor([1, 2, 3, 4]), scale=0.5)
    >>> y.shape
    torch.Size([4, 8])

    Where the model's own code cannot be cut, give the code of each part, with the modules that it is for:

    >>> def start(embed, first, ids):
    ...     return torch.tanh(first(embed(ids)))
    >>> def end(second, third, x, *, scale=1.0):
    ...     return third(torch.tanh(second(x))) * scale
    >>> parts = split(model, glue=[(["embed", "h.0"], start), (["h.1", "h.2"], end)])
    >>> with Pipe(parts, balance=[1, 1], chunks=2) as pipe:
    ...     y = pipe(torch.tensor([1, 2, 3, 4]), scale=2.0)

    Modules that lie between two cuts run as they are: their modes, hooks, buffers and random numbers are their own.
    The modules around a cut are opened: at every call the code of their ``forward`` runs on tensors without memory,
    once before the parts, so that it reads what is there now, and once after them, so that a module that changed what
    it reads is seen. All values that later parts need are handed on, and gradients come back the same way.

    Args:
        model: any module. It stays usable, and shares its modules, parameters and buffers with the parts.
        at: qualified names of submodules, in the order they run, each called once: a part begins with the call.
        example: inputs to find out by which part calls each module: a tuple of positional ones, or a mapping of
            keyword ones. Without it a Hugging Face model's ``dummy_inputs`` serve; else modules are in the order in
            which the model names them, and a call that finds one in another part raises.
        glue: in place of ``at``, for each part the names of its modules and a function: of these modules and the
            model's inputs for the first part, of its modules and the value of the part before for the others. Names
            cover all parameters and buffers; the functions' keyword parameters are inputs by name.

    Returns:
        A ``nn.Sequential`` for ``Pipe``; called itself it is the model. Its names are the model's.

    Raises:
        ValueError: a name that the model lacks, that it does not call, or calls out of order or twice.
        CaptureError: code around a cut that cannot be split: names the line and the reason. So does a call of its pipe
            with inputs that take another way through that code.

    Source: ``torch.distributed.pipelining`` splits a graph by ``torch.export``, modules included.
    """
    if glue is not None:
        if at or example is not None:
            raise ValueError("glue= has the code of all parts; leave out at= and example=")
        _check_glue(model, glue)
        return PartedModel(model, [_GluedPart(model, i, *pair) for i, pair in enumerate(glue)])
    source = SplitSource(model, _checked(model, at), example)
    return PartedModel(model, [SplitPart(source, index) for index in range(len(source.at) + 1)], source)


def _checked(model: nn.Module, at: Sequence[str]) -> list[str]:
    if isinstance(at, str) or not all(isinstance(name, str) for name in at):
        raise TypeError(f"at={at!r} is not a list of names of submodules; use for example at=['h.3', 'h.7']")
    named = dict(model.named_modules())
    for name in at:
        if name not in named or not name:
            near = [one for one in named if one.endswith(f".{name}")] or [one for one in named if one]
            more = f" and {len(near) - 8} more" if len(near) > 8 else ""
            raise ValueError(f"{type(model).__name__} has no submodule {name!r} to cut at; it has {near[:8]}{more}")
        if type(named[name]).forward is nn.Module.forward:
            kind = type(named[name]).__name__
            raise ValueError(f"{name!r} is a {kind}, which is never called; name one of its items")
    if len(set(at)) < len(at) or not at:
        raise ValueError(f"at={at!r} must name at least one submodule that starts a stage, each once")
    return list(at)


class SplitSource:
    """A model that was split, the parts that its modules and tensors belong to, and its programs."""

    def __init__(self, model: nn.Module, at: list[str], example: Example | None) -> None:
        self.model = model
        self.at = at
        self.units: list[list[str]] = [[] for _ in range(len(at) + 1)]
        self.held: list[list[HeldTensor]] = [[] for _ in range(len(at) + 1)]
        self.forms: dict[object, Form] = {}
        self.alone: PartProgram | None = None  # of the parts that run one by one
        self._assign(_example_of(model, example))

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "forms": {}, "alone": None}

    # Assignment to parts.

    def _assign(self, example: _Inputs | None) -> None:
        programs = [] if example is None else self._in_both_modes(signature_of(*example))
        uses: Uses = {}
        for name, parts in (pair for program in programs for pair in program.uses().items()):
            uses[name] = list(dict.fromkeys([*uses.get(name, []), *parts]))
        modules = {path: parts for path, parts in uses.items() if isinstance(path, str)}
        for path, parts in modules.items():
            around = next((other for other in modules if other != path and is_within(path, other)), None)
            if around is not None and set(parts) <= set(modules[around]):
                continue  # it comes with that one
            if has_state(self.model.get_submodule(path)) and (around is not None or len(parts) > 1):
                code = [one for program in programs for part in program.parts for one in part if one.target == path]
                places = ", ".join(dict.fromkeys(one.place for one in code))
                raise CaptureError(
                    f"{path!r} is called by the parts {parts} ({places}), but "
                    + (f"{around!r}, which contains it, by {modules[around]}" if around else "can be in only one")
                    + "; move the cut so that they are called in one part, or make two modules that share parameters"
                )
            self.units[parts[0]].append(path)
        for tensor, parts in uses.items():
            for part in parts:
                if isinstance(tensor, HeldTensor) and not self._owns(part, tensor.module):
                    self.held[part].append(tensor)
        self._assign_the_rest(by_name=example is None)

    def _owns(self, part: int, path: str) -> bool:
        return any(is_within(path, unit) for unit in self.units[part])

    def _in_both_modes(self, signature: Signature) -> list[PartProgram]:
        """Return the programs of training and of evaluation, which may call other modules."""
        modes = [(module, module.training) for module in self.model.modules()]
        try:
            programs = []
            for mode in (True, False):
                for module, _ in modes:
                    module.training = mode
                programs += self._trace([signature])
            return programs
        finally:
            for module, mode in modes:
                module.training = mode

    def _assign_the_rest(self, *, by_name: bool) -> None:
        """Assign modules that the example did not reach to the part of those before them, and tensors, which several
        parts may read: of modules around a cut to every part if there was no example.
        """
        part = 0
        opened = opened_by(self.at)
        owned = {unit: p for p, units in enumerate(self.units) for unit in units}
        taken = {tensor for tensors in self.held for tensor in tensors}
        for path, module in self.model.named_modules():
            above = [owned[unit] for unit in owned if is_within(path, unit)]
            part = above[0] if above else self.at.index(path) + 1 if path in self.at else part
            if above:
                continue
            inside = path in opened or any(is_within(unit, path) for unit in owned)
            if not inside and has_state(module):
                owned[path] = part
                self.units[part].append(path)
                continue
            tensors = [HeldTensor(path, name) for name in (*module._parameters, *module._buffers)]
            for held in self.held if by_name else [self.held[part]]:
                held += [tensor for tensor in tensors if tensor not in taken]

    def shares(self, path: str) -> bool:
        """Return True if several parts read tensors of the module."""
        return sum(any(tensor.module == path for tensor in tensors) for tensors in self.held) > 1 or any(
            is_within(path, unit) for units in self.units for unit in units
        )

    # Programs.

    def trace(self, signatures: Sequence[Signature]) -> list[PartProgram]:
        """Return the programs of the model's code, as it is now, for inputs of these forms.

        Raises:
            CaptureError: one uses a module or a tensor that is in another part.
        """
        programs = self._trace(signatures)
        for name, parts in (pair for program in programs for pair in program.uses().items()):
            path, what = (name, repr(name)) if isinstance(name, str) else (name.module, f"{name.module}.{name.name}")
            if isinstance(name, str) and not has_state(self.model.get_submodule(path)):
                continue
            for part in parts:
                if name not in self.held[part] and not self._owns(part, path):
                    owner = next((p for p in range(len(self.units)) if self._owns(p, path)), None)
                    raise CaptureError(
                        f"with these inputs {what} is used by part {part}, but it is in part {owner}; split the model "
                        "with example= inputs of this kind, in this mode"
                    )
        return programs

    def _trace(self, signatures: Sequence[Signature]) -> list[PartProgram]:
        modes = ThreadModes.take()
        # Without gradients inference mode makes no difference to a model's code.
        modes = replace(modes, inference=False, grad=modes.grad and not modes.inference)
        return trace(self.model, self.at, signatures, modes, self.forms)


class SplitPart(ModelPart):
    """The modules from one cut to the next, and the code between them; named by the module that it begins with."""

    def __init__(self, source: SplitSource, index: int) -> None:
        shared = {tensor.module for tensor in source.held[index] if source.shares(tensor.module)}
        name = source.at[index - 1] if index else "start"
        super().__init__(name, source.model, source.units[index], source.held[index], shared)
        self.__dict__["source"], self.index = source, index

    source: SplitSource

    def takes(self, names: Iterable[str], positional: int) -> tuple[str, ...]:
        """Return those of the keyword inputs ``names`` that the model takes: its first part gets them."""
        return () if self.index else accepted_keywords(self.source.model.forward, names, positional, rest=True)

    def forward(self, *args: object, **kwargs: object) -> tuple[object, ...]:
        """Run this part's share of the model's forward; the first one takes the model's inputs."""
        source = self.source
        program = current_program()
        if program is None:
            program = source.alone = source.alone if self.index else source.trace([signature_of(args, kwargs)])[0]
            assert program is not None
        values = args[0] if self.index else [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        return program.run(self.index, cast("Sequence[object]", values), source.model, self._look_up)

    def _look_up(self, tensor: HeldTensor) -> object:
        holder = self.holders.get(tensor.module)
        for kind in ("_parameters", "_buffers"):
            if holder is not None and tensor.name in holder.__dict__[kind]:
                return holder.__dict__[kind][tensor.name]
        return getattr(self.source.model.get_submodule(tensor.module), tensor.name)


def _example_of(model: nn.Module, example: Example | None) -> _Inputs | None:
    """Return the positional and keyword inputs of an example; ``None`` if there is none."""
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple):
        return example, {}
    if example is not None:
        raise TypeError(f"example= is a tensor, a tuple of inputs or a mapping by name, got a {type(example).__name__}")
    inputs = getattr(model, "dummy_inputs", None)  # of Hugging Face's models; tokens, whatever the model accepts
    if isinstance(inputs, Mapping) and len(accepted_keywords(model.forward, inputs, 0)) == len(inputs):
        no_cache = {"use_cache": False} if accepted_keywords(model.forward, ["use_cache"], 0) else {}
        return (), {**inputs, **no_cache}
    return None


class _GluedPart(ModelPart):
    """Modules of a model, and a function of the user that calls them; see ``split``."""

    def __init__(self, model: nn.Module, index: int, names: Sequence[str], function: Callable[..., object]) -> None:
        super().__init__(f"{getattr(function, '__name__', 'part')} {index}", model, list(names))
        self.function = function

    def takes(self, names: Iterable[str], positional: int) -> tuple[str, ...]:
        return accepted_keywords(self.function, names, len(self._units) + positional)

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.function(*map(self._model.get_submodule, self._units), *args, **kwargs)


def _check_glue(model: nn.Module, glue: Sequence[Glue]) -> None:
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

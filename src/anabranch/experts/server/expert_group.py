"""Experts described by plain values, from a command line or a file; and the backends made of them.

::

    flags ────────┐
    fleet.toml ───┴──> ExpertGroup ──> uids ──> factory ──> module, or arguments ──┐
                            └── what is said here comes before what the factory says ┴──> ExpertBackend
"""

from __future__ import annotations

import inspect
import os
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from anabranch.errors import BoundaryError
from anabranch.experts.directory import Directory, DirectoryLike
from anabranch.experts.nesting import nesting_of
from anabranch.experts.schema import specs_of
from anabranch.experts.server.backend import ExpertBackend
from anabranch.experts.server.layers import find_factory, make_optimizer, make_scheduler
from anabranch.experts.uid_patterns import UidPattern, draw_uids, expand_uids
from anabranch.record.spans import mark
from anabranch.tensors import Structure, TensorSpec
from anabranch.tensors.dtypes import DTYPE_CODES, dtype_named
from anabranch.tensors.spec import Compression
from anabranch.transport.redis_directory import RedisDirectory

__all__ = ["ExpertGroup", "make_experts", "parse_schema"]

_FEATURES = 512
# Seconds for which drawn uids are claimed: long enough to make their modules and load their saved state.
_CLAIM_SECONDS = 600.0
_WHOLE = {
    "count": 1,
    "seed": 0,
    "features": 1,
    "keep_activations": 0,
    "min_batch_size": 1,
    "max_batch_size": 1,
    "max_queue_rows": 1,
    "max_queue_bytes": 1,
}
_NUMBERS = {"lr": "a number, 0 or more", "clip_grad_norm": "a number above 0", "timeout": "seconds, 0 or more"}
_CHOICES: dict[str, tuple[str, ...]] = {
    "gradient_reduction": ("sum", "mean"),
    "compression": ("float16", "bfloat16", "int8"),
}
_TEXTS = ("uids", "module", "optimizer", "scheduler", "device")
_MAPPINGS = ("module_args", "optimizer_args", "scheduler_args", "kwargs_schema")
# Plain arguments of ExpertBackend, passed on unchanged.
_PASSED = (
    "clip_grad_norm",
    "gradient_reduction",
    "keep_activations",
    "min_batch_size",
    "max_batch_size",
    "timeout",
    "max_queue_rows",
    "max_queue_bytes",
)
_OF_BACKEND = tuple(name for name in inspect.signature(ExpertBackend).parameters if name != "uid")
_OF_SPEC = ("shape", "dtype", "requires_grad", "compression", "pad")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroup:
    """Experts of one kind; ``None`` leaves a value to the factory of the module, or to its default.

    >>> group = ExpertGroup(uids="ffn.[0:2]", features=8, optimizer="sgd", lr=0.1, clip_grad_norm=1.0)
    >>> [backend.uid for backend in make_experts([group])]
    ['ffn.0', 'ffn.1']

    Attributes:
        uids: a pattern, such as ``ffn.[0:4].[0:8]``.
        count: draw so many of them at random, that the directory does not list; by default all are served.
        seed: of the draws.
        module: ``ffn``, ``nop``, or ``package.module:function``, which returns a module, or a mapping of arguments of
            ``ExpertBackend`` with the module among them.
        module_args: the function's keyword arguments. Without them it is called with ``features`` alone; with them,
            ``features`` come first if they are given.
        features: the last size of an input, 512 by default; the schema, where none is said, is one input of it.
        args_schema: a list, with a table for each positional argument: ``{"shape": ["any", 512]}``, with ``dtype``,
            ``compression``, ``pad`` and ``requires_grad`` as of ``TensorSpec``; lists and tables nest.
        kwargs_schema: a table by name of keyword argument.
        outputs_schema: the same for the output; a list stands for a tuple. By default found by running the module.
        compression: of all floating inputs and outputs that say none of their own.
        optimizer: ``sgd``, ``adam`` (the default), ``adamw``, ``adagrad``, ``none``, or ``package.module:class``.
        optimizer_args: its further arguments.
        lr: the learning rate, 0.001 by default.
        scheduler: a class of ``torch.optim.lr_scheduler``, or ``package.module:function`` of the optimizer.
        scheduler_args: its further arguments.
        device: where the experts live.
        where: the place where this is said, for messages.

    The others are those of ``ExpertBackend``.

    Raises:
        ValueError: a value of the wrong type or out of bounds; the message names it and says what to give.
    """

    uids: str
    count: int | None = None
    seed: int | None = None
    module: str = "ffn"
    module_args: Mapping[str, object] | None = None
    features: int | None = None
    args_schema: Sequence[object] | None = None
    kwargs_schema: Mapping[str, object] | None = None
    outputs_schema: object = None
    compression: Compression | None = None
    optimizer: str | None = None
    optimizer_args: Mapping[str, object] | None = None
    lr: float | None = None
    scheduler: str | None = None
    scheduler_args: Mapping[str, object] | None = None
    clip_grad_norm: float | None = None
    gradient_reduction: str | None = None
    keep_activations: int | None = None
    min_batch_size: int | None = None
    max_batch_size: int | None = None
    timeout: float | None = None
    max_queue_rows: int | None = None
    max_queue_bytes: int | None = None
    device: str | None = None
    where: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                _check_value(field.name, value)
        # Refused here rather than after all earlier modules have been made.
        pattern = UidPattern(self.uids)
        if self.count is not None and self.count > pattern.size:
            raise ValueError(f"count is at most the {pattern.size} uids of {self.uids!r}, got {self.count}")
        if self.seed is not None and self.count is None:
            raise ValueError(f"seed is for drawing uids, but there is no count; got only seed {self.seed}")
        if "lr" in (self.optimizer_args or {}):
            raise ValueError(f"lr is a separate argument, not part of optimizer_args, got {self.optimizer_args!r}")
        for name, of in (("optimizer_args", "optimizer"), ("scheduler_args", "scheduler")):
            if getattr(self, name) is not None and getattr(self, of) is None:
                raise ValueError(f"{name} are for the {of}, which is not given; give it")

    @property
    def said(self) -> dict[str, object]:
        """The given plain arguments of ``ExpertBackend``."""
        return {name: getattr(self, name) for name in _PASSED if getattr(self, name) is not None}


def _check_value(name: str, value: object) -> None:
    expected = ""
    if name in _WHOLE:
        if isinstance(value, bool) or not isinstance(value, int) or value < _WHOLE[name]:
            expected = f"a whole number, {_WHOLE[name]} or more"
    elif name in _NUMBERS:
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < float("inf"):
            expected = _NUMBERS[name]
            if isinstance(value, str):
                expected += ", without quotes, and in YAML with a decimal point: 1.0e-3"
    elif name in _CHOICES:
        if value not in _CHOICES[name]:
            expected = f"one of {', '.join(_CHOICES[name])}"
    elif name in _TEXTS:
        if not isinstance(value, str) or not value:
            expected = "a text"
    elif name in _MAPPINGS:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            expected = "a table of values by name"
    elif name == "args_schema" and not isinstance(value, (list, tuple)):
        expected = 'a list of inputs, such as [{"shape": ["any", 512]}]'
    if expected:
        raise ValueError(f"{name} is {expected}, got {value!r}")


def make_experts(
    groups: Iterable[ExpertGroup],
    *,
    directory: DirectoryLike | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
) -> list[ExpertBackend]:
    """Make the experts of all groups.

    Args:
        groups: their descriptions.
        directory: lists the uids that others serve, which are not drawn. A ``Directory`` claims the drawn ones for ten
            minutes, or until they are announced, so that two that draw at once draw different ones.
        checkpoint_dir: has the experts of an earlier run, which are drawn first.

    Raises:
        ValueError: two groups have a uid in common, a module or optimizer cannot be made, no uid is left to draw.
        SchemaError: a module does not accept the inputs of its schema.
        BoundaryError: the directory does not answer.
    """
    groups = list(groups)
    owners: dict[str, ExpertGroup] = {}
    uids: dict[int, list[str]] = {}
    with _Claims(directory) as claims:
        # Groups drawn last avoid all others.
        for group in sorted(groups, key=lambda group: group.count is not None):
            with _told_where(group):
                mine = expand_uids(group.uids) if group.count is None else _draw(group, owners, claims, checkpoint_dir)
                if twice := [uid for uid in mine if uid in owners]:
                    raise ValueError(f"{twice[0]} is in another group too, {owners[twice[0]].uids!r}; keep it in one")
                owners |= dict.fromkeys(mine, group)
                uids[id(group)] = mine
        backends: list[ExpertBackend] = []
        for group in groups:
            with _told_where(group):
                factory = find_factory(group.module)
                backends += [_make_expert(group, factory, uid) for uid in uids[id(group)]]
    return backends


class _Claims:
    """The uids drawn here, claimed in a directory until they are announced; released on an error.

    Args:
        directory: lists the uids that others serve; ``None`` if there are no others. A user's own directory that cannot
            claim uids is only asked which of them are served.
    """

    def __init__(self, directory: DirectoryLike | None) -> None:
        self._directory = directory
        self._claimer = uuid.uuid4().hex
        self._claimed: list[str] = []

    def served(self, uids: Sequence[str]) -> Collection[str]:
        """Return those of ``uids`` that others serve."""
        return () if self._directory is None else self._directory.lookup(uids)

    def take(self, uids: list[str]) -> list[str]:
        """Return those of ``uids`` that are now claimed for this process."""
        if not isinstance(self._directory, Directory | RedisDirectory):
            return uids
        mine = self._directory.claim(uids, self._claimer, _CLAIM_SECONDS)
        self._claimed += mine
        return mine

    def __enter__(self) -> _Claims:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or not self._claimed:
            return
        assert isinstance(self._directory, Directory | RedisDirectory)
        try:
            self._directory.release(self._claimed, self._claimer)
        except BoundaryError as lost:
            # A claim that is not released expires.
            mark("experts.directory_lost", error=str(lost))


@contextmanager
def _told_where(group: ExpertGroup) -> Iterator[None]:
    """Add the place where the group is described to the block's errors."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if not group.where:
            raise
        raise ValueError(f"{group.where}: {error}") from error


def _draw(
    group: ExpertGroup,
    owners: Collection[str],
    claims: _Claims,
    checkpoint_dir: str | os.PathLike[str] | None,
) -> list[str]:
    assert group.count is not None
    found: list[str] = []
    if checkpoint_dir is not None and Path(checkpoint_dir).is_dir():
        pattern = UidPattern(group.uids)
        names = sorted(path.name for path in Path(checkpoint_dir).iterdir() if path.is_dir())
        found = [name for name in names if name in pattern and name not in owners][: group.count]
    refused: set[str] = set()

    def taken(uids: Sequence[str]) -> set[str]:
        return {*claims.served(uids), *refused.union(owners, found).intersection(uids)}

    while missing := group.count - len(found):
        drawn = draw_uids(group.uids, missing, taken=taken, seed=group.seed)
        mine = claims.take(drawn)
        refused.update(drawn)
        found += mine
    return found


def _make_expert(
    group: ExpertGroup, factory: Callable[..., nn.Module | Mapping[str, object]], uid: str
) -> ExpertBackend:
    features = _FEATURES if group.features is None and group.module_args is None else group.features
    made = factory(*([] if features is None else [features]), **(group.module_args or {}))
    given: dict[str, Any] = {"module": made} if isinstance(made, nn.Module) else dict(made)
    if unknown := [name for name in given if name not in _OF_BACKEND]:
        raise ValueError(
            f"{group.module!r} returned {unknown[0]!r}, which is not an argument of ExpertBackend; its arguments are: "
            f"{', '.join(_OF_BACKEND)}"
        )
    module = given["module"] = _placed(given["module"], group.device)
    given |= group.said
    given |= _make_updates(group, module, given)
    given |= _make_schemas(group, given, features)
    backend = ExpertBackend(uid, **given)
    if group.compression is not None and given.get("outputs_schema") is None:
        given["outputs_schema"] = _compressed(backend.schema.outputs, group.compression)
        backend = ExpertBackend(uid, **given)
    return backend


def _make_updates(group: ExpertGroup, module: nn.Module, given: Mapping[str, Any]) -> dict[str, object]:
    """Return the optimizer and the scheduler; those of the group take precedence over the factory's."""
    optimizer = given.get("optimizer")
    if group.optimizer is not None or "optimizer" not in given:
        optimizer = make_optimizer(group.optimizer or "adam", module, group.lr, group.optimizer_args)
        if given.get("scheduler") is not None and group.scheduler is None:
            raise ValueError(
                f"the scheduler of {group.module!r} is for the optimizer that it returns, but another one was "
                "requested; leave the optimizer out, or name a scheduler too"
            )
    elif group.lr is not None:
        raise ValueError(f"lr is {group.lr}, and {group.module!r} returns its own optimizer; set lr there")
    scheduler = given.get("scheduler")
    if group.scheduler is not None:
        if not isinstance(optimizer, Optimizer):
            raise ValueError(f"scheduler is {group.scheduler!r}, but there is no optimizer to schedule; name one")
        scheduler = make_scheduler(group.scheduler, optimizer, group.scheduler_args)
    return {"optimizer": optimizer, "scheduler": scheduler}


def _make_schemas(group: ExpertGroup, given: Mapping[str, Any], features: int | None) -> dict[str, Structure]:
    """Return the schemas; those of the group take precedence over the factory's."""
    arguments: Structure = given.get("args_schema") or ()
    keywords: Structure = given.get("kwargs_schema") or {}
    outputs: Structure = given.get("outputs_schema")
    if group.args_schema is not None or group.kwargs_schema is not None:
        # Together they are all inputs.
        arguments = tuple(parse_schema(part, f"args_schema[{i}]") for i, part in enumerate(group.args_schema or ()))
        keywords = {
            key: parse_schema(part, f"kwargs_schema.{key}") for key, part in (group.kwargs_schema or {}).items()
        }
    elif not arguments and not keywords:
        if features is None:
            raise ValueError(
                f"the inputs of {group.module!r} are not known: give features, args_schema or kwargs_schema, or let it "
                "return them"
            )
        arguments = (TensorSpec(features),)
    if group.outputs_schema is not None:
        outputs = parse_schema(group.outputs_schema, "outputs_schema", sequence=tuple)
    schemas: dict[str, Structure] = {"args_schema": arguments, "kwargs_schema": keywords, "outputs_schema": outputs}
    if group.compression is None:
        return schemas
    return {
        name: None if schema is None else _compressed(schema, group.compression) for name, schema in schemas.items()
    }


def parse_schema(
    description: object, name: str, *, sequence: type[list[Any]] | type[tuple[Any, ...]] = list
) -> Structure:
    """Return the specs described by plain values.

    >>> parse_schema({"shape": ["any", 512], "dtype": "float16"}, "args_schema[0]")
    TensorSpec(None, 512, dtype=torch.float16)

    Args:
        description: a table with ``shape``; or a list or table of such; or ``None``.
        name: of the value, for messages.
        sequence: what a list stands for.

    Raises:
        ValueError: it describes no schema.
    """
    if description is None:
        return None
    if isinstance(description, (list, tuple)):
        parts = [parse_schema(part, f"{name}[{i}]", sequence=sequence) for i, part in enumerate(description)]
        return sequence(parts)
    if not isinstance(description, Mapping):
        raise ValueError(f'{name} is a table such as {{"shape": ["any", 512]}}, got {description!r}')
    if "shape" not in description:
        return {str(key): parse_schema(part, f"{name}.{key}", sequence=sequence) for key, part in description.items()}
    if unknown := [key for key in description if key not in _OF_SPEC]:
        raise ValueError(f"{name} has {unknown[0]!r}; a tensor has {', '.join(_OF_SPEC)}")
    shape = description["shape"]
    if not isinstance(shape, (list, tuple)):
        raise ValueError(f'{name}.shape is a list of sizes, "any" for one that varies, got {shape!r}')
    options = {key: value for key, value in description.items() if key not in ("shape", "dtype")}
    for flag in ("requires_grad", "pad"):
        if not isinstance(options.get(flag, False), bool):
            raise ValueError(f"{name}.{flag} is true or false, got {options[flag]!r}")
    try:
        dtype = dtype_named(str(description.get("dtype", "float32")), among=DTYPE_CODES)
        return TensorSpec(*(None if size == "any" else size for size in shape), dtype=dtype, **options)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _compressed(structure: Structure, compression: Compression) -> Structure:
    """Return the schema with ``compression`` for the floating tensors that have none."""

    def compress(spec: TensorSpec | None) -> TensorSpec | None:
        if spec is None or spec.compression is not None or not spec.dtype.is_floating_point:
            return spec
        return TensorSpec(
            *spec.shape, dtype=spec.dtype, requires_grad=spec.requires_grad, compression=compression, pad=spec.pad
        )

    return nesting_of(structure).rebuild([compress(spec) for spec in specs_of(structure)])


def _placed(module: nn.Module, device: torch.device | str | None) -> nn.Module:
    try:
        return module.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"no expert can run on {str(device)!r} here: {error}") from error

"""Experts of the command line: those of a function of the user's, and named modules with named optimizers."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anabranch.experts.server.backend import ExpertBackend
from anabranch.tensors import TensorSpec
from anabranch.transport.announcements import check_uid

_FEATURES = 512
_RANGE = re.compile(r"\[(0|[1-9][0-9]*):(0|[1-9][0-9]*)\]")


class Feedforward(nn.Module):
    """A transformer's feed-forward layer with a residual connection: four times as wide inside.

    >>> Feedforward(8)(torch.zeros(2, 8)).shape
    torch.Size([2, 8])

    Args:
        features: the last size of its input and output.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.inner = nn.Linear(features, 4 * features)
        self.outer = nn.Linear(4 * features, features)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus the layer's output."""
        hidden: Tensor = nn.functional.gelu(self.inner(self.norm(x)))
        changed: Tensor = self.outer(hidden)
        return x + changed


class Nothing(nn.Module):
    """Returns its input, so that a call costs only the transport.

    >>> Nothing(8)(torch.zeros(2, 8)).shape
    torch.Size([2, 8])

    Args:
        features: the last size of its input.
    """

    def __init__(self, features: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Return the input, as its own tensor."""
        return x.clone()


_NAMED: dict[str, type[nn.Module]] = {"ffn": Feedforward, "nop": Nothing}
_OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
}


def expand_uids(pattern: str) -> list[str]:
    """Expand ``pattern`` into uids: ``[a:b]`` is each index from a up to, not including, b.

    >>> expand_uids("ffn.[0:2].[5:7]")
    ['ffn.0.5', 'ffn.0.6', 'ffn.1.5', 'ffn.1.6']

    Raises:
        ValueError: the pattern gives an invalid uid, or none.
    """
    parts = [
        [part] if (match := _RANGE.fullmatch(part)) is None else map(str, range(int(match[1]), int(match[2])))
        for part in pattern.split(".")
    ]
    uids = [check_uid(".".join(names)) for names in itertools.product(*parts)]
    if not uids:
        raise ValueError(f"{pattern!r} matches no uid: a range is empty; write [first:last+1]")
    return uids


def make_named_experts(
    pattern: str,
    module: str = "ffn",
    optimizer: str | None = None,
    lr: float | None = None,
    device: str | None = None,
    max_batch_size: int | None = None,
) -> list[ExpertBackend]:
    """Make an expert for each uid of ``pattern``.

    >>> [backend.uid for backend in make_named_experts("ffn.[0:2]", "ffn:8", "sgd", 0.1)]
    ['ffn.0', 'ffn.1']

    Args:
        pattern: as of ``expand_uids``.
        module: ``ffn`` or ``nop``, with the last size of its input (``ffn:64``; 512 unless given), or
            ``package.module:function``, which returns a mapping of arguments of ``ExpertBackend``, with ``module`` and
            its schema among them.
        optimizer: ``sgd``, ``adam``, ``adamw``, ``adagrad`` or ``none``; by default the function's, or Adam.
        lr: its learning rate; by default .001.
        device: of the experts.
        max_batch_size: the most rows of a batch.

    Raises:
        ValueError: no such module, function, optimizer or device.
    """
    factory = _factory(module)
    backends = []
    for uid in expand_uids(pattern):
        arguments = factory()
        if optimizer is not None or "optimizer" not in arguments:
            arguments["optimizer"] = _make_optimizer(optimizer or "adam", arguments["module"], lr)
        elif lr is not None:
            raise ValueError(f"--lr {lr} is for an optimizer by name, and {module!r} makes its own; set lr there")
        if max_batch_size is not None:
            arguments["max_batch_size"] = max_batch_size
        try:
            backend = ExpertBackend(uid, **arguments)
        except TypeError as error:
            raise ValueError(f"{module!r} returned arguments that ExpertBackend does not take: {error}") from error
        try:
            backends.append(backend if device is None else backend.to(device))
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"no expert can run on {device!r} here: {error}") from error
    return backends


def make_backends_of(target: str, index: int, count: int) -> list[ExpertBackend]:
    """Return what the function ``FILE_OR_MODULE:NAME`` makes for the ``index``-th of ``count`` servers.

    Raises:
        ValueError: no such file, module or function, or one that returns something else.
    """
    backends = load_function(target)(index, count)
    if not isinstance(backends, Sequence) or not all(isinstance(backend, ExpertBackend) for backend in backends):
        raise ValueError(f"{target}(index, count) returns a list of ExpertBackend, got {type(backends).__name__}")
    return list(backends)


def load_function(target: str) -> Callable[..., Any]:
    """Return the function ``FILE_OR_MODULE:NAME``; modules are looked for in the current folder too.

    Raises:
        ValueError: there is none.
    """
    place, _, name = target.rpartition(":")
    # Last, so that the current folder hides no other module.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        function = getattr(_load_file(Path(place)) if place.endswith(".py") else import_module(place), name)
    except (ImportError, AttributeError, ValueError, OSError) as error:
        cure = "name FILE.py:function or package.module:function"
        raise ValueError(f"{target!r} cannot be loaded: {error}; {cure}") from error
    if not callable(function):
        raise ValueError(f"{target!r} is a {type(function).__name__}, not a function")
    return cast("Callable[..., Any]", function)


def _load_file(path: Path) -> object:
    # As `python FILE` does it, but for the name: code under `if __name__ == "__main__"` does not run.
    sys.path.insert(0, str(path.resolve().parent))
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _factory(name: str) -> Callable[[], dict[str, Any]]:
    kind, _, width = name.partition(":")
    if kind in _NAMED:
        if width and (not width.isdecimal() or not int(width)):
            raise ValueError(f"the width of {kind!r} is a whole number above 0, such as {kind}:64, got {name!r}")
        features = int(width or _FEATURES)
        return lambda: {"module": _NAMED[kind](features), "args_schema": [TensorSpec(features)]}
    if not width:
        cure = f"use {', '.join(_NAMED)} or package.module:function"
        raise ValueError(f"{name!r} is not the name of a module to serve; {cure}")
    function = load_function(name)

    def make() -> dict[str, Any]:
        made = function()
        if not isinstance(made, Mapping) or not isinstance(made.get("module"), nn.Module):
            takes = "a mapping of ExpertBackend's arguments, with 'module' and 'args_schema' or 'kwargs_schema'"
            raise ValueError(f"{name!r} returns {takes}, got {type(made).__name__}")
        return dict(made)

    return make


def _make_optimizer(name: str, module: nn.Module, lr: float | None) -> Optimizer | None:
    if name == "none" or next(module.parameters(), None) is None:
        return None
    if name not in _OPTIMIZERS:
        raise ValueError(f"{name!r} is not an optimizer; use {', '.join(_OPTIMIZERS)} or none")
    return _OPTIMIZERS[name](module.parameters(), lr=1e-3 if lr is None else lr)  # type: ignore[call-arg]

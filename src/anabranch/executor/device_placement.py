"""``Executor(devices=...)``: parts of a model on their own devices, with a transfer at each edge.

::

    home:     batch ──> stem ──┐         ┌──> head ──> loss
                               v         │
    cuda:1:                 [ encoder ]──┘          devices={"encoder": "cuda:1"}

The inputs of a placed module are moved to its device and its outputs back to the surrounding device, so the rest
of the model need not know. The tape records the transfers, and a captured graph has them as nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from anabranch.autodiff.hooks import move_at_edges
from anabranch.autodiff.moved_parameter import Switch


@contextmanager
def placed(
    models: Sequence[nn.Module],
    devices: Mapping[str, str | torch.device],
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> Iterator[None]:
    """Move the modules named in ``devices`` there until the block ends.

    Args:
        models: contain the modules.
        devices: device by a module's qualified name; of names that are in one another each counts for its own part.
        optimizers: their state moves along.

    Raises:
        ValueError: a name that no model has.
    """
    where = {name: torch.device(device) for name, device in devices.items()}
    known = [dict(model.named_modules()) for model in models]
    for name in where:
        if not name or not any(name in modules for modules in known):
            others = ", ".join(sorted(filter(None, set().union(*known))))
            raise ValueError(f"devices= names {name!r}; the modules are: {others or 'none; use model.to(device)'}")

    def around(name: str) -> str | None:
        """Return the nearest of the named modules that the one of this name, or a part of it, is in."""
        return max((prefix for prefix in where if name.startswith(f"{prefix}.")), key=len, default=None)

    done: set[nn.Module] = set()
    with ExitStack() as undo:
        undo.callback(_move_state, optimizers)
        for model, modules in zip(models, known, strict=True):
            for name in [name for name in where if name in modules and modules[name] not in done]:
                done.add(modules[name])
                for inner, module in modules.items():  # without other placed modules inside it
                    if around(f"{inner}.") == name:
                        tensors = (*module._parameters.values(), *module._buffers.values())
                        before = next((tensor.device for tensor in tensors if tensor is not None), where[name])
                        _move(module, where[name])
                        undo.callback(_move, module, before)
                outer = around(name)
                home = home_of(model, devices) if outer is None else where[outer]
                undo.enter_context(move_at_edges(modules[name], where[name], home))
        _move_state(optimizers)
        yield


def home_of(model: nn.Module, devices: Mapping[str, str | torch.device]) -> torch.device:
    """Return the device for batches: the device of the modules that were not placed."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if not any(name.startswith(f"{prefix}.") for prefix in devices):
            return tensor.device
    return tensors[0][1].device if tensors else torch.device("cpu")


def _move(module: nn.Module, device: torch.device) -> None:
    """Move the module's own parameters and buffers, which stay the objects that they are if they are parameters."""
    module._apply(lambda tensor: tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]


def _move_state(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Move the optimizers' state to where their parameters are."""
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and type(parameter) is not Switch and value.shape == parameter.shape:
                    state[key] = value.to(parameter.device)

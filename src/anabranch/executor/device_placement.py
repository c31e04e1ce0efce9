"""``Executor(devices=...)``: parts of a model on their own devices, with a transfer at each edge.

::

    home:     batch ──> stem ──┐         ┌──> head ──> loss
                               v         │
    cuda:1:                 [ encoder ]──┘          devices={"encoder": "cuda:1"}

The inputs of a placed module are moved to its device and its outputs back to the surrounding device, so the rest
of the model need not know. The tape records the transfers, and a captured graph has them as nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from anabranch.autodiff.hooks import move_at_edges
from anabranch.autodiff.moved_parameter import Switch


class DevicePlacement:
    """The modules named in ``devices`` moved there, until it is closed.

    Args:
        models: contain the modules.
        devices: device by a module's qualified name; of names that are in one another each counts for its own part.
        optimizers: their state moves along.

    Raises:
        ValueError: a name that no model has.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        devices: Mapping[str, str | torch.device],
        optimizers: Iterable[torch.optim.Optimizer] = (),
    ) -> None:
        self._optimizers = list(optimizers)
        self._undo = ExitStack()
        self._devices = {name: torch.device(device) for name, device in devices.items()}
        known = [dict(model.named_modules()) for model in models]
        for name in self._devices:
            if not name or not any(name in modules for modules in known):
                others = ", ".join(sorted(filter(None, set().union(*known))))
                raise ValueError(f"devices= names {name!r}; the modules are: {others or 'none; use model.to(device)'}")
        placed: set[nn.Module] = set()
        for model, modules in zip(models, known, strict=True):
            home = self.home(model, devices)
            for name in self._devices:
                if name in modules and modules[name] not in placed:
                    placed.add(modules[name])
                    self._place(name, modules, home)
        self._move_optimizer_state()

    @staticmethod
    def home(model: nn.Module, devices: Mapping[str, str | torch.device]) -> torch.device:
        """Return the device for batches: the device of the modules that were not placed."""
        tensors = [*model.named_parameters(), *model.named_buffers()]
        for name, tensor in tensors:
            if not any(name.startswith(f"{prefix}.") for prefix in devices):
                return tensor.device
        return tensors[0][1].device if tensors else torch.device("cpu")

    def _place(self, name: str, modules: Mapping[str, nn.Module], home: torch.device) -> None:
        """Move the contents of the module of this name, without other placed modules inside it."""
        device = self._devices[name]
        for inner, module in modules.items():
            if self._prefix(f"{inner}.") == name:
                tensors = (*module._parameters.values(), *module._buffers.values())
                before = next((tensor.device for tensor in tensors if tensor is not None), device)
                _move(module, device)
                self._undo.callback(_move, module, before)
        outer = self._prefix(name)
        around = home if outer is None else self._devices[outer]
        self._undo.enter_context(move_at_edges(modules[name], device, around))

    def _prefix(self, name: str) -> str | None:
        """Return the nearest placed module that the module or parameter of this name is in."""
        return max((prefix for prefix in self._devices if name.startswith(f"{prefix}.")), key=len, default=None)

    def _move_optimizer_state(self) -> None:
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    if isinstance(value, Tensor) and type(parameter) is not Switch and value.shape == parameter.shape:
                        state[key] = value.to(parameter.device)

    def close(self) -> None:
        """Everything goes back to where it was."""
        self._undo.close()
        self._move_optimizer_state()


def _move(module: nn.Module, device: torch.device) -> None:
    """Move the module's own parameters and buffers, which stay the objects that they are if they are parameters."""
    module._apply(lambda tensor: tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]

"""``RemoteModule``: a caller's module whose parameters are on servers, and what stands for them here."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from anabranch.autodiff.boundary import whole_calls
from anabranch.autodiff.moved_parameter import Switch
from anabranch.experts.schema import Schema

__all__ = ["RemoteModule"]


_CURE = (
    "leave it out of what sums, counts, copies or averages parameters (`if not name.endswith('weights_there')`); "
    "loss.backward() trains them there, with the weight_decay= of their optimizer and clip_grad_norm= of their server"
)


class RemoteModule(nn.Module):
    """A module that calls experts, which update themselves in its backward.

    Attributes:
        weights_there: a parameter without numbers, in place of the experts' own. Where it is frozen, as by
            ``requires_grad_(False)`` of a model around it, or where a backward does not go to it, as
            ``torch.autograd.grad(y, x)``, the experts give gradients and are not updated.

    Args:
        served: what is on servers, for errors.
    """

    steps_there: ClassVar[bool] = True
    """The far side makes an update of every gradient that comes."""

    def __init__(self, served: str) -> None:
        super().__init__()
        self.weights_there = Switch(f"weights_there stands for the parameters of {served} on servers", _CURE)
        self._schema: Schema | None = None  # once a capture has asked for it, by ``learn_form``
        self._handle = whole_calls.handle_of(self)

    def _keep(self, schema: Schema) -> None:
        """Keep it with what nesting outputs takes: Dynamo cannot follow the lock of a property's first reading."""
        _ = schema.gives_one, schema.output_nesting, schema.output_specs
        self._schema = schema

    def _behind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Schema, Sequence[Tensor]]:
        """Cross the boundary, which Dynamo sees as one call; it guards what it reads itself: the modes."""
        if torch.compiler.is_dynamo_compiling():
            assert self._schema is not None
            modes = self.training, self.weights_there.requires_grad
            return self._schema, whole_calls.call(self._handle, (*modes, *args), kwargs)
        return self._cross(args, kwargs, evaluating=not self.training)

    def call_whole(self, training: bool, trained: bool, *args: Any, **kwargs: Any) -> Sequence[Tensor]:
        """Cross the boundary, as one call that Dynamo does not trace into."""
        return self._cross(args, kwargs, evaluating=not training)[1]

    @abstractmethod
    def _cross(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, evaluating: bool
    ) -> tuple[Schema, Sequence[Tensor]]:
        """Return the schema of the experts that answered, and their outputs; each caller's own."""

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_handle"}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._handle = whole_calls.handle_of(self)

    # Servers save the experts' parameters.

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}weights_there"]

    def _load_from_state_dict(self, *args: Any) -> None:
        with self.weights_there.out_of(self):
            super()._load_from_state_dict(*args)

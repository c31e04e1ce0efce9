"""An optimizer as a server needs it: the state of a row, and the constants of one step.

The worker's optimizer also governs parameters on servers, so a server reads the same ``param_groups`` as torch.
``RowOptimizer`` holds them as a value: it can be compared, logged and sent, and a hyperparameter changed by a scheduler
gives a new value for the next step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.tables.kernels import rules as rules
from anabranch.tables.optimizers.gradient_optimizers import FTRL, RowWiseAdagrad
from anabranch.tables.table_spec import state_dtype
from anabranch.tensors.dtypes import working_dtype

OptimizerFactory = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
"""Makes an optimizer of parameters, as ``functools.partial(torch.optim.SGD, lr=0.1)`` does."""

CONSTANTS = 12
"""The count of numbers that one step needs; ``RowOptimizer.constants`` lists them."""


class Family(StrEnum):
    """The update rules that a table can run."""

    SGD = "SGD"
    ADAGRAD = "Adagrad"
    ROW_WISE_ADAGRAD = "RowWiseAdagrad"
    ADAM = "Adam"
    ADAMW = "AdamW"
    SPARSE_ADAM = "SparseAdam"
    RMSPROP = "RMSprop"
    ADAMAX = "Adamax"
    FTRL = "FTRL"


class _Facts(NamedTuple):
    """PyTorch's optimizer, the rule's number, the names of its states, and if it changes rows without a gradient."""

    kind: type[torch.optim.Optimizer]
    number: int
    states: tuple[str, ...] = ()
    decays: bool = False


_MOMENTS = ("exp_avg", "exp_avg_sq")
_FAMILIES = {
    Family.SGD: _Facts(torch.optim.SGD, rules.SGD),
    Family.ADAGRAD: _Facts(torch.optim.Adagrad, rules.ADAGRAD, ("sum",)),
    Family.ROW_WISE_ADAGRAD: _Facts(RowWiseAdagrad, rules.ROW_WISE, ("sum",)),
    Family.ADAM: _Facts(torch.optim.Adam, rules.ADAM, _MOMENTS, decays=True),
    Family.ADAMW: _Facts(torch.optim.AdamW, rules.ADAM, _MOMENTS, decays=True),
    Family.SPARSE_ADAM: _Facts(torch.optim.SparseAdam, rules.ADAM, _MOMENTS),
    Family.RMSPROP: _Facts(torch.optim.RMSprop, rules.RMSPROP, decays=True),
    Family.ADAMAX: _Facts(torch.optim.Adamax, rules.ADAMAX, ("exp_avg", "exp_inf"), decays=True),
    Family.FTRL: _Facts(FTRL, rules.FTRL, ("z", "n")),
}
_OF_KIND = {facts.kind: family for family, facts in _FAMILIES.items()}
_BELOW_1 = math.nextafter(1.0, 0.0)
_LIMITS = {
    **dict.fromkeys(["eps", "lr_decay", "initial_accumulator_value", "l1", "l2"], (0.0, math.inf)),
    **dict.fromkeys(["beta1", "beta2"], (0.0, _BELOW_1)),
    "alpha": (0.0, 1.0),
}


@dataclass(frozen=True, slots=True)
class RowOptimizer:
    """An update rule and its hyperparameters at one step.

    >>> rule = RowOptimizer.from_factory(lambda rows: torch.optim.Adagrad(rows, lr=0.1))
    >>> rule.family, rule.lr, rule.state_names
    (<Family.ADAGRAD: 'Adagrad'>, 0.1, ('sum',))

    Attributes:
        family: the update rule.
        lr, weight_decay, momentum, dampening, nesterov, beta1, beta2, eps, lr_decay, maximize, alpha, centered,
            amsgrad: as torch names them; those that the family does not use keep their defaults.
        initial_accumulator_value: the first value of Adagrad's sum of squares.
        beta, l1, l2: of ``FTRL``.
    """

    family: Family
    lr: float
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    maximize: bool = False
    alpha: float = 0.0
    centered: bool = False
    amsgrad: bool = False
    beta: float = 0.0
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        for entry in fields(self)[1:]:
            value, (low, high) = getattr(self, entry.name), _LIMITS.get(entry.name, (-math.inf, math.inf))
            kinds = bool if isinstance(entry.default, bool) else (int, float)
            if not (isinstance(value, kinds) and math.isfinite(value) and low <= value <= high):
                form = "True or False" if kinds is bool else f"a finite number from {low:g} to {high:g}"
                raise ValueError(f"{self.family} takes {entry.name} as {form}, got {value!r}")
        if self.family is Family.FTRL and not (self.beta > 0 and self.lr >= 0):
            raise ValueError(f"FTRL takes beta > 0 and lr >= 0, got {self.beta!r} and {self.lr!r}")

    @property
    def state_names(self) -> tuple[str, ...]:
        """The tensors that ``torch.optim`` keeps for each parameter, in their order in a row."""
        if self.family is Family.SGD:
            return ("momentum_buffer",) if self.momentum else ()
        if self.family is Family.RMSPROP:
            buffer = ("momentum_buffer",) if self.momentum else ()
            return ("square_avg", *buffer, *(("grad_avg",) if self.centered else ()))
        return (*_FAMILIES[self.family].states, *(("max_exp_avg_sq",) if self.amsgrad else ()))

    @property
    def number(self) -> int:
        """The rule's number in ``kernels/rules.py``."""
        if self.family is Family.SGD:
            return rules.MOMENTUM if self.momentum else rules.SGD
        return rules.AMSGRAD if self.amsgrad else _FAMILIES[self.family].number

    def state_form(self, width: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Return the count and the dtype of the numbers of state beside ``width`` weights of ``dtype``."""
        if self.family is Family.ROW_WISE_ADAGRAD:  # a growing sum soon stops changing in half precision
            return 1, working_dtype(dtype)
        return width * len(self.state_names), state_dtype(dtype)

    def row_width(self, width: int) -> int:
        """Values of a row of ``width`` weights with all its state."""
        return width + self.state_form(width, torch.float32)[0]

    @property
    def moves_quiet_rows(self) -> bool:
        """True if the dense optimizer also changes a row, or its state, in a step without a gradient for it."""
        return (
            _FAMILIES[self.family].decays
            or bool(self.weight_decay)
            or (self.family is Family.SGD and bool(self.momentum))
        )

    def same_layout(self, other: RowOptimizer) -> bool:
        """Return True if rows kept for this rule can be updated by ``other``: only hyperparameters differ, not the
        stored state.
        """
        return self.family is other.family and self.state_names == other.state_names

    def constants(self, step: int) -> NDArray[np.float64]:
        """Return the constants for step number ``step`` (from 1) of this rule, computed in doubles as torch computes
        them.

        SGD: lr, momentum, 1 - dampening, nesterov, weight decay, sign, first step.
        Adagrad, row-wise Adagrad: decayed lr, eps, -, -, weight decay, sign.
        Adam family: -lr/bc1, sqrt(bc2), 1 - beta1, beta2, weight decay (L2), sign, eps, 1 - lr * decoupled decay,
        1 - beta2, beta1, step, lr; the step is 0 where torch has no fused form.
        RMSprop: lr, momentum, alpha, centered, weight decay, sign, eps.
        Adamax: lr/bc1, -, beta1, beta2, weight decay, sign, eps.
        FTRL: lr, -, beta, l1, -, sign, l2.
        """
        sign = -1.0 if self.maximize else 1.0
        numbers: tuple[float, ...]
        if self.family is Family.SGD:
            damped = 1 - self.dampening
            numbers = (self.lr, self.momentum, damped, self.nesterov, self.weight_decay, sign, step == 1)
        elif self.family in (Family.ADAGRAD, Family.ROW_WISE_ADAGRAD):
            numbers = (self.lr / (1 + (step - 1) * self.lr_decay), self.eps, 0.0, 0.0, self.weight_decay, sign)
        elif self.family is Family.RMSPROP:
            numbers = (self.lr, self.momentum, self.alpha, self.centered, self.weight_decay, sign, self.eps)
        elif self.family is Family.ADAMAX:
            rate = self.lr / (1 - self.beta1**step)
            numbers = (rate, 0.0, self.beta1, self.beta2, self.weight_decay, sign, self.eps)
        elif self.family is Family.FTRL:
            numbers = (self.lr, 0.0, self.beta, self.l1, 0.0, sign, self.l2)
        else:
            numbers = self._adam_constants(step, sign)
        return np.array(numbers + (0.0,) * (CONSTANTS - len(numbers)))

    def _adam_constants(self, step: int, sign: float) -> tuple[float, ...]:
        correction1 = 1 - self.beta1**step
        correction2 = math.sqrt(1 - self.beta2**step)
        step_size, root = -self.lr / correction1, correction2
        if self.family is Family.SPARSE_ADAM:  # its eps is added to the uncorrected root
            step_size, root = -self.lr * correction2 / correction1, 1.0
        decoupled = self.family is Family.ADAMW
        return (
            step_size, root, 1 - self.beta1, self.beta2, 0.0 if decoupled else self.weight_decay, sign, self.eps,
            1 - self.lr * self.weight_decay if decoupled else 1.0, 1 - self.beta2, self.beta1,
            0.0 if self.family is Family.SPARSE_ADAM else float(step), self.lr,
        )  # fmt: skip

    @classmethod
    def from_factory(cls, factory: OptimizerFactory) -> RowOptimizer:
        """Return the rule of ``factory`` for a parameter; ``from_torch`` lists those that are refused."""
        if not callable(factory):
            raise TypeError(
                f"optimizer is called with parameters, like functools.partial(torch.optim.SGD, lr=0.1), got {factory!r}"
            )
        optimizer = factory([torch.nn.Parameter(torch.zeros(1, device="cpu"))])
        return cls.from_torch(optimizer)

    @classmethod
    def from_torch(cls, optimizer: torch.optim.Optimizer, group: int = 0) -> RowOptimizer:
        """Return the rule of ``optimizer.param_groups[group]``, with its current hyperparameters.

        Raises:
            ValueError: an optimizer, or an option of one, that tables cannot run; names it and the supported ones.
        """
        return cls.of_group(optimizer, optimizer.param_groups[group])

    @classmethod
    def of_group(cls, optimizer: torch.optim.Optimizer, numbers: Mapping[str, object]) -> RowOptimizer:
        """Return the rule of a parameter group of such an optimizer with these hyperparameters."""
        family = _OF_KIND.get(type(optimizer))
        if family is None:
            names = ", ".join(facts.kind.__name__ for facts in _FAMILIES.values())
            raise ValueError(f"tables cannot run {type(optimizer).__name__}; use one of {names}")
        if numbers.get("differentiable"):
            raise ValueError(f"{family}: no gradient flows through steps on servers; leave differentiable=True out")
        if family is Family.ADAM and numbers.get("decoupled_weight_decay"):
            family = Family.ADAMW
        return _rule_of(family, tuple(_numbers_of(numbers).items()))

    def to_dict(self) -> dict[str, float | str | bool]:
        """Its fields as plain values, for a manifest or a message."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"family": self.family.value}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> RowOptimizer:
        """Return the rule from the ``values`` of ``to_dict``."""
        numbers = dict(values)
        return _rule_of(Family(str(numbers.pop("family"))), tuple(numbers.items()))


@functools.lru_cache(256)  # a step brings the numbers of the last one, unless a scheduler has changed them
def _rule_of(family: Family, numbers: tuple[tuple[str, object], ...]) -> RowOptimizer:
    return RowOptimizer(family, **dict(numbers))  # type: ignore[arg-type]


def _numbers_of(group: Mapping[str, object]) -> dict[str, float | bool]:
    numbers: dict[str, float | bool] = {}
    for field in fields(RowOptimizer):
        value = group.get(field.name)
        if isinstance(value, bool):
            numbers[field.name] = value
        elif value is not None:
            numbers[field.name] = float(cast(float, value))
    if "betas" in group:
        beta1, beta2 = cast(tuple[float, float], group["betas"])
        numbers |= {"beta1": float(beta1), "beta2": float(beta2)}
    return numbers


@dataclass(frozen=True, slots=True)
class ParameterState:
    """A parameter's values with its optimizer's state.

    Attributes:
        values: of the whole parameter.
        states: one tensor of its shape for each number a weight; of row-wise Adagrad one number per row.
        step: optimizer steps so far.
    """

    values: Tensor
    states: Sequence[Tensor] = ()
    step: int = 0


def to_torch(rule: RowOptimizer, kept: ParameterState) -> dict[str, object]:
    """Convert to the form of ``optimizer.state[parameter]``.

    >>> rule = RowOptimizer.from_factory(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    >>> to_torch(rule, ParameterState(torch.zeros(2), [torch.ones(2)], 3))
    {'momentum_buffer': tensor([1., 1.])}
    """
    if not kept.step and rule.family is not Family.ADAGRAD:  # torch makes Adagrad's before the first step
        return {}
    state: dict[str, object] = dict(zip(rule.state_names, kept.states, strict=False))
    if rule.family is Family.SPARSE_ADAM:
        state["step"] = kept.step
    elif rule.family is not Family.SGD:
        state["step"] = torch.tensor(float(kept.step), device="cpu")
    return state


def from_torch(rule: RowOptimizer, values: Tensor, state: Mapping[str, object]) -> ParameterState:
    """Return the inverse of ``to_torch``; an empty ``state`` belongs to a parameter without steps so far.

    Raises:
        ValueError: a state of another optimizer, or of another shape.
    """
    names = rule.state_names
    found = [tensor.to_dense() for name in names if isinstance(tensor := state.get(name), Tensor)]
    if not found and not state.get("step"):
        return ParameterState(values)
    shape = values.shape[:1] if rule.family is Family.ROW_WISE_ADAGRAD else values.shape
    if len(found) != len(names) or any(tensor.shape != shape for tensor in found):
        raise ValueError(f"{rule.family} keeps {', '.join(names)} of shape {tuple(shape)}, the state has {list(state)}")
    return ParameterState(values, found, int(cast(float, state.get("step", 1))))

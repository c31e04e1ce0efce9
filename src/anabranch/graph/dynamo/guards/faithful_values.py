"""Values and calls that Dynamo computes differently from Python and PyTorch, or reads without a guard.

It writes ``torch.addcdiv(value=)`` and a few others as several calls, which round differently; it divides floats by
``//`` as ``floor(a / b)``, which is another number (``1.0 // 0.1`` is 9.0); its guards on branches merge constants
(``rate + 0.1 + 0.2`` becomes ``rate + 0.30000000000000004``); it drops the format of a number in a string; it treats
NumPy's scalars as tensors; and it rereads neither a view's base nor a function's annotations.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias
from unittest.mock import patch

import numpy as np
import torch
from torch import fx

from anabranch.graph.dynamo.origins import OURS
from anabranch.graph.dynamo.refusals import DIVIDED

__all__ = ["faithful_values"]

Note: TypeAlias = "Callable[[Callable[..., object], tuple[Any, ...], dict[str, Any]], None]"

_REWRITTEN = (torch.addcdiv, torch._foreach_lerp_, torch._foreach_pow, math.radians, getattr(math, "fma", None))
_MERGED = (operator.add, operator.sub, operator.mul, operator.neg, operator.iadd, operator.isub, operator.imul)
_UNGUARDED = ("_base", "_is_view", "is_leaf", "grad_fn", "retains_grad", "output_nr", "_backward_hooks")
_OF_ANY_TENSOR = ("_base", "_is_view")  # of computed tensors too: they may be views of inputs
_READING = (
    "is_",
    "_is_",
    "are_",
    "_are_",
    "can_",
    "get_",
    "_get_",
    "current_",
    "device_count",
    "_rank_not",
    "_resolve_",
)
_SEEN_OTHERWISE = (
    "is_grad_enabled",
    "is_tensor",
    "is_tensor_like",
    "_get_tracing_state",
)  # by guards, or never changing


@contextmanager
def faithful_values(deny: Callable[[str], None], refuse: Callable[[str], None], note: Note) -> Iterator[None]:
    """Keep torch's calls whole while Dynamo traces, and report values that it would compute or read differently.

    Args:
        deny: called with the reason that the step cannot be a graph; raises.
        refuse: called with a description of a value read without a guard.
        note: called with each function that reads a process state of PyTorch, and with its arguments.
    """
    with ExitStack() as stack:
        for change in (_whole_calls(), *_exact_numbers(deny), *_guarded_reads(refuse), _noted_states(note)):
            stack.enter_context(change)
        yield


def _whole_calls() -> Any:
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    handlers = TorchInGraphFunctionVariable._get_handlers()
    return patch.dict(handlers, {each: _left_whole for each in _REWRITTEN if each in handlers})


def _left_whole(*_: object, **__: object) -> None:
    """Leave a call to Dynamo's general rule, which keeps it unchanged."""


def _exact_numbers(deny: Callable[[str], None]) -> Iterator[Any]:
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.tensor import SymNodeVariable

    translator: Any = InstructionTranslatorBase
    builder: Any = VariableBuilder
    symbol: Any = SymNodeVariable
    evaluate = symbol.evaluate_expr
    format_value, wrap_number = translator._format_value, builder.wrap_unspecialized_primitive

    def divided(_number: object, _other: object) -> Any:
        deny(DIVIDED)

    def formatted(self: Any, spec: Any, flags: int) -> Any:
        if isinstance(self.stack[-1], SymNodeVariable) and spec.as_python_constant():
            deny("it formats a number that changes as a text")
        return format_value(self, spec, flags)

    def evaluated(self: Any, output_graph: Any = None) -> Any:
        if _is_merged(self.as_proxy().node):
            deny(
                "it branches on several sums or products of a float that changes, which a guard would round differently"
            )
        return evaluate(self, output_graph)

    def of_numpy(_builder: object, _value: object) -> Any:
        deny("it computes with NumPy values, which a graph would round differently; use torch or plain numbers")

    def number(self: Any, value: object) -> Any:
        return of_numpy(self, value) if isinstance(value, np.generic) else wrap_number(self, value)

    yield patch.multiple(torch.SymFloat, __floordiv__=divided, __rfloordiv__=divided)
    yield patch.object(translator, "_format_value", formatted)
    yield patch.object(symbol, "evaluate_expr", evaluated)
    yield patch.multiple(builder, wrap_numpy_ndarray=of_numpy, wrap_unspecialized_primitive=number)


def _is_merged(node: fx.Node) -> bool:
    """Return True for a value from sums or products of others, which sympy would merge; it computes ints exactly."""
    seen: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if _is_sum_of_floats(node) and any(map(_is_sum_of_floats, node.all_input_nodes)):
            return True
        waiting += [each for each in node.all_input_nodes if each not in seen]
        seen.update(node.all_input_nodes)
    return False


def _is_sum_of_floats(node: fx.Node) -> bool:
    return node.target in _MERGED and isinstance(node.meta.get("example_value"), torch.SymFloat)


def _guarded_reads(refuse: Callable[[str], None]) -> Iterator[Any]:
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.functions import UserFunctionVariable
    from torch._dynamo.variables.tensor import TensorVariable, UntypedStorageVariable

    tensor: Any = TensorVariable
    storage: Any = UntypedStorageVariable
    function: Any = UserFunctionVariable
    builtin: Any = BuiltinVariable
    of_tensor, of_function = tensor.var_getattr, function.var_getattr
    call_tensor, call_storage, call = tensor.call_method, storage.call_method, builtin.call_function

    def look_at_tensor(self: Any, name: str) -> None:
        if name in _OF_ANY_TENSOR or (name in _UNGUARDED and self.source is not None):
            refuse(f"the {name} of a tensor")

    def read_tensor(self: Any, tx: Any, name: str) -> Any:
        look_at_tensor(self, name)
        return of_tensor(self, tx, name)

    def ask_tensor(self: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        look_at_tensor(self, name)
        return call_tensor(self, tx, name, *args, **kwargs)

    def ask_storage(self: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if name in ("size", "nbytes", "__len__"):
            refuse("the size of a tensor's memory")
        return call_storage(self, tx, name, *args, **kwargs)

    def read_function(self: Any, tx: Any, name: str) -> Any:
        signature = tx.f_code.co_filename == inspect.__file__  # reads them along with the requested names
        if name == "__annotations__" and not signature and not self.get_code().co_filename.startswith(OURS):
            refuse(f"the annotations of {self.get_name()}")
        return of_function(self, tx, name)

    def ask(self: Any, *args: Any) -> Any:
        if self.fn is dir:
            refuse("the names that dir() lists")
        return call(self, *args)

    yield patch.multiple(tensor, var_getattr=read_tensor, call_method=ask_tensor)
    yield patch.object(storage, "call_method", ask_storage)
    yield patch.object(function, "var_getattr", read_function)
    yield patch.object(builtin, "call_function", ask)


def _noted_states(note: Note) -> Any:
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable, tracing_state_functions

    function: Any = TorchInGraphFunctionVariable
    call = function.call_function

    def noting(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        result = call(self, tx, args, kwargs)
        name = getattr(self.value, "__name__", "")
        reads = name.startswith(_READING) and name not in _SEEN_OTHERWISE and not name.startswith("_is_torch_function")
        constant = isinstance(result, ConstantVariable) and all(
            each.is_python_constant() for each in (*args, *kwargs.values())
        )
        if reads and constant and self.value not in tracing_state_functions():
            values = {key: each.as_python_constant() for key, each in kwargs.items()}
            note(self.value, tuple(each.as_python_constant() for each in args), values)
        return result

    return patch.object(function, "call_function", noting)

"""Calls that stay whole where TorchDynamo reads the code around them, because their work is not a tensor operation.

A module that crosses a boundary has a ``WholeCall``. Dynamo, to which it is a constant, sees one operation that takes
tensors and returns tensors. The graph engine, which asks Dynamo to read the code, then traces through the call with its
own tracer, and so meets the boundary itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy, set_eval_frame
from torch.utils._pytree import register_constant

from anabranch.autodiff.boundary.crossing import current_tracer
from anabranch.errors import AnabranchError, SchemaError
from anabranch.tensors import map_structure


class WholeCallable(Protocol):
    """Something whose calls stay whole."""

    def call_whole(self, *args: Any, **kwargs: Any) -> Sequence[Tensor]:
        """Take nested tensors and ``None``; returns flat tensors."""


def learn_forms(modules: Iterable[object]) -> None:
    """Let modules that return nested outputs ask the remote side how they nest, before Dynamo reads their code."""
    for module in modules:
        learn = getattr(type(module), "learn_form", None)
        if learn is not None:
            learn(module)


_NONE = "\0none"
"""Stands for ``None``, which Dynamo takes for no input of such a call."""


class WholeCall:
    """``owner.call_whole``, as far as Dynamo follows it. It is copied and pickled with its owner."""

    def __init__(self, owner: WholeCallable) -> None:
        self.owner = weakref.ref(owner)  # Dynamo keeps this

    def __reduce__(self) -> tuple[type[WholeCall], tuple[WholeCallable | None]]:
        return WholeCall, (self.owner(),)

    def __eq__(self, other: object) -> bool:  # PyTorch takes no constant that has object's own
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __call__(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        return _whole(self, _without_none(args), _without_none(kwargs))


register_constant(WholeCall)


def _without_none(value: Any) -> Any:
    return map_structure(lambda leaf: _NONE if leaf is None else leaf, value)


def _with_none(value: Any) -> Any:
    return map_structure(lambda leaf: None if isinstance(leaf, str) and leaf == _NONE else leaf, value)


def _call(whole: WholeCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    try:
        owner = whole.owner()
        assert owner is not None
        return list(owner.call_whole(*_with_none(args), **_with_none(kwargs)))
    except (AnabranchError, SchemaError) as error:
        if (tracer := current_tracer()) is not None:
            tracer.failure = error
        raise


def beside(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs)``, of which Dynamo sees nothing: a user's ``torch.compile`` ends one graph here and
    begins another behind it.
    """
    prior = set_eval_frame(None)
    try:
        return function(*args, **kwargs)
    finally:
        set_eval_frame(prior)


# What torch.compiler.disable does, which imports all of Dynamo: it is not inlined, and its own frame is not looked at.
beside._torchdynamo_disable = True  # type: ignore[attr-defined]
set_code_exec_strategy(beside.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))


def _call_beside(whole: WholeCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return cast("list[Tensor]", beside(_call, (whole, args, kwargs), {}))


_whole: Callable[[WholeCall, tuple[Any, ...], dict[str, Any]], list[Tensor]] = _call_beside


def keep_whole(mark: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let ``mark`` make Dynamo leave the call opaque; called once, by the code that sets Dynamo up."""
    global _whole
    # The user's torch.compile fails here and then runs it without tracing into it.
    _whole = mark(_call_beside)

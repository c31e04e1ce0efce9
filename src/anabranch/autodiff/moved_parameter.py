"""``Elsewhere``: a Parameter whose numbers are elsewhere. ``MovedParameter``: one whose numbers went to servers.

A Parameter that moves stays the same object wherever it is held.

::

    before         the model's, the optimizer's, the user's references ──> nn.Parameter, 10 M x 64 numbers
    while moved    the same references ──> the same object: a MovedParameter, one number (NaN) expanded to the shape
    given back     the same references ──> the same object: an nn.Parameter, the trained numbers

It answers facts that are true of it wherever it is, and a table lookups; every other use is a ``ValueError`` that names
it and the cure. Three things change in place:

- the class, because ``__torch_function__`` belongs to it: every use from Python, through any reference, comes here
  first;
- the numbers become NaN, because C++ that Python does not see (``torch.tensor(w)``, ``torch.func.grad``,
  ``torch.jit.script``, an extension) reads them all the same, and a step with NaN is refused where one with zeros
  trains on. Stride 0 takes no memory, and kernels refuse to write to it. (An emptied storage, or a wrapper's, ends
  there in a segmentation fault.)
- the version counter, so that a graph of before the move that saved the numbers refuses its backward.

``torch.utils.swap_tensors`` keeps the identity, too, but fails if there is a weak reference, a view, or a graph that
saved the weight.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F


class RowLookups(Protocol):
    """Functions in place of ``F.embedding`` and ``F.embedding_bag``, with their arguments."""

    @property
    def name(self) -> str:
        """The parameter, as routes name it."""

    def rows(self, *args: Any, **kwargs: Any) -> Tensor:
        """In place of ``F.embedding``."""

    def bags(self, *args: Any, **kwargs: Any) -> Tensor:
        """In place of ``F.embedding_bag``."""


_plain: Callable[..., Any] = nn.Parameter.__torch_function__  # calls a function as for any other Parameter


def _reads(name: str) -> Any:
    return getattr(Tensor, name).__get__


def _sets(name: str) -> Any:
    return getattr(Tensor, name).__set__


_data, _grad, _version = map(_reads, ("data", "grad", "_version"))
_set_data, _set_grad = map(_sets, ("data", "grad"))
# True of a parameter wherever it is. Not among them: stride, is_contiguous, data_ptr, which would tell of the one NaN.
_FACTS = frozenset(
    [_reads(name) for name in dir(Tensor) if name.startswith("is_") and not callable(getattr(Tensor, name))]
    + [
        _reads(name)
        for name in (
            "shape", "dtype", "device", "layout", "requires_grad", "ndim", "itemsize", "nbytes", "grad_fn",
            "retains_grad", "output_nr",
        )
    ]
    + [
        Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size,
        Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed, Tensor.get_device, Tensor.is_inference,
        Tensor.__len__, Tensor.__dir__, torch.is_floating_point, torch.is_complex, torch.is_signed, torch.is_inference,
        torch.numel, torch.get_device, torch._has_compatible_shallow_copy_type,
        # Honoured: rows of a frozen table get no gradient.
        Tensor.requires_grad_, _sets("requires_grad"),
    ]
)  # fmt: skip
# What follows from the shape alone, as an optimizer's first state.
_LIKE_IT = frozenset([torch.zeros_like, torch.ones_like, torch.full_like])
# A placeholder again: so zero_grad(), state_dict() and `p.grad is None` do as always, and what is done with it is
# refused.
_WHOLE = frozenset([_data, _grad, Tensor.detach, torch.detach])
# They return the tensor itself where it has the type and the place already: model.to(device) is then no change.
_CASTS = frozenset(
    getattr(Tensor, name) for name in ["to", "type", "type_as", "cpu", "cuda", "float", "double", "half", "bfloat16"]
)
_MOVES = _CASTS | {torch.empty_like, Tensor.share_memory_}  # to_empty(), share_memory()
_CURES = {
    "__getitem__": "call the module to look rows up",
    "embedding": "look rows up outside of torch.func, vmap and torch.jit",
    "__deepcopy__": "copy the model before the Executor is made or after it is closed",
    "a second Executor": "close the one that has it (executor.close(), or leave its with block)",
    "load_state_dict": "load before the Executor is made, or with executor.load(path)",
}
_CURES |= {"copy_": _CURES["load_state_dict"], "embedding_bag": _CURES["embedding"]}
_READS = "executor.state_dict() and executor.save(path) read them"


class Elsewhere(nn.Parameter):
    """A parameter whose numbers are elsewhere.

    Attributes:
        what: the words of errors: which it is, and where its numbers are.
        cure: what to do instead.
        facts: the functions that it answers.
        detached: its ``.data``, ``.grad`` or ``.detach()``, whose rows get no gradient.
        stepped_elsewhere: its optimizer here passes over it: it finds no gradient.
    """

    what: str
    cure: str
    facts: ClassVar[frozenset[Any]] = _FACTS | _LIKE_IT
    facts_in_order: ClassVar[Sequence[Any]] = tuple(facts)
    detached = False
    stepped_elsewhere = True

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding or func is F.embedding_bag:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            if isinstance(weight, MovedParameter) and weight.gone is None and _looks_up():
                lookups = weight.lookups
                return (lookups.rows if func is F.embedding else lookups.bags)(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():  # it reads the user's code, and this, but cannot hash a getter
            if func in cls.facts_in_order:
                return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
            raise ValueError("the numbers of a parameter are elsewhere; a table on the servers can only be looked up")
        if func in cls.facts:
            return _plain(func, types, args, kwargs)
        if torch._guards.TracingContext.try_get() is not None:
            return _plain(func, types, args, kwargs)  # Dynamo itself takes down the layout, for its guards
        if (func == _set_grad and args[1] is None) or (func == _grad and (args[0].stepped_elsewhere or is_within())):
            return None
        if func == _set_data and getattr(args[1], "what", "") == getattr(args[0], "what", None):  # as model.to() does
            return _plain(func, types, args, kwargs) if cls is Switch else None
        if func is torch.autograd.backward and cls is not MovedParameter:
            # Not by _plain, which would disable this for all that runs in the backward.
            edge = partial(_plain, get_gradient_edge, ())
            ends = [edge((p,), {}) if isinstance(p, Elsewhere) else p for p in kwargs["inputs"]]
            return func(*args, **{**kwargs, "inputs": ends})
        if func in _WHOLE:
            # An object of its own: zero_grad(set_to_none=False) sets its requires_grad, not the table's.
            whole = args[0].another(_plain(Tensor.detach, (), args[:1], {}))
            whole.detached = True
            return whole
        if func in _MOVES and cls is Switch and args and isinstance(args[0], Switch):
            moved = _plain(func, types, args, kwargs)
            return moved if moved is args[0] or not isinstance(moved, Tensor) else args[0].another(moved)
        if func in _CASTS and isinstance(args[0], Elsewhere):
            none = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
            answer = func(none, *args[1:], **kwargs)
            if not isinstance(answer, Tensor) or answer is none:
                return args[0] if answer is none else answer
        use = getattr(func, "__name__", str(func))
        if use in ("__get__", "__set__"):
            use = f".{getattr(getattr(func, '__self__', None), '__name__', '')}{' =' if use == '__set__' else ''}"
        for parameter in _among([args, kwargs]):
            parameter.refuse(use)
        raise ValueError(f"the numbers of a parameter are elsewhere, and {use!r} cannot reach them")

    def another(self, tensor: Tensor) -> Elsewhere:
        """Make ``tensor`` stand for the same numbers."""
        tensor.__dict__.update(self.__dict__)
        tensor.__class__ = type(self)
        return tensor  # type: ignore[return-value]

    def refuse(self, use: str) -> NoReturn:
        """Raise the error of a use that needs the numbers."""
        # A ValueError: PyTorch turns a TypeError inside a binary operator into NotImplemented, so that `1 - w` would
        # say "unsupported operand type(s)", without the name, and `w == w` be True.
        raise ValueError(f"{self.what}, and {use!r} cannot reach its numbers there; {self.cure}")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<{self.what}>"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __deepcopy__(self, memo: Any) -> Elsewhere:
        return self.another(_plain(_data, (), (self,), {})).requires_grad_(self.requires_grad)  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.refuse("__reduce_ex__")


# Dynamo inlines it, but is not to compile it as a frame of its own: there it would take itself for compiling, and the
# program of a fact ask the parameter again, without end.
eval_frame.set_code_exec_strategy(
    Elsewhere.__torch_function__.__code__,
    eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT),
)


class Switch(Elsewhere):
    """A parameter of no numbers in place of others, which are not known here: it is there to be frozen."""

    def __new__(cls, what: str, cure: str, dtype: torch.dtype = torch.float32, *, requires_grad: bool = True) -> Switch:
        """Make it out of no numbers."""
        switch: Switch = Tensor._make_subclass(cls, torch.empty(0, dtype=dtype), requires_grad)
        switch.what, switch.cure = what, cure
        return switch

    def __reduce_ex__(self, protocol: Any) -> Any:
        return partial(Switch, requires_grad=self.requires_grad), (self.what, self.cure, self.dtype)

    @contextmanager
    def out_of(self, module: nn.Module) -> Iterator[None]:
        """Take it out of ``module`` in the block, which loads a state: it has none."""
        (name,) = [name for name, value in module._parameters.items() if value is self]
        del module._parameters[name]
        try:
            yield
        finally:
            module._parameters[name] = self


class MovedParameter(Elsewhere):
    """A table whose rows are on servers. It is never constructed: ``Move`` gives this class to an existing Parameter.

    Attributes:
        lookups: read its rows.
        gone: the reason why its numbers could not be read back when they were to return.
    """

    lookups: RowLookups
    gone: str | None = None
    facts = _FACTS
    facts_in_order = tuple(facts)
    stepped_elsewhere = False
    cure = _READS

    @property
    def what(self) -> str:  # type: ignore[override]
        return f"{self.lookups.name} is on the servers while its Executor is open"

    def refuse(self, use: str) -> NoReturn:
        """Raise the error of a use that is no lookup."""
        name = self.lookups.name
        if self.gone is not None:
            where = f"{name} was on servers that could not be read when its Executor was closed ({self.gone})"
            cure = "make the model again, and load a checkpoint of it"
            raise ValueError(f"{where}, so its numbers are not here for {use!r}; {cure}")
        cure = f"{_CURES.get(use, _READS)}, or keep it on the workers: routes={{{name!r}: 'AllReduce'}}"
        raise ValueError(f"{self.what}, and {use!r} cannot reach its numbers there; {cure}")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<{self.lookups.name}: {tuple(self.shape)}, {self.dtype}, on the servers>"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.refuse("__deepcopy__")


class MovedState:
    """In ``optimizer.state`` in place of a parameter's state that is elsewhere: every use of it calls ``refuse``."""

    def __init__(self, name: str, refuse: Callable[[], None]) -> None:
        self._name, self._refuse = name, refuse

    def _use(self, *_: object, **__: object) -> None:
        self._refuse()

    def __repr__(self) -> str:
        return f"<state of {self._name}, on the servers>"


for _use_of_dict in (*(vars(dict).keys() - vars(object).keys()), "__bool__"):
    setattr(MovedState, _use_of_dict, MovedState._use)


def _looks_up() -> bool:
    """Return False where a lookup would be recorded with its rows as constants, or run without real ids."""
    return torch.compiler.is_dynamo_compiling() or not (
        torch._C._is_tracing() or torch._C._are_functorch_transforms_active()
    )


def _among(values: Iterable[Any]) -> Iterator[Elsewhere]:
    for value in values:
        if isinstance(value, Elsewhere):
            yield value
        elif isinstance(value, list | tuple | Mapping):
            yield from _among(value.values() if isinstance(value, Mapping) else value)


_of_thread = threading.local()


@contextmanager
def from_within() -> Iterator[None]:
    """Let the package itself call optimizers and modules in this thread: they find no gradient, may load and save."""
    before, _of_thread.is_within = is_within(), True
    try:
        yield
    finally:
        _of_thread.is_within = before


def is_within() -> bool:
    """Return True in a block of ``from_within``."""
    return getattr(_of_thread, "is_within", False)


def put_elsewhere(parameter: nn.Parameter, kind: type[Elsewhere], **attributes: object) -> None:
    """Make ``parameter`` one whose numbers are elsewhere; its memory is freed."""
    with torch.inference_mode(False):
        nothing = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
        parameter.grad, parameter.data = None, nothing.expand(parameter.shape)
    torch.autograd.graph.increment_version(parameter)
    vars(parameter).update(attributes)
    parameter.__class__ = kind


def parameters_here(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the module's parameters by name, without those whose numbers are elsewhere."""
    return {name: value for name, value in module.named_parameters() if not isinstance(value, Elsewhere)}


class Ways:
    """The dict entries on the ways to a parameter in ``models``: what is replaced differs in one of them.

    Attributes:
        holders: the modules on the ways to it, and others.
    """

    def __init__(self, parameter: nn.Parameter, models: Iterable[nn.Module]) -> None:
        self._parameter = parameter
        self._entries: list[tuple[Mapping[str, Any], str, object]] = []
        self.holders: dict[nn.Module, bool] = {}
        for model in models:
            self._find(model)

    def _find(self, module: nn.Module) -> bool:
        if module not in self.holders:
            self.holders[module] = False
            own = [entry for entry in module._parameters.items() if entry[1] is self._parameter]
            below = [entry for entry in module._modules.items() if entry[1] is not None and self._find(entry[1])]
            self._entries += [(module._parameters, *entry) for entry in own]
            self._entries += [(module._modules, *entry) for entry in below]
            self.holders[module] = bool(own or below)
        return self.holders[module]

    def replaced(self) -> str | None:
        """Return the name of an entry that is another by now."""
        for holder, key, held in self._entries:
            if holder.get(key) is not held:
                return key
        return None


class Move:
    """One parameter's move; ``give_back`` ends it, whether it has begun, is begun in part, or has not.

    Args:
        parameter: a plain ``nn.Parameter``; its numbers have been copied.
        lookups: read its rows from now on.
        models: the modules that may hold it.

    Attributes:
        holders: the modules on the ways to it.
    """

    def __init__(self, parameter: nn.Parameter, lookups: RowLookups, models: Iterable[nn.Module]) -> None:
        self.parameter, self.name, self._lookups = parameter, lookups.name, lookups
        self._ways = Ways(parameter, models)
        self.holders = self._ways.holders
        # More than the parameter and the object just made: another tensor's numbers, too, which are to return there.
        shared = torch._C._storage_Use_Count(parameter.untyped_storage()._cdata) > 2
        self._shared = parameter.data if shared else None

    def begin(self) -> None:
        """Make a placeholder of the parameter."""
        if self._shared is not None:
            self._shared.fill_(float("nan"))
        put_elsewhere(self.parameter, MovedParameter, lookups=self._lookups)
        self._version = _plain(_version, (), (self.parameter,), {})

    def check(self) -> None:
        """Raise ``ValueError`` for what did not pass by ``__torch_function__``; takes a microsecond."""
        parameter = self.parameter
        changed = self._ways.replaced()
        why = None
        if changed is not None or type(parameter) is not MovedParameter:
            why = f"{changed or 'its class'!r} was replaced in the model"
        elif _plain(_grad, (), (parameter,), {}) is not None:
            why = "it got a gradient from a graph of before the Executor"
        elif _plain(_version, (), (parameter,), {}) != self._version:
            why = "it was written to"
        if why is not None:
            raise ValueError(
                f"{self.name} is on the servers, and {why} here, which they do not see; do it before the Executor is "
                f"made or after it is closed, or keep it on the workers: routes={{{self.name!r}: 'AllReduce'}}"
            )

    def refuse(self, use: str) -> NoReturn:
        """Raise the error of a use that is no lookup."""
        assert isinstance(self.parameter, MovedParameter)
        self.parameter.refuse(use)

    def lose(self, reason: str) -> None:
        """Say in all later errors why the numbers could not be read back."""
        if isinstance(self.parameter, MovedParameter):
            self.parameter.gone = reason

    def give_back(self, values: Tensor) -> None:
        """End the move, whatever happened since; a tensor that shares the memory sees the numbers, too."""
        parameter = self.parameter
        parameter.__class__ = nn.Parameter
        parameter.__dict__.pop("lookups", None)
        parameter.grad, parameter.data = None, values if self._shared is None else self._shared.copy_(values)
        torch.autograd.graph.increment_version(parameter)

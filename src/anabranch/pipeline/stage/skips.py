"""Tensors that skip layers: a module's declaration, the commands its ``forward`` yields, and the stored values.

A skippable module's ``forward`` is a generator. It stores a value with ``yield stash(name, value)`` and takes one
with ``value = yield pop(name)``; the declaration on the class lists the names, so that a pipeline knows before it runs
the values that each stage needs from each other::

    layer        0        1        2        3
              stash a ------------------> pop a          one name, one stash, one pop
              stash b ---> pop b ---> pop b              several pops when ``shared``

Between stash and pop a value waits in a ``SkipStore``. Each thread has one current store, because ``forward`` gets no
argument for it: a stage installs its own; outside a pipeline the thread's default store lets the same modules run in a
plain ``nn.Sequential``.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from torch import nn

from anabranch.errors import SkipError
from anabranch.tensors import Structure

_NO_YIELD = "ab.pop(name) only requests the value; write value = yield ab.pop(name)"

_Module = TypeVar("_Module", bound=nn.Module)
_ModuleClass = TypeVar("_ModuleClass", bound=type[nn.Module])


class Namespace:
    """Keeps skips of the same name apart: give one to ``isolate`` of every module that shares them.

    >>> first, second = Namespace(), Namespace()
    >>> first == second
    False
    """

    __slots__ = ("__weakref__",)


SkipName: TypeAlias = tuple[Namespace | None, str]
"""A skip's full name: its namespace (``None`` outside any) and the name in the declaration."""


@dataclass(slots=True)
class stash:  # noqa: N801 - a command, read as a verb where it is yielded
    """Hands ``value`` to the modules that pop ``name``; yielded from the ``forward`` of a skippable module.

    >>> @skippable(stash=["input"])
    ... class Keep(nn.Module):
    ...     def forward(self, x):
    ...         yield stash("input", x)
    ...         return x + 1

    Args:
        name: one of the names that the class declares in ``stash=``.
        value: tensors of any dtype in any nesting, or ``None``.
    """

    name: str
    value: Structure


@dataclass(slots=True)
class pop:  # noqa: N801
    """Requests the value stashed as ``name``; yielded from the ``forward`` of a skippable module.

    >>> @skippable(pop=["input"])
    ... class Add(nn.Module):
    ...     def forward(self, x):
    ...         skip = yield pop("input")
    ...         return x + skip

    Args:
        name: one of the names that the class declares in ``pop=``.
    """

    name: str

    @classmethod
    def __torch_function__(cls, *_: object) -> None:
        """Refuse to be used in place of the value: its ``yield`` was forgotten."""
        raise RuntimeError(_NO_YIELD)

    if not TYPE_CHECKING:  # which refuses all of these itself

        def __getattr__(self, name: str) -> None:
            raise AttributeError(name if name.startswith("__") else _NO_YIELD)  # copy and pickle try special methods

        def __add__(self, *_: object) -> None:
            raise RuntimeError(_NO_YIELD)

        __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __add__
        __matmul__ = __pow__ = __neg__ = __getitem__ = __iter__ = __add__


@dataclass(frozen=True, slots=True)
class Declaration:
    """The skips that a module stashes and pops, in the order declared, and those of them that are shared."""

    stashes: tuple[SkipName, ...]
    pops: tuple[SkipName, ...]
    shared: frozenset[SkipName]


class SkipStore:
    """The values stashed and not yet popped.

    A shared value stays until the store is dropped; any other leaves with its one pop.

    Args:
        shared: names known to be shared, whichever module stashes or pops them.
    """

    def __init__(self, shared: Iterable[SkipName] = ()) -> None:
        self._values: dict[SkipName, tuple[Structure, bool]] = {}
        self._shared = frozenset(shared)

    def put(self, name: SkipName, value: Structure, *, shared: bool = False) -> None:
        """Keep ``value`` under ``name``, in place of an older one."""
        self._values[name] = value, shared or name in self._shared

    def take(self, name: SkipName, *, shared: bool = False) -> Structure:
        """Return the value of ``name``, removed unless it is shared; raises ``KeyError`` for an unknown name."""
        value, stays = self._values[name]
        if not (shared or stays):
            del self._values[name]
        return value

    def __contains__(self, name: SkipName) -> bool:
        return name in self._values


class _Current(threading.local):
    def __init__(self) -> None:
        self.store = SkipStore()


_current = _Current()


@contextmanager
def using_store(store: SkipStore) -> Iterator[None]:
    """Make ``store`` this thread's current one until the block ends."""
    outer, _current.store = _current.store, store
    try:
        yield
    finally:
        _current.store = outer


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = (), shared: Iterable[str] = ()
) -> Callable[[_ModuleClass], _ModuleClass]:
    """Declare the skips of a module class whose ``forward`` is a generator; a ``forward`` without ``yield`` works too.

    >>> import torch
    >>> @skippable(stash=["long"])
    ... class Encode(nn.Module):
    ...     def forward(self, x):
    ...         yield stash("long", x)
    ...         return x * 2
    >>> @skippable(pop=["long"])
    ... class Decode(nn.Module):
    ...     def forward(self, x):
    ...         return x + (yield pop("long"))
    >>> nn.Sequential(Encode(), nn.Identity(), Decode())(torch.ones(2))
    tensor([3., 3.])

    Returns the class itself, with an added method ``isolate(namespace, only=None)``: names in state dicts,
    ``isinstance`` and ``super()`` work as before.

    Args:
        stash: names that ``forward`` returns, each exactly once a call.
        pop: names that ``forward`` takes in, each exactly once a call.
        shared: those of the names that more than one module may pop; one declaration, where it is stashed, is enough.

    Raises:
        SkipError: a name in ``shared`` that is neither stashed nor popped here.
        RuntimeError: in ``forward``: an undeclared name, a pop of a name that was not stashed, or a declared name
            that was not stashed or popped; names module and skip.

    Source: skip connections of torchgpipe (Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for Training
    Giant Models", 2020).
    """
    stashes, pops, shares = _names(stash, "stash"), _names(pop, "pop"), _names(shared, "shared")
    for name in shares:
        if name not in stashes and name not in pops:
            raise SkipError(f"{name!r} is declared as shared but neither in stash= nor in pop=; name it there too")

    def decorate(cls: _ModuleClass) -> _ModuleClass:
        forward = cls.forward

        @functools.wraps(forward)
        def drive(self: nn.Module, *args: Structure, **kwargs: Structure) -> Structure:
            return _carry_out(self, forward(self, *args, **kwargs))

        cls._skip_declaration = (stashes, pops, frozenset(shares))  # type: ignore[attr-defined]
        cls.forward = drive
        cls.isolate = isolate  # type: ignore[attr-defined]
        return cls

    return decorate


def _names(names: Iterable[str], argument: str) -> tuple[str, ...]:
    if isinstance(names, str):
        raise SkipError(f"{argument}={names!r} is one string; give the names in a list, such as [{names!r}]")
    return tuple(dict.fromkeys(names))


def isolate(module: _Module, namespace: Namespace, only: str | Iterable[str] | None = None) -> _Module:
    """Put the skips of ``module``, or those named in ``only``, into ``namespace``; returns ``module``.

    Also a method of every skippable module, ``Encode().isolate(namespace)``; type checkers do not see it, because the
    decorator adds it.

    >>> @skippable(stash=["long"])
    ... class Encode(nn.Module):
    ...     def forward(self, x):
    ...         yield stash("long", x)
    ...         return x
    >>> outer = Namespace()
    >>> isinstance(isolate(Encode(), outer), Encode)
    True

    Args:
        module: of a class that ``skippable`` declares.
        namespace: the same one for all modules that share these skips.
        only: some of the names that the class declares; by default all.

    Raises:
        SkipError: a name in ``only`` that the module does not declare.
    """
    stashes, pops, _ = module._skip_declaration  # type: ignore[misc]
    declared = (*stashes, *pops)
    names = declared if only is None else (only,) if isinstance(only, str) else tuple(only)
    for name in names:
        if name not in declared:
            raise SkipError(f"{type(module).__name__} declares no skip {name!r} to isolate; it declares {declared}")
    # Assigned whole: a copied module must not share the dict with its original.
    module._skip_namespaces = {**_namespaces(module), **dict.fromkeys(names, namespace)}  # type: ignore[assignment]
    return module


def _namespaces(module: nn.Module) -> dict[str, Namespace]:
    return module.__dict__.get("_skip_namespaces", {})  # type: ignore[no-any-return]


def declaration_of(module: nn.Module) -> Declaration | None:
    """Return the declaration of ``module``, with the namespaces it was isolated into; ``None`` if it is not
    skippable.
    """
    declared = getattr(type(module), "_skip_declaration", None)
    if declared is None:
        return None
    namespaces = _namespaces(module)
    stashes, pops, shared = ([(namespaces.get(name), name) for name in names] for names in declared)
    return Declaration(tuple(stashes), tuple(pops), frozenset(shared))


def _carry_out(module: nn.Module, result: Structure) -> Structure:
    """Return the result of a forward, of a generator after its commands."""
    declaration, store, name = declaration_of(module), _current.store, type(module).__name__
    assert declaration is not None
    stashes = {skip: (namespace, skip) for namespace, skip in declaration.stashes}
    pops = {skip: (namespace, skip) for namespace, skip in declaration.pops}
    stashed: dict[SkipName, Structure] = {}
    answer: Structure = None
    while inspect.isgenerator(result):
        try:
            command = result.send(answer)
        except StopIteration as stop:
            result = stop.args[0] if stop.args else None  # TorchDynamo knows no StopIteration.value
            break
        answer = None
        if isinstance(command, stash):
            full = stashes.get(command.name)
            if full is None:
                raise RuntimeError(f"{name} stashes {command.name!r} but does not declare it in stash=")
            if full in stashed:
                raise RuntimeError(f"{name} stashes {command.name!r} twice in one forward")
            # Not in the store before forward has ended: a module never pops its own stash.
            stashed[full] = command.value
        elif isinstance(command, pop):
            full = pops.pop(command.name, None)
            if full is None:
                raise RuntimeError(f"{name} pops {command.name!r} but does not declare it in pop=, or pops it twice")
            if full not in store:
                raise RuntimeError(f"{name} pops {command.name!r}, which has not been stashed by an earlier module")
            answer = store.take(full, shared=full in declaration.shared)
        else:
            raise TypeError(f"{name}.forward yielded {command!r}; yield stash(name, value) or pop(name)")
    missing = [skip for skip, full in stashes.items() if full not in stashed]
    for names, verb in ((missing, "stash"), (list(pops), "pop")):
        if names:
            raise RuntimeError(f"{name} declares {names} in {verb}= but its forward did not {verb} it")
    for full, value in stashed.items():
        store.put(full, value, shared=full in declaration.shared)
    return result


def verify_skippables(module: nn.Module) -> None:
    """Check that every skip in ``module``, nested containers included, is stashed once, and popped once after that.

    >>> @skippable(stash=["a"])
    ... class Stash(nn.Module): ...
    >>> verify_skippables(nn.Sequential(Stash()))  # doctest: +NORMALIZE_WHITESPACE
    Traceback (most recent call last):
    anabranch.errors.SkipError: skips that do not match:
    * 'a' is stashed by '0' but no later module pops it,
      or it lacks @ab.skippable(pop=['a'])

    Raises:
        SkipError: names every mismatch at once: a name declared both ways by one module, stashed twice, popped twice
            without being shared, popped but not stashed before, stashed but not popped; and a layer that yields
            without the decorator.
    """
    stashed_by: dict[SkipName, str] = {}
    popped_by: dict[SkipName, str] = {}
    shared: set[SkipName] = set()
    containers: set[str] = set()
    faults: list[str] = []
    for path, child in module.named_modules(remove_duplicate=False):
        declaration = declaration_of(child)
        if declaration is None:
            # Of a layer; a module within one may be a generator to the module around it.
            if not path or path.rpartition(".")[0] in containers:
                forward = type(child).forward
                if forward in (nn.Sequential.forward, nn.Module.forward):
                    containers.add(path)
                elif inspect.isgeneratorfunction(forward):
                    faults.append(f"{path!r} yields in its forward but lacks @ab.skippable(stash=[...], pop=[...])")
            continue
        path = path or type(child).__name__
        shared |= declaration.shared
        both = [name for name in declaration.stashes if name in declaration.pops]
        faults += [f"{name!r} is declared both in stash= and in pop= by {path!r}" for _, name in both]
        for name in (name for name in declaration.stashes if name not in both):
            earlier = stashed_by.setdefault(name, path)
            if earlier != path:
                cure = "isolate them into two namespaces"
                faults.append(f"{name[1]!r} is stashed by {earlier!r} and again by {path!r}; {cure}")
        for name in (name for name in declaration.pops if name not in both):
            if name not in stashed_by:
                faults.append(f"{name[1]!r} is popped by {path!r} but no earlier module stashes it")
                continue
            earlier = popped_by.setdefault(name, path)
            if earlier != path and name not in shared:
                cure = "declare it in shared=, or isolate them into two namespaces"
                faults.append(f"{name[1]!r} is popped by {earlier!r} and again by {path!r}; {cure}")
    for name, path in stashed_by.items():
        if name not in popped_by:
            cure = f"@ab.skippable(pop=[{name[1]!r}])"
            faults.append(f"{name[1]!r} is stashed by {path!r} but no later module pops it, or it lacks {cure}")
    if faults:
        raise SkipError("skips that do not match:\n" + "\n".join(f"* {fault}" for fault in faults))

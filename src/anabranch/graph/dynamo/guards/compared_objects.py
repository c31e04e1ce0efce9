"""Objects that are compared by identity: Dynamo decides such comparisons while it traces, and guards only the types.

That is how ``==``, ``!=``, ``in``, sets and dicts compare objects whose class has no ``__eq__``, modules among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

__all__ = ["compared_objects"]

_HASH: Any = object.__hash__
_EQUAL: Any = object.__eq__


@contextmanager
def compared_objects(refuse: Callable[[str], None]) -> Iterator[None]:
    """Guards the identity of objects that Dynamo compares while it traces.

    Args:
        refuse: called with a description of an object that cannot be guarded: another may get its address.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.variables import builder, object_protocol
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    protocol: Any = object_protocol
    building: Any = builder
    kind: Any = UserDefinedObjectVariable
    compare, make_guard_of_two = protocol.vt_identity_compare, building.make_dupe_guard
    hash_of, equal_keys = kind.hash_impl, kind.is_python_equal
    other_sources: dict[Any, list[Any]] = {}

    def guard(variable: Any) -> None:
        if variable.source is None or variable.is_python_constant():  # made in the step, or guarded by identity
            return
        if type(variable.value).__weakrefoffset__ == 0:
            refuse(f"the identity of a {type(variable.value).__qualname__}, which does not allow weak references")
        for source in (variable.source, *other_sources.get(variable.source, ())):
            install_guard(source.make_guard(GuardBuilder.ID_MATCH))

    def comparing(left: Any, right: Any) -> Any:
        both = left.realize(), right.realize()
        if all(isinstance(each, kind) for each in both) and type(both[0].value) is type(both[1].value):
            for each in both:
                guard(each)
        return compare(left, right)

    def hashing(self: Any, tx: Any) -> Any:
        if type(self.value).__hash__ is _HASH:
            guard(self)
        return hash_of(self, tx)

    def comparing_keys(self: Any, other: Any) -> bool:
        if isinstance(other, kind) and type(self.value).__eq__ is _EQUAL:
            guard(self)
            guard(other)
        return bool(equal_keys(self, other))

    def guarding_two(source: Any, known: Any) -> Any:
        made = make_guard_of_two(source, known)
        if made is None and known is not None and known != source:  # one is a global, the other is not
            other_sources.setdefault(known, []).append(source)
        return made

    with (
        patch.object(protocol, "vt_identity_compare", comparing),
        patch.object(building, "make_dupe_guard", guarding_two),
        patch.multiple(kind, hash_impl=hashing, is_python_equal=comparing_keys),
    ):
        yield

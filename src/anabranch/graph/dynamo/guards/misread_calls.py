"""Calls that Dynamo replaces with others: it bypasses the cache of ``functools.lru_cache`` and a metaclass's
``__call__``.

A cache or a singleton returns another object than the one that Dynamo recreates, and no guard watches it.
An object with the user's ``__del__`` would be made while the code is read, and never in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from anabranch.graph.dynamo.origins import INSTALLED, LIBRARIES, OURS

__all__ = ["misread_calls"]


@contextmanager
def misread_calls(refuse: Callable[[str], None], deny: Callable[[str], None]) -> Iterator[None]:
    """Report such calls while Dynamo traces.

    Args:
        refuse: called with a description of the call.
        deny: raises the error that the code cannot be a graph, before an object is made.
    """
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.functions import WrapperUserFunctionVariable
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable

    wrapper: Any = WrapperUserFunctionVariable
    kind: Any = UserDefinedClassVariable
    call_wrapped, make = wrapper.call_function, kind.call_function

    def through_cache(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        result = call_wrapped(self, tx, args, kwargs)
        cached = getattr(self.wrapper_obj, "__wrapped__", None)
        if hasattr(self.wrapper_obj, "cache_info") and isinstance(cached, FunctionType):
            file = cached.__code__.co_filename
            # A library's cache of numbers and strings, such as whether another one is installed, holds constants.
            known = file.startswith(OURS) or (file.startswith(INSTALLED) and isinstance(result, ConstantVariable))
            if not known:
                refuse(f"what {cached.__qualname__} has cached")
        return result

    def make_anew(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        call = getattr(type(self.value), "__call__", None)  # noqa: B004 - the metaclass's own
        if _is_users(call):
            refuse(f"what {self.value.__qualname__}() returns, which {type(self.value).__qualname__} decides")
        if _is_users(getattr(self.value, "__del__", None)):
            deny(f"it makes an object of {self.value.__qualname__}, whose __del__ a graph would not run")
        return make(self, tx, args, kwargs)

    wrapper.call_function, kind.call_function = through_cache, make_anew
    try:
        yield
    finally:
        wrapper.call_function, kind.call_function = call_wrapped, make


def _is_users(function: object) -> bool:
    return isinstance(function, FunctionType) and not function.__code__.co_filename.startswith(LIBRARIES)

"""Lookups that fail inside ``try`` and are caught: Dynamo leaves no guard for them, and later they may succeed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from anabranch.graph.dynamo.origins import OURS

__all__ = ["caught_lookups"]

# inspect asks functions for a __signature__ and a __wrapped__, as transformers has it do in each forward.
_PASSED = (*OURS, inspect.__file__)


@contextmanager
def caught_lookups(refuse: Callable[[str], None]) -> Iterator[None]:
    """Guards the keys that are missed in a dict while Dynamo traces, and reports other lookups that are caught.

    Args:
        refuse: called with a description of the failed lookup, for instance an attribute.
    """
    from torch._dynamo.exc import ObservedAttributeError, ObservedKeyError
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.dicts import ConstDictVariable

    translator: Any = InstructionTranslatorBase
    dictionary: Any = ConstDictVariable
    look_up, handle = dictionary.getitem_const_raise_exception_if_absent, translator.exception_handler

    def guarding(self: Any, tx: Any, key: Any) -> Any:
        missed = key not in self
        if missed:
            self.install_dict_contains_guard(tx, [key])
        try:
            return look_up(self, tx, key)
        except ObservedKeyError as error:
            error.is_guarded = missed  # type: ignore[attr-defined]
            raise

    def noting(self: Any, raised: Any) -> None:
        lookup = isinstance(raised, (ObservedKeyError, ObservedAttributeError))
        if lookup and self.current_instruction.opname == "RAISE_VARARGS":
            raised.is_guarded = True  # exceptions raised by the code itself follow from values that it read
        if lookup and self.current_instruction.exn_tab_entry is not None:  # caught here, not by a caller
            # A __getattr__ that asks another object next, as peft's, is called only for what the object has not.
            known = getattr(raised, "is_guarded", False) or self.f_code.co_name == "__getattr__"
            if not known and not self.f_code.co_filename.startswith(_PASSED):
                what = "an attribute" if isinstance(raised, ObservedAttributeError) else "a key"
                refuse(f"{what} that does not exist, caught in {self.f_code.co_filename}:{self.lineno}")
        handle(self, raised)

    dictionary.getitem_const_raise_exception_if_absent, translator.exception_handler = guarding, noting
    try:
        yield
    finally:
        dictionary.getitem_const_raise_exception_if_absent, translator.exception_handler = look_up, handle

"""Lookups that fail inside ``try`` and are caught: Dynamo leaves no guard for them, and later they may succeed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

__all__ = ["caught_lookups"]

# inspect asks functions for a __signature__ and a __wrapped__, as transformers has it do in each forward.
_PASSED = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), inspect.__file__)


@contextmanager
def caught_lookups(refuse: Callable[[str], None]) -> Iterator[None]:
    """Guards the keys that are missed in a dict while Dynamo traces, and reports other lookups that are caught.

    Args:
        refuse: called with what was looked up in vain and caught, for instance an attribute.
    """
    from torch._dynamo.exc import ObservedAttributeError, ObservedKeyError
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.dicts import ConstDictVariable

    translator: Any = InstructionTranslatorBase
    dictionary: Any = ConstDictVariable
    look_up, handle = dictionary.getitem_const_raise_exception_if_absent, translator.exception_handler
    guarded = False

    def guarding(self: Any, tx: Any, key: Any) -> Any:
        nonlocal guarded
        if key not in self:
            self.install_dict_contains_guard(tx, [key])
            guarded = True
        return look_up(self, tx, key)

    def noting(self: Any, raised: Any) -> None:
        nonlocal guarded
        lookup = isinstance(raised, (ObservedKeyError, ObservedAttributeError))
        if self.current_instruction.opname == "RAISE_VARARGS":  # what the code raises itself follows from what it read
            guarded = True
        if lookup and self.current_instruction.exn_tab_entry is not None:  # caught here, not by a caller
            known, guarded = guarded and isinstance(raised, ObservedKeyError), False
            # A __getattr__ that asks another object next, as peft's, is called only for what the object has not.
            known = known or self.f_code.co_name == "__getattr__"
            if not known and not self.f_code.co_filename.startswith(_PASSED):
                what = "an attribute" if isinstance(raised, ObservedAttributeError) else "a key"
                refuse(f"{what} that is not there, caught in {self.f_code.co_filename}:{self.lineno}")
        handle(self, raised)

    dictionary.getitem_const_raise_exception_if_absent, translator.exception_handler = guarding, noting
    try:
        yield
    finally:
        dictionary.getitem_const_raise_exception_if_absent, translator.exception_handler = look_up, handle

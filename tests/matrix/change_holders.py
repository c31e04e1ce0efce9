"""Ways to hold a number in Python: each gives a function that reads it and one that changes it."""

from __future__ import annotations

import abc
import argparse
import array
import bisect
import builtins
import collections
import configparser
import contextvars
import ctypes
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import heapq
import io
import itertools
import json
import logging
import math
import mmap
import operator
import os
import pathlib
import queue
import random
import sqlite3
import string
import struct
import sys
import tempfile
import threading
import time
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

Holder = Callable[[pytest.MonkeyPatch], tuple[Callable[[], Any], Callable[[int], None]]]
HOLDERS: dict[str, Holder] = {}


def holder(function: Holder) -> Holder:
    HOLDERS[function.__name__] = function
    return function


def of_setter(
    read: Callable[[], Any], write: Callable[[float], Any]
) -> tuple[Callable[[], Any], Callable[[int], None]]:
    """Numbers 1.5 at first, 2.5 and 3.5 after the changes."""
    write(1.5)
    return read, lambda k: (write(1.5 + k), None)[1]


# Names.


@holder
def closure(patch: pytest.MonkeyPatch) -> Any:
    number = 1.5

    def write(value: float) -> None:
        nonlocal number
        number = value

    return of_setter(lambda: number, write)


GLOBAL = 1.5


@holder
def module_global(patch: pytest.MonkeyPatch) -> Any:
    return of_setter(lambda: GLOBAL, lambda v: patch.setitem(globals(), "GLOBAL", v))


@holder
def other_modules_global(patch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType("settings_of_the_run")
    patch.setitem(sys.modules, "settings_of_the_run", module)
    return of_setter(lambda: module.number, lambda v: setattr(module, "number", v))


@holder
def imported_inside(patch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType("settings_of_the_run")
    patch.setitem(sys.modules, "settings_of_the_run", module)

    def read() -> float:
        import settings_of_the_run  # type: ignore[import-not-found]

        return settings_of_the_run.number  # type: ignore[no-any-return]

    return of_setter(read, lambda v: setattr(module, "number", v))


@holder
def module_replaced_in_sys_modules(patch: pytest.MonkeyPatch) -> Any:
    def write(value: float) -> None:
        module = types.ModuleType("settings_of_the_run")
        module.number = value  # type: ignore[attr-defined]
        patch.setitem(sys.modules, "settings_of_the_run", module)

    def read() -> float:
        import settings_of_the_run

        return settings_of_the_run.number  # type: ignore[no-any-return]

    return of_setter(read, write)


@holder
def sys_modules_item(patch: pytest.MonkeyPatch) -> Any:
    def write(value: float) -> None:
        patch.setitem(sys.modules, "settings_of_the_run", types.SimpleNamespace(number=value))

    return of_setter(lambda: sys.modules["settings_of_the_run"].number, write)


@holder
def builtin_name(patch: pytest.MonkeyPatch) -> Any:
    patch.setattr(builtins, "number_of_the_run", 1.5, raising=False)
    return of_setter(
        lambda: number_of_the_run,  # type: ignore[name-defined]  # noqa: F821
        lambda v: setattr(builtins, "number_of_the_run", v),
    )


@holder
def globals_of_exec(patch: pytest.MonkeyPatch) -> Any:
    names: dict[str, Any] = {}
    exec("def read():\n    return number\n", names)
    return of_setter(lambda: names["read"](), lambda v: names.update(number=v))


@holder
def function_of_exec(patch: pytest.MonkeyPatch) -> Any:
    names: dict[str, Any] = {"number": 1.5}
    exec("def read():\n    return number\n", names)
    return of_setter(names["read"], lambda v: names.update(number=v))


@holder
def eval_of_text(patch: pytest.MonkeyPatch) -> Any:
    text = ["1.5"]
    return of_setter(lambda: eval(text[0]), lambda v: text.__setitem__(0, str(v)))


@holder
def globals_call(patch: pytest.MonkeyPatch) -> Any:
    return of_setter(lambda: globals()["GLOBAL"], lambda v: patch.setitem(globals(), "GLOBAL", v))


# Functions.


@holder
def default_argument(patch: pytest.MonkeyPatch) -> Any:
    def scale(number: float = 1.5) -> float:
        return number

    return of_setter(lambda: scale(), lambda v: setattr(scale, "__defaults__", (v,)))


@holder
def keyword_default(patch: pytest.MonkeyPatch) -> Any:
    def scale(*, number: float = 1.5) -> float:
        return number

    return of_setter(lambda: scale(), lambda v: setattr(scale, "__kwdefaults__", {"number": v}))


@holder
def keyword_default_in_place(patch: pytest.MonkeyPatch) -> Any:
    def scale(*, number: float = 1.5) -> float:
        return number

    return of_setter(lambda: scale(), lambda v: scale.__kwdefaults__.update(number=v))


@holder
def mutable_default(patch: pytest.MonkeyPatch) -> Any:
    def scale(numbers: list[float] = [1.5]) -> float:  # noqa: B006 - the case
        return numbers[0]

    return of_setter(lambda: scale(), lambda v: scale.__defaults__[0].__setitem__(0, v))  # type: ignore[index]


@holder
def function_attribute(patch: pytest.MonkeyPatch) -> Any:
    def scale() -> Any:
        return scale.number  # type: ignore[attr-defined]

    return of_setter(lambda: scale(), lambda v: setattr(scale, "number", v))


@holder
def cell_contents(patch: pytest.MonkeyPatch) -> Any:
    number = 1.5

    def scale() -> float:
        return number

    return of_setter(lambda: scale(), lambda v: setattr(scale.__closure__[0], "cell_contents", v))  # type: ignore[index]


@holder
def partial_replaced(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace()
    return of_setter(lambda: held.f(1.0), lambda v: setattr(held, "f", functools.partial(operator.mul, v)))


@holder
def partial_keywords(patch: pytest.MonkeyPatch) -> Any:
    def scale(number: float = 0.0) -> float:
        return number

    f = functools.partial(scale, number=1.5)
    return of_setter(lambda: f(), lambda v: f.keywords.update(number=v))


@holder
def partial_setstate(patch: pytest.MonkeyPatch) -> Any:
    def scale(number: float = 0.0) -> float:
        return number

    f: Any = functools.partial(scale, 1.5)
    return of_setter(lambda: f(), lambda v: f.__setstate__((scale, (v,), {}, {})))


@holder
def lru_cache_cleared(patch: pytest.MonkeyPatch) -> Any:
    held = [1.5]

    @functools.lru_cache
    def scale() -> float:
        return held[0]

    def write(value: float) -> None:
        held[0] = value
        scale.cache_clear()

    return of_setter(lambda: scale(), write)


@holder
def lru_cache_kept(patch: pytest.MonkeyPatch) -> Any:
    # The plain loop goes on with the cached number.
    held = [1.5]

    @functools.lru_cache
    def scale() -> float:
        return held[0]

    return of_setter(lambda: scale(), lambda v: held.__setitem__(0, v))


@holder
def bound_method_of(patch: pytest.MonkeyPatch) -> Any:
    class Holder:
        number = 0.0

        def scale(self) -> float:
            return self.number

    held = Holder()
    method = held.scale
    return of_setter(lambda: method(), lambda v: setattr(held, "number", v))


@holder
def monkeypatched_function(patch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType("settings_of_the_run")
    return of_setter(lambda: module.scale(), lambda v: setattr(module, "scale", lambda: v))


@holder
def swapped_code(patch: pytest.MonkeyPatch) -> Any:
    def scale() -> float:
        return 1.5

    def write(value: float) -> None:
        code = scale.__code__
        constants = tuple(value if isinstance(c, float) else c for c in code.co_consts)
        scale.__code__ = code.replace(co_consts=constants)

    return of_setter(lambda: scale(), write)


@holder
def generator_state(patch: pytest.MonkeyPatch) -> Any:
    # Nothing changes but by reading.
    numbers = iter([1.0 + i for i in range(12)])
    return (lambda: next(numbers)), (lambda k: None)


@holder
def generator_function_state(patch: pytest.MonkeyPatch) -> Any:
    def count() -> Iterator[float]:
        number = 0.0
        while True:
            number += 0.5
            yield number

    numbers = count()
    return (lambda: next(numbers)), (lambda k: None)


@holder
def generator_sent(patch: pytest.MonkeyPatch) -> Any:
    def hold() -> Any:
        number = 1.5
        while True:
            number = (yield number) or number

    numbers = hold()
    next(numbers)
    return of_setter(lambda: next(numbers), lambda v: numbers.send(v))


@holder
def itertools_count(patch: pytest.MonkeyPatch) -> Any:
    numbers = itertools.count(1)
    return (lambda: float(next(numbers))), (lambda k: None)


@holder
def itertools_cycle(patch: pytest.MonkeyPatch) -> Any:
    numbers = itertools.cycle([1.0, 2.0, 3.0])
    return (lambda: next(numbers)), (lambda k: None)


@holder
def counter_in_closure(patch: pytest.MonkeyPatch) -> Any:
    calls = 0

    def read() -> float:
        nonlocal calls
        calls += 1
        return float(calls)

    return read, lambda k: None


@holder
def counter_in_list(patch: pytest.MonkeyPatch) -> Any:
    calls = [0]

    def read() -> float:
        calls[0] += 1
        return calls[0] * 0.5

    return read, lambda k: calls.__setitem__(0, 10 * k)


@holder
def history_appended(patch: pytest.MonkeyPatch) -> Any:
    history: list[float] = []

    def read() -> float:
        history.append(1.0)
        return float(len(history))

    return read, lambda k: history.clear()


# Containers.


@holder
def list_item(patch: pytest.MonkeyPatch) -> Any:
    held = [0.0]
    return of_setter(lambda: held[0], lambda v: held.__setitem__(0, v))


@holder
def list_length(patch: pytest.MonkeyPatch) -> Any:
    held = [1, 2]
    return (lambda: len(held)), (lambda k: held.append(k))


@holder
def list_sum(patch: pytest.MonkeyPatch) -> Any:
    held = [1.0, 2.0]
    return (lambda: sum(held)), (lambda k: held.append(k))


@holder
def list_sorted_in_place(patch: pytest.MonkeyPatch) -> Any:
    held = [3.0, 1.0, 2.0]
    return (lambda: held[0]), (lambda k: held.sort(reverse=k == 2))


@holder
def list_comprehension(patch: pytest.MonkeyPatch) -> Any:
    held = [3.0, 1.0, 2.0]
    return (lambda: max(v for v in held if v < 10)), (lambda k: held.append(3.0 + k))


@holder
def dict_item(patch: pytest.MonkeyPatch) -> Any:
    held: dict[str, float] = {}
    return of_setter(lambda: held["number"], lambda v: held.update(number=v))


@holder
def dict_presence(patch: pytest.MonkeyPatch) -> Any:
    held: dict[str, float] = {}
    return (lambda: 2.0 if "key" in held else 1.0), (lambda k: held.update(key=1.0) if k == 1 else held.clear())


@holder
def dict_get_default(patch: pytest.MonkeyPatch) -> Any:
    held: dict[str, float] = {}
    return (lambda: held.get("number", 1.0)), (lambda k: held.update(number=1.0 + k))


@holder
def dict_order(patch: pytest.MonkeyPatch) -> Any:
    held = {"a": 1.0, "b": 2.0}
    return (lambda: next(iter(held.values()))), (lambda k: held.update({next(iter(held)): held.pop(next(iter(held)))}))


@holder
def dict_six_deep(patch: pytest.MonkeyPatch) -> Any:
    held: dict[str, Any] = {"a": {"b": {"c": {"d": {"e": {"f": 0.0}}}}}}
    inner = held["a"]["b"]["c"]["d"]["e"]
    return of_setter(lambda: held["a"]["b"]["c"]["d"]["e"]["f"], lambda v: inner.update(f=v))


@holder
def dict_of_20000(patch: pytest.MonkeyPatch) -> Any:
    held = {i: float(i) for i in range(20_000)}
    return of_setter(lambda: held[19_000], lambda v: held.update({19_000: v}))


@holder
def list_of_20000(patch: pytest.MonkeyPatch) -> Any:
    held = [0.0] * 20_000
    return of_setter(lambda: held[19_000], lambda v: held.__setitem__(19_000, v))


@holder
def object_in_a_list_of_a_hundred(patch: pytest.MonkeyPatch) -> Any:
    held = [types.SimpleNamespace(number=float(i)) for i in range(100)]
    return of_setter(lambda: held[77].number, lambda v: setattr(held[77], "number", v))


@holder
def sum_over_a_hundred_objects(patch: pytest.MonkeyPatch) -> Any:
    held = [types.SimpleNamespace(number=0.01) for _ in range(100)]
    return of_setter(lambda: sum(one.number for one in held), lambda v: setattr(held[77], "number", v))


@holder
def tuple_replaced(patch: pytest.MonkeyPatch) -> Any:
    held = {"t": (0.0,)}
    return of_setter(lambda: held["t"][0], lambda v: held.update(t=(v,)))


@holder
def list_in_a_tuple(patch: pytest.MonkeyPatch) -> Any:
    held = ([0.0], "name")
    return of_setter(lambda: held[0][0], lambda v: held[0].__setitem__(0, v))


@holder
def set_membership(patch: pytest.MonkeyPatch) -> Any:
    held = {0}
    return (lambda: 2.0 if 5 in held else 1.0), (lambda k: held.add(5) if k == 1 else held.discard(5))


@holder
def set_of_numbers(patch: pytest.MonkeyPatch) -> Any:
    held = {1.0}
    return (lambda: sum(held)), (lambda k: held.add(1.0 + k))


@holder
def frozenset_replaced(patch: pytest.MonkeyPatch) -> Any:
    held = [frozenset({1.0})]
    return (lambda: max(held[0])), (lambda k: held.__setitem__(0, frozenset({1.0 + k})))


@holder
def user_dict(patch: pytest.MonkeyPatch) -> Any:
    held: Any = collections.UserDict()
    return of_setter(lambda: held["number"], lambda v: held.update(number=v))


@holder
def user_list(patch: pytest.MonkeyPatch) -> Any:
    held: Any = collections.UserList([0.0])
    return of_setter(lambda: held[0], lambda v: held.__setitem__(0, v))


@holder
def user_string(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace(text=collections.UserString("1.5"))
    return of_setter(lambda: float(str(held.text)), lambda v: setattr(held.text, "data", str(v)))


@holder
def chain_map(patch: pytest.MonkeyPatch) -> Any:
    inner: dict[str, float] = {}
    held = collections.ChainMap({}, inner)
    return of_setter(lambda: held["number"], lambda v: inner.update(number=v))


@holder
def chain_map_shadowed(patch: pytest.MonkeyPatch) -> Any:
    first: dict[str, float] = {}
    held = collections.ChainMap(first, {"number": 1.5})
    return (lambda: held["number"]), (lambda k: first.update(number=1.5 + k))


@holder
def mapping_proxy(patch: pytest.MonkeyPatch) -> Any:
    inner: dict[str, float] = {}
    held = types.MappingProxyType(inner)
    return of_setter(lambda: held["number"], lambda v: inner.update(number=v))


@holder
def ordered_dict(patch: pytest.MonkeyPatch) -> Any:
    held: collections.OrderedDict[str, float] = collections.OrderedDict(a=1.0, b=2.0)
    return (lambda: next(iter(held.values()))), (lambda k: held.move_to_end(next(iter(held))))


@holder
def default_dict(patch: pytest.MonkeyPatch) -> Any:
    held: Any = collections.defaultdict(lambda: 1.0)
    return (lambda: held["number"]), (lambda k: held.update(number=1.0 + k))


@holder
def default_dict_factory(patch: pytest.MonkeyPatch) -> Any:
    held: Any = collections.defaultdict(float)
    names = iter("abcdefgh")

    def write(value: float) -> None:
        held.clear()
        held.default_factory = lambda: value

    del names
    return of_setter(lambda: held["number"], write)


@holder
def counter(patch: pytest.MonkeyPatch) -> Any:
    held = collections.Counter("a")
    return (lambda: float(held["a"])), (lambda k: held.update("a"))


@holder
def deque(patch: pytest.MonkeyPatch) -> Any:
    held = collections.deque([1.5], maxlen=2)
    return (lambda: held[0] + held[-1]), (lambda k: held.append(1.5 + k))


@holder
def deque_rotated(patch: pytest.MonkeyPatch) -> Any:
    held = collections.deque([1.0, 2.0, 3.0])
    return (lambda: held[0]), (lambda k: held.rotate(1))


@holder
def heap(patch: pytest.MonkeyPatch) -> Any:
    held = [5.0, 6.0]
    return (lambda: heapq.nsmallest(1, held)[0]), (lambda k: heapq.heappush(held, 5.0 - k))


@holder
def bisected_list(patch: pytest.MonkeyPatch) -> Any:
    held = [1.0, 2.0, 3.0]
    return (lambda: 1.0 + bisect.bisect(held, 2.5)), (lambda k: held.insert(0, -float(k)))


@holder
def byte_array(patch: pytest.MonkeyPatch) -> Any:
    held = bytearray(b"\x01\x02")
    return (lambda: float(held[0])), (lambda k: held.__setitem__(0, 1 + k))


@holder
def bytes_replaced(patch: pytest.MonkeyPatch) -> Any:
    held = [b"\x01"]
    return (lambda: float(held[0][0])), (lambda k: held.__setitem__(0, bytes([1 + k])))


@holder
def memory_view(patch: pytest.MonkeyPatch) -> Any:
    inner = bytearray(b"\x01\x02")
    held = memoryview(inner)
    return (lambda: float(held[0])), (lambda k: inner.__setitem__(0, 1 + k))


@holder
def array_array(patch: pytest.MonkeyPatch) -> Any:
    held = array.array("d", [1.5])
    return of_setter(lambda: held[0], lambda v: held.__setitem__(0, v))


@holder
def memory_map(patch: pytest.MonkeyPatch) -> Any:
    held = mmap.mmap(-1, 16)
    return of_setter(lambda: struct.unpack("d", held[:8])[0], lambda v: held.__setitem__(slice(8), struct.pack("d", v)))


@holder
def ctypes_number(patch: pytest.MonkeyPatch) -> Any:
    held = ctypes.c_double(0.0)
    return of_setter(lambda: held.value, lambda v: setattr(held, "value", v))


@holder
def ctypes_structure(patch: pytest.MonkeyPatch) -> Any:
    class Numbers(ctypes.Structure):
        _fields_ = (("number", ctypes.c_double),)

    held = Numbers()
    return of_setter(lambda: held.number, lambda v: setattr(held, "number", v))


@holder
def ctypes_array(patch: pytest.MonkeyPatch) -> Any:
    held = (ctypes.c_double * 4)()
    return of_setter(lambda: held[2], lambda v: held.__setitem__(2, v))


@holder
def queue_item(patch: pytest.MonkeyPatch) -> Any:
    held: queue.Queue[float] = queue.Queue()

    def write(value: float) -> None:
        held.queue.clear()
        held.put(value)

    return of_setter(lambda: held.queue[0], write)


@holder
def slice_object(patch: pytest.MonkeyPatch) -> Any:
    held = [slice(0, 1)]
    numbers = [1.0, 2.0, 3.0, 4.0]
    return (lambda: sum(numbers[held[0]])), (lambda k: held.__setitem__(0, slice(0, 1 + k)))


@holder
def range_object(patch: pytest.MonkeyPatch) -> Any:
    held = [range(2)]
    return (lambda: 1.0 + sum(held[0])), (lambda k: held.__setitem__(0, range(2 + k)))


@holder
def dict_view(patch: pytest.MonkeyPatch) -> Any:
    inner = {"number": 1.5}
    held = inner.values()
    return of_setter(lambda: sum(held), lambda v: inner.update(number=v))


@holder
def dict_subclass(patch: pytest.MonkeyPatch) -> Any:
    class Config(dict):  # type: ignore[type-arg]
        def __getattr__(self, name: str) -> Any:
            return self[name]

    held = Config()
    return of_setter(lambda: held.number, lambda v: held.update(number=v))


@holder
def nested_attribute_dict(patch: pytest.MonkeyPatch) -> Any:
    class Config(dict):  # type: ignore[type-arg]
        def __init__(self, **items: Any) -> None:
            super().__init__(items)
            self.__dict__ = self

    held = Config(inner=Config(number=0.0))
    return of_setter(lambda: held.inner.number, lambda v: setattr(held.inner, "number", v))


@holder
def dict_with_missing(patch: pytest.MonkeyPatch) -> Any:
    number = [1.5]

    class Config(dict):  # type: ignore[type-arg]
        def __missing__(self, key: str) -> float:
            return number[0]

    held = Config()
    return of_setter(lambda: held["number"], lambda v: number.__setitem__(0, v))


@holder
def list_subclass_getitem(patch: pytest.MonkeyPatch) -> Any:
    class Scaled(list):  # type: ignore[type-arg]
        factor = 1.0

        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(index) * self.factor

    held = Scaled([1.0])
    return of_setter(lambda: held[0], lambda v: setattr(held, "factor", v))


@holder
def object_as_key(patch: pytest.MonkeyPatch) -> Any:
    key = types.SimpleNamespace
    held: dict[Any, float] = {key: 1.0}
    return of_setter(lambda: held[key], lambda v: held.update({key: v}))


# Classes and objects.


@holder
def instance_attribute(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace()
    return of_setter(lambda: held.number, lambda v: setattr(held, "number", v))


@holder
def instance_dict(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace()
    return of_setter(lambda: held.number, lambda v: vars(held).update(number=v))


@holder
def object_replaced(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace()
    return of_setter(lambda: held.inner.number, lambda v: setattr(held, "inner", types.SimpleNamespace(number=v)))


@holder
def integer_attribute(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace(number=1)
    return (lambda: held.number), (lambda k: setattr(held, "number", 1 + k))


@holder
def integer_becomes_float(patch: pytest.MonkeyPatch) -> Any:
    held: Any = types.SimpleNamespace(number=2)
    return (lambda: 3.0 / held.number), (lambda k: setattr(held, "number", [2.0, True][k - 1]))


@holder
def true_becomes_one(patch: pytest.MonkeyPatch) -> Any:
    held: Any = types.SimpleNamespace(number=True)
    return (lambda: 2.0 if held.number is True else 1.0), (lambda k: setattr(held, "number", [1, 1.0][k - 1]))


@holder
def zero_becomes_minus_zero(patch: pytest.MonkeyPatch) -> Any:
    held: Any = types.SimpleNamespace(number=0.0)
    return (lambda: 2.0 + math.copysign(1.0, held.number)), (lambda k: setattr(held, "number", [-0.0, 0.0][k - 1]))


@holder
def number_becomes_nan(patch: pytest.MonkeyPatch) -> Any:
    held: Any = types.SimpleNamespace(number=math.nan)
    return (lambda: 1.0 if math.isnan(held.number) else held.number), (
        lambda k: setattr(held, "number", [2.0, math.nan][k - 1])
    )


@holder
def large_integer(patch: pytest.MonkeyPatch) -> Any:
    held: Any = types.SimpleNamespace(number=2**53)
    return (lambda: float(held.number % 7 + 1)), (lambda k: setattr(held, "number", 2**53 + k))


@holder
def complex_number(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace(number=1.5 + 1j)
    return of_setter(lambda: held.number.real, lambda v: setattr(held, "number", complex(v, 1.0)))


@holder
def none_becomes_number(patch: pytest.MonkeyPatch) -> Any:
    held: Any = types.SimpleNamespace(number=None)
    return (lambda: 1.0 if held.number is None else held.number), (
        lambda k: setattr(held, "number", [2.0, None][k - 1])
    )


@holder
def text(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace(text="")
    return of_setter(lambda: float(held.text), lambda v: setattr(held, "text", str(v)))


@holder
def text_branch(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace(mode="mean")
    return (lambda: {"mean": 1.0, "sum": 3.0}[held.mode]), (lambda k: setattr(held, "mode", ["sum", "mean"][k - 1]))


@holder
def formatted_text(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace(number=1.0)
    return of_setter(lambda: float(f"{held.number:.1f}"), lambda v: setattr(held, "number", v))


@holder
def template_text(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace(template=string.Template("$n"), number="1.5")
    return of_setter(lambda: float(held.template.substitute(n=held.number)), lambda v: setattr(held, "number", str(v)))


@holder
def class_attribute(patch: pytest.MonkeyPatch) -> Any:
    class Settings:
        number = 0.0

    return of_setter(lambda: Settings.number, lambda v: setattr(Settings, "number", v))


@holder
def class_attribute_through_instance(patch: pytest.MonkeyPatch) -> Any:
    class Settings:
        number = 0.0

    held = Settings()
    return of_setter(lambda: held.number, lambda v: setattr(Settings, "number", v))


@holder
def base_class_attribute(patch: pytest.MonkeyPatch) -> Any:
    class Base:
        number = 0.0

    class Settings(Base):
        pass

    held = Settings()
    return of_setter(lambda: held.number, lambda v: setattr(Base, "number", v))


@holder
def shadowed_class_attribute(patch: pytest.MonkeyPatch) -> Any:
    class Base:
        number = 1.5

    class Settings(Base):
        pass

    held = Settings()
    return (lambda: held.number), (lambda k: setattr([Settings, held][k - 1], "number", 1.5 + k))


@holder
def metaclass_attribute(patch: pytest.MonkeyPatch) -> Any:
    class Meta(type):
        number = 0.0

    class Settings(metaclass=Meta):
        pass

    return of_setter(lambda: Settings.number, lambda v: setattr(Meta, "number", v))


@holder
def metaclass_property(patch: pytest.MonkeyPatch) -> Any:
    held = [0.0]

    class Meta(type):
        @property
        def number(cls) -> float:
            return held[0]

    class Settings(metaclass=Meta):
        pass

    return of_setter(lambda: Settings.number, lambda v: held.__setitem__(0, v))


@holder
def class_bases_replaced(patch: pytest.MonkeyPatch) -> Any:
    class One:
        number = 1.5

    class Two:
        number = 2.5

    class Settings(One):
        pass

    held = Settings()
    return (lambda: held.number), (lambda k: setattr(Settings, "__bases__", ([Two, One][k - 1],)))


@holder
def class_of_an_object_replaced(patch: pytest.MonkeyPatch) -> Any:
    class One:
        number = 1.5

    class Two:
        number = 2.5

    held = One()
    return (lambda: held.number), (lambda k: setattr(held, "__class__", [Two, One][k - 1]))


@holder
def property_of_an_object(patch: pytest.MonkeyPatch) -> Any:
    class Settings:
        _number = 0.0

        @property
        def number(self) -> float:
            return self._number

    held = Settings()
    return of_setter(lambda: held.number, lambda v: setattr(held, "_number", v))


@holder
def property_replaced(patch: pytest.MonkeyPatch) -> Any:
    class Settings:
        pass

    held: Any = Settings()
    return of_setter(lambda: held.number, lambda v: setattr(Settings, "number", property(lambda self: v)))


@holder
def cached_property(patch: pytest.MonkeyPatch) -> Any:
    source = [0.0]

    class Settings:
        @functools.cached_property
        def number(self) -> float:
            return source[0]

    held = Settings()

    def write(value: float) -> None:
        source[0] = value
        vars(held).pop("number", None)

    return of_setter(lambda: held.number, write)


@holder
def descriptor(patch: pytest.MonkeyPatch) -> Any:
    class Number:
        value = 0.0

        def __get__(self, instance: object, owner: type) -> float:
            return self.value

    number = Number()

    class Settings:
        held = number

    held = Settings()
    return of_setter(lambda: held.held, lambda v: setattr(number, "value", v))


@holder
def data_descriptor(patch: pytest.MonkeyPatch) -> Any:
    values: dict[int, float] = {}

    class Number:
        def __get__(self, instance: object, owner: type) -> float:
            return values[id(instance)]

        def __set__(self, instance: object, value: float) -> None:
            values[id(instance)] = value

    class Settings:
        number = Number()

    held = Settings()
    return of_setter(lambda: held.number, lambda v: setattr(held, "number", v))


@holder
def slots(patch: pytest.MonkeyPatch) -> Any:
    class Settings:
        __slots__ = ("number",)

        def __init__(self) -> None:
            self.number = 0.0

    held = Settings()
    return of_setter(lambda: held.number, lambda v: setattr(held, "number", v))


@holder
def getattr_method(patch: pytest.MonkeyPatch) -> Any:
    inner: dict[str, float] = {}

    class Settings:
        def __getattr__(self, name: str) -> float:
            return inner[name]

    held = Settings()
    return of_setter(lambda: held.number, lambda v: inner.update(number=v))


@holder
def getattribute_method(patch: pytest.MonkeyPatch) -> Any:
    inner: dict[str, float] = {}

    class Settings:
        def __getattribute__(self, name: str) -> Any:
            return inner[name] if name == "number" else object.__getattribute__(self, name)

    held = Settings()
    return of_setter(lambda: held.number, lambda v: inner.update(number=v))


@holder
def class_method(patch: pytest.MonkeyPatch) -> Any:
    class Settings:
        number = 0.0

        @classmethod
        def read(cls) -> float:
            return cls.number

    return of_setter(lambda: Settings.read(), lambda v: setattr(Settings, "number", v))


@holder
def static_method_replaced(patch: pytest.MonkeyPatch) -> Any:
    class Settings:
        @staticmethod
        def read() -> float:
            return 0.0

    return of_setter(lambda: Settings.read(), lambda v: setattr(Settings, "read", staticmethod(lambda: v)))


@holder
def method_replaced_on_class(patch: pytest.MonkeyPatch) -> Any:
    class Settings:
        def read(self) -> float:
            return 0.0

    held = Settings()
    return of_setter(lambda: held.read(), lambda v: setattr(Settings, "read", lambda self: v))


@holder
def method_replaced_on_instance(patch: pytest.MonkeyPatch) -> Any:
    class Settings:
        def read(self) -> float:
            return 1.5

    held = Settings()
    return (lambda: held.read()), (lambda k: setattr(held, "read", lambda: 1.5 + k))


@holder
def callable_object(patch: pytest.MonkeyPatch) -> Any:
    class Scale:
        number = 0.0

        def __call__(self) -> float:
            return self.number

    held = Scale()
    return of_setter(held, lambda v: setattr(held, "number", v))


def _special(name: str, use: Callable[[Any], float], kind: Callable[[float], Any] = float) -> Holder:
    def build(patch: pytest.MonkeyPatch) -> Any:
        number = [1.5]

        class Special:
            pass

        setattr(Special, name, lambda self, *args: kind(number[0]))
        held = Special()
        return of_setter(lambda: use(held), lambda v: number.__setitem__(0, v))

    return build


HOLDERS |= {
    "special_float": _special("__float__", float),
    "special_index": _special("__index__", lambda held: float(operator.index(held)), int),
    "special_len": _special("__len__", lambda held: float(len(held)), int),
    "special_bool": _special("__bool__", lambda held: 2.0 if held else 1.0, lambda v: v > 2),
    "special_contains": _special("__contains__", lambda held: 2.0 if 1 in held else 1.0, lambda v: v > 2),
    "special_eq": _special("__eq__", lambda held: 2.0 if held == 1 else 1.0, lambda v: v > 2),
    "special_lt": _special("__lt__", lambda held: 2.0 if held < 1 else 1.0, lambda v: v > 2),
    "special_iter": _special("__iter__", lambda held: sum(held), lambda v: iter([v])),
    "special_getitem": _special("__getitem__", lambda held: held[0]),
    "special_mul": _special("__mul__", lambda held: held * 1.0),
    "special_rmul": _special("__rmul__", lambda held: 1.0 * held),
    "special_neg": _special("__neg__", lambda held: -held),
    "special_str": _special("__str__", lambda held: float(str(held)), str),
    "special_hash": _special("__hash__", lambda held: float(hash(held)), int),
    "special_round": _special("__round__", lambda held: float(round(held)), int),
    "special_enter": _special("__enter__", lambda held: held.__enter__()),
}


@holder
def subclass_of_float(patch: pytest.MonkeyPatch) -> Any:
    class Number(float):
        factor = 1.0

        def __mul__(self, other: Any) -> Any:
            return float(self) * self.factor * other

        __rmul__ = __mul__

    held = types.SimpleNamespace(number=Number(1.0))
    return of_setter(lambda: held.number * 1.0, lambda v: setattr(held.number, "factor", v))


class Mode(enum.Enum):
    LOW = 1.5
    HIGH = 2.5


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Flags(enum.Flag):
    ONE = 1
    TWO = 2


@holder
def enum_member(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace(mode=Mode.LOW)
    return (lambda: held.mode.value), (lambda k: setattr(held, "mode", [Mode.HIGH, Mode.LOW][k - 1]))


@holder
def enum_value_changed(patch: pytest.MonkeyPatch) -> Any:
    return (lambda: Mode.LOW.value), (lambda k: patch.setattr(Mode.LOW, "_value_", 1.5 + k))


@holder
def int_enum_member(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace(mode=Level.LOW)
    return (lambda: held.mode * 1.5), (lambda k: setattr(held, "mode", [Level.HIGH, Level.LOW][k - 1]))


@holder
def flag_member(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace(mode=Flags.ONE)
    return (lambda: 2.0 if Flags.TWO in held.mode else 1.0), (
        lambda k: setattr(held, "mode", [Flags.ONE | Flags.TWO, Flags.ONE][k - 1])
    )


@dataclasses.dataclass
class Numbers:
    number: float = 1.5


@dataclasses.dataclass(frozen=True)
class FrozenNumbers:
    number: float = 1.5


@dataclasses.dataclass(slots=True)
class SlottedNumbers:
    number: float = 1.5


@dataclasses.dataclass(eq=False)
class UnequalNumbers:
    number: float = 1.5


class NamedNumbers(NamedTuple):
    number: float = 1.5


@holder
def data_class(patch: pytest.MonkeyPatch) -> Any:
    held = Numbers()
    return of_setter(lambda: held.number, lambda v: setattr(held, "number", v))


@holder
def slotted_data_class(patch: pytest.MonkeyPatch) -> Any:
    held = SlottedNumbers()
    return of_setter(lambda: held.number, lambda v: setattr(held, "number", v))


@holder
def unequal_data_class(patch: pytest.MonkeyPatch) -> Any:
    held = UnequalNumbers()
    return of_setter(lambda: held.number, lambda v: setattr(held, "number", v))


@holder
def frozen_data_class(patch: pytest.MonkeyPatch) -> Any:
    held = FrozenNumbers()
    return of_setter(lambda: held.number, lambda v: object.__setattr__(held, "number", v))


@holder
def data_class_replaced(patch: pytest.MonkeyPatch) -> Any:
    held = {"numbers": FrozenNumbers()}
    return of_setter(
        lambda: held["numbers"].number,
        lambda v: held.update(numbers=dataclasses.replace(held["numbers"], number=v)),
    )


@holder
def named_tuple_replaced(patch: pytest.MonkeyPatch) -> Any:
    held = {"numbers": NamedNumbers()}
    return of_setter(lambda: held["numbers"].number, lambda v: held.update(numbers=NamedNumbers(v)))


@holder
def argparse_namespace(patch: pytest.MonkeyPatch) -> Any:
    held = argparse.Namespace()
    return of_setter(lambda: held.number, lambda v: setattr(held, "number", v))


@holder
def singleton(patch: pytest.MonkeyPatch) -> Any:
    class Settings:
        _one: Any = None
        number = 0.0

        def __new__(cls) -> Any:
            if cls._one is None:
                cls._one = super().__new__(cls)
            return cls._one

    return of_setter(lambda: Settings().number, lambda v: setattr(Settings(), "number", v))


@holder
def isinstance_registered(patch: pytest.MonkeyPatch) -> Any:
    class Base(abc.ABC):  # noqa: B024
        pass

    class Own:
        pass

    held = Own()
    return (lambda: 2.0 if isinstance(held, Base) else 1.0), (lambda k: Base.register(Own) if k == 1 else None)  # type: ignore[func-returns-value]


@holder
def isinstance_hook(patch: pytest.MonkeyPatch) -> Any:
    number = [1.5]

    class Meta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return number[0] > 2

    class Base(metaclass=Meta):
        pass

    return of_setter(lambda: 2.0 if isinstance(3, Base) else 1.0, lambda v: number.__setitem__(0, v))


@holder
def single_dispatch(patch: pytest.MonkeyPatch) -> Any:
    @functools.singledispatch
    def scale(x: object) -> float:
        return 1.5

    return (lambda: scale(1)), (lambda k: scale.register(int, lambda x: 1.5 + k))


@holder
def hasattr_of(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace()
    return (lambda: 2.0 if hasattr(held, "extra") else 1.0), (
        lambda k: setattr(held, "extra", 1) if k == 1 else delattr(held, "extra")
    )


@holder
def identity(patch: pytest.MonkeyPatch) -> Any:
    one, two = object(), object()
    held = types.SimpleNamespace(now=one)
    return (lambda: 2.0 if held.now is one else 1.0), (lambda k: setattr(held, "now", [two, one][k - 1]))


@holder
def typing_annotations(patch: pytest.MonkeyPatch) -> Any:
    class Settings:
        number: typing.Annotated[float, 1.5]

    return of_setter(
        lambda: typing.get_args(Settings.__annotations__["number"])[1],
        lambda v: Settings.__annotations__.update(number=typing.Annotated[float, v]),
    )


# References, threads, processes.


@holder
def weak_reference(patch: pytest.MonkeyPatch) -> Any:
    held = FrozenNumbers()
    reference = weakref.ref(held)

    def read() -> float:
        live = reference()
        assert live is not None
        return live.number

    return of_setter(read, lambda v: object.__setattr__(held, "number", v))


@holder
def weak_reference_dies(patch: pytest.MonkeyPatch) -> Any:
    held = [Numbers()]
    reference = weakref.ref(held[0])
    return (lambda: 1.0 if reference() is not None else 2.0), (lambda k: held.clear())


@holder
def weak_value_dictionary(patch: pytest.MonkeyPatch) -> Any:
    keep: list[Any] = [None]
    held: Any = weakref.WeakValueDictionary()

    def write(value: float) -> None:
        keep[0] = Numbers(value)
        held["numbers"] = keep[0]

    return of_setter(lambda: held["numbers"].number, write)


@holder
def weak_value_dictionary_dies(patch: pytest.MonkeyPatch) -> Any:
    keep = [UnequalNumbers()]
    held: Any = weakref.WeakValueDictionary({"numbers": keep[0]})
    return (lambda: 1.0 + len(held)), (lambda k: keep.clear())


@holder
def weak_key_dictionary(patch: pytest.MonkeyPatch) -> Any:
    key = UnequalNumbers()
    held: Any = weakref.WeakKeyDictionary({key: 1.5})
    return of_setter(lambda: held[key], lambda v: held.update({key: v}))


@holder
def weak_set(patch: pytest.MonkeyPatch) -> Any:
    keep = [UnequalNumbers()]
    held = weakref.WeakSet(keep)
    return (lambda: 1.0 + len(held)), (lambda k: keep.clear())


@holder
def weak_proxy(patch: pytest.MonkeyPatch) -> Any:
    held = UnequalNumbers()
    proxy = weakref.proxy(held)
    keep = [held]
    return of_setter(lambda: proxy.number, lambda v: setattr(keep[0], "number", v))


@holder
def weak_method(patch: pytest.MonkeyPatch) -> Any:
    class Scale:
        number = 0.0

        def read(self) -> float:
            return self.number

    held = Scale()
    method: Any = weakref.WeakMethod(held.read)
    return of_setter(lambda: method()(), lambda v: setattr(held, "number", v))


VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("VARIABLE", default=1.5)


@holder
def context_variable(patch: pytest.MonkeyPatch) -> Any:
    VARIABLE.set(0.0)
    return of_setter(lambda: VARIABLE.get(), lambda v: VARIABLE.set(v))


@holder
def context_variable_of_a_closure(patch: pytest.MonkeyPatch) -> Any:
    variable = contextvars.ContextVar("variable", default=1.5)
    return of_setter(variable.get, lambda v: variable.set(v))


@holder
def thread_local(patch: pytest.MonkeyPatch) -> Any:
    held = threading.local()
    return of_setter(lambda: held.number, lambda v: setattr(held, "number", v))


@holder
def thread_name(patch: pytest.MonkeyPatch) -> Any:
    patch.setattr(threading.current_thread(), "name", "1.5")
    return of_setter(
        lambda: float(threading.current_thread().name), lambda v: setattr(threading.current_thread(), "name", str(v))
    )


@holder
def event_set(patch: pytest.MonkeyPatch) -> Any:
    held = threading.Event()
    return (lambda: 2.0 if held.is_set() else 1.0), (lambda k: held.set() if k == 1 else held.clear())


@holder
def lock_held(patch: pytest.MonkeyPatch) -> Any:
    held = threading.Lock()
    return (lambda: 2.0 if held.locked() else 1.0), (lambda k: [held.acquire, held.release][k - 1]() and None)


@holder
def environment(patch: pytest.MonkeyPatch) -> Any:
    return of_setter(lambda: float(os.environ["NUMBER"]), lambda v: patch.setenv("NUMBER", str(v)))


@holder
def environment_getenv(patch: pytest.MonkeyPatch) -> Any:
    patch.delenv("NUMBER", raising=False)
    return (lambda: float(os.getenv("NUMBER", "1.5"))), (lambda k: patch.setenv("NUMBER", str(1.5 + k)))


@holder
def environment_presence(patch: pytest.MonkeyPatch) -> Any:
    patch.delenv("NUMBER", raising=False)
    return (lambda: 2.0 if "NUMBER" in os.environ else 1.0), (lambda k: patch.setenv("NUMBER", "1"))


@holder
def file_opened(patch: pytest.MonkeyPatch) -> Any:
    path = pathlib.Path(tempfile.mkdtemp()) / "number"

    def read() -> float:
        with open(path) as file:
            return float(file.read())

    return of_setter(read, lambda v: path.write_text(str(v)))


@holder
def file_read_text(patch: pytest.MonkeyPatch) -> Any:
    path = pathlib.Path(tempfile.mkdtemp()) / "number"
    return of_setter(lambda: float(path.read_text()), lambda v: path.write_text(str(v)))


@holder
def file_exists(patch: pytest.MonkeyPatch) -> Any:
    path = pathlib.Path(tempfile.mkdtemp()) / "stop"
    return (lambda: 2.0 if path.exists() else 1.0), (lambda k: path.touch() if k == 1 else path.unlink())


@holder
def file_exists_by_os(patch: pytest.MonkeyPatch) -> Any:
    path = pathlib.Path(tempfile.mkdtemp()) / "stop"
    name = str(path)
    return (lambda: 2.0 if os.path.exists(name) else 1.0), (lambda k: path.touch() if k == 1 else path.unlink())


@holder
def json_file(patch: pytest.MonkeyPatch) -> Any:
    path = pathlib.Path(tempfile.mkdtemp()) / "config.json"
    return of_setter(
        lambda: json.loads(path.read_text())["number"], lambda v: path.write_text(json.dumps({"number": v}))
    )


@holder
def json_text(patch: pytest.MonkeyPatch) -> Any:
    held = {"text": ""}
    return of_setter(lambda: json.loads(held["text"])["number"], lambda v: held.update(text=json.dumps({"number": v})))


@holder
def string_io(patch: pytest.MonkeyPatch) -> Any:
    held = io.StringIO()

    def write(value: float) -> None:
        held.seek(0)
        held.truncate()
        held.write(str(value))

    return of_setter(lambda: float(held.getvalue()), write)


@holder
def config_parser(patch: pytest.MonkeyPatch) -> Any:
    held = configparser.ConfigParser()
    held.add_section("s")
    return of_setter(lambda: held.getfloat("s", "number"), lambda v: held.set("s", "number", str(v)))


@holder
def database(patch: pytest.MonkeyPatch) -> Any:
    held = sqlite3.connect(":memory:", check_same_thread=False)
    patch.setitem(globals(), "_connection", held)
    held.execute("create table t (number real)")

    def write(value: float) -> None:
        held.execute("delete from t")
        held.execute("insert into t values (?)", (value,))

    read, change = of_setter(lambda: held.execute("select number from t").fetchone()[0], write)
    patch.callback(held.close) if hasattr(patch, "callback") else None
    return read, change


@holder
def wall_clock(patch: pytest.MonkeyPatch) -> Any:
    start = [time.time() + 1e6]
    return (lambda: 2.0 if time.time() > start[0] else 1.0), (
        lambda k: start.__setitem__(0, time.time() + [-1e6, 1e6][k - 1])
    )


@holder
def monotonic_clock(patch: pytest.MonkeyPatch) -> Any:
    # What a clock said first decides: a graph of that would never see time go on.
    limit = time.monotonic() + 1e6
    held = [limit]
    return (lambda: 2.0 if time.monotonic() > held[0] else 1.0), (lambda k: held.__setitem__(0, [0.0, limit][k - 1]))


@holder
def date_and_time(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace(when=datetime.datetime(2020, 1, 1))
    return (lambda: held.when.year - 2018.5), (lambda k: setattr(held, "when", datetime.datetime(2020 + k, 1, 1)))


@holder
def decimal_number(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace(number=decimal.Decimal("1.5"))
    return of_setter(lambda: float(held.number), lambda v: setattr(held, "number", decimal.Decimal(str(v))))


@holder
def decimal_precision(patch: pytest.MonkeyPatch) -> Any:
    context = decimal.getcontext()
    patch.setattr(context, "prec", 5)
    return (lambda: float(decimal.Decimal(1) / decimal.Decimal(3))), (lambda k: setattr(context, "prec", 5 - k))


@holder
def fraction(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace(number=fractions.Fraction(3, 2))
    return of_setter(lambda: float(held.number), lambda v: setattr(held, "number", fractions.Fraction(v)))


@holder
def recursion_limit(patch: pytest.MonkeyPatch) -> Any:
    limit = sys.getrecursionlimit()
    held = [limit]
    return (lambda: 1.0 + (sys.getrecursionlimit() > limit) + held[0] * 0), (
        lambda k: sys.setrecursionlimit(limit + 1 if k == 1 else limit)
    )


@holder
def logger_level(patch: pytest.MonkeyPatch) -> Any:
    logger = logging.getLogger("the run's own")
    logger.setLevel(logging.WARNING)
    return (lambda: 2.0 if logger.isEnabledFor(logging.DEBUG) else 1.0), (
        lambda k: logger.setLevel([logging.DEBUG, logging.WARNING][k - 1])
    )


@holder
def callers_local(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace(number=1.5)

    def read() -> float:
        return sys._getframe().f_globals.get("GLOBAL", 0.0) + held.number

    return of_setter(read, lambda v: setattr(held, "number", v))


# Random numbers.


@holder
def python_random(patch: pytest.MonkeyPatch) -> Any:
    return (lambda: 1.0 + random.random()), (lambda k: random.seed(k))


@holder
def own_random(patch: pytest.MonkeyPatch) -> Any:
    held = random.Random(0)
    return (lambda: 1.0 + held.random()), (lambda k: held.seed(k))


@holder
def random_choice(patch: pytest.MonkeyPatch) -> Any:
    return (lambda: random.choice([1.0, 2.0, 3.0])), (lambda k: random.seed(k))


@holder
def random_integer(patch: pytest.MonkeyPatch) -> Any:
    return (lambda: float(random.randint(1, 9))), (lambda k: random.seed(k))


@holder
def numpy_random(patch: pytest.MonkeyPatch) -> Any:
    return (lambda: 1.0 + float(np.random.rand())), (lambda k: np.random.seed(k))


@holder
def numpy_generator(patch: pytest.MonkeyPatch) -> Any:
    held = [np.random.default_rng(0)]
    return (lambda: 1.0 + held[0].random()), (lambda k: held.__setitem__(0, np.random.default_rng(k)))


@holder
def torch_random(patch: pytest.MonkeyPatch) -> Any:
    return (lambda: torch.rand(())), (lambda k: torch.manual_seed(k) and None)


@holder
def torch_random_state(patch: pytest.MonkeyPatch) -> Any:
    states = [torch.get_rng_state()]
    return (lambda: torch.rand(())), (lambda k: torch.set_rng_state(states[0]))


@holder
def torch_generator(patch: pytest.MonkeyPatch) -> Any:
    held = torch.Generator().manual_seed(0)
    return (lambda: torch.rand((), generator=held)), (lambda k: held.manual_seed(k) and None)


@holder
def torch_seed_inside(patch: pytest.MonkeyPatch) -> Any:
    seed = [1]

    def read() -> Tensor:
        torch.manual_seed(seed[0])
        return torch.rand(())

    return read, lambda k: seed.__setitem__(0, k)


@holder
def torch_initial_seed(patch: pytest.MonkeyPatch) -> Any:
    torch.manual_seed(1)
    return (lambda: float(torch.initial_seed())), (lambda k: torch.manual_seed(1 + k) and None)


# numpy and tensors.


@holder
def numpy_item(patch: pytest.MonkeyPatch) -> Any:
    held = np.zeros(3)
    return of_setter(lambda: float(held[1]), lambda v: held.__setitem__(1, v))


@holder
def numpy_zero_dimensional(patch: pytest.MonkeyPatch) -> Any:
    held = np.array(0.0)
    return of_setter(lambda: held.item(), lambda v: held.__setitem__((), v))


@holder
def numpy_scalar(patch: pytest.MonkeyPatch) -> Any:
    held = [np.float64(0.0)]
    return of_setter(lambda: held[0], lambda v: held.__setitem__(0, np.float64(v)))


@holder
def numpy_float32_scalar(patch: pytest.MonkeyPatch) -> Any:
    held = [np.float32(0.0)]
    return of_setter(lambda: float(held[0]) * 1.1, lambda v: held.__setitem__(0, np.float32(v + 0.1)))


@holder
def numpy_integer_scalar(patch: pytest.MonkeyPatch) -> Any:
    held = [np.int64(1)]
    return (lambda: float(held[0])), (lambda k: held.__setitem__(0, np.int64(1 + k)))


@holder
def numpy_as_tensor(patch: pytest.MonkeyPatch) -> Any:
    held = np.zeros(3, dtype=np.float32)
    return of_setter(lambda: torch.from_numpy(held).sum(), lambda v: held.__setitem__(1, v))


@holder
def numpy_tensor_copied(patch: pytest.MonkeyPatch) -> Any:
    held = np.zeros(3, dtype=np.float32)
    return of_setter(lambda: torch.tensor(held).sum(), lambda v: held.__setitem__(1, v))


@holder
def numpy_sum(patch: pytest.MonkeyPatch) -> Any:
    held = np.zeros(3)
    return of_setter(lambda: float(held.sum()), lambda v: held.__setitem__(1, v))


@holder
def numpy_large(patch: pytest.MonkeyPatch) -> Any:
    held = np.zeros(400_000, dtype=np.float32)
    return of_setter(lambda: float(held[333_333]), lambda v: held.__setitem__(333_333, v))


@holder
def numpy_structured(patch: pytest.MonkeyPatch) -> Any:
    held = np.zeros(3, dtype=[("number", "f8")])
    return of_setter(lambda: float(held["number"][1]), lambda v: held["number"].__setitem__(1, v))


@holder
def numpy_object_array(patch: pytest.MonkeyPatch) -> Any:
    held = np.array([1.5, None], dtype=object)
    return of_setter(lambda: held[0], lambda v: held.__setitem__(0, v))


@holder
def tensor_in_place(patch: pytest.MonkeyPatch) -> Any:
    held = torch.zeros(())
    return of_setter(lambda: held, lambda v: held.fill_(v))


@holder
def tensor_replaced(patch: pytest.MonkeyPatch) -> Any:
    held = [torch.zeros(())]
    return of_setter(lambda: held[0], lambda v: held.__setitem__(0, torch.tensor(v)))


@holder
def tensor_global_replaced(patch: pytest.MonkeyPatch) -> Any:
    return of_setter(lambda: GLOBAL, lambda v: patch.setitem(globals(), "GLOBAL", torch.tensor(v)))


@holder
def tensor_data_replaced(patch: pytest.MonkeyPatch) -> Any:
    held = torch.zeros(())
    return of_setter(lambda: held, lambda v: setattr(held, "data", torch.tensor(v)))


@holder
def tensor_item(patch: pytest.MonkeyPatch) -> Any:
    held = torch.zeros(())
    return of_setter(lambda: held.item(), lambda v: held.fill_(v))


@holder
def tensor_to_list(patch: pytest.MonkeyPatch) -> Any:
    held = torch.zeros(3)
    return of_setter(lambda: held.tolist()[1], lambda v: held.__setitem__(1, v))


@holder
def tensor_as_boolean(patch: pytest.MonkeyPatch) -> Any:
    held = torch.zeros(())
    return of_setter(lambda: 2.0 if held > 2 else 1.0, lambda v: held.fill_(v))


@holder
def tensor_attribute(patch: pytest.MonkeyPatch) -> Any:
    held: Any = torch.ones(())
    return of_setter(lambda: held * held.factor, lambda v: setattr(held, "factor", v))


@holder
def tensor_shape(patch: pytest.MonkeyPatch) -> Any:
    held = [torch.ones(2)]
    return (lambda: held[0].sum() + held[0].shape[0]), (lambda k: held.__setitem__(0, torch.ones(2 + k)))


@holder
def tensor_type(patch: pytest.MonkeyPatch) -> Any:
    held = [torch.tensor(1.1)]
    return (lambda: held[0]), (
        lambda k: held.__setitem__(0, torch.tensor(1.1, dtype=[torch.float64, torch.bfloat16][k - 1]))
    )


@holder
def tensor_strides(patch: pytest.MonkeyPatch) -> Any:
    held = [torch.arange(6.0).reshape(2, 3)]
    return (lambda: held[0].stride(0) + held[0].sum()), (lambda k: held.__setitem__(0, held[0].t().contiguous().t()))


@holder
def tensor_view_of_another(patch: pytest.MonkeyPatch) -> Any:
    base = torch.zeros(4)
    held = base[2]
    return of_setter(lambda: held, lambda v: base.__setitem__(2, v))


@holder
def tensor_shares_numpy(patch: pytest.MonkeyPatch) -> Any:
    base = np.zeros(4, dtype=np.float32)
    held = torch.from_numpy(base)
    return of_setter(lambda: held[2], lambda v: base.__setitem__(2, v))


@holder
def tensors_in_a_dict(patch: pytest.MonkeyPatch) -> Any:
    held = {f"t{i}": torch.ones(()) for i in range(30)}
    return of_setter(lambda: sum(held.values()), lambda v: held.update(t7=torch.tensor(v)))


@holder
def tensor_aliased_later(patch: pytest.MonkeyPatch) -> Any:
    held = [torch.ones(2), torch.ones(2)]

    def read() -> Tensor:
        one = held[0].clone() if held[0] is held[1] else held[0] * 2
        return (one + held[1]).sum()

    return read, lambda k: held.__setitem__(1, held[0] if k == 1 else torch.ones(2))


@holder
def tensor_becomes_parameter(patch: pytest.MonkeyPatch) -> Any:
    held: list[Any] = [torch.ones(())]
    return (lambda: held[0] * (2.0 if isinstance(held[0], nn.Parameter) else 1.0)), (
        lambda k: held.__setitem__(0, nn.Parameter(torch.ones(()), requires_grad=False))
    )


@holder
def running_mean_in_a_dict(patch: pytest.MonkeyPatch) -> Any:
    held = {"mean": torch.ones(())}

    def read() -> Tensor:
        held["mean"] = held["mean"] * 0.9 + 0.2
        return held["mean"]

    return read, lambda k: held.update(mean=torch.tensor(float(k)))


@holder
def running_mean_in_place(patch: pytest.MonkeyPatch) -> Any:
    held = torch.ones(())

    def read() -> Tensor:
        held.mul_(0.9).add_(0.2)
        return held.clone()

    return read, lambda k: (held.fill_(float(k)), None)[1]


@holder
def tensor_default_dtype_made(patch: pytest.MonkeyPatch) -> Any:
    held = [1.1]
    return of_setter(lambda: torch.tensor(held[0] + 0.1), lambda v: held.__setitem__(0, v))


@holder
def tensor_made_of_a_list(patch: pytest.MonkeyPatch) -> Any:
    held = [1.1, 2.2]
    return of_setter(lambda: torch.tensor(held).sum(), lambda v: held.__setitem__(1, v))


@holder
def tensor_full_of_a_number(patch: pytest.MonkeyPatch) -> Any:
    held = [1.1]
    return of_setter(lambda: torch.full((2,), held[0] / 3).sum(), lambda v: held.__setitem__(0, v))


@holder
def number_in_arithmetic(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace(number=1.5)
    return of_setter(
        lambda: math.exp(-held.number) + held.number**0.5 + math.sin(held.number) / 3,
        lambda v: setattr(held, "number", v),
    )


@holder
def number_in_floor_and_modulo(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace(number=1.5)
    return of_setter(
        lambda: held.number // 0.7 + held.number % 0.7 + round(held.number, 1) + int(held.number),
        lambda v: setattr(held, "number", v),
    )


@holder
def number_as_a_size(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace(number=2)
    return (lambda: torch.arange(float(held.number)).sum() + 1.0), (lambda k: setattr(held, "number", 2 + k))


@holder
def number_as_an_index(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace(number=0)
    table = torch.tensor([1.0, 2.0, 3.0])
    return (lambda: table[held.number]), (lambda k: setattr(held, "number", k))


@holder
def number_as_an_exponent(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace(number=2.0)
    table = torch.tensor([1.1, 2.3, 3.7])
    return (lambda: (table**held.number).sum()), (lambda k: setattr(held, "number", [2.5, 2][k - 1]))


@holder
def number_in_a_comparison(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace(number=0)

    def read() -> float:
        held.number += 1
        return 1.0 if held.number < 6 else 3.0

    return read, lambda k: None


@holder
def every_third_call(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace(number=0)

    def read() -> float:
        held.number += 1
        return 1.0 if held.number % 3 else 3.0

    return read, lambda k: None


@holder
def exponential_decay_counter(patch: pytest.MonkeyPatch) -> Any:
    held = types.SimpleNamespace(number=1.0)

    def read() -> float:
        held.number *= 0.9
        return held.number

    return read, lambda k: None


# torch's own objects.


@holder
def normal_replaced_loc(patch: pytest.MonkeyPatch) -> Any:
    held = torch.distributions.Normal(torch.tensor(0.0), torch.tensor(1.0))
    return of_setter(lambda: -held.log_prob(torch.tensor(0.3)), lambda v: setattr(held, "loc", torch.tensor(v)))


@holder
def normal_loc_in_place(patch: pytest.MonkeyPatch) -> Any:
    held = torch.distributions.Normal(torch.tensor(0.0), torch.tensor(1.0))
    return of_setter(lambda: -held.log_prob(torch.tensor(0.3)), lambda v: held.loc.fill_(v))


@holder
def normal_sample(patch: pytest.MonkeyPatch) -> Any:
    held = torch.distributions.Normal(torch.tensor(0.0), torch.tensor(1.0))
    return of_setter(lambda: held.rsample() + held.scale, lambda v: setattr(held, "scale", torch.tensor(v)))


@holder
def categorical(patch: pytest.MonkeyPatch) -> Any:
    held = [torch.distributions.Categorical(logits=torch.ones(3))]
    return of_setter(
        lambda: held[0].entropy() + 1,
        lambda v: held.__setitem__(0, torch.distributions.Categorical(logits=torch.tensor([1.0, v, 0.0]))),
    )


@holder
def teacher_parameters(patch: pytest.MonkeyPatch) -> Any:
    teacher = nn.Linear(2, 1)

    def write(value: float) -> None:
        with torch.no_grad():
            teacher.weight.fill_(value)

    return of_setter(lambda: teacher(torch.ones(1, 2)).sum().detach(), write)


@holder
def teacher_layer_replaced(patch: pytest.MonkeyPatch) -> Any:
    teacher = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

    def change(k: int) -> None:
        teacher[0] = nn.Linear(2, 2)

    def read() -> Tensor:
        with torch.no_grad():
            return 2 + teacher(torch.ones(1, 2)).sum()

    return read, change


@holder
def teacher_mode(patch: pytest.MonkeyPatch) -> Any:
    teacher = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))

    def read() -> Tensor:
        with torch.no_grad():
            return 2 + teacher(torch.ones(1, 2)).sum()

    return read, lambda k: teacher.train(k == 2) and None


@holder
def teacher_number(patch: pytest.MonkeyPatch) -> Any:
    teacher = nn.Sequential(nn.Linear(2, 2), nn.LeakyReLU(0.1))
    teacher.requires_grad_(False)
    return of_setter(lambda: 2 + teacher(-torch.ones(1, 2)).sum(), lambda v: setattr(teacher[1], "negative_slope", v))


@holder
def teacher_replaced(patch: pytest.MonkeyPatch) -> Any:
    held = {"teacher": nn.Linear(2, 1)}

    def read() -> Tensor:
        with torch.no_grad():
            return 2 + held["teacher"](torch.ones(1, 2)).sum()

    return read, lambda k: held.update(teacher=nn.Linear(2, 1))


@holder
def loss_module_number(patch: pytest.MonkeyPatch) -> Any:
    criterion = nn.HuberLoss(delta=1.0)
    return of_setter(lambda: criterion(torch.tensor(5.0), torch.tensor(0.0)), lambda v: setattr(criterion, "delta", v))


@holder
def loss_module_weight(patch: pytest.MonkeyPatch) -> Any:
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0]))
    return of_setter(
        lambda: 1 + criterion(torch.tensor([[0.5, 0.1], [0.2, 0.3]]), torch.tensor([0, 1])),
        lambda v: setattr(criterion, "weight", torch.tensor([1.0, v])),
    )


@holder
def loss_module_reduction(patch: pytest.MonkeyPatch) -> Any:
    criterion = nn.MSELoss()
    return (lambda: criterion(torch.tensor([2.0, 3.0]), torch.zeros(2))), (
        lambda k: setattr(criterion, "reduction", ["sum", "mean"][k - 1])
    )


class Scaled(torch.autograd.Function):
    number = 1.5

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * Scaled.number

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * Scaled.number


@holder
def autograd_function_attribute(patch: pytest.MonkeyPatch) -> Any:
    return of_setter(lambda: Scaled.apply(torch.tensor(1.0)), lambda v: patch.setattr(Scaled, "number", v))  # type: ignore[no-untyped-call]


@holder
def finfo_of_a_type(patch: pytest.MonkeyPatch) -> Any:
    held = [torch.float32]
    return (lambda: 1.0 + torch.finfo(held[0]).eps * 1e2), (
        lambda k: held.__setitem__(0, [torch.bfloat16, torch.float16][k - 1])
    )


@holder
def disabled_function(patch: pytest.MonkeyPatch) -> Any:
    held = [0.0]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def scale() -> float:
        return held[0]

    return of_setter(lambda: scale(), lambda v: held.__setitem__(0, v))


@holder
def nonstrict_function(patch: pytest.MonkeyPatch) -> Any:
    held = [0.0]

    @torch._dynamo.allow_in_graph  # type: ignore[untyped-decorator]
    def scale(x: Tensor) -> Tensor:
        return x * held[0]

    return of_setter(lambda: scale(torch.tensor(1.0)), lambda v: held.__setitem__(0, v))


@holder
def assumed_constant(patch: pytest.MonkeyPatch) -> Any:
    held = [0.0]

    @torch.compiler.assume_constant_result
    def scale() -> float:
        return held[0]

    return of_setter(lambda: scale(), lambda v: held.__setitem__(0, v))


@holder
def compiling_branch(patch: pytest.MonkeyPatch) -> Any:
    held = [0.0]
    return of_setter(
        lambda: 5.0 * held[0] if torch.compiler.is_compiling() else held[0], lambda v: held.__setitem__(0, v)
    )


@holder
def dynamo_compiling_branch(patch: pytest.MonkeyPatch) -> Any:
    held = [0.0]
    return of_setter(
        lambda: 5.0 * held[0] if torch._dynamo.is_compiling() else held[0],  # type: ignore[no-untyped-call]
        lambda v: held.__setitem__(0, v),
    )


@holder
def tracing_branch(patch: pytest.MonkeyPatch) -> Any:
    held = [0.0]
    return of_setter(
        lambda: 5.0 * held[0] if torch.jit.is_tracing() else held[0],  # type: ignore[no-untyped-call]
        lambda v: held.__setitem__(0, v),
    )


@holder
def fake_tensor_branch(patch: pytest.MonkeyPatch) -> Any:
    held = torch.zeros(())
    return of_setter(lambda: held * (1.0 if type(held) is Tensor else 5.0), lambda v: held.fill_(v))


@holder
def compiling_branch_after_the_change(patch: pytest.MonkeyPatch) -> Any:
    # The trap is closed while the graph is compared with the tape, and opens afterwards.
    held = types.SimpleNamespace(number=1.5, trap=False)

    def change(k: int) -> None:
        held.number, held.trap = 1.5 + k, True

    def read() -> float:
        return 5.0 if held.trap and torch.compiler.is_compiling() else held.number

    return read, change


@holder
def compiling_branch_in_one_term(patch: pytest.MonkeyPatch) -> Any:
    # The same number both ways at first, and another gradient: only the gradient tells.
    held = types.SimpleNamespace(number=0.0)

    def read() -> Tensor:
        return torch.tensor(1.0 + held.number) if torch.compiler.is_compiling() else torch.tensor(1.0)

    return read, lambda k: setattr(held, "number", float(k))


@holder
def parametrised_module_dict(patch: pytest.MonkeyPatch) -> Any:
    held = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})

    def read() -> Tensor:
        with torch.no_grad():
            return 3.0 + next(iter(held.values()))(torch.ones(1, 1)).sum()

    def change(k: int) -> None:
        name = next(iter(held))
        held[name] = held.pop(name)

    return read, change


@holder
def parameter_list_appended(patch: pytest.MonkeyPatch) -> Any:
    held = nn.ParameterList([nn.Parameter(torch.ones(()), requires_grad=False)])
    return (lambda: sum(held)), (
        lambda k: held.append(nn.Parameter(torch.tensor(1.0 + k), requires_grad=False)) and None
    )


@holder
def torch_size_replaced(patch: pytest.MonkeyPatch) -> Any:
    held = [torch.Size([2])]
    return (lambda: 1.0 + held[0].numel()), (lambda k: held.__setitem__(0, torch.Size([2 + k])))

"""Random numbers of a stage and microbatch, from a separate generator.

PyTorch's CPU generator belongs to the whole process: stages that run at once would draw from it in an order that
changes from run to run, and a second forward could not replay the first without disturbing the others. So every
forward of (seed, step, stage, microbatch) makes a fresh generator from these four numbers, in one process and across
ranks alike, and the second forward makes it again.

Functions that draw are intercepted where Python calls them (a ``TorchFunctionMode``: one table lookup for all others),
and run under a ``TorchDispatchMode`` that passes the generator to each ATen operation underneath. An operation that
draws without accepting a generator is computed another way (dropout kernels), or refused by name.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

_Function: TypeAlias = Callable[..., object]
_Args: TypeAlias = tuple[object, ...]
_Named: TypeAlias = "dict[str, object] | None"


class _Here(threading.local):
    stream: drawing_from | None = None


_here = _Here()
_entering = threading.Lock()
_entered = 0


def _get_state() -> Tensor:
    return _PROCESS[0]() if _here.stream is None else _here.stream.on(torch.device("cpu")).get_state()


def _set_state(state: Tensor) -> None:
    if _here.stream is None:
        _PROCESS[1](state)
    else:
        _here.stream.on(torch.device("cpu")).set_state(state)


def _get_device_states(*args: object) -> tuple[list[int], list[Tensor]]:
    devices, states = _PROCESS[2](*args)
    if _here.stream is not None:
        kind = checkpoint._infer_device_type(*args)  # type: ignore[no-untyped-call]
        states = [_here.stream.on(torch.device(kind, index)).get_state() for index in devices]
    return devices, states


def _set_device_states(devices: Sequence[int], states: Sequence[Tensor], *, device_type: str | None = None) -> None:
    if _here.stream is None:
        _PROCESS[3](devices, states, device_type=device_type)
        return
    kind = device_type or checkpoint.DefaultDeviceType.get_device_type()
    for index, state in zip(devices, states, strict=True):
        _here.stream.on(torch.device(kind, index)).set_state(state)


_PLACES = [(torch, "get_rng_state"), (torch, "set_rng_state")]
_PLACES += [(checkpoint, "get_device_states"), (checkpoint, "set_device_states")]
_PROCESS = [getattr(*place) for place in _PLACES]
_STREAMS = [_get_state, _set_state, _get_device_states, _set_device_states]


_DROPOUTS = "dropout alpha_dropout feature_alpha_dropout feature_dropout"
_DRAWING_NAMES = (
    f"{_DROPOUTS} dropout1d dropout2d dropout3d native_dropout rrelu gumbel_softmax scaled_dot_product_attention "
    "multi_head_attention_forward fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices "
    "fractional_max_pool3d_with_indices bernoulli binomial multinomial normal poisson rand rand_like randint "
    "randint_like randn randn_like randperm random cauchy exponential geometric log_normal uniform lstm gru rnn_tanh "
    "rnn_relu _sample_dirichlet _standard_gamma pca_lowrank svd_lowrank trunc_normal kaiming_uniform kaiming_normal "
    "xavier_uniform xavier_normal orthogonal sparse"
).split()


def _drawing_functions() -> frozenset[Callable[..., object]]:
    places = (torch, F, Tensor, nn.init, torch._VF)
    names = [name + ending for name in _DRAWING_NAMES for ending in ("", "_")]
    functions = (getattr(place, name, None) for place in places for name in names)
    return frozenset(function for function in functions if callable(function))


_DRAWING = _drawing_functions()


class drawing_from(TorchFunctionMode):  # noqa: N801 - a context
    """Makes this thread draw its random numbers from the stream of these four numbers until the block ends.

    >>> with drawing_from(0, 1, 2, 3):
    ...     first = torch.rand(2)
    >>> with drawing_from(0, 1, 2, 3):
    ...     torch.equal(torch.rand(2), first)
    True

    ``torch.utils.checkpoint`` saves and restores the stream of its thread meanwhile: it reads the process's generator
    else. Other threads' calls reach the process's functions as before.

    Attributes:
        hooked: the sequence numbers of the graph's nodes that were made meanwhile and have hooks, also on what they
            save, for ``SplitBackward``: another mode to see them would cost every operation a second lookup.
    """

    def __init__(self, seed: int, step: int, stage: int, microbatch: int) -> None:
        super().__init__()
        self._place = struct.pack("<Q3q", seed % 2**64, step, stage, microbatch)
        self._generators: dict[torch.device, torch.Generator] = {}
        self.hooked: set[int] = set()

    def on(self, device: torch.device) -> torch.Generator:
        """Return the stream's generator on ``device``."""
        if device not in self._generators:
            seed = int.from_bytes(hashlib.blake2b(self._place, digest_size=8).digest(), "little") >> 1
            self._generators[device] = torch.Generator(device).manual_seed(seed)
        return self._generators[device]

    def __enter__(self) -> drawing_from:
        global _entered
        with _entering:
            if not _entered:
                for (module, name), function in zip(_PLACES, _STREAMS, strict=True):
                    setattr(module, name, function)
            _entered += 1
        self._outer, _here.stream = _here.stream, self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        global _entered
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        _here.stream = self._outer
        with _entering:
            _entered -= 1
            if not _entered:
                for (module, name), function in zip(_PLACES, _PROCESS, strict=True):
                    setattr(module, name, function)

    def __torch_function__(self, func: _Function, types_: object, args: _Args = (), kwargs: _Named = None) -> object:
        compiling = torch.compiler.is_dynamo_compiling()  # it can follow neither ``_original`` nor a node's number
        if type(func) is types.FunctionType or not (compiling or type(func) in _IN_C):
            func = _original(func)
        if func is Tensor.register_hook:
            node = args[0].grad_fn  # type: ignore[attr-defined]
            if node is not None:
                self.hooked.add(node._sequence_nr())
        first = 0 if compiling else _next_sequence_nr()  # what is compiled is one node
        if func in _DRAWING:
            with _GiveGenerator(self):
                result = func(*args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        if not compiling and _saved_tensors_hooks(True) is not None:
            self.hooked.update(range(first, _next_sequence_nr()))
        return result


def _original(func: Callable[..., object]) -> Callable[..., object]:
    """Return PyTorch's own function where a user's wrapper has its name.

    In Python PyTorch's functions hand themselves to a mode by their names; the wrapper, which has called this one,
    would run a second time.
    """
    frame = sys._getframe(2)
    if frame.f_code is _HANDLE and frame.f_back is not None:
        code, its = frame.f_back.f_code, getattr(func, "__code__", None)  # an object that is called has none
        if its is None or (code is not its and not its.co_filename.startswith(_TORCH)):
            return _PYTHON.get(code) or types.FunctionType(code, frame.f_back.f_globals)
    return func


_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_next_sequence_nr = torch._C._autograd._get_sequence_nr
_IN_C = frozenset({types.BuiltinFunctionType, types.MethodDescriptorType, types.MethodWrapperType})
_TORCH = str(Path(torch.__file__).parent)
_HANDLE = handle_torch_function.__code__
_PYTHON = {one.__code__: one for one in (*vars(F).values(), *vars(nn.init).values()) if type(one) is types.FunctionType}


class _GiveGenerator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, stream: drawing_from) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stream = stream

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: _Args = (), kwargs: _Named = None
    ) -> object:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        replacement = _REPLACEMENTS.get(func)
        if replacement is not None:
            return replacement(self._stream, *args, **kwargs)
        taking = _with_generator(func)
        if taking is not None:
            kwargs["generator"] = self._stream.on(_device_of(args, kwargs))  # perhaps in place of ``None``
            return taking(*args, **kwargs)
        if not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        with self:
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise RuntimeError(_refusal(f"the operation {func}"))
        return result


def _refusal(what: str) -> str:
    return (
        f"{what} draws random numbers but takes no generator, so a pipeline could not replay them; use dropout between "
        "the operations instead, or draw inside forward with torch.rand or similar"
    )


def _device_of(args: Iterable[object], kwargs: dict[str, object]) -> torch.device:
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device)  # type: ignore[call-overload, no-any-return]
    return next((arg.device for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)), torch.device("cpu"))


@cache
def _with_generator(func: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return the operation's overload with the same parameters and a generator."""
    names = {**_parameters(func), "generator": "Optional[Generator]"}
    overloads = (getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads())
    return next((one for one in overloads if _parameters(one) == names), None)


def _parameters(func: torch._ops.OpOverload) -> dict[str, str]:
    return {argument.name: str(argument.type) for argument in func._schema.arguments}


def _draws(func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Return True if this call of an operation that may draw does; attention without dropout does not."""
    if func is torch.ops.aten._fused_sdp_choice.default:
        return False
    values = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
    return not any(
        name in defaults and not values.get(name, defaults[name]) for name in ("dropout_p", "dropout", "train")
    )


def _native_dropout(stream: drawing_from, x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    if not train:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1.0:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1.0 - p, generator=stream.on(x.device))
    return x * mask * (1.0 / (1.0 - p)), mask


_REPLACEMENTS: dict[object, Callable[..., object]] = {torch.ops.aten.native_dropout.default: _native_dropout}


def refuse_undrawable(name: str, module: nn.Module, device: torch.device) -> None:
    """Raise ``ValueError`` for a module that would draw, inside one operation, without accepting a generator."""
    if device.type == "cpu":
        return  # torch builds them there of operations that take one
    for path, child in module.named_modules(prefix=name):
        if isinstance(child, nn.RNNBase) and child.dropout > 0 and child.num_layers > 1:
            raise ValueError(_refusal(f"{path} ({type(child).__name__} with dropout={child.dropout} on {device})"))

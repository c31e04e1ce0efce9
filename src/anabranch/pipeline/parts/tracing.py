"""Records the code between a model's modules while it runs on tensors without memory.

Only the modules around a cut are opened: their ``forward`` runs here, on a copy of the model whose tensors have shapes
but no values, and each PyTorch function that it calls is recorded. Every other module is one instruction: it is called
unchanged when the program runs, with its own mode, hooks, buffers and random numbers::

    GPT2Model.forward          opened: wte, wpe, the mask, h.0 ... h.3 ... are its instructions
      h.3                      a cut begins here
        h.3.attn, h.3.mlp      not seen

Code whose effects such a run cannot see is refused, with the line of the model's code: a branch on a tensor's values,
state that the code leaves on its modules, a random number that is not PyTorch's, a tensor of unknown origin.
"""

from __future__ import annotations

import copy
import enum
import inspect
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.overrides import TorchFunctionMode

from anabranch.autodiff.moved_parameter import Elsewhere, Switch
from anabranch.autodiff.thread_modes import ThreadModes
from anabranch.errors import CaptureError
from anabranch.pipeline.parts.names import is_within
from anabranch.pipeline.parts.part_program import HeldTensor, Instruction, PartProgram, Slot, is_plain
from anabranch.pipeline.parts.signature import Signature, TensorFacts, seen_in
from anabranch.pipeline.parts.trees import build, take_apart
from anabranch.pipeline.stage.skips import SkipStore, using_store

__all__ = ["Traced", "Users", "WrongCut", "trace", "users_by_fx"]


@dataclass(slots=True)
class Users:
    """The parts that call or read the model's modules and tensors.

    Attributes:
        modules: for each module called, by name, the parts that call it.
        held: for each tensor of the model that its code reads, the parts that do.
    """

    modules: dict[str, list[int]] = field(default_factory=dict)
    held: dict[HeldTensor, list[int]] = field(default_factory=dict)

    def use(self, name: str | HeldTensor, part: int) -> None:
        """Record a use by ``part``."""
        if isinstance(name, str):
            parts = self.modules.setdefault(name, [])
        else:
            parts = self.held.setdefault(name, [])
        if part not in parts:
            parts.append(part)


@dataclass(frozen=True, slots=True)
class Traced:
    """Results of a trace: the model's code, and the parts that use its modules and tensors."""

    program: PartProgram
    users: Users


def trace(
    model: nn.Module, at: Sequence[str], signature: Signature, key: str, modes: ThreadModes, device: torch.device
) -> Traced:
    """Return the program of ``model``'s forward for inputs of this kind.

    Raises:
        CaptureError: the code between the modules cannot be seen from outside; says where and why.
    """
    recorder = _Recorder(model, at, modes)
    result: list[Traced] = []
    error: list[BaseException] = []

    def run() -> None:
        try:
            result.append(recorder.run(signature, key, device))
        except BaseException as caught:  # noqa: BLE001 - raised again in the caller's thread
            error.append(caught)

    # In its own thread, where no mode of the caller's is on.
    thread = threading.Thread(target=run, name="anabranch-split")
    thread.start()
    while thread.is_alive():  # the caller's own work, done there; looked at so that an interrupt comes through
        thread.join(0.5)
    if error:
        raise error[0]
    return result[0]


class _Recorder(TorchFunctionMode):
    """The instructions so far, and which tensor is in which slot."""

    def __init__(self, model: nn.Module, at: Sequence[str], modes: ThreadModes) -> None:
        super().__init__()
        self._model = model
        self._at = list(at)
        self._modes = modes
        self._opened = {name for cut in at for name in _around(cut)}
        self._cuts = _Cuts(at)
        self._originals = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._depth = 0
        self._slots: dict[int, Slot] = {}
        self._alive: list[object] = []
        self._count = 0
        self._names: dict[int, HeldTensor] = {}
        self._parts: list[list[Instruction]] = [[] for _ in range(len(at) + 1)]
        self._storages = _Storages()
        self._users = Users()

    def run(self, signature: Signature, key: str, device: torch.device) -> Traced:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with _none_drawn_elsewhere(), self._modes.entered(), using_store(SkipStore()):
            self._modes = ThreadModes.take()
            copied, self._names, named = _without_memory(self._model, device, fake)
            self._alive += named  # a module may drop its own, and another tensor would get the same id
            kept = [
                (HeldTensor(path, name), tensor, tensor._version)
                for path, module in copied.named_modules()
                for name, tensor in (*module._parameters.items(), *module._buffers.items())
                if tensor is not None
            ]
            for path, module in list(copied.named_modules()):
                module.__class__ = _listening(type(module), self, path)
            with fake:
                leaves = [_empty(leaf, device) if isinstance(leaf, TensorFacts) else leaf for leaf in signature.leaves]
            args, kwargs = cast("tuple[tuple[object, ...], dict[str, object]]", build(signature.tree, iter(leaves)))
            inputs = tuple(self._put(leaf).index for leaf in leaves if isinstance(leaf, Tensor))
            before = self._states(copied)
            with fake, _seeing_functions(self), self:
                output = self._called(copied, args, kwargs)
            self._check_states(before, self._states(copied))
        self._cuts.close()
        found: list[object] = []
        tree = take_apart(output, found)
        out_leaves = tuple(self._named(leaf, "the model's output") for leaf in found)
        program = PartProgram(key, inputs, tuple(map(tuple, self._parts)), tree, out_leaves, device)
        self._storages.check(program.carried, self._at)
        self._check_changed({held: tensor for held, tensor, version in kept if tensor._version != version}, program)
        return Traced(program, self._users)

    def _called(self, copied: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        try:
            return copied(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise CaptureError(f"{_line_of(error)} {_READS_VALUES}") from error
        except UnsupportedFakeTensorException as error:
            raise CaptureError(f"{_line_of(error)} cannot run on tensors without memory: {error}") from error

    # The copy.

    def called(self, path: str, module: nn.Module, run: Callable[[], object], given: object) -> object:
        """Record a call of a module, or open it."""
        if self._depth:
            return run()
        self._cuts.enter(path)
        if path in self._opened:
            _refuse_hooks(path or type(self._model).__name__, module)
            return run()
        self._users.use(path, self._part)
        try:
            return self._record(path, run, given)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise CaptureError(
                f"the module {path!r} at {_line_of(error)} depends on the values of a tensor, so the shapes of its "
                "results are not known before it runs; pass the code of the parts to split as glue="
            ) from error

    @property
    def _part(self) -> int:
        return self._cuts.part

    # The code.

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if self._depth:
            return func(*args, **kwargs)
        if func in _READS:
            raise CaptureError(f"{_place()} {_READS_VALUES}")
        return self._record(func, lambda: func(*args, **kwargs), (args, kwargs))

    def _record(self, target: str | Callable[..., object], run: Callable[[], object], given: object) -> object:
        if self._depth:
            return run()
        self._depth += 1
        try:
            return self._write_down(target, run, given)
        finally:
            self._depth -= 1

    def applied(self, function: type[torch.autograd.Function], run: Callable[[], object], given: object) -> object:
        """Record a call of a function with its own backward."""
        return self._record(_apply.__get__(None, function), run, given)

    def _write_down(self, target: str | Callable[..., object], run: Callable[[], object], given: object) -> object:
        leaves: list[object] = []
        tree = take_apart(given, leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        before = [tensor._version for tensor in tensors]
        result = run()
        changed = [tensor for tensor, version in zip(tensors, before, strict=True) if tensor._version != version]
        found: list[object] = []
        out_tree = take_apart(result, found)
        makes = any(isinstance(leaf, Tensor) for leaf in found)
        if not (isinstance(target, str) or makes or changed or target in _EFFECTS):
            return result
        what = f"{target!r}" if isinstance(target, str) else getattr(target, "__name__", str(target))
        named = tuple(self._named(leaf, what) for leaf in leaves)
        for tensor in changed:
            self._storages.change(tensor, self._part, _place())
        out_leaves = tuple(self._put(leaf) if isinstance(leaf, Tensor) else leaf for leaf in found)
        modes = ThreadModes.take()
        differing = modes if modes != self._modes else None
        self._parts[self._part].append(Instruction(target, tree, named, out_tree, out_leaves, differing, _place()))
        return result

    def _put(self, tensor: Tensor) -> Slot:
        slot = self._slots[id(tensor)] = Slot(self._count)
        self._count += 1
        self._alive.append(tensor)
        self._storages.add(slot.index, tensor)
        return slot

    def _named(self, leaf: object, what: str) -> object:
        """Return the place of a tensor, or the constant itself."""
        if isinstance(leaf, Tensor):
            held = self._names.get(id(leaf))
            if held is not None:
                self._users.use(held, self._part)
                return held
            return self._slots[id(leaf)] if id(leaf) in self._slots else self._constant(leaf, what)
        if is_plain(leaf) or (isinstance(leaf, _CONSTANTS) and not _holds_something(leaf)):
            return leaf
        hint = "; set use_cache=False" if "Cache" in type(leaf).__name__ else ""
        raise CaptureError(
            f"{_place()} passes a {type(leaf).__name__} to {what}, which may change from call to call{hint}; pass "
            "tensors, numbers, strings and containers of them between the modules around a cut"
        )

    def _constant(self, tensor: Tensor, what: str) -> Tensor:
        if isinstance(tensor, FakeTensor):
            raise CaptureError(
                f"{_place()} passes {what} a tensor that comes from no PyTorch function and no module's result; make "
                "it with torch.tensor or similar, return it from the module, or move the cut so that this code is "
                "inside a module"
            )
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise CaptureError(f"{_place()} runs inside a torch.func transform; put that into its own module")
        if id(tensor) in self._originals:
            raise CaptureError(
                f"{_place()} reaches a module of the model other than through its attributes (for example a closure), "
                "so that a copy of the model does too; call it as self.<name>"
            )
        if tensor.requires_grad:
            raise CaptureError(f"{_place()} trains a tensor that is not a parameter of the model; register it as one")
        self._alive.append(tensor)
        return tensor

    # Effects that would be missed.

    def _states(self, copied: nn.Module) -> dict[tuple[str, str], tuple[object, str]]:
        opened = ((path, module) for path, module in copied.named_modules() if path in self._opened)
        return {
            (path, name): (value, seen_in(value))
            for path, module in opened
            for name, value in (
                *vars(module).items(),
                *module._parameters.items(),
                *module._buffers.items(),
                *module._modules.items(),
            )
        }

    def _check_states(
        self, before: Mapping[tuple[str, str], tuple[object, str]], after: Mapping[tuple[str, str], tuple[object, str]]
    ) -> None:
        gone: tuple[object, str] = (object(), "")
        for path, name in {**before, **after}:
            (old, was), (new, now) = before.get((path, name), gone), after.get((path, name), gone)
            if was != now or (old is not new and not is_plain(old)):
                where = path or type(self._model).__name__
                raise CaptureError(
                    f"the forward of {where!r} sets its attribute {name!r}, which its parts could not share; keep "
                    "it in a submodule, change a buffer in place, or return it"
                )

    def _check_changed(self, changed: Mapping[HeldTensor, Tensor], program: PartProgram) -> None:
        for held, tensor in changed.items():
            parts = set(self._users.held.get(held, ()))
            for path, users in self._users.modules.items():
                parts.update(users if is_within(held.module, path) else ())
            for part, slots in enumerate(program.carried):
                parts.update((part, part + 1) if self._storages.has(tensor, slots) else ())
            if len(parts) > 1:
                raise CaptureError(
                    f"{held.module}.{held.name} is changed in place, but it is used by the parts {sorted(parts)}, "
                    "which run different microbatches at the same time; use it in one part only, or pass on a copy"
                )


def _without_memory(
    model: nn.Module, device: torch.device, fake: FakeTensorMode
) -> tuple[nn.Module, dict[int, HeldTensor], list[Tensor]]:
    """Return a copy of ``model`` whose parameters and buffers have no memory, its tensors' names, and the tensors."""
    memo: dict[int, object] = {}
    names: dict[int, HeldTensor] = {}
    named: list[Tensor] = []
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or id(tensor) in memo or type(tensor) is Switch:
                continue
            with fake:
                stride = torch.empty(tensor.size(), device="meta") if isinstance(tensor, Elsewhere) else tensor
                empty = torch.empty_strided(tensor.size(), stride.stride(), dtype=tensor.dtype, device=device)
                if isinstance(tensor, nn.Parameter):
                    empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = empty
            names[id(empty)] = HeldTensor(path, name)
            named.append(empty)
    try:
        copied = copy.deepcopy(model, memo)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CaptureError(f"{type(model).__name__} cannot be copied for tracing: {error}") from error
    for path, module in model.named_modules():
        twin = vars(copied.get_submodule(path))
        for name, kept in list(vars(module).items()):
            if isinstance(kept, Tensor) and isinstance(twin.get(name), Tensor):
                names[id(twin[name])] = HeldTensor(path, name)
                named.append(twin[name])
    return copied, names, named


class WrongCut(ValueError):
    """A name at which no part can begin."""


class _Cuts:
    """The part that runs, while modules are entered."""

    def __init__(self, at: Sequence[str]) -> None:
        self._at = list(at)
        self.part = 0

    def enter(self, path: str) -> None:
        if path not in self._at:
            return
        if path in self._at[: self.part]:
            raise WrongCut(f"{path!r} is called twice, so no stage can start there; name a module that is called once")
        if path != self._at[self.part]:
            raise WrongCut(f"at={self._at!r} are not in execution order: {path!r} runs before {self._at[self.part]!r}")
        self.part += 1

    def close(self) -> None:
        if self.part != len(self._at):
            raise WrongCut(f"{self._at[self.part]!r} is not called by the model's forward, so no stage starts there")


def users_by_fx(model: nn.Module, at: Sequence[str]) -> Users:
    """Return the parts that use the model's modules and tensors, traced by ``torch.fx`` without inputs.

    Raises:
        CaptureError: it cannot.
    """
    tracer = _Symbolic(at)
    # On a copy: symbolic tracing runs what needs no input, and leaves constants on the model.
    copied, *_ = _without_memory(model, torch.device("cpu"), FakeTensorMode(allow_non_fake_inputs=True))
    try:
        parameters = inspect.signature(model.forward).parameters.values()
        graph = tracer.trace(copied, {p.name: p.default for p in parameters if p.default is not p.empty})
    except WrongCut:
        raise
    except Exception as error:
        raise CaptureError(
            f"torch.fx cannot trace {type(model).__name__} at {_line_of(error)}: {error}; split it with example= inputs"
        ) from error
    tracer.cuts.close()
    for node in graph.nodes:
        if node.op == "get_attr":
            module, _, name = str(node.target).rpartition(".")
            tracer.users.use(HeldTensor(module, name), tracer.part_of.get(node, 0))
    return tracer.users


class _Symbolic(torch.fx.Tracer):
    def __init__(self, at: Sequence[str]) -> None:
        super().__init__()
        self.cuts = _Cuts(at)
        self.users = Users()
        self.part_of: dict[torch.fx.Node, int] = {}
        self._opened = {name for cut in at for name in _around(cut)}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened

    def call_module(
        self, m: nn.Module, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        path = self.path_of_module(m)
        self.cuts.enter(path)
        if self.is_leaf_module(m, path):
            self.users.use(path, self.cuts.part)
        return super().call_module(m, forward, args, kwargs)

    def create_node(self, *args: object, **kwargs: object) -> torch.fx.Node:
        node = super().create_node(*args, **kwargs)  # type: ignore[arg-type]
        self.part_of[node] = self.cuts.part
        return node


_CONSTANTS = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    enum.Enum,
    range,
    type,
    types.EllipsisType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.ModuleType,
)
"""Types of arguments beside tensors and plain values that mean the same in every call."""

_READS: frozenset[Callable[..., object]] = frozenset({Tensor.numpy, Tensor.__array__, Tensor.data_ptr})
"""Functions that hand a tensor's values to code that is not PyTorch's."""

_READS_VALUES = (
    "depends on the values of a tensor, which are not known before the parts run; put it into its own module, or "
    "move the cut so that it is inside one"
)

_EFFECTS: frozenset[Callable[..., object]] = frozenset({Tensor.register_hook, torch._assert})
"""Functions that return no tensor and are called for what they do."""


def _holds_something(function: object) -> bool:
    """Return True for a function bound to an object, or closing over one: of the copy, when the copy's code made it."""
    cells = getattr(function, "__closure__", None) or ()
    defaults = getattr(function, "__defaults__", None) or ()
    of = getattr(function, "__self__", None)
    return not (
        all(is_plain(cell.cell_contents) for cell in cells)
        and all(map(is_plain, defaults))
        and isinstance(of, types.ModuleType | None)
    )


class _Active(threading.local):
    recorder: _Recorder | None = None


_active = _Active()
_watching = threading.Lock()
_watchers = 0
_apply = torch.autograd.Function.__dict__["apply"]


def _seen_apply(cls: type[torch.autograd.Function], /, *args: object, **kwargs: object) -> object:
    def run() -> object:
        return _apply.__get__(None, cls)(*args, **kwargs)

    return run() if _active.recorder is None else _active.recorder.applied(cls, run, (args, kwargs))


@contextmanager
def _seeing_functions(recorder: _Recorder) -> Iterator[None]:
    """Let ``recorder`` record this thread's calls of ``torch.autograd.Function``: no mode sees them."""
    global _watchers
    with _watching:
        _watchers += 1
        torch.autograd.Function.apply = classmethod(_seen_apply)  # type: ignore[assignment, method-assign]
    _active.recorder = recorder
    try:
        yield
    finally:
        _active.recorder = None
        with _watching:
            _watchers -= 1
            if not _watchers:
                torch.autograd.Function.apply = _apply  # type: ignore[method-assign]


def _around(cut: str) -> Iterator[str]:
    """Return the names of the modules that a cut is in, the model's own first."""
    names = cut.split(".")
    return (".".join(names[:n]) for n in range(len(names)))


def _empty(facts: TensorFacts, device: torch.device) -> Tensor:
    tensor = torch.empty(facts.shape, dtype=facts.dtype, device=device)
    # Not a leaf: the model may change its inputs in place, like those of a stage.
    return tensor.requires_grad_().clone() if facts.requires_grad else tensor


def _listening(cls: type[nn.Module], recorder: _Recorder, path: str) -> type[nn.Module]:
    """Return ``cls`` with calls that go through the recorder; only the copy's modules become of it."""

    def call(self: nn.Module, *args: object, **kwargs: object) -> object:
        return recorder.called(path, self, lambda: cls.__call__(self, *args, **kwargs), (args, kwargs))

    names = {"__call__": call, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return types.new_class(cls.__name__, (cls,), exec_body=lambda body: body.update(names))


def _refuse_hooks(path: str, module: nn.Module) -> None:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks):
        raise CaptureError(
            f"{path!r} has hooks, but a cut is inside it: no part runs the whole module that they expect; put them on "
            "modules within one part"
        )


@contextmanager
def _none_drawn_elsewhere() -> Iterator[None]:
    """Refuse code that draws from Python's or NumPy's generators."""
    numpy = sys.modules.get("numpy")
    before = (random.getstate(), numpy.random.get_state()[1].tobytes() if numpy else None)
    yield
    after = (random.getstate(), numpy.random.get_state()[1].tobytes() if numpy else None)
    if before != after:
        raise CaptureError(
            "the model draws random numbers from Python's or NumPy's generator between its modules, which would be "
            "drawn once for all batches; draw with torch.rand"
        )


class _Storages:
    """The memory of the values, and its writers: two that share it cannot cross a cut to be changed after it."""

    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        self._changed: dict[int, list[tuple[int, str]]] = {}

    def add(self, slot: int, tensor: Tensor) -> None:
        self._of[slot] = _storage(tensor)

    def change(self, tensor: Tensor, part: int, place: str) -> None:
        self._changed.setdefault(_storage(tensor), []).append((part, place))

    def has(self, tensor: Tensor, slots: Sequence[int]) -> bool:
        """Return True if one of the slots shares memory with ``tensor``."""
        return any(self._of[slot] == _storage(tensor) for slot in slots)

    def check(self, carried: Sequence[Sequence[int]], at: Sequence[str]) -> None:
        for part, slots in enumerate(carried):
            sharing: dict[int, int] = {}
            for slot in slots:
                storage = self._of[slot]
                sharing[storage] = sharing.get(storage, 0) + 1
            for storage, count in sharing.items():
                later = [place for changed, place in self._changed.get(storage, ()) if changed > part]
                if count > 1 and later:
                    raise CaptureError(
                        f"{later[0]} changes in place one of {count} views of the same memory that cross the cut at "
                        f"{at[part]!r} separately; make it out of place"
                    )


def _storage(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def _place() -> str:
    """Return the innermost line of code that is neither PyTorch's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*_OURS, "<")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def _line_of(error: BaseException) -> str:
    trace, found = error.__traceback__, "the model's forward"
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith((*_OURS, "<")):
            found = f"{code.co_filename}:{trace.tb_lineno} ({code.co_name})"
        trace = trace.tb_next
    return found

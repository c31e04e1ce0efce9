"""Runs the code between a model's modules on tensors without memory, and records it.

At every call the ``forward`` of the modules around a cut runs here, the user's own Python with whatever it reads then,
on a copy of the model whose tensors have shapes but no values; each PyTorch function that it calls is recorded. Every
other module is one instruction: it is called unchanged when the program runs, with its own mode, hooks, buffers and
random numbers::

    GPT2Model.forward          opened: wte, wpe, the mask, h.0 ... h.3 ... are its instructions
      h.3                      a cut begins here
        h.3.attn, h.3.mlp      not seen

Only the form of what a module returns is remembered, by the forms of its inputs: the first time it runs here, too, and
whenever it really runs its result must have that form.

Code whose effects such a run cannot see is refused, with the line of the model's code: a branch on a tensor's values,
state that the code leaves on its modules, a random number that is not PyTorch's, a tensor of unknown origin.
"""

from __future__ import annotations

import contextvars
import copy
import enum
import functools
import gc
import inspect
import operator
import random
import sys
import traceback
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, cast

import torch
from optree import PyTreeSpec
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from anabranch.autodiff.moved_parameter import Elsewhere, Switch
from anabranch.autodiff.thread_modes import ThreadModes
from anabranch.errors import CaptureError
from anabranch.liveness.meeting import begin_call
from anabranch.pipeline.parts.part_program import (
    HeldTensor,
    Instruction,
    PartProgram,
    Signature,
    Slot,
    TensorForm,
    forms_of,
    is_plain,
)
from anabranch.pipeline.stage.partition import has_hooks
from anabranch.pipeline.stage.skips import SkipStore, declaration_of, using_store
from anabranch.tensors import flatten, unflatten

_DisableTorchFunction = torch._C.DisableTorchFunction

_Run: TypeAlias = Callable[[list[object], "PyTreeSpec", ThreadModes], object]
"""A call, given the leaves and the containers of its arguments and the thread's modes."""

Uses: TypeAlias = dict[str | HeldTensor, list[int]]
"""For each module called, and each parameter and buffer read, the parts that do."""

Form: TypeAlias = "tuple[PyTreeSpec, tuple[object, ...]]"
"""The containers of a module's result, and in them the forms and strides of its tensors, or plain values."""

_Function: TypeAlias = Callable[..., object]
_Args: TypeAlias = tuple[object, ...]
_Named: TypeAlias = Mapping[str, object] | None


def trace(
    model: nn.Module, at: Sequence[str], signatures: Sequence[Signature], modes: ThreadModes, forms: dict[object, Form]
) -> list[PartProgram]:
    """Return the programs of ``model``'s forward for inputs of these forms.

    Raises:
        CaptureError: the code between the modules cannot be seen from outside; says where and why.
    """
    recorder = _Recorder(model, at, modes, forms)
    fake = recorder.fake
    references = sys.getrefcount(fake) - 1  # that of the recorder goes
    # In its own thread, where no mode of the caller's is on; its context variables are read by the model's code.
    run = functools.partial(contextvars.copy_context().run, recorder.run, signatures)
    thread, answer = begin_call(run, "anabranch-split")
    while thread.is_alive():  # the caller's own work, done there; looked at so that an interrupt comes through
        thread.join(0.5)
    failed = answer.exception(timeout=0)
    place_of = recorder.close()
    # Frames hold the tensors. Those of the model's own errors stay, for a debugger.
    error: BaseException | None = failed if isinstance(failed, CaptureError) else None
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
    for generation in (1, 2):  # young cycles of PyTorch's own dispatch lead to it; a look at all takes longer
        if sys.getrefcount(fake) > references:  # each of its tensors has a reference to it
            gc.collect(generation)
    if sys.getrefcount(fake) > references:
        frozen = gc.get_freeze_count()
        gc.unfreeze()  # what is frozen is not looked at below
        left = [it for it in gc.get_objects() if type(it) is FakeTensor and it.fake_mode is fake]
        places = [place_of[id(tensor)] for tensor in left if id(tensor) in place_of]
        _take_out(left)
        if frozen:
            gc.freeze()
        if places and failed is None:
            raise CaptureError(
                f"{places[0]} makes a tensor that is kept outside the model (in a global dictionary or by "
                "functools.lru_cache), where it would have no values; call the model itself once with inputs of this "
                f"shape, so that it is there before, make it a buffer, or {_GLUE}"
            )
    return answer.result(timeout=0)


def _take_out(left: Sequence[object]) -> None:
    """Take tensors without memory out of the caches that the model's code has put them into.

    A global or an attribute becomes ``None``, as of ``if MASK is None: MASK = ...``; a key is removed.
    """
    inside: list[object] = list(left)
    while inside:
        ids = set(map(id, inside))
        tuples: list[object] = []
        for holder in gc.get_referrers(*inside):
            if isinstance(holder, dict):
                # A class, a module or another object whose attributes these are.
                referrers = gc.get_referrers(holder)
                owners = (one for one in referrers if isinstance(one, type) or getattr(one, "__dict__", None) is holder)
                owner = next(owners, None)
                for key in [key for key, value in dict.items(holder) if id(value) in ids]:
                    if owner is None:
                        del holder[key]
                    else:
                        setattr(owner, key, None)
            elif isinstance(holder, list) and holder is not inside and holder is not left:
                holder[:] = [value for value in holder if id(value) not in ids]
            elif isinstance(holder, tuple):
                tuples.append(holder)
            elif hasattr(holder, "cache_clear"):  # of functools.lru_cache
                holder.cache_clear()
            else:
                for name in [name for name, value in getattr(holder, "__dict__", {}).items() if id(value) in ids]:
                    setattr(holder, name, None)
        inside = tuples


class _Recorder(TorchFunctionMode):
    """The instructions so far, and which tensor is in which slot."""

    def __init__(self, model: nn.Module, at: Sequence[str], modes: ThreadModes, forms: dict[object, Form]) -> None:
        super().__init__()
        self.fake = _WithoutMemory()
        self._model, self._at, self._modes, self._forms = model, at, modes, forms
        self._opened = opened_by(at)
        tensors = (*model.parameters(), *model.buffers())
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._anchor = torch.empty(0, requires_grad=True, device="meta")
        self._depth = 0
        self._guess: int | None = None
        self._classes: dict[type[nn.Module], type[nn.Module]] = {}
        self._states: dict[str, tuple[object, ...]] = {}
        self._alive: list[object] = []
        self._places: dict[int, str] = {}
        self._seed = torch.initial_seed()

    def run(self, signatures: Sequence[Signature]) -> list[PartProgram]:
        """Return the programs: of one copy of the model, which a run that is not refused leaves as it is."""
        with (
            torch.inference_mode(False),
            _none_drawn_elsewhere(self._model),
            self._modes.entered(),
            using_store(SkipStore()),
        ):
            self._modes = ThreadModes.take()
            self._copy = _Copy(self._model, self._opened, self._device, self.fake, self._listen)
            return list(map(self._run, signatures))

    def close(self) -> dict[int, str]:
        """Let go of all tensors; return the places that made those of the last run, by their ids."""
        places = self._places
        if "_copy" in vars(self):
            self._copy.close()
        vars(self).clear()
        return places

    def _run(self, signature: Signature) -> PartProgram:
        self._part = self._count = 0
        self._slots: dict[int, Slot] = {}
        self._loose: dict[int, tuple[Tensor, int]] = {}
        self._parts: list[list[Instruction]] = [[] for _ in range(len(self._at) + 1)]
        leaves = self._all_without_memory(signature.leaves)
        args, kwargs = unflatten(signature.tree, leaves)
        inputs = tuple(self._put(leaf, "the model's input") for leaf in leaves if isinstance(leaf, Tensor))
        with self.fake, self:
            output = self._called(args, kwargs)
        self._copy.check()
        if self._part != len(self._at):
            raise ValueError(f"{self._at[self._part]!r} is not called by the model's forward: no stage starts there")
        out_leaves, tree = flatten(output)
        named = tuple(self._named(leaf, "the model's output") for leaf in out_leaves)
        parts = tuple(map(tuple, self._parts))
        return PartProgram(inputs, parts, tree, named, self._device, self._loose)

    def _called(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        try:
            return self._copy.module("")(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise CaptureError(f"{_line_of(error)} {_READS_VALUES}") from error
        except (UnsupportedFakeTensorException, UnsupportedOperatorException) as error:
            cure = f"register a form of the operation for them (torch.library.register_fake), or {_GLUE}"
            raise CaptureError(f"{_line_of(error)} cannot run on tensors without memory: {error}; {cure}") from error

    def _all_without_memory(self, forms: Iterable[object]) -> list[object]:
        return [self._without_memory(form) if isinstance(form, TensorForm) else form for form in forms]

    def _without_memory(self, form: TensorForm) -> Tensor:
        tensor = _fake_tensor(form, self._device, self.fake, trained=False)
        if not form.requires_grad:
            return tensor
        with _DisableTorchFunction(), torch.enable_grad():  # not a leaf: the code may change it in place
            return cast(Tensor, _Result.apply(self._anchor, [tensor]))  # type: ignore[no-untyped-call]

    # Modules.

    def _listen(self, path: str, module: nn.Module) -> None:
        """Let calls of a copied module come to ``_enter``."""
        cls = type(module)
        if cls.__call__ is nn.Module.__call__:
            # Where nn.Module keeps what compile() made of a module, and what its __call__ runs then. So the class
            # stays the user's.
            run: Callable[..., object] = module._call_impl
            module.__dict__["_compiled_call_impl"] = lambda *args, **kwargs: self._enter(
                path, lambda: run(*args, **kwargs), (args, kwargs)
            )
            return

        def call(module: nn.Module, *args: object, **kwargs: object) -> object:
            path = self._copy.paths[id(module)]
            return self._enter(path, lambda: cls.__call__(module, *args, **kwargs), (args, kwargs))

        if cls not in self._classes:
            names = {"__call__": call, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
            self._classes[cls] = types.new_class(cls.__name__, (cls,), exec_body=lambda body: body.update(names))
        module.__class__ = self._classes[cls]

    def _enter(self, path: str, run: Callable[[], object], arguments: object) -> object:
        """Record a call of a module, or open it."""
        if self._depth:
            return run()
        if path in self._at:
            self._begin_part(path)
        if path in self._opened:
            if has_hooks(self._copy.originals[path]):
                what = f"{path or type(self._model).__name__!r}"
                raise CaptureError(f"{what} has hooks, but a cut is inside it; put them on modules within one part")
            return run()
        self._copy.check(path)
        return self._record(path, functools.partial(self._returned, path), arguments)

    def _begin_part(self, path: str) -> None:
        following = self._at[self._part :]
        if path not in following:
            raise ValueError(f"{path!r} is called twice, so no stage starts there; name a module that is called once")
        if path != following[0]:
            raise ValueError(f"at={self._at!r} are not in execution order: {path!r} runs before {following[0]!r}")
        self._part += 1

    def _returned(self, path: str, leaves: Sequence[object], tree: PyTreeSpec, modes: ThreadModes) -> object:
        """Return a result of the form remembered, or that of a first run on tensors without memory."""
        with _DisableTorchFunction():
            if path not in self._states:
                modules = list(self._copy.originals[path].modules())
                tensors = [tensor for child in modules for tensor in _tensors_in(child)]
                state = ((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors)
                self._states[path] = (*state, *(child.training for child in modules))
            inputs = [one if isinstance(one, TensorForm) else (type(one), repr(one)) for one in forms_of(leaves)]
        key = (path, tree, modes, *inputs, self._states[path])
        form = self._forms.get(key)
        if form is None:
            # Other tensors than the code's, so that the module may keep them.
            args, kwargs = unflatten(tree, self._all_without_memory(forms_of(leaves)))
            results, out_tree = flatten(self._first_run(path, args, kwargs))
            form = out_tree, forms_of(results)
            plain = all(isinstance(x, Tensor | None) for x in results)  # numbers may be others the next time
            if plain and not any(map(declaration_of, self._copy.originals[path].modules())):
                if len(self._forms) >= _MOST_FORMS:
                    self._forms.clear()
                self._forms[key] = form
        return unflatten(form[0], self._all_without_memory(form[1]))

    def _first_run(self, path: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run a module as it is, without its hooks, on a copy of it."""
        for self._guess in (0, 1):
            self._guessed = False
            try:
                self.fake.is_in_module = True
                with torch.random.fork_rng(devices=[]):  # it may seed
                    return self._copy.whole(path)(*args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException) as raised:
                where = f"the module {path!r} at {_line_of(raised)}"
                raise CaptureError(f"{where} returns shapes that depend on the values of a tensor; {_GLUE}") from raised
            except Exception as error:
                if self._guessed and not self._guess:
                    continue
                if self._guessed:
                    read = f"{path!r} ran without values, to see the form of its results: each number that it read"
                    error.add_note(f"{read} was 0 at first, then 1; if the error comes of that, {_GLUE}")
                raise
            finally:
                self._guess, self.fake.is_in_module = None, False
                self.fake.put_versions_back()
        raise AssertionError("the second guess returns or raises")

    # The code.

    def __torch_function__(self, func: _Function, types: object, args: _Args = (), kwargs: _Named = None) -> object:
        kwargs = kwargs or {}
        if self._depth:
            return self._inside(func, args, kwargs)
        if func in _READS:
            raise CaptureError(f"{_place()} {_READS_VALUES}")
        return self._record(func, lambda *_: func(*args, **kwargs), (args, kwargs))

    def _inside(self, func: _Function, args: _Args, kwargs: Mapping[str, object]) -> object:
        """Run a function in a module that stays whole; where it reads a number, that is guessed.

        The form that comes of it is compared when the module really runs.
        """
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            if func not in _NUMBERS or self._guess is None:
                raise
            self._guessed = True
            tensor = cast(Tensor, args[0])
            with _DisableTorchFunction(), unset_fake_temporarily():
                return func(torch.full(tensor.shape, self._guess, dtype=tensor.dtype, device="cpu"))

    def _record(self, target: str | Callable[..., object], run: _Run, arguments: object) -> object:
        if torch.initial_seed() != self._seed:  # here, too: torch.random.fork_rng puts it back
            raise _drawn(_place(), "seeds PyTorch's generator")
        by_module = isinstance(target, str)
        with _DisableTorchFunction():  # reading a tensor's facts is no call of the code's
            place = _place()
            leaves, tree = flatten(arguments)
            what = f"{target!r}" if by_module else getattr(target, "__name__", str(target))
            named = tuple(self._named(leaf, what) for leaf in leaves) if by_module else ()
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            before = [] if by_module else list(map(_version, tensors))
            modes = ThreadModes.take()
        self._depth += 1
        try:
            result = run(leaves, tree, modes)
        finally:
            self._depth -= 1
        with _DisableTorchFunction():
            results, out_tree = flatten(result)
            makes = any(isinstance(leaf, Tensor) for leaf in results)
            if not (by_module or makes or list(map(_version, tensors)) != before or target in _EFFECTS):
                return result
            if not by_module:
                named = tuple(self._named(leaf, what) for leaf in leaves)
            out_leaves = tuple(self._put(leaf, place) if isinstance(leaf, Tensor) else leaf for leaf in results)
            differing = modes if modes != self._modes else None
            part = self._parts[self._part]
            part.append(Instruction(target, tree, named, out_tree, out_leaves, differing, place))
        return result

    def _put(self, tensor: Tensor, place: str) -> Slot:
        self._places[id(tensor)] = place
        slot = self._slots[id(tensor)] = Slot(self._count, TensorForm.of(tensor))
        self._count += 1
        self._alive.append(tensor)
        return slot

    def _named(self, leaf: object, what: str) -> object:
        """Return the place of a tensor, or the constant itself."""
        if isinstance(leaf, Tensor):
            name = self._copy.names.get(id(leaf)) or self._slots.get(id(leaf))
            return self._constant(leaf, what) if name is None else name
        if is_plain(leaf) or (isinstance(leaf, _CONSTANTS) and not _holds_something(leaf)):
            return leaf
        hint = "; set use_cache=False" if "Cache" in type(leaf).__name__ else ""
        raise CaptureError(
            f"{_place()} passes a {type(leaf).__name__} to {what}, which may change from call to call{hint}; pass "
            f"tensors, numbers, strings and containers of them between the modules around a cut, or {_GLUE}"
        )

    def _constant(self, tensor: Tensor, what: str) -> Tensor:
        why = None
        if isinstance(tensor, FakeTensor):
            why = f"passes {what} a tensor that comes from no PyTorch function and no module's result; make it there"
        elif torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            why = "runs inside a torch.func transform; put that into its own module"
        elif tensor.requires_grad:
            why = "trains a tensor that is not a parameter of the model; register it, return it from a module"
        if why is not None:
            raise CaptureError(f"{_place()} {why}, or {_GLUE}")
        self._loose[id(tensor)] = tensor, _version(tensor)
        return tensor


class _WithoutMemory(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Runs operations on tensors without memory, and never changes a real one that the user's code reaches.

    Attributes:
        is_in_module: a module that stays whole runs: what it changes in place stays, for it will run again.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.is_in_module = False
        self._versions: dict[int, tuple[Tensor, int]] = {}

    def __torch_dispatch__(
        self, func: _Function, types: Sequence[type], args: Sequence[object] = (), kwargs: _Named = None
    ) -> object:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor) and not self.in_kernel_invocation:
            return args[0].fake_device  # asked for so often that the general way takes a tenth of a run
        kwargs = kwargs or {}
        for tensor in _written(func, args, kwargs):
            if not isinstance(tensor, FakeTensor):
                if not self.is_in_module:
                    raise CaptureError(
                        f"{_place()} changes a tensor in place that is no parameter or buffer read from its module, "
                        f"but an attribute, a global variable or in a closure; make it a buffer read there, or {_GLUE}"
                    )
                if not tensor.is_inference():
                    self._versions.setdefault(id(tensor), (tensor, tensor._version))
                args, kwargs = tree_map_only(Tensor, self._twin, (args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[arg-type]

    def put_versions_back(self) -> None:
        """After a module: what it changed in place was a twin, and a backward asks the real one for its version."""
        for tensor, version in self._versions.values():
            torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
        self._versions.clear()

    def _twin(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.fake_tensor_converter.from_real_tensor(self, tensor)


def _written(func: object, args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[Tensor]:
    """Return the tensors that an operation changes, of a view its base."""
    if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
        for index, argument in enumerate(func._schema.arguments):
            if argument.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                for leaf in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(leaf, Tensor):
                        yield leaf if leaf._base is None else leaf._base


class _Result(torch.autograd.Function):
    """A tensor as the result of an operation, without the time that one takes on tensors without memory."""

    @staticmethod
    def forward(ctx: object, anchor: Tensor, box: list[Tensor]) -> Tensor:
        return box[0]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _tensors_in(module: nn.Module) -> Iterator[Tensor]:
    """Return the parameters and buffers of this module alone."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and type(tensor) is not Switch:
            yield tensor


def _fake_tensor(form: TensorForm, device: torch.device, fake: _WithoutMemory, *, trained: bool = True) -> FakeTensor:
    # Made directly: an operation of the mode takes thirty times as long.
    with _DisableTorchFunction(), unset_fake_temporarily():
        meta = torch.empty(form.shape, dtype=form.dtype, device="meta")
        if form.stride is not None and form.stride != meta.stride():
            meta = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")
        return FakeTensor(fake, meta.requires_grad_(form.requires_grad and trained), device)


_Listen: TypeAlias = Callable[[str, nn.Module], None]
_HOOKS = [name for name, value in vars(nn.Module()).items() if "_hooks" in name and isinstance(value, dict)]
_CONTAINERS = (dict, list, set)


class _Copy:
    """A copy of a model without hooks: of the modules around a cut with all that they hold, on tensors without memory.

    Of another module it has, once something of the module is read, the attributes; ``whole`` is a copy that can run.

    Attributes:
        originals: the model's modules, by name.
        paths: the names of the copied modules, by their ids.
        names: the names of parameters and buffers, by the ids of the model's own and of the copy's.
    """

    def __init__(
        self, model: nn.Module, opened: Collection[str], device: torch.device, fake: _WithoutMemory, listen: _Listen
    ) -> None:
        self._opened, self._device, self._fake, self._listen = opened, device, fake, listen
        self.originals = dict(model.named_modules())
        self._copies: dict[str, nn.Module] = {}
        self._seen: dict[str, list[tuple[str, object, dict[object, object]]]] = {}
        self._memo = _Memo(self)
        self._empty: dict[int, Tensor] = {}
        no_hooks: OrderedDict[object, object] = OrderedDict()
        self._hooks = dict.fromkeys(_HOOKS, no_hooks)
        self._watch("", "hooks", [no_hooks])
        self.path_of = {id(module): path for path, module in self.originals.items()}
        self.paths: dict[int, str] = {}
        self.names: dict[int, HeldTensor] = {}
        for path, module in self.originals.items():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and type(tensor) is not Switch:
                    self.names.setdefault(id(tensor), HeldTensor(path, name))
        for path in opened:
            self._memo.update((id(t), self._without_memory(t)) for t in _tensors_in(self.originals[path]))

    def module(self, path: str) -> nn.Module:
        """Return the copy of a module."""
        if path not in self._copies:
            original = self.originals[path]
            self._copies[path] = module = nn.Module.__new__(type(original))
            self.paths[id(module)] = path
            state = vars(module)
            state |= vars(original)
            state |= self._hooks
            state["_modules"] = _Children(self, original._modules)
            for name, value in vars(original).items():
                if path in self._opened and name not in (*_HOOKS, "_modules") and not is_plain(value):
                    before = {id(self._memo), *self._memo}  # under its own id, deepcopy keeps the originals alive
                    state[name] = _deep_copy(value, self._memo)
                    self._watch(path, name, [value for key, value in self._memo.items() if key not in before])
                elif type(value) in _CONTAINERS and name != "_modules":
                    state[name] = copy.copy(value)
                    self._watch(path, name, [state[name]])
            self._listen(path, module)
            self._watch(path, "", [state, state["_modules"]])
        return self._copies[path]

    def close(self) -> None:
        """Let go of all tensors, in cycles too."""
        for module in self._copies.values():
            vars(module).clear()
        vars(self).clear()

    def _without_memory(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._empty:
            with _DisableTorchFunction():
                form = TensorForm.of(tensor, strided=not isinstance(tensor, Elsewhere))
                empty = _fake_tensor(form, self._device, self._fake)
            if isinstance(tensor, nn.Parameter):
                empty._is_param = True  # what isinstance(_, nn.Parameter) asks for
            self._empty[id(tensor)] = empty
            self.names[id(empty)] = self.names[id(tensor)]
        return self._empty[id(tensor)]

    def whole(self, path: str) -> nn.Module:
        """Return a new copy of a module with all that it holds."""
        module = self.originals[path]
        memo: dict[int, object] = {}
        for child in module.modules():
            memo.update((id(tensor), self._without_memory(tensor)) for tensor in _tensors_in(child))
            memo.update((id(getattr(child, name)), OrderedDict()) for name in _HOOKS)
        whole = cast(nn.Module, _deep_copy(module, memo))
        for child in whole.modules():
            if "_orig_mod" in child._modules:  # of torch.compile, whose code knows no tensors without memory
                vars(child)["forward"] = child._orig_mod
        return whole

    # Effects that would be missed.

    def _watch(self, path: str, name: str, values: Sequence[object]) -> None:
        self._seen.setdefault(path, []).extend((name, value, _contents(value)) for value in values)

    def check(self, within: str = "") -> None:
        """Raise for an object that holds something else now: of the model, or of one of its modules."""
        inside = f"{within}."
        paths = [path for path in self._seen if not within or path == within or path.startswith(inside)]
        for owner, (name, value, before) in ((path, one) for path in paths for one in self._seen[path]):
            now = _contents(value)
            if len(now) == len(before) and all(map(operator.is_, now.values(), before.values())):
                continue
            for key in {**before, **now}:
                if not _unchanged(before.get(key, before), now.get(key, now)):
                    where, what = owner or type(self.module("")).__name__, key if name in _OF_MODULES else name
                    opened = self.originals[owner if owner in self._opened else ""]
                    line = _place() if within else _forward_of(opened)
                    raise CaptureError(
                        f"the code around {where!r} ({line}) sets its attribute {what!r}, which its parts could not "
                        f"share; keep it in a submodule, change a buffer in place, return it, or {_GLUE}"
                    )


class _Children(dict[str, "nn.Module | None"]):
    """The children of a copied module, which are copied at the first look."""

    def __init__(self, copied: _Copy, children: Mapping[str, nn.Module | None]) -> None:
        super().__init__(children)
        self._copied = copied

    def __getitem__(self, name: str) -> nn.Module | None:
        child = super().__getitem__(name)
        path = self._copied.path_of.get(id(child))
        return child if path is None else self._copied.module(path)

    def items(self) -> Iterator[tuple[str, nn.Module | None]]:  # type: ignore[override]
        return ((name, self[name]) for name in self)

    def values(self) -> Iterator[nn.Module | None]:  # type: ignore[override]
        return (self[name] for name in self)


class _Memo(dict[int, object]):
    """deepcopy's memo, which it asks for the copy of an object before it makes one."""

    def __init__(self, copied: _Copy) -> None:
        super().__init__()
        self._copied = copied

    def get(self, key: int, default: object = None) -> object:
        path = self._copied.path_of.get(key)
        return super().get(key, default) if path is None else self._copied.module(path)


_OF_MODULES = ("", "_parameters", "_buffers")


def _deep_copy(value: object, memo: dict[int, object]) -> object:
    try:
        with _SharingTensors():
            return copy.deepcopy(value, memo)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        what = f"a {type(value).__name__} that the model holds"
        raise CaptureError(f"{what} cannot be copied ({error}); keep it elsewhere, or {_GLUE}") from error


class _SharingTensors(TorchFunctionMode):
    """Copies share the tensors that are neither parameters nor buffers."""

    def __torch_function__(self, func: _Function, types: object, args: _Args = (), kwargs: _Named = None) -> object:
        return args[0] if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


def _contents(value: object) -> dict[object, object]:
    if isinstance(value, dict):
        return dict(dict.items(value))
    if isinstance(value, list | set | deque):
        return dict(enumerate(value))
    return dict(getattr(value, "__dict__", {}))


def _unchanged(before: object, now: object) -> bool:
    return before is now or (is_plain(before) and type(before) is type(now) and before == now)


# Types of arguments beside tensors and plain values that mean the same in every call.
_CONSTANTS: tuple[type, ...] = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, enum.Enum)
_CONSTANTS += (range, slice, type, types.EllipsisType, types.ModuleType)
_CONSTANTS += (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)

_READS: frozenset[Callable[..., object]] = frozenset({Tensor.numpy, Tensor.__array__, Tensor.data_ptr})
"""Functions that hand a tensor's values to code that is not PyTorch's."""

_GLUE = "give the code of the parts as glue="

_READS_VALUES = f"depends on the values of a tensor, unknown before the parts run; put it into a module, or {_GLUE}"

_NUMBERS: frozenset[Callable[..., object]] = frozenset(
    {Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__}
)
"""Functions that read a number."""

_MOST_FORMS = 4096

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


def opened_by(at: Sequence[str]) -> set[str]:
    """Return the names of the modules that a cut is in, the model's own, ``""``, too."""
    names = [cut.split(".") for cut in at]
    return {".".join(path[:n]) for path in names for n in range(len(path))}


@contextmanager
def _none_drawn_elsewhere(model: nn.Module) -> Iterator[None]:
    """Refuse code that draws from Python's or NumPy's generator or seeds PyTorch's, which is put back."""
    before, state = _generators(), torch.get_rng_state()
    try:
        yield
    finally:
        seeded = not torch.equal(torch.get_rng_state(), state)  # a draw on tensors without memory leaves it as it is
        if seeded:
            torch.set_rng_state(state)
    if seeded or _generators() != before:
        what = "seeds PyTorch's generator" if seeded else "draws random numbers from Python's or NumPy's generator"
        raise _drawn(f"the model ({_forward_of(model)})", what)


def _drawn(where: str, what: str) -> CaptureError:
    cure = f"do it inside a module, draw with torch.rand, or {_GLUE}"
    return CaptureError(f"{where} {what} between its modules, which its parts could not repeat; {cure}")


def _generators() -> tuple[object, object]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state()[1].tobytes() if numpy else None


_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")


_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def _place() -> str:
    """Return the innermost line of code that is neither PyTorch's nor ours.

    Raises:
        CaptureError: it is inside the forward of a function with a backward of its own.
    """
    frame: types.FrameType | None = sys._getframe(1)
    place = applied = None
    while frame is not None:
        code = frame.f_code
        if code is _APPLY:  # no mode sees such a call, only what its forward calls
            applied, place = frame.f_locals["cls"], None
        elif place is None and not code.co_filename.startswith(_OURS):
            place = f"{code.co_filename}:{frame.f_lineno} ({code.co_name})"
        frame = frame.f_back
    if applied is not None:
        what = f"{place} calls {applied.__qualname__}.apply, whose backward cannot be cut"
        raise CaptureError(f"{what}; put the call into a module of its own, which stays whole, or {_GLUE}")
    return place or "the model's forward"


def _forward_of(module: nn.Module) -> str:
    """Return the place of a module's own code."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return "the model's forward" if code is None else f"{code.co_filename}:{code.co_firstlineno} ({code.co_name})"


def _line_of(error: BaseException) -> str:
    trace, place = error.__traceback__, "the model's forward"
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(_OURS):
            place = f"{code.co_filename}:{trace.tb_lineno} ({code.co_name})"
        trace = trace.tb_next
    return place

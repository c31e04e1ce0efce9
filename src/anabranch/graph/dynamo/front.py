"""TorchDynamo as the front-end: the torch calls that a Python function makes, and guards on the state that it read.

::

    front(model, batch) ── guards hold ──> the program made for them ──> results; Python side effects replayed
            └──────────── guards miss ───> Dynamo reads the Python code again ──> ``make`` builds another program

Dynamo answers one question: which torch calls does this function make, and for which Python state. Programs are built
elsewhere: ``make`` gets the calls and returns the function to call in their place, once in each run.

Dynamo's defaults omit guards to save time; ``_SOUND`` turns all of them on, for the duration of a compilation.
Changes that no guard can see are refused: hooks on all modules, anomaly mode, hooks on saved tensors.

The file is long because everything that depends on Dynamo's internals is in it: a new PyTorch affects one file.
"""

from __future__ import annotations

import enum
import itertools
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch._C import _len_torch_function_stack
from torch.distributions import Distribution
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import _disable_current_modes

from anabranch.activity import Activity, during
from anabranch.autodiff import opaque
from anabranch.autodiff.boundary.crossing import Boundary, Crossed, traced_by
from anabranch.autodiff.hooks import hooked
from anabranch.errors import AnabranchError, CaptureError
from anabranch.graph.dynamo.guards.added_guards import guard_emptiness, guard_signs
from anabranch.graph.dynamo.guards.caught_lookups import caught_lookups
from anabranch.graph.dynamo.guards.compared_objects import compared_objects
from anabranch.graph.dynamo.guards.compiled_by_user import (
    compiled_refusal,
    has_compiled_methods,
    refuse_compiled_code,
    refuse_compiled_parts,
)
from anabranch.graph.dynamo.guards.faithful_values import faithful_values
from anabranch.graph.dynamo.guards.misread_calls import misread_calls
from anabranch.graph.dynamo.guards.unseen import REGISTERED, Unseen
from anabranch.graph.dynamo.guards.watched_code import WatchedCode
from anabranch.graph.dynamo.origins import closed_over
from anabranch.graph.dynamo.other_threads import unseen_by_other_threads
from anabranch.graph.dynamo.random_states import random_states_untouched
from anabranch.graph.dynamo.refusals import reason_here, refusal_of
from anabranch.graph.dynamo.silence import silent
from anabranch.graph.dynamo.slow_capture import log_if_slow
from anabranch.graph.trace.make_fx import UserMistake, WrongType, one_at_a_time, undisturbed

__all__ = ["DynamoFront", "GuardMiss", "Make", "TracedCall", "guards_hold", "mark", "mistake"]

_MOST_VARIANTS = 8

_SOUND: Mapping[str, object] = {
    "recompile_limit": _MOST_VARIANTS,
    "accumulated_recompile_limit": 1 << 16,
    "skip_nnmodule_hook_guards": False,  # hooks that are added, removed or replaced
    "skip_fsdp_guards": False,
    "skip_no_tensor_aliasing_guards_on_parameters": False,  # parameters that are tied later
    "skip_tensor_guards_with_matching_dict_tags": False,  # requires_grad_() changes no dict
    "assume_dunder_attributes_remain_unchanged": False,
    "use_recursive_dict_tags_for_guards": False,
    "guard_nn_modules": True,
    "suppress_errors": False,
    "replay_side_effects": True,
    "trace_numpy": False,  # torch's functions in place of NumPy's round differently
    "enable_dynamo_decompositions": False,  # and so do products and sums in place of addcdiv_
    "allow_rnn": True,
    "allow_unspec_int_on_nn_module": True,  # self.calls += 1
    "trace_autograd_ops": True,  # gradient penalties
    "allow_empty_graphs": True,
    "error_on_nested_fx_trace": True,
    "automatic_dynamic_shapes": True,  # for numbers that change; the shapes within one kind of batch do not
    "automatic_dynamic_local_pgo": False,  # dynamic shapes must not depend on an earlier process
    "automatic_dynamic_remote_pgo": False,
    "record_runtime_overhead": False,  # two calls of Python in each run, for profilers
    "verbose": False,
}

_EVERY_MODULE = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
)
_hooks_of_every_module = [getattr(nn.modules.module, name) for name in _EVERY_MODULE]


class GuardMiss(CaptureError):
    """No program fits the current Python state, and none may be made now; nothing has been computed."""


class _SwitchedOff(CaptureError):
    """Dynamo compiles nothing here."""


class _NotCompiled(BaseException):
    """The front was about to run as plain Python; raised before its first line."""


def mark(name: str, value: Tensor) -> Tensor:
    """``value``; in Dynamo's graph a call that names it."""
    return value.view_as(value)


def mistake(kind: str, text: str) -> Tensor:
    """Return a call that reports a user's mistake to ``make``: ``kind`` is ``"type"`` or ``"value"``."""
    return torch.empty(0, device="cpu")


@dataclass(frozen=True, slots=True)
class TracedCall:
    """Dynamo's result for one Python state.

    Attributes:
        module: the torch calls, one node each; one placeholder for each tensor or number that they take.
        names: the Python name of each placeholder, such as ``batch.x``.
        numbers: the placeholders of Python floats, which arrive as 0-dim float64 tensors.
    """

    module: fx.GraphModule
    names: tuple[str, ...]
    numbers: frozenset[int]

    def marks(self) -> dict[str, fx.Node]:
        """Return the nodes named by ``mark``, in their order."""
        return {str(node.args[0]): node for node in self.module.graph.find_nodes(op="call_function", target=mark)}

    def check(self) -> None:
        """Raise the mistake recorded by ``mistake``.

        Raises:
            UserMistake, WrongType: the user's mistake.
        """
        for node in self.module.graph.find_nodes(op="call_function", target=mistake):
            kind, text = node.args
            raise (WrongType if kind == "type" else UserMistake)(str(text))


Make: TypeAlias = "Callable[[TracedCall], Callable[..., Sequence[object]]]"
"""``make(call)`` returns a function from the placeholders' values to the outputs of ``call.module``."""


class DynamoFront:
    """``function`` run by programs that ``make`` builds, one for each Python state that it has met.

    Args:
        function: called with positional arguments. It returns values that ``mark`` and Python make of torch calls.
        make: builds a program; held weakly by Dynamo, which keeps everything.
        what: the name of ``function`` in refusals.
        settings: Dynamo's, in addition to those that make its guards complete.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        make: Make,
        *,
        what: str = "the step",
        settings: Mapping[str, object] | None = None,
    ) -> None:
        _allow_marks()
        self._function, self._make, self._what = function, make, what
        self._settings: dict[str, Any] = {**_SOUND, **(settings or {})}
        self._fronts: dict[object, _Compiled] = {}
        self._exhausted: dict[object, str] = {}
        self._may_trace = self._has_made = False
        self._code: WatchedCode | None = None
        self.traced: set[types.CodeType] = set()
        self._changes = 0
        self.when_slow: Callable[[], None] | None = None
        """Called once in a capture that takes long."""
        self.failure: BaseException | None = None
        """The error of ``make`` or of a program in the run in progress; Dynamo wraps some of it."""
        self.unseen = Unseen()

    def knows(self, kind: object) -> bool:
        """Return True if a program was made for batches of this kind."""
        return kind in self._fronts

    def forget(self) -> None:
        """Drop all programs."""
        self._fronts.clear()
        self._exhausted.clear()
        self._code = None
        self.unseen = Unseen()

    def _has_changed(self) -> bool:
        """Return True if something has changed that Dynamo's guards do not look at."""
        return self._code is not None and (self.unseen.changed() is not None or not self._code.unchanged())

    def _look_again(self, may_wait: bool) -> None:
        """Forget all programs, unless the change is that of another thread's capture, whose tracer changes nn.Module.

        Raises:
            GuardMiss: it would have to wait for that capture, and may not.
        """
        if not one_at_a_time.acquire(blocking=may_wait):
            raise GuardMiss("another thread captures a graph")
        try:
            if self._has_changed():
                self._changes += self.unseen.changed() != REGISTERED
                self.forget()
        finally:
            one_at_a_time.release()

    def run(self, kind: object, *args: object, may_trace: bool = True) -> Any:
        """``function(*args)``.

        Args:
            kind: a hint which programs to try first: arguments of one kind share a list of them. Guards decide.
            args: the function's arguments.
            may_trace: make a program if none fits; otherwise raise ``GuardMiss``.

        Raises:
            GuardMiss: no program fits, and none may be made.
            CaptureError: the function cannot be a graph; nothing has happened.
        """
        _refuse_what_guards_miss()
        if self._has_changed():
            self._look_again(may_trace)
        compiled = self._fronts.get(kind)
        if compiled is not None:
            try:
                return compiled.quick(*args)
            except _NotCompiled:
                pass
        if not may_trace:
            raise GuardMiss(f"no graph of {self._what} matches the current batch and Python values")
        return self._trace(kind, compiled, args)

    def _trace(self, kind: object, compiled: _Compiled | None, args: tuple[object, ...]) -> Any:
        _refuse_other_pytorch()
        known = self._exhausted.get(kind)
        if known is not None:
            raise CaptureError(known)
        if self._changes > _MOST_VARIANTS:
            raise CaptureError(
                f"classes or functions that {self._what} uses change from step to step; use engine='tape'"
            )
        refuse_compiled_parts([*args, *closed_over(self._function)])
        if compiled is None:
            compiled = _Compiled(self._function, _Backend(self))
        self.failure = None
        opaque.take_failure()
        torch._dynamo.symbolic_convert._import_module.cache_clear()  # a name may refer to another module now
        self._may_trace, self._has_made = True, False
        try:
            settings = torch._dynamo.config.patch(**self._settings, ignore_logging_functions=_said_once())
            slow, caught, compared, misread, faithful = (
                log_if_slow(self.when_slow),
                caught_lookups(self._refuse),
                compared_objects(self._refuse),
                misread_calls(self._refuse, self._deny),
                faithful_values(self._deny, self._refuse, self.unseen.note_state),
            )
            with (
                during(Activity.CAPTURING),
                one_at_a_time,
                opaque.failures_noted(),
                undisturbed(),
                silent(),
                settings,
                traced_by(_Forms()),
                slow,
                caught,
                compared,
                misread,
                faithful,
                _untimed(),
                unseen_by_other_threads(),
                random_states_untouched(),
            ):
                return self._twice_if_busy(compiled, args)
        except BaseException as error:  # noqa: BLE001 - what to raise in its place
            raise self._explained(error, kind) from None
        finally:
            self._may_trace = False
            self.failure = None
            if self.unseen.refused is not None:
                self.unseen.refused = None
                self._fronts.pop(kind, None)
            elif self._has_made and kind not in self._exhausted:
                self._fronts[kind] = compiled
                kinds = itertools.chain(_kinds_of(self._function, args), self.unseen.kinds)
                self._code = WatchedCode(kinds, self.traced)

    def _refuse(self, what: str) -> None:
        self.unseen.refused = what

    def _deny(self, reason: str) -> None:
        """Raise an error for code that cannot be a graph, in a way that Dynamo does not catch."""
        self.unseen.refused = reason
        self.failure = CaptureError(reason_here(reason, self._what))
        raise self.failure

    def _twice_if_busy(self, compiled: _Compiled, args: tuple[object, ...]) -> Any:
        try:
            return compiled.full(*args)
        except RuntimeError as error:
            if "symbolically trace" not in str(error):  # of another thread, which uses make_fx without our lock
                raise
        return compiled.full(*args)

    def make(self, module: fx.GraphModule) -> Callable[..., Sequence[object]]:
        """Return the function that Dynamo is to call in place of ``module``."""
        if not self._may_trace:
            raise GuardMiss(f"no graph of {self._what} matches the current batch and Python values")
        try:
            _refuse_what_is_lost()
            _guard_order()
            self.traced.update(torch._guards.TracingContext.get_traced_code() or ())
            refuse_compiled_code(self.traced)
            self.unseen.examine_code(self.traced)
            self.unseen.examine_calls(module)
            self.unseen.examine_states()
            call = _describe(module)
            call.check()
            program = self._noting(self._make(call))
            self._has_made = True
            return program
        except BaseException as error:
            self.failure = error
            raise

    def _noting(self, program: Callable[..., Sequence[object]]) -> Callable[..., Sequence[object]]:
        """``program``, which records the exceptions of its first call, in the middle of a compilation."""
        mine = weakref.ref(self)

        def run(*args: object) -> Sequence[object]:
            try:
                front = mine()
                if front is not None and front.unseen.refused is not None:
                    raise front.failure or CaptureError(
                        f"{front._what} reads {_plain_source(front.unseen.refused)}, whose changes a graph would not "
                        "notice; use engine='tape'"
                    )
                with traced_by(None):
                    return program(*args)
            except BaseException as error:
                front = mine()
                if front is not None and front._may_trace:
                    front.failure = error
                raise

        run.program = program  # type: ignore[attr-defined]
        return run

    def _explained(self, error: BaseException, kind: object) -> BaseException:
        """Return the error to raise in place of Dynamo's."""
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        failed = opaque.take_failure()
        if self.failure is not None or failed is not None:
            return self.failure or failed  # type: ignore[return-value]
        if isinstance(error, FailOnRecompileLimitHit):
            self._exhausted[kind] = (
                f"Python values that {self._what} reads change from step to step, and each change needs a new graph; "
                "pass them in the batch, make them tensors that are changed in place, or use engine='tape'"
            )
            self._fronts.pop(kind, None)
            return CaptureError(self._exhausted[kind])
        if isinstance(error, (CaptureError, AnabranchError, KeyboardInterrupt, SystemExit)):
            return error
        if isinstance(error, _NotCompiled) or "no compiled frames" in str(error):
            return _SwitchedOff(
                "torch.compile is switched off here (torch.compiler.set_stance, TORCHDYNAMO_DISABLE, a dispatch mode), "
                "but capturing needs it; switch it on, or use engine='tape'"
            )
        if isinstance(error, TorchDynamoException) or _inside_dynamo(error):
            return refusal_of(error, self._what)
        return error


class _Probe(nn.Module):
    """The module changed by the self-test."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Identity(), 1.0
        # Not random: that would change the user's random numbers.
        self.weight = nn.Parameter(torch.ones(1, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.weight * self.scale  # type: ignore[no-any-return]


class _SelfTest(threading.local):
    """True while this thread runs the self-test."""

    running = False


_self_test = _SelfTest()
_passed: bool | None = None


def guards_hold() -> bool:
    """Capture a tiny module, change it in three ways, and check whether each change is noticed."""
    probe, x = _Probe(), torch.ones(1, 1, device="cpu")
    front = DynamoFront(
        lambda model, x: mark("y", model(x)),
        lambda call: lambda *args: [torch.ones(1, 1, device="cpu")],
        what="a self-test",
    )
    front.run((), probe, x)

    def noticed() -> bool:
        try:
            front.run((), probe, x, may_trace=False)
        except GuardMiss:
            return True
        return False

    if noticed():
        return False  # a program that never fits is useless
    with hooked(probe.layer, lambda *_: None):
        found = [noticed()]
    probe.weight.requires_grad_(False)
    found.append(noticed())
    probe.weight.requires_grad_(True)
    probe.scale = 2.0
    found.append(noticed())
    return all(found)


def _refuse_other_pytorch() -> None:
    """Test Dynamo's guards once per process, before the first capture.

    Raises:
        CaptureError: they miss changes, or Dynamo is switched off.
    """
    global _passed
    if _passed is None and not _self_test.running:
        _self_test.running = True
        try:
            _passed = guards_hold()
        except _SwitchedOff:  # which says nothing about guards
            raise
        except CaptureError:
            _passed = False
        finally:
            _self_test.running = False
        if not _passed:
            warnings.warn(
                f"TorchDynamo of PyTorch {torch.__version__} does not notice all changes of Python values; "
                "steps run on the tape",
                stacklevel=2,
            )
    if _passed is False:
        raise CaptureError(
            f"TorchDynamo of PyTorch {torch.__version__} failed the self-test of its guards: a graph could be stale; "
            "use engine='tape', or the PyTorch that anabranch is tested with"
        )


class _Forms:
    """The tracer of Dynamo's part: requests only the forms of boundaries' outputs."""

    captures = True

    @contextmanager
    def outside(self) -> Iterator[None]:
        with _disable_current_modes(), torch._C.DisableTorchFunction(), traced_by(None):
            yield

    def entry(self) -> Tensor:
        return torch.empty((), requires_grad=True, device="cpu")

    def forward(self, boundary: Boundary, inputs: Sequence[Tensor | None], wants: Sequence[bool] | None) -> Crossed:
        with self.outside():
            forms = boundary.forms(inputs)
        outputs = [torch.empty(form.shape, dtype=form.dtype, device=form.device) for form in forms]
        return Crossed(outputs, None, [i for i, form in enumerate(forms) if not form.differentiable])

    def backward(
        self,
        boundary: Boundary,
        state: object,
        inputs: Sequence[Tensor | None],
        gradients: Sequence[Tensor | None],
        wants: Sequence[bool],
    ) -> Sequence[Tensor | None]:
        raise CaptureError(
            f"the loss itself differentiates through {boundary.kind} {boundary.name!r}, which a graph cannot; use "
            "engine='tape'"
        )


@contextmanager
def _untimed() -> Iterator[None]:
    """Keep Dynamo from measuring the time of guards in a block for its log: that empties the CPU's caches."""
    from torch._dynamo import guards

    space: Any = guards
    measure, space.profile_guard_manager = space.profile_guard_manager, lambda *_: 0.0
    try:
        yield
    finally:
        space.profile_guard_manager = measure


class _Compiled:
    """One copy of the front, which has its own list of programs, because Dynamo keeps them with the code object.

    The copy has its own globals too, in which Dynamo leaves the programs it made: they are freed with the copy.
    """

    def __init__(self, function: Callable[..., Any], backend: _Backend) -> None:
        from torch._C._dynamo.eval_frame import set_eval_frame

        front = _copy_of(_front_of(function))
        self._front, self._set_eval_frame = front, set_eval_frame
        options: dict[str, Any] = {"guard_filter_fn": backend.look_at_guards}
        self._compile = torch.compile(front, backend=backend, fullgraph=True, options=options)
        self._wrapped: dict[str, Callable[..., Any]] = {}
        weakref.finalize(self, _let_go, front.__code__, front.__globals__).atexit = False

    def full(self, *args: object) -> Any:
        """Run the program whose guards hold, or build one."""
        self._front.__globals__.update(self._wrapped)
        try:
            return self._compile(*args)  # type: ignore[no-untyped-call]
        finally:
            self._unwrap()

    def _unwrap(self) -> None:
        """Let ``quick`` call programs without Dynamo's two wrappers and ours, which are for compilations."""
        space = self._front.__globals__
        for name in [name for name in space if name.startswith("__compiled_fn")]:
            wrapped = space[name]
            program = getattr(getattr(wrapped, "_torchdynamo_orig_callable", None), "program", None)
            if program is not None:
                self._wrapped[name] = wrapped
                space[name] = _unhooked(program, self._set_eval_frame)

    def quick(self, *args: object) -> Any:
        """Run the program whose guards hold; ``torch._dynamo.run`` without the bookkeeping around it.

        Raises:
            _NotCompiled: no program's guards hold; nothing has happened.
        """
        prior = self._set_eval_frame(False)
        try:
            return self._front(*args)
        finally:
            self._set_eval_frame(prior)


def _unhooked(program: Callable[..., Any], set_eval_frame: Callable[[Any], Any]) -> Callable[..., Any]:
    """``program``, whose calls Dynamo does not trace; ``quick`` restores the setting."""
    from torch._dynamo.eval_frame import skip_code

    def run(*args: Any) -> Any:
        set_eval_frame(None)
        return program(*args)

    skip_code(run.__code__)
    return run


def _let_go(code: types.CodeType, space: dict[str, Any]) -> None:
    """Frees Dynamo's programs for a front.

    Its tables hold the globals of a program as long as its code lives, and the code lives as long as anything that was
    traced under it, which the globals hold.
    """
    from torch._C._dynamo.eval_frame import reset_code

    reset_code(code)
    for name in space:
        space[name] = None


def _front_of(function: Callable[..., Any]) -> Callable[..., Any]:
    def front(*args: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():  # folded away in a program
            raise _NotCompiled
        return function(*args)

    return front


def _copy_of(function: Any) -> Any:
    space = dict(function.__globals__)
    # A unique name: Dynamo remembers changing numbers by file, line and name.
    code = function.__code__.replace(co_name=f"front_{next(_fronts)}")
    return types.FunctionType(code, space, function.__name__, function.__defaults__, function.__closure__)


class _Backend:
    """The backend that receives Dynamo's calls."""

    def __init__(self, front: DynamoFront) -> None:
        self._front = weakref.ref(front)

    def __call__(self, module: fx.GraphModule, _examples: Sequence[object], **_: object) -> Callable[..., Any]:
        front = self._front()
        assert front is not None
        return front.make(module)

    def look_at_guards(self, entries: Sequence[Any]) -> list[bool]:
        """Record guards that compare a value with itself; keep all guards."""
        front = self._front()
        measured = {entry.name for entry in entries if _MEASURING & {entry.guard_type, *entry.derived_guard_types}}
        kinds: dict[type, str] = {}
        for entry in entries:
            kind_alone = entry.guard_type == "TYPE_MATCH" and entry.name not in measured
            if kind_alone and isinstance(entry.value, dict) and not _is_of_a_module(str(entry.name), front):
                guard_emptiness(entry.orig_guard, entry.value)
            compares = entry.guard_type in _COMPARING or any(kind in _COMPARING for kind in entry.derived_guard_types)
            if front is not None and entry.has_value:
                front.unseen.examine_value(str(entry.name), entry.value)
                kinds.setdefault(type(entry.value), str(entry.name))
            if compares and entry.has_value:
                guard_signs(entry.orig_guard, entry.value)
            copied = type(entry.value) in (list, set) if entry.has_value else False  # by Dynamo, to compare with
            if front is not None and compares and entry.has_value and not copied and _may_change(entry.value):
                front.unseen.refused = f"{entry.name}, a container in a tuple (use a list instead)"
        for kind, name in kinds.items():
            if front is not None and has_compiled_methods(kind):
                front.failure = compiled_refusal(f"a method of {kind.__qualname__}")
                front.unseen.refused = name
        return [True] * len(entries)


def _last_lr(self: LRScheduler) -> list[float | Tensor]:
    return self._last_lr


def _is_of_a_module(name: str, front: DynamoFront | None) -> bool:
    """Return True for dicts that every module has, and whose truth nobody requests but code that names them."""
    last = name.rpartition(".")[2]
    return last.startswith("_global_") or (last in _OF_MODULES and front is not None and not front.unseen.names(last))


_OF_MODULES = ("_modules", "_parameters", "_buffers")
_MEASURING = {"SEQUENCE_LENGTH", "DICT_KEYS_MATCH", "EMPTY_NN_MODULE_HOOKS_DICT"}
_COMPARING = ("EQUALS_MATCH", "CONSTANT_MATCH")
_UNCHANGING = (
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type, range, slice, enum.Enum, torch.dtype,
    torch.device, torch.layout, torch.memory_format, types.CodeType, types.FunctionType,
    types.BuiltinFunctionType, types.ModuleType,
)  # fmt: skip


def _may_change(value: object) -> bool:
    """Return True if a guard that compares with ``value`` itself would see it change too, and so never miss."""
    if isinstance(value, (tuple, frozenset)):
        return any(map(_may_change, value))
    return not isinstance(value, _UNCHANGING)


_fronts = itertools.count()
_allowed = threading.Lock()
_are_allowed = False


def _allow_marks() -> None:
    """Register the calls that stay whole in Dynamo's graph; not at import, which would load Dynamo."""
    global _are_allowed
    with _allowed:
        if not _are_allowed:
            import torch._dynamo
            from torch._dynamo.eval_frame import TorchPatcher

            checks = Distribution._validate_args
            TorchPatcher.patch()  # torch's optimizers and modules, once; otherwise they would seem changed
            Distribution.set_default_validate_args(checks)  # which that switches off, for the whole process
            for function in (mark, mistake):
                torch._dynamo.allow_in_graph(function)  # type: ignore[no-untyped-call]
            opaque.keep_whole(torch._dynamo.nonstrict_trace)
            # Dynamo skips the file of the schedulers; this substitute reads a list, so Dynamo guards its numbers.
            torch._dynamo.substitute_in_graph(LRScheduler.get_last_lr, skip_signature_check=True)(_last_lr)
            _are_allowed = True


def _describe(module: fx.GraphModule) -> TracedCall:
    """Return the call with the facts of Dynamo's placeholders that Dynamo forgets after the compilation."""
    names: list[str] = []
    numbers: set[int] = set()
    for index, node in enumerate(module.graph.find_nodes(op="placeholder")):
        arg = node.meta.get("grapharg")
        names.append(_plain(getattr(getattr(arg, "source", None), "name", None), node))
        read = all(user.op == "call_method" and user.target == "item" for user in node.users)
        if arg is not None and not arg.is_tensor and arg.pass_arg_as_tensor and read:
            numbers.add(index)
    return TracedCall(module, tuple(names), frozenset(numbers))


def _plain(source: object, node: fx.Node) -> str:
    """Return the plain name of a source: ``1.x`` for ``L['args'][1]['x']``."""
    name = source if isinstance(source, str) else None
    if name is None:
        return node.name.removeprefix("l_").rstrip("_")
    for old, new in (("L['args']", ""), ("G['", ""), ("_modules['", ""), ("_parameters['", ""), ("_buffers['", "")):
        name = name.replace(old, new)
    for old in ("['", "[", "']", "]"):
        name = name.replace(old, "." if old.startswith("[") else "")
    return ".".join(part for part in name.split(".") if part)


def _plain_source(source: str) -> str:
    """Return the plain name of a source in errors: ``held`` for ``L['args'][0].held``."""
    return source.removeprefix("L[").replace("args[0].", "").replace("args[1]", "batch")


def _said_once() -> set[object]:
    """Functions that log a message once per process: the tape has logged it, so a graph need not."""
    module = sys.modules.get("transformers.utils.logging")
    return set() if module is None else {module.warning_once, module.logging.Logger.warning_once}


def _kinds_of(function: Callable[..., Any], args: Sequence[object]) -> Iterator[type]:
    """Yield the classes whose methods a call of ``function`` may go through."""
    yield from (Tensor, nn.Parameter, nn.Module, type(function))
    for arg in args:
        yield type(arg)
        for module in arg.modules() if isinstance(arg, nn.Module) else ():
            yield type(module)
    for value in closed_over(function):
        yield type(value)
        yield type(getattr(value, "__self__", None))


def _refuse_what_is_lost() -> None:
    """Raise if the traced code writes gradients, as ``backward()`` does: the graph computes its own."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    if output.random_calls:
        raise CaptureError(
            "the step draws random numbers outside torch, which a graph would not draw again; draw them with "
            "torch, pass them in the batch, or use engine='tape'"
        )
    effects = output.side_effects
    for variable in effects.id_to_variable.values():
        if type(variable).__name__ == "DequeVariable" and effects.is_modified(variable):
            raise CaptureError(
                "the step changes a deque, which a graph would do differently from Python; use engine='tape'"
            )
    changed = effects.store_attr_mutations
    names = {name for attributes in changed.values() for name in attributes}
    sets = any(node.target is Tensor.set_ or node.target == "set_" for node in output.graph.nodes)
    if sets or names & {"grad", "data"}:
        raise CaptureError(
            "backward() is called, or the .grad or .data of a tensor assigned, in the middle of the step, which a "
            "graph would lose; use torch.autograd.grad, or engine='tape'"
        )


def _guard_order() -> None:
    """Guards the keys of each dict whose order was read: ``list(d)`` alone has Dynamo look at its length only."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    for source in output.guard_on_key_order:
        if isinstance(output.resolve_source_value(source), dict):
            install_guard(source.make_guard(GuardBuilder.DICT_KEYS_MATCH))


def _refuse_what_guards_miss() -> None:
    if torch._C._is_any_autocast_enabled() and _autocast_depth() == 0:
        raise CaptureError(
            "autocast is switched on for the whole process (torch.set_autocast_enabled), and PyTorch then keeps using "
            "the weights that it cast first; use `with torch.autocast(...)` around each step or in the loss"
        )
    if _len_torch_function_stack():
        raise CaptureError(
            "a TorchFunctionMode is active around the step, which a graph would not call; a default device "
            "(torch.set_default_device) is one: name the device where tensors are made, or use engine='tape'"
        )
    if any(_hooks_of_every_module):
        raise CaptureError(
            "a hook is set on every module (torch.nn.modules.module.register_module_*_hook), which a graph would not "
            "notice; remove it, or use engine='tape'"
        )
    if torch.is_anomaly_enabled():
        raise CaptureError(
            "anomaly detection checks every gradient, which a graph does not; switch it off, or use engine='tape'"
        )
    if torch._C._autograd._top_saved_tensors_default_hooks(False):
        raise CaptureError(
            "saved_tensors_hooks are active around the step, which a graph would not call; remove them, or use "
            "engine='tape'"
        )


def _autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _inside_dynamo(error: BaseException) -> bool:
    """Return True if PyTorch's tracing machinery raised it."""
    step = error.__traceback__
    while step is not None:
        if "/torch/_dynamo/" in step.tb_frame.f_code.co_filename.replace("\\", "/"):
            return True
        step = step.tb_next
    return False

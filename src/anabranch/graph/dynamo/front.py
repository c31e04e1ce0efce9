"""TorchDynamo as the front-end: the torch calls that a Python function makes, and guards on the state that it read.

::

    front(model, batch) ── guards hold ──> the program made for them ──> results; Python side effects replayed
            └──────────── guards miss ───> Dynamo reads the Python code again ──> ``make`` builds another program

Dynamo answers one question: which torch calls does this function make, and for which Python state. Programs are built
elsewhere: ``make`` gets the calls and returns the function to call in their place, once in each run.

Dynamo's defaults omit guards to save time; ``_SOUND`` turns all of them on, for the duration of a compilation. Three
changes were seen to escape them, and are caught here: NumPy values are refused, and the functions and code that a
capture has inlined are compared before each run. Modes that no guard sees are refused: hooks on all modules, anomaly
mode, hooks on saved tensors. Any error of Dynamo's own is a ``CaptureError``, with the original as its cause.

The file is long because everything that depends on Dynamo's internals is in it: a new PyTorch affects one file.
"""

from __future__ import annotations

import itertools
import operator
import re
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._dynamo import symbolic_convert
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution

from anabranch.autodiff.boundary.crossing import Tracer, traced_by
from anabranch.autodiff.boundary.whole_calls import keep_whole
from anabranch.errors import AnabranchError, CaptureError
from anabranch.graph.dynamo.refusals import refusal_of, user_line, user_line_of
from anabranch.graph.trace import one_at_a_time, random_states_untouched, silent, undisturbed
from anabranch.record.spans import Lasting

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
    "replay_side_effects": True,
    "trace_numpy": False,  # torch's functions in place of NumPy's round differently
    "enable_dynamo_decompositions": False,  # and so do products and sums in place of addcdiv_
    "allow_rnn": True,
    "allow_unspec_int_on_nn_module": True,  # self.calls += 1
    "trace_autograd_ops": True,  # gradient penalties
    "allow_empty_graphs": True,
    "automatic_dynamic_shapes": True,  # for numbers that change; the shapes within one kind of batch do not
    "automatic_dynamic_local_pgo": False,  # dynamic shapes must not depend on an earlier process
    "record_runtime_overhead": False,  # two calls of Python in each run, for profilers
}

_EVERY_MODULE = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
)
_code_of = operator.attrgetter("__code__")
_OF_PYTORCH = (nn.Module, object)  # PyTorch's tracers replace methods of nn.Module while they work
_hooks_of_every_module = operator.attrgetter(*_EVERY_MODULE)


class GuardMiss(CaptureError):
    """No program fits the current Python state, and none may be made now; nothing has been computed."""


class _NotCompiled(BaseException):
    """The front was about to run as plain Python; raised before its first line."""


def mark(name: str, value: Tensor) -> Tensor:
    """``value``; in Dynamo's graph a call that names it."""
    return value.view_as(value)


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

    def release_tensors(self) -> None:
        """Drop Dynamo's weak references to the tensors of the trace, once it is compiled.

        ``torch.utils.swap_tensors`` refuses a tensor that has any.
        """
        values = (node.meta.get("example_value") for node in self.module.graph.nodes)
        for value in values:
            if isinstance(value, FakeTensor):
                value.fake_mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()


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
        self._function, self._make, self.what = function, make, what
        self._settings: dict[str, Any] = {**_SOUND, **(settings or {})}
        self._fronts: dict[object, _Compiled] = {}
        self._inlined = InlinedCode()
        self._traced: set[types.CodeType] = set()
        self.failure: BaseException | None = None
        """The error of ``make`` or of a program in the run in progress; Dynamo wraps some of it."""

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
        try:
            _refuse_what_guards_miss()
            unchanged = self._inlined.unchanged()
        except AttributeError as error:  # of a PyTorch without one of the private names
            raise refusal_of(error, self.what) from error
        if not unchanged:
            self._fronts.clear()
            self._inlined = InlinedCode()
        compiled = self._fronts.get(kind)
        if compiled is not None:
            try:
                return compiled.quick(*args)
            except _NotCompiled:
                pass
        if not may_trace:
            raise GuardMiss(f"no graph of {self.what} matches the current batch and Python values")
        return self._trace(kind, compiled, args)

    def _trace(self, kind: object, compiled: _Compiled | None, args: tuple[object, ...]) -> Any:
        self.failure = None
        forms = Tracer()
        try:
            with one_at_a_time:
                _allow_marks()
            symbolic_convert._import_module.cache_clear()  # guards would be on a module that was imported anew since
            if compiled is None:
                compiled = self._fronts[kind] = _Compiled(self._function, weakref.proxy(self))
            with (
                Lasting("capture", "compute"),
                one_at_a_time,
                undisturbed(),
                silent(),
                torch._dynamo.config.patch(**self._settings, ignore_logging_functions=_said_once()),
                traced_by(forms),
                random_states_untouched(),
            ):
                return compiled.full(*args)
        except BaseException as error:  # noqa: BLE001 - what to raise in its place
            explained = self.failure or forms.failure or self._explained(error)
            raise explained from explained.__cause__
        finally:
            self.failure = None

    def note_guards(self, entries: Sequence[Any]) -> None:
        """Watch the code in the values that guards are about.

        Raises:
            CaptureError: one is NumPy's, which Dynamo does not compare where the step reads it as a number.
        """
        for entry in entries:
            if isinstance(entry.value, (np.ndarray, np.generic)):
                line = user_line(getattr(entry.orig_guard, "user_stack", None))
                self.failure = _of_numpy(self.what, str(entry.name), line)
                raise CaptureError(str(self.failure))  # a copy: Dynamo adds to the message
        values = [entry.value for entry in entries]
        kinds = (value if isinstance(value, type) else type(value) for value in values)
        functions = (value for value in values if isinstance(value, types.FunctionType))
        self._inlined.add(kinds, functions, self._traced)

    def make(self, module: fx.GraphModule) -> Callable[..., Sequence[object]]:
        """Return the function that Dynamo is to call in place of ``module``."""
        try:
            _refuse_what_is_lost()
            self._traced.update(torch._guards.TracingContext.get_traced_code() or ())
            return self._noting(self._make(_describe(module, self.what)))
        except BaseException as error:
            expected = isinstance(error, AnabranchError) or not isinstance(error, Exception)
            self.failure = error if expected else refusal_of(error, self.what)
            raise

    def _noting(self, program: Callable[..., Sequence[object]]) -> Callable[..., Sequence[object]]:
        """``program``, which records the exceptions of its first call, in the middle of a compilation."""
        mine = weakref.ref(self)

        def run(*args: object) -> Sequence[object]:
            try:
                with traced_by(None):
                    return program(*args)
            except BaseException as error:
                front = mine()
                if front is not None:
                    front.failure = error
                raise

        run.program = program  # type: ignore[attr-defined]
        return run

    def _explained(self, error: BaseException) -> BaseException:
        """Return the error to raise in place of Dynamo's."""
        if type(error).__name__ == "FailOnRecompileLimitHit":
            return CaptureError(
                f"Python values that {self.what} reads change from step to step, and each change needs a new graph; "
                "pass them in the batch, make them tensors that are changed in place, or use engine='tape'"
            )
        if isinstance(error, _NotCompiled):
            return CaptureError(
                "torch.compile is switched off here (torch.compiler.set_stance, TORCHDYNAMO_DISABLE, a dispatch mode), "
                "but capturing needs it; switch it on, or use engine='tape'"
            )
        if isinstance(error, AnabranchError) or not isinstance(error, Exception):
            return error
        return refusal_of(error, self.what)


class InlinedCode:
    """The functions found so far whose code a capture has inlined, compared before each run.

    Dynamo guards the functions that it finds by name, and a module's class, but neither a method that is replaced on a
    class nor a ``__code__`` that is replaced in place, as IPython's autoreload does.
    """

    def __init__(self) -> None:
        self._members: dict[tuple[type, str], object] = {}
        self._codes: dict[types.FunctionType, types.CodeType] = {}
        self._variables: list[tuple[dict[str, object], str, object]] = []  # globals that Dynamo guards elsewhere

    def add(
        self, kinds: Iterable[type], functions: Iterable[types.FunctionType], inlined: Collection[types.CodeType]
    ) -> None:
        """Add the methods of these classes and the functions among these whose code is ``inlined``."""
        called = [function for function in functions if function.__code__ in inlined]
        for kind in dict.fromkeys(kinds):
            for base, name, function in _methods_of(kind):
                if function.__code__ in inlined:
                    called.append(function)
                    for owner in (kind, base):
                        self._members.setdefault((owner, name), getattr(owner, name))
        for function in called:
            if function not in self._codes:
                self._codes[function] = function.__code__
                self._variables += _variables_elsewhere(function)

    def unchanged(self) -> bool:
        """Return True if the classes still have these methods, and all functions their code."""
        if list(map(_code_of, self._codes)) != list(self._codes.values()):
            return False
        if self._variables and any(names.get(name) is not value for names, name, value in self._variables):
            return False
        try:
            return list(itertools.starmap(getattr, self._members)) == list(self._members.values())
        except AttributeError:
            return False


def _variables_elsewhere(function: types.FunctionType) -> list[tuple[dict[str, object], str, object]]:
    """Return the globals of a function that are not those of its module, as in a process that was spawned.

    Dynamo guards the variables of the module.
    """
    own = function.__globals__
    module = sys.modules.get(own.get("__name__", ""))
    if module is None or vars(module) is own:
        return []
    return [(own, name, own[name]) for name in function.__code__.co_names if name in own]


def _methods_of(kind: type) -> Iterator[tuple[type, str, types.FunctionType]]:
    """Yield the functions that a class has or inherits, with the class that defines them and their names."""
    for base in kind.__mro__:
        for name, member in vars(base).items() if base not in _OF_PYTORCH else ():
            if isinstance(member, (staticmethod, classmethod)):
                member = member.__func__
            if isinstance(member, property):
                member = member.fget
            if isinstance(member, types.FunctionType):
                yield base, name, member


class _Compiled:
    """One copy of the front, which has its own list of programs, because Dynamo keeps them with the code object.

    The copy has its own globals too, in which Dynamo leaves the programs it made: they are freed with the copy.
    """

    def __init__(self, function: Callable[..., Any], owner: DynamoFront) -> None:
        from torch._C._dynamo.eval_frame import set_eval_frame

        front = _front_of(function)
        self._front, self._set_eval_frame = front, set_eval_frame

        def backend(module: fx.GraphModule, _examples: Sequence[object], **_: object) -> Callable[..., Any]:
            return owner.make(module)

        def every_guard(entries: Sequence[Any]) -> list[bool]:
            owner.note_guards([entry for entry in entries if entry.has_value])
            return [True] * len(entries)

        options: dict[str, Any] = {"guard_filter_fn": every_guard}
        self._compile = torch.compile(front, backend=backend, fullgraph=True, options=options)
        self._wrapped: dict[str, Callable[..., Any]] = {}
        weakref.finalize(self, _let_go, front.__code__, front.__globals__).atexit = False

    def full(self, *args: object) -> Any:
        """Run the program whose guards hold, or build one."""
        self._front.__globals__.update(self._wrapped)
        try:
            return self._compile(*args)
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


def _front_of(function: Callable[..., Any]) -> types.FunctionType:
    def front(*args: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():  # folded away in a program
            raise _NotCompiled
        return function(*args)

    # A unique name: Dynamo remembers changing numbers by file, line and name.
    code = front.__code__.replace(co_name=f"front_{next(_fronts)}")
    return types.FunctionType(code, dict(front.__globals__), front.__name__, None, front.__closure__)


_fronts = itertools.count()


@cache
def _allow_marks() -> None:
    """Register the calls that stay whole in Dynamo's graph; not at import, which would load Dynamo."""
    import torch._dynamo
    from torch._dynamo.eval_frame import TorchPatcher

    checks = Distribution._validate_args
    TorchPatcher.patch()  # torch's optimizers and modules, once; otherwise they would seem changed
    Distribution.set_default_validate_args(checks)  # which that switches off, for the whole process
    torch._dynamo.allow_in_graph(mark)  # type: ignore[no-untyped-call]
    keep_whole(torch._dynamo.nonstrict_trace)


def _describe(module: fx.GraphModule, what: str) -> TracedCall:
    """Return the call with the facts of Dynamo's placeholders that Dynamo forgets after the compilation.

    Raises:
        CaptureError: one is a NumPy value, which Dynamo would treat as a tensor.
    """
    names: list[str] = []
    numbers: set[int] = set()
    for index, node in enumerate(module.graph.find_nodes(op="placeholder")):
        arg = node.meta.get("grapharg")
        source = getattr(getattr(arg, "source", None), "name", None)
        if isinstance(source, str) and source.startswith("___from_numpy("):
            line = next(map(user_line_of, node.users), "")
            raise _of_numpy(what, source.removeprefix("___from_numpy(").removesuffix(")"), line)
        names.append(plain_name(source) if isinstance(source, str) else node.name.removeprefix("l_").rstrip("_"))
        read = all(user.op == "call_method" and user.target == "item" for user in node.users)
        if arg is not None and not arg.is_tensor and arg.pass_arg_as_tensor and read:
            numbers.add(index)
    return TracedCall(module, tuple(names), frozenset(numbers))


_OF_DYNAMO = re.compile(
    r"^L\['(args|function)'\]|^G\b|\.(__closure__\[\d+\]\.cell_contents|_(modules|parameters|buffers)\b)"
)


def plain_name(source: str) -> str:
    """Return Dynamo's name of a value as a user would write it: ``1.x`` for ``L['args'][1]['x']``."""
    return ".".join(part for part in re.split(r"[\[\]'.]+", _OF_DYNAMO.sub("", source)) if part)


def _of_numpy(what: str, source: str, line: str) -> CaptureError:
    name = plain_name(source).removeprefix("args.").removeprefix("0.")  # an attribute of the model
    return CaptureError(
        f"{line}{what} reads {name}, a NumPy value, whose changes a graph would not notice; use a tensor or a Python "
        "number, or engine='tape'"
    )


def _said_once() -> set[object]:
    """Functions that log a message once per process: the tape has logged it, so a graph need not."""
    module = sys.modules.get("transformers.utils.logging")
    return set() if module is None else {module.warning_once, module.logging.Logger.warning_once}


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
    changed = effects.store_attr_mutations
    names = {name for attributes in changed.values() for name in attributes}
    sets = any(node.target is Tensor.set_ or node.target == "set_" for node in output.graph.nodes)
    if sets or names & {"grad", "data"}:
        raise CaptureError(
            "backward() is called, or the .grad or .data of a tensor assigned, in the middle of the step, which a "
            "graph would lose; use torch.autograd.grad, or engine='tape'"
        )


def _refuse_what_guards_miss() -> None:
    if torch._C._len_torch_function_stack():
        what = "a TorchFunctionMode, as a default device (torch.set_default_device) is one"
    elif any(_hooks_of_every_module(nn.modules.module)):
        what = "a hook of every module (torch.nn.modules.module.register_module_*_hook)"
    elif torch.is_anomaly_enabled():
        what = "anomaly detection"
    elif torch._C._autograd._top_saved_tensors_default_hooks(False):
        what = "a pair of saved_tensors_hooks"
    else:
        return
    raise CaptureError(f"{what} is active around the step, which a graph would not call; use engine='tape'")


def changed_objects() -> set[int]:
    """Return the ids of the objects that the traced code changes; Dynamo changes them after the program has run."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    effects = InstructionTranslator.current_tx().output.side_effects
    return {known for known, variable in effects.id_to_variable.items() if effects.is_modified(variable)}

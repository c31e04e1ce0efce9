"""Every hook that the package sets on a user's tensors or modules; no other file registers one.

Modules have ``record_outputs``. A leaf's gradient passes three places::

    ... ──> (1) ──> AccumulateGrad ──> .grad ──> (3)
                          (2)

At (1), a tensor hook, it is the engine's own buffer, which two tensors may share. At (2) torch steals the buffer, or
copies one that is shared or laid out unlike the leaf. So ``Sweep.watch_leaf`` takes it at (3), out of ``.grad``, at no
cost beyond torch's own; what ``.grad`` held before, to which (2) would add, the sweep's owner sets aside and puts back.
Results of operations have (1) alone.

Hooks are set once and stay from step to step; outside their own sweep they do nothing. All tensors with the same
callbacks share one hook and no object is made per tensor: between two steps everything here falls out of the
processor's cache, and on small models fetching one object a parameter costs as much as the hook itself. A hook holds
its sweep weakly: callbacks lead back to the model, and the garbage collector does not see through autograd's C++ part.
"""

from __future__ import annotations

import concurrent.futures
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from anabranch.tensors import map_structure

GradientFuture: TypeAlias = "concurrent.futures.Future[Tensor] | torch._C.Future[Any]"
"""A gradient on its way: of ``concurrent.futures``, of torch, or ``get_future()`` of a collective's work."""
Gradient: TypeAlias = "Tensor | GradientFuture"
Callback: TypeAlias = "Callable[[Tensor, Any], Gradient | None]"
"""``callback(tensor, gradient)`` returns the gradient to continue with, a future of it, or ``None`` to keep it."""


class Sweep:
    """A session's own sweeps: the hooks that belong to them, and what has arrived in the one that runs.

    Attributes:
        running: whether the hooks act.
        tensors: the tensors reached so far, in order.
        values: their gradients, as the callbacks left them.
        replaced: whether a callback has returned anything, which may be a future.
    """

    def __init__(self) -> None:
        self.running = False
        self.tensors: list[Tensor] = []
        self.values: list[Gradient] = []
        self.replaced = False
        self._chains: list[tuple[Callback, ...]] = []
        self._hooks: dict[tuple[Callback, ...], Callable[[Tensor], None]] = {}

    def begin(self) -> None:
        """Let the hooks act from here on."""
        self.clear()  # an interrupt may have kept the sweep before from doing so
        self.replaced = False
        self.running = True

    def end(self) -> None:
        """Let the hooks act no more; raise ``RuntimeError`` if a gradient arrived in parts."""
        self.running = False
        if len(set(map(id, self.tensors))) != len(self.tensors):
            raise RuntimeError(
                "the gradient of a tensor arrived twice in one backward, as happens when torch.utils.checkpoint runs "
                "with use_reentrant=True; pass use_reentrant=False"
            )

    def clear(self) -> None:
        """Forget the tensors that arrived."""
        self.running = False
        self.tensors.clear()
        self.values.clear()

    def watch_leaf(self, leaf: Tensor, callbacks: tuple[Callback, ...]) -> RemovableHandle:
        """Run ``callbacks`` on the leaf's final gradient, taken at (3) out of ``.grad``, which is None then."""
        if callbacks not in self._hooks:
            sweep_ref, number = weakref.ref(self), len(self._chains)
            self._chains.append(callbacks)

            def hook(leaf: Tensor) -> None:
                sweep = sweep_ref()
                if sweep is not None and sweep.running and (grad := leaf.grad) is not None:
                    leaf.grad = None
                    sweep._take(leaf, grad, sweep._chains[number])

            self._hooks[callbacks] = hook
        return leaf.register_post_accumulate_grad_hook(self._hooks[callbacks])  # type: ignore[no-untyped-call, no-any-return]

    def _take(self, tensor: Tensor, grad: Tensor, callbacks: tuple[Callback, ...]) -> None:
        """Run ``callbacks`` on a final gradient."""
        self.tensors.append(tensor)
        value: Gradient = grad
        try:
            for callback in callbacks:
                answer = callback(tensor, value)
                if answer is not None:
                    value = answer
                    self.replaced = True
        finally:  # a future that one callback returned before another raised must not be lost
            self.values.append(value)

    def watch_result(self, result: Tensor, callbacks: tuple[Callback, ...]) -> RemovableHandle:
        """Run ``callbacks`` on the final gradient, at (1), of a tensor that an operation made."""
        sweep_ref = weakref.ref(self)

        def look(tensor: Tensor | None, grad: Tensor) -> None:
            sweep = sweep_ref()
            if sweep is not None and sweep.running and tensor is not None:
                sweep._take(tensor, grad, callbacks)

        return watch_result(result, look)


def watch_result(result: Tensor, call: Callable[[Tensor | None, Tensor], object]) -> RemovableHandle:
    """Call with the final gradient at (1), and with the tensor unless it has been dropped, in anybody's sweep."""
    watched = weakref.ref(result)

    def hook(grad: Tensor | None) -> None:
        # The engine calls with None for a result of which only a sibling (another chunk) was used.
        if grad is not None:
            call(watched(), grad)

    return result.register_hook(hook)  # type: ignore[no-untyped-call, no-any-return]


def watch_node(
    node: Node, call: Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...] | None]
) -> RemovableHandle:
    """Call with the final gradients of a node's outputs before it runs; the result replaces them."""
    return node.register_prehook(call)


_probes = 0


def hooks_registered() -> int:
    """Return a number that changes whenever a hook is registered, anywhere in the process, but by ``hooks_of_node``."""
    return RemovableHandle.next_id - _probes


def hooks_of_node(leaf: Tensor) -> Iterator[Mapping[int, Callable[..., object]]]:
    """Yield the hooks around (2), set on the node of a leaf: torch shows them only to the owner of another one.

    >>> leaf = torch.ones(1, requires_grad=True)
    >>> node = get_gradient_edge(leaf).node
    >>> handle = node.register_prehook(print)
    >>> [list(hooks.values()) for hooks in hooks_of_node(leaf)]
    [[], [<built-in function print>]]
    """
    global _probes
    plain = type(leaf) in (Tensor, nn.Parameter) and leaf.layout is torch.strided
    if not plain or not leaf.is_leaf or not leaf.requires_grad or torch.is_inference_mode_enabled():
        return
    node = get_gradient_edge(leaf).node
    for register in (node.register_hook, node.register_prehook):
        _probes += 1  # before the handle, so that another thread may only look once too often
        handle = register(_do_nothing)
        hooks = dict(handle.hooks_dict_ref() or {})
        handle.remove()
        del hooks[handle.id]
        yield hooks


def foreign_hooks(leaf: Tensor) -> list[Callable[..., object]]:
    """Return the hooks that others have set on the gradient of a leaf, at any of the three places."""
    kinds = (leaf._backward_hooks, getattr(leaf, "_post_accumulate_grad_hooks", None), *hooks_of_node(leaf))
    hooks = [hook for kind in kinds for hook in (kind or {}).values()]
    return [hook for hook in hooks if getattr(hook, "__module__", "") != __name__]


_EVERY_STEP: tuple[Mapping[int, Callable[..., object]], ...] = tuple(
    vars(sys.modules[Optimizer.__module__])[f"_global_optimizer_{when}_hooks"] for when in ("pre", "post")
)


def hooks_of_step(optimizer: Optimizer) -> list[Callable[..., object]]:
    """Return what runs around or in place of the optimizer's own step, without the counters of torch's schedulers."""
    mine = vars(optimizer)
    kinds = (*_EVERY_STEP, mine.get("_optimizer_step_pre_hooks"), mine.get("_optimizer_step_post_hooks"))
    hooks = [hook for kind in kinds if kind for hook in kind.values()]
    # A scheduler's counter is named after the step that it wraps, which may be a custom one. The steps of some classes,
    # such as SparseAdam's, are wrapped by Dynamo at its first capture, which may come after the scheduler.
    step, own = mine.get("step"), type(optimizer).step
    steps = own, getattr(own, "_torchdynamo_orig_callable", own)
    counts = hasattr(step, "_wrapped_by_lr_sched") and vars(step).get("__wrapped__") in steps
    return hooks if step is None or counts else [*hooks, step]


def _do_nothing(*_: object) -> None:
    """Leave the gradients of a backward in another thread as they are."""


@contextmanager
def record_outputs(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, object]]:
    """Collect the modules' outputs while the block runs, by the given names.

    >>> layer = nn.Identity()
    >>> with record_outputs({"layer": layer}) as outputs:
    ...     _ = layer(3)
    >>> outputs
    {'layer': 3}

    A module that is called several times keeps its last output; one that is not called has none. Outputs are kept as
    they are, on the tape.
    """
    with OutputRecorder().recording(modules) as outputs:
        yield outputs


class OutputRecorder:
    """Collects what modules return, by the same hooks at the same place each time: a graph's guards know them again."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], tuple[dict[str, object], list[Callable[..., None]]]] = {}

    @contextmanager
    def recording(self, modules: Mapping[str, nn.Module]) -> Iterator[dict[str, object]]:
        """Collect the outputs of ``modules`` while the block runs, the last of each."""
        names = tuple(modules)
        if names not in self._kept:
            outputs: dict[str, object] = {}
            self._kept[names] = outputs, [_keeping(outputs, name) for name in names]
        outputs, hooks = self._kept[names]
        outputs.clear()
        places = [(module._forward_hooks, -number) for number, module in enumerate(modules.values(), 1)]
        for (registered, key), hook in zip(places, hooks, strict=True):  # torch counts its keys upwards from 0
            registered[key] = hook
        try:
            yield outputs
        finally:
            for registered, key in places:
                registered.pop(key, None)


def _keeping(outputs: dict[str, object], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: object, output: object) -> None:
        outputs[name] = output

    return hook


@contextmanager
def move_at_edges(module: nn.Module, device: torch.device, around: torch.device) -> Iterator[None]:
    """Move the tensors that the module is given to ``device``, and those that it returns to ``around``, in the block.

    >>> layer = nn.Identity()
    >>> with move_at_edges(layer, torch.device("meta"), torch.device("meta")):
    ...     layer(torch.ones(2)).device
    device(type='meta')
    """

    def to(place: torch.device) -> Callable[[object], object]:
        return lambda value: value.to(place) if isinstance(value, Tensor) else value

    def before(_: nn.Module, args: object, kwargs: object) -> tuple[Any, dict[str, Any]]:
        return map_structure(to(device), args), cast("dict[str, Any]", map_structure(to(device), kwargs))

    def after(_: nn.Module, args: object, output: object) -> object:
        return map_structure(to(around), output)

    with ExitStack() as stack:
        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(after).remove)
        yield


def before_load(module: nn.Module, call: Callable[..., object]) -> RemovableHandle:
    """Call with the arguments of the module's ``_load_from_state_dict`` before anything below it is loaded."""
    return module.register_load_state_dict_pre_hook(call)  # type: ignore[no-untyped-call, no-any-return]


def before_state(optimizer: Optimizer, call: Callable[[Optimizer], None]) -> list[RemovableHandle]:
    """Call with the optimizer before its state is returned or loaded."""
    return [
        optimizer.register_state_dict_pre_hook(call),
        optimizer.register_load_state_dict_pre_hook(lambda optimizer, _: call(optimizer)),
    ]

"""Promises checked on the source itself: nothing unpickles or evaluates bytes, and no wait is without end."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import anabranch as ab

ROOT = Path(ab.__file__).parent
TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}

FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_METHODS = {("torch", "load"), ("torch", "save"), ("os", "fork"), ("os", "forkpty")}
# Collectives of objects pickle what they are given.
FORBIDDEN_NAMES = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"}
# Methods that wait for ever when they are called with nothing.
MAY_WAIT_FOR_EVER = {"join", "wait", "result", "acquire", "get"}


def offences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in FORBIDDEN_MODULES:
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] in FORBIDDEN_MODULES:
                yield node.lineno, f"from {node.module} import"
        elif isinstance(node, ast.Call):
            yield from _call_offences(node)


def _call_offences(node: ast.Call) -> Iterator[tuple[int, str]]:
    if any(keyword.arg == "allow_pickle" for keyword in node.keywords):
        yield node.lineno, "allow_pickle"
    if isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS | FORBIDDEN_NAMES:
        yield node.lineno, node.func.id
    if isinstance(node.func, ast.Attribute):
        owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
        if (owner, node.func.attr) in FORBIDDEN_METHODS or node.func.attr in FORBIDDEN_NAMES:
            yield node.lineno, f"{owner}.{node.func.attr}"


def unbounded_waits(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Calls of a waiting method with neither arguments nor a timeout: ``thread.join()``, ``future.result()``."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in MAY_WAIT_FOR_EVER and not node.args and not node.keywords:
            yield node.lineno, f".{node.func.attr}()"


# The one file that forks: a process that has exactly one thread, looks before each fork, and has opened nothing.
FORKS = "launch/fork_server.py"

# The one file that sets hooks on a user's tensors and modules.
HOOKS = "autodiff/hooks.py"


def registered_hooks(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Calls of ``register_hook`` and its kin, and of functions that register hooks for all modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if name.startswith("register_") and ("hook" in name):
                yield node.lineno, name


def found_in_the_sources(look: Callable[[ast.AST], Iterator[tuple[int, str]]]) -> dict[str, list[tuple[int, str]]]:
    """What ``look`` finds, by file."""
    found = {path: list(look(tree)) for path, tree in TREES.items()}
    return {path: places for path, places in found.items() if places}


def test_hooks_on_tensors_and_modules_are_set_in_one_file_only() -> None:
    assert set(found_in_the_sources(registered_hooks)) == {HOOKS}


def test_nothing_unpickles_or_evaluates_bytes() -> None:
    found = {path: [what for _, what in places] for path, places in found_in_the_sources(offences).items()}
    assert found == {FORKS: ["os.fork"] * 2}


def test_no_wait_is_without_a_bound() -> None:
    assert found_in_the_sources(unbounded_waits) == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from dill import loads",
        "eval(text)",
        "torch.load(path)",
        "numpy.load(path, allow_pickle=True)",
        "dist.all_gather_object(out, value)",
        "os.fork()",
    ],
)
def test_the_check_sees_what_it_forbids(source: str) -> None:
    assert list(offences(ast.parse(source)))


@pytest.mark.parametrize("source", ["thread.join()", "future.result()", "event.wait()", "lock.acquire()", "q.get()"])
def test_the_check_sees_an_unbounded_wait(source: str) -> None:
    assert list(unbounded_waits(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    ["tensor.register_hook(f)", "module.register_forward_hook(f)", "leaf.register_post_accumulate_grad_hook(f)"],
)
def test_the_check_sees_a_hook(source: str) -> None:
    assert list(registered_hooks(ast.parse(source)))

"""Promises checked on the source itself: nothing unpickles or evaluates bytes, and no wait is without end."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

import anabranch as ab

ROOT = Path(ab.__file__).parent

FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_METHODS = {("torch", "load"), ("torch", "save"), ("os", "fork"), ("os", "forkpty")}
# Collectives of objects pickle what they are given.
FORBIDDEN_NAMES = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"}
# Methods that wait for ever when they are called with nothing.
MAY_WAIT_FOR_EVER = {"join", "wait", "result", "acquire", "get"}


@functools.lru_cache(maxsize=1)
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return all nodes of a file, which several questions go through one after the other."""
    return tuple(ast.walk(tree))


def offences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in nodes(tree):
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
    for node in nodes(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in MAY_WAIT_FOR_EVER and not node.args and not node.keywords:
            yield node.lineno, f".{node.func.attr}()"


# The one file that forks: a process that has exactly one thread, looks before each fork, and has opened nothing. In a
# fork it runs text as code: the script of the user, as the interpreter does.
FORKS = "launch/forks/fork_server.py"

# The one file that sets hooks on a user's tensors and modules.
HOOKS = "autodiff/hooks.py"


def registered_hooks(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Calls of ``register_hook`` and its kin, and of functions that register hooks for all modules."""
    for node in nodes(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if name.startswith("register_") and ("hook" in name):
                yield node.lineno, name


# Files that ask for the date: of a certificate, of a checkpoint, of a job, of the time since that began, and of an end
# that is compared with a log's.
DATES = {
    "held_error.py",
    "transport/certificates.py",
    "checkpoint/writing.py",
    "launch/job_status.py",
    "launch/supervision/worker.py",
}


def asked_dates(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Calls that read the clock on the wall, which may be set while somebody waits by it."""
    for node in nodes(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            name = f"{node.func.value.id}.{node.func.attr}"
            if name in {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}:
                yield node.lineno, name


# What prints: a command's own words, and the line of `record_loads`, which promises it.
PRINTS = {
    "cli/__init__.py",  # Ctrl-C before the command line has been imported
    "executor/saving/background_saves.py",  # at the end of the process, where nobody is left to raise to
    "executor/executor.py",
    "launch/forks/fork_server.py",
    "transport/server/service.py",
}


def prints(tree: ast.AST) -> bool:
    """Tell whether a file calls ``print``: the library speaks through the logger ``anabranch``."""
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        for node in nodes(tree)
    )


# Files with tensors that are on PyTorch's default device because they are as if the user had made them.
ON_DEFAULT_DEVICE = {
    "autodiff/moved_parameter.py",  # a module's parameter, beside the model's others
    "executor/loaders/loading.py",  # draws the number that a DataLoader draws
    "experts/client/mixture.py",  # a module's buffer, beside its parameters
    "tensors/jagged.py",  # a batch from lists
}
FACTORIES = {function.__name__ for function in _device_constructors()}


def placed_by_default(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Calls that make a tensor and name no device: after ``torch.set_default_device("cuda")`` it would be there."""
    for node in nodes(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and node.func.attr in FACTORIES
            and all(keyword.arg not in ("device", None) for keyword in node.keywords)
        ):
            yield node.lineno, node.func.attr


QUESTION_WORDS = {"What", "Whether", "Where", "How", "Who", "Whom", "Whose", "Why", "When", "Which"}


def questions(tree: ast.AST) -> Iterator[str]:
    """First lines of docstrings that open like a question instead of saying the thing itself."""
    for node in nodes(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if first.partition(" ")[0] in QUESTION_WORDS:
                yield first


def test_the_sources_keep_their_promises() -> None:
    """Each tree is looked at once and let go: kept, all of them would be in the way of every collection of garbage."""
    hooks, dates, printing, placed, forbidden, waits, asked = set(), set(), set(), set(), {}, {}, {}
    classes: Counter[str] = Counter()
    for path in sorted(ROOT.rglob("*.py")):
        name, tree = str(path.relative_to(ROOT)), ast.parse(path.read_text())
        if list(registered_hooks(tree)):
            hooks.add(name)
        if list(asked_dates(tree)):
            dates.add(name)
        if prints(tree):
            printing.add(name)
        if list(placed_by_default(tree)):
            placed.add(name)
        if found := [what for _, what in offences(tree)]:
            forbidden[name] = found
        if places := list(unbounded_waits(tree)):
            waits[name] = places
        if opened := list(questions(tree)):
            asked[name] = opened
        names = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        classes.update(one for one in names if not one.startswith("_"))
    assert hooks == {HOOKS}, "hooks on tensors and modules are set in one file only"
    assert dates == DATES, "every deadline is on a clock that nobody sets"
    assert printing == PRINTS, "the library says nothing by itself"
    assert placed == ON_DEFAULT_DEVICE, "tensors of the library's own do not follow the user's default device"
    assert forbidden == {FORKS: ["exec", "os.fork", "os.fork"]}, "nothing unpickles or evaluates bytes"
    assert waits == {}, "no wait is without a bound"
    assert asked == {}, "docstrings say the thing itself"
    assert [name for name, times in classes.items() if times > 1] == [], "no two classes share a name"


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (offences, "import pickle"),
        (offences, "from dill import loads"),
        (offences, "eval(text)"),
        (offences, "torch.load(path)"),
        (offences, "numpy.load(path, allow_pickle=True)"),
        (offences, "dist.all_gather_object(out, value)"),
        (unbounded_waits, "thread.join()"),
        (unbounded_waits, "future.result()"),
        (registered_hooks, "leaf.register_post_accumulate_grad_hook(f)"),
        (placed_by_default, "torch.tensor(1.0, dtype=torch.float64)"),
        (asked_dates, "datetime.now(UTC)"),
        (questions, '"""What it is."""'),
    ],
)
def test_a_check_sees_what_it_is_for(check: Callable[[ast.AST], Iterator[object]], source: str) -> None:
    assert list(check(ast.parse(source)))
    assert not list(check(ast.parse("torch.zeros(3, device=x.device)")))

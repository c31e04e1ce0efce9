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


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str, str]]:
    """All calls with the name in front of the dot, "?" for any other expression and "" for none, and that behind it."""
    for node in nodes(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node, "", node.func.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node, node.func.value.id if isinstance(node.func.value, ast.Name) else "?", node.func.attr


def offences(tree: ast.AST) -> Iterator[str]:
    for node in nodes(tree):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (f"import {module}" for module in modules if module.split(".")[0] in FORBIDDEN_MODULES)
    for call, owner, name in calls(tree):
        if any(keyword.arg == "allow_pickle" for keyword in call.keywords):
            yield "allow_pickle"
        if name in FORBIDDEN_NAMES | (set() if owner else FORBIDDEN_CALLS) or (owner, name) in FORBIDDEN_METHODS:
            yield f"{owner}.{name}".lstrip(".")


def unbounded_waits(tree: ast.AST) -> Iterator[str]:
    """Calls of a waiting method with neither arguments nor a timeout: ``thread.join()``, ``future.result()``."""
    for call, owner, name in calls(tree):
        if owner and name in MAY_WAIT_FOR_EVER and not call.args and not call.keywords:
            yield f".{name}()"


# The one file that forks: a process that has exactly one thread, looks before each fork, and has opened nothing. In a
# fork it runs text as code: the script of the user, as the interpreter does.
FORKS = "launch/forks/fork_server.py"

# The one file that sets hooks on a user's tensors and modules.
HOOKS = "autodiff/hooks.py"


def registered_hooks(tree: ast.AST) -> Iterator[str]:
    """Calls of ``register_hook`` and its kin, and of functions that register hooks for all modules."""
    yield from (name for _, _, name in calls(tree) if name.startswith("register_") and "hook" in name)


# Files that ask for the date: of a certificate, of a checkpoint, of a job, of the time since that began, and of an end
# that is compared with a log's.
DATES = {
    "held_error.py",
    "transport/certificates.py",
    "checkpoint/writing.py",
    "launch/job_status.py",
    "launch/supervision/worker.py",
}


def asked_dates(tree: ast.AST) -> Iterator[str]:
    """Calls that read the clock on the wall, which may be set while somebody waits by it."""
    clocks = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}
    yield from (f"{owner}.{name}" for _, owner, name in calls(tree) if f"{owner}.{name}" in clocks)


# What prints: a command's own words, and the line of `record_loads`, which promises it.
PRINTS = {
    "cli/__init__.py",  # Ctrl-C before the command line has been imported
    "executor/saving/background_saves.py",  # at the end of the process, where nobody is left to raise to
    "executor/executor.py",
    "launch/forks/fork_server.py",
    "transport/server/service.py",
}


def prints(tree: ast.AST) -> Iterator[str]:
    """Calls of ``print``: the library speaks through the logger ``anabranch``."""
    yield from (name for _, owner, name in calls(tree) if not owner and name == "print")


# Files with tensors that are on PyTorch's default device because they are as if the user had made them.
ON_DEFAULT_DEVICE = {
    "autodiff/moved_parameter.py",  # a module's parameter, beside the model's others
    "executor/loaders/loading.py",  # draws the number that a DataLoader draws
    "experts/client/mixture.py",  # a module's buffer, beside its parameters
    "tensors/jagged.py",  # a batch from lists
}
FACTORIES = {function.__name__ for function in _device_constructors()}


def placed_by_default(tree: ast.AST) -> Iterator[str]:
    """Calls that make a tensor and name no device: after ``torch.set_default_device("cuda")`` it would be there."""
    for call, owner, name in calls(tree):
        named = any(keyword.arg in ("device", None) for keyword in call.keywords)
        if owner == "torch" and name in FACTORIES and not named:
            yield name


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
    checks = (offences, unbounded_waits, registered_hooks, asked_dates, prints, placed_by_default, questions)
    found: dict[object, dict[str, list[str]]] = {check: {} for check in checks}
    classes: Counter[str] = Counter()
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for check in checks:
            if places := list(check(tree)):
                found[check][str(path.relative_to(ROOT))] = places
        names = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        classes.update(one for one in names if not one.startswith("_"))
    assert found[registered_hooks].keys() == {HOOKS}, "hooks on tensors and modules are set in one file only"
    assert found[asked_dates].keys() == DATES, "every deadline is on a clock that nobody sets"
    assert found[prints].keys() == PRINTS, "the library says nothing by itself"
    assert found[placed_by_default].keys() == ON_DEFAULT_DEVICE, "tensors of its own do not follow the user's device"
    assert found[offences] == {FORKS: ["exec", "os.fork", "os.fork"]}, "nothing unpickles or evaluates bytes"
    assert found[unbounded_waits] == {}, "no wait is without a bound"
    assert found[questions] == {}, "docstrings say the thing itself"
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
def test_a_check_sees_what_it_is_for(check: Callable[[ast.AST], Iterator[str]], source: str) -> None:
    assert list(check(ast.parse(source)))
    assert not list(check(ast.parse("torch.zeros(3, device=x.device)")))

"""Runs a Python file or module as ``__main__`` of this process, exactly like ``python file.py``."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

from anabranch.launch.python_program import PythonProgram

_OURS = (
    __file__,
    runpy.__file__,
    "<frozen runpy>",
    "<frozen importlib._bootstrap>",
    "<frozen importlib._bootstrap_external>",
)


def run_as_main(program: PythonProgram) -> None:
    """Run ``program``; return or raise like it, and show an error's traceback from its own first frame on."""
    sys.argv = [program.target, *program.arguments]
    sys.orig_argv = program.command
    try:
        if program.is_module:
            if program.looks_here and not sys.flags.safe_path:
                sys.path.insert(0, os.getcwd())
            runpy.run_module(program.target, run_name="__main__", alter_sys=True)
        else:
            _run_file(program.target)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
            trace = trace.tb_next
        shown_by, sys.excepthook = sys.excepthook, lambda *_: None  # the interpreter shows nothing more
        shown_by(type(error), error.with_traceback(trace), trace)
        raise


def _run_file(target: str) -> None:
    path = os.path.join(os.getcwd(), target.removeprefix("./"))
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    module = ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    vars(module).update(__file__=path, __cached__=None, __loader__=loader, __builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = module
    try:
        source = loader.get_data(path)
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(2)
    exec(loader.source_to_code(source, path), vars(module))  # noqa: S102 - as the interpreter runs a script, not cached

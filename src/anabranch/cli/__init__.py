"""The command line, ``anabranch``: one file per command, each a thin layer over the package that does the work.

It adds no functionality of its own. Open ``run.py`` first.
"""

import signal
import sys
from types import FrameType

__all__ = ["main"]


def main() -> None:
    """Run the command that ``sys.argv`` names, and exit with its code."""
    before = signal.getsignal(signal.SIGINT)
    if sys.argv[1:2] == ["run"] and before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)  # until the launcher collects signals
    try:
        from anabranch.cli.app import main as run_command  # a third of a second, in which Ctrl-C may come

        run_command()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, before)


def _stop(number: int, frame: FrameType | None) -> None:
    print("anabranch: SIGINT: stopped before anything had started", file=sys.stderr)
    sys.exit(130)

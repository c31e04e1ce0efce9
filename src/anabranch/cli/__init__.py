"""The command line, ``anabranch``: one file a command, each a thin layer over the package that does the work.

What it is not: a second way to do anything. Open ``run.py`` first.
"""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command that ``sys.argv`` names, and exit with its code."""
    try:
        from anabranch.cli.app import main as run_command  # a third of a second, in which Ctrl-C may come

        run_command()
    except KeyboardInterrupt:
        print("anabranch: SIGINT: stopped before anything had started", file=sys.stderr)
        sys.exit(130)

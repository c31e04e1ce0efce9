"""Installs Anabranch with a dependency group into the virtual environment whose Python runs this, in one line.

Called by `make` with the group's name. All that pip says is in `install.log` in the environment, and shown if it fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

LOG = Path(sys.prefix, "install.log")
PIP = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "-c", "constraints.txt"]
MEGABYTE = 1 << 20
LARGE = 50 * MEGABYTE
SHOWN_LINES = 30
PARTS = "tables", "others"  # of the kernels


class Display:
    """One line that is drawn over again on a terminal; elsewhere a line for each large download, and no more."""

    def __init__(self) -> None:
        self._drawn = sys.stdout.isatty()
        self._what = ""
        self._announced = ""

    def take(self, line: str) -> None:
        """Show what a line of pip's output tells."""
        if found := re.match(r"Progress (\d+) of (\d+)", line):
            done, total = int(found[1]), int(found[2])
            if self._drawn:
                self._draw(f"{self._what}: {done / MEGABYTE:.0f} of {total / MEGABYTE:.0f} MB")
            elif total >= LARGE and self._announced != self._what:
                self._announced = self._what
                print(f"{self._what}: {total / MEGABYTE:.0f} MB", flush=True)
        elif found := re.match(r"\s*(Downloading|Collecting|Building|Installing|compiling)\s+(\S+)(.*)", line):
            rest = found[3] if found[1] == "compiling" else ""
            self._what = f"{found[1].lower()} {found[2].rsplit('/')[-1]}{rest}"
            self._draw(self._what)

    def _draw(self, text: str) -> None:
        if self._drawn:
            width = os.get_terminal_size().columns - 1
            print(f"\r{text[:width]}\x1b[K", end="", flush=True)

    def finish(self, text: str) -> None:
        """Return the closing line, in place of the progress."""
        print(f"\r{text}\x1b[K" if self._drawn else text, flush=True)


def steps_of(group: str) -> list[list[str]]:
    """Return pip's commands: the first group's bring pip itself and the package."""
    own = [*PIP, "--progress-bar", "raw", "--group", group]
    if group != "demo":
        return [own]
    # The first pip that knows dependency groups. Modules are compiled where they are imported: pip compiles all, on one
    # core, for half a minute.
    return [[*PIP, "--upgrade", "pip>=25.1"], [*own, "--no-compile", "--editable", "."]]


def compile_kernels(log: IO[str]) -> None:
    """Compile kernels, and the modules that are imported for it, which are kept also where the environment forbids it.

    What cannot be compiled is when it is needed, or fails there with its reason.
    """
    command = [sys.executable, "tools/compile_kernels.py", "float32"]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    parts = [subprocess.Popen([*command, part], stdout=log, stderr=log, env=environment) for part in PARTS]
    for process in parts:
        process.wait()


def main(group: str) -> None:
    """Run the steps; exits with 1 and the end of the log if one fails."""
    started = time.monotonic()
    display = Display()
    size = "torch is large, this takes a minute" if group == "demo" else f"for `make {group}`"
    print(f"installing into {Path(sys.prefix).name} (once; {size})", flush=True)
    with LOG.open("a") as log:
        for step in steps_of(group):
            # Through a pipe pip draws nothing of its own, and its warnings are not the reader's.
            with subprocess.Popen(step, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
                assert process.stdout
                for line in process.stdout:
                    log.write(line)
                    display.take(line)
            if process.returncode:
                log.flush()
                display.finish(f"pip failed (exit code {process.returncode}); the end of {LOG}:")
                lines = [line for line in LOG.read_text().splitlines() if not line.startswith("Progress ")]
                sys.exit("\n".join(lines[-SHOWN_LINES:]))
        if group == "demo":
            display.take("compiling kernels (half a minute)")
            compile_kernels(log)
    display.finish(f"installed in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])

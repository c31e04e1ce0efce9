"""``LivePicture``: the picture of a job at the bottom of the launcher's terminal while the job runs."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

from anabranch.launch.job_status import JobStatus, status_of
from anabranch.launch.output.picture import drawn, picture
from anabranch.launch.output.screen import Screen

__all__ = ["LivePicture"]

_FIRST = 1.0  # seconds before the first picture: in a shorter job it would only flicker
_EVERY = 0.5


class LivePicture:
    """Draws the job, from the status files in its log folder, on a thread of the launcher; a context manager.

    Args:
        folder: the job's log folder.
        screen: shows the lines; made with ``pictures``.
    """

    def __init__(self, folder: Path, screen: Screen) -> None:
        self._folder = folder
        self._screen = screen
        self._before: JobStatus | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="anabranch-picture", daemon=True)

    def _run(self) -> None:
        pause = _FIRST
        while not self._stop.wait(pause):
            pause = _EVERY
            try:
                found, size = status_of(self._folder), os.get_terminal_size(1)
            except (ValueError, OSError):  # a folder that was removed, a terminal that was closed
                continue
            # One column less: a terminal that is at its last column may clear it with the rest of the line.
            self._screen.draw(drawn(picture(found, self._before, lines=size.lines // 2), size.columns - 1))
            self._before = found

    def __enter__(self) -> LivePicture:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=10.0)

"""``JobTrace``: the trace of a whole job, made at its end, however it ends, from the recordings of its processes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

from anabranch.record.process import TRACE_VARIABLE
from anabranch.record.trace import ProcessTrace, check_trace_path, read_part, write_trace

__all__ = ["JobTrace"]


class JobTrace:
    """Makes the processes of a job record spans until the block ends; then writes the trace.

    Args:
        path: where the trace goes.
        log_dir: where processes write their records, in a folder that is removed at the end.
        names: returns the names of the job's services, by their endpoints.
        tell: called with a line about the file, or the reason why there is none.

    Raises:
        ValueError: no file can be written there.
    """

    def __init__(
        self, path: Path, log_dir: Path, names: Callable[[], Mapping[str, str]], tell: Callable[[str], None]
    ) -> None:
        self._path = check_trace_path(path)
        self._log_dir = log_dir
        self._names = names
        self._tell = tell

    def __enter__(self) -> Mapping[str, str]:
        """Return the environment variables for each process of the job."""
        self._folder = Path(tempfile.mkdtemp(prefix=".spans-", dir=self._log_dir)).absolute()
        return {TRACE_VARIABLE: str(self._folder)}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._write()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self) -> None:
        parts = list(self._parts())
        if not parts:
            self._tell(f"no trace was written to {self._path}: no process recorded anything")
            return
        try:
            wrote = write_trace(self._path, parts, names=self._names())
        except OSError as error:
            self._tell(f"no trace was written to {self._path}: {error.strerror}")
            return
        missing = f" ({wrote.dropped} more were dropped)" if wrote.dropped else ""
        self._tell(
            f"the trace: {self._path}, {wrote.spans} spans of {wrote.processes} processes{missing}; open it at "
            "https://ui.perfetto.dev"
        )

    def _parts(self) -> Iterator[ProcessTrace]:
        for path in sorted(self._folder.glob("*.spans")):
            part = read_part(path.read_bytes())
            if part is not None:
                yield part

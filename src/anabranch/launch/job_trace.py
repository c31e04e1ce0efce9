"""The trace of a whole job, made at its end, however it ends, from the recordings of its processes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from anabranch.record.process import TRACE_VARIABLE
from anabranch.record.trace import ProcessTrace, read_part, write_trace


@contextmanager
def traced(
    path: Path, log_dir: Path, names: Callable[[], Mapping[str, str]], tell: Callable[[str], None]
) -> Iterator[Mapping[str, str]]:
    """Make the processes of a job record spans until the block ends; then write the trace.

    Args:
        path: where the trace goes.
        log_dir: where processes write their records, in a folder that is removed at the end.
        names: returns the names of the job's services, by their endpoints.
        tell: called with a line about the file, or the reason why there is none.

    Yields:
        The environment variables for each process of the job.
    """
    path = path.absolute()
    with tempfile.TemporaryDirectory(prefix=".spans-", dir=log_dir, ignore_cleanup_errors=True) as name:
        folder = Path(name).absolute()
        try:
            yield {TRACE_VARIABLE: str(folder)}
        finally:
            parts = [read_part(file.read_bytes()) for file in sorted(folder.glob("*.spans"))]
            tell(_write(path, [part for part in parts if part is not None], names()))


def _write(path: Path, parts: list[ProcessTrace], names: Mapping[str, str]) -> str:
    if not parts:
        return f"no trace was written to {path}: no process recorded anything"
    try:
        wrote = write_trace(path, parts, names=names)
    except OSError as error:
        return f"no trace was written to {path}: {error.strerror}"
    missing = f" ({wrote.dropped} more were dropped)" if wrote.dropped else ""
    return (
        f"the trace: {path}, {wrote.spans} spans of {wrote.processes} processes{missing}; open it at "
        "https://ui.perfetto.dev"
    )

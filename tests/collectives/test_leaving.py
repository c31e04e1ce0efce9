"""A closed group of workers leaves no thread of gloo behind, which could outlive the interpreter and abort it."""

from __future__ import annotations

from anabranch.testing import LocalJob


def test_closing_ends_the_threads_of_gloo():
    job = LocalJob(workers=2, timeout=60).run_source(
        """
        import json
        from pathlib import Path

        import torch

        from anabranch.collectives import Workers

        def threads_of_gloo():
            names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
            return sum("gloo" in name for name in names)

        workers = Workers()
        workers.all_reduce(torch.zeros(4))
        before = threads_of_gloo()
        workers.close()
        print(json.dumps({"before": before, "after": threads_of_gloo()}))
        """
    )
    for result in job.check().results:
        assert result is not None
        assert result["before"] > 0
        assert result["after"] == 0

"""The table of `make demo-compare`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def test_each_run_is_a_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    from compare_runs import table

    folders = [tmp_path / "killed", tmp_path / "alone"]
    for folder, workers, missed in zip(folders, (2, 1), ({"worker 1": 9.5}, {}), strict=True):
        folder.mkdir()
        facts = {"workers": workers, "servers": workers - 1, "experts": 0, "missed_seconds": missed}
        facts |= {"bits_per_byte": 1.25 * workers, "lzma_bits_per_byte": 1.658}
        (folder / "result.json").write_text(json.dumps(facts))
        (folder / "curve.json").write_text(json.dumps({"held_out": [[workers, 9.0], [80, 2.0], [160, 1.5]]}))
    assert [line.split("  ")[0] for line in table(folders)] == [
        "held-out bits per byte",
        "after step 80",
        "after step 160",
        "all held-out bytes",
        "lzma -9e",
        "worker 1 was killed, and missed for 9.5 s",
    ]
    assert table(folders)[3].split()[-2:] == ["2.500", "1.250"]

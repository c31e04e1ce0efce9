"""Clicks as text: Criteo's and Adult's lines as read, exact positions, and the best score on generated lines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from covering import slow_except


def criteo(label: object = 1, numbers: object = range(13), categories: object = range(26)) -> str:
    fields = [label, *numbers, *(f"{value:08x}" if isinstance(value, int) else value for value in categories)]
    return "\t".join(map(str, fields)) + "\n"


def clicks(path: Path, text: str | bytes, form: str = "criteo", batch: int = 4, **others: object):
    import _clicks

    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return _clicks.Clicks(_clicks.Part(path), _clicks.FORMATS[form], batch, **{"rows": None, **others})


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def slowly(text: str):
    """Criteo's lines read the simple way."""
    import _clicks

    labels, numbers, categories = [], [], []
    for line in text.splitlines():
        label, *fields = line.split("\t")
        labels.append(float(label))
        numbers.append([float(field) if field else np.nan for field in fields[:13]])
        categories.append([int(field, 16) if field else _clicks.MISSING for field in fields[13:]])
    return np.array(labels), np.array(numbers), np.array(categories)


# Reading.


def test_criteos_lines_are_read_as_the_simple_way_reads_them(tmp_path):
    import _clicks
    import _planted

    path = tmp_path / "clicks.txt"
    _planted.Planted("criteo", seed=3).write(path, 500, part=0)
    text = path.read_text() + criteo(0, [-3, "", *[999999999999] * 11], ["", "ffffffff", "0", *["ABcdef01"] * 23])
    read = _clicks.read_criteo(np.frombuffer(text.encode(), np.uint8))
    for mine, expected in zip((read.clicked, read.numbers, read.categories), slowly(text), strict=True):
        np.testing.assert_array_equal(mine, expected)
    assert {len(line.split("\t")) for line in text.splitlines()} == {40}
    assert np.isnan(read.numbers[:-1]).any(), "empty numbers are among what is generated"
    assert (read.categories[:-1] == _clicks.MISSING).any()
    assert (read.numbers[:-1] < 0).any()


def test_a_batch_has_logarithms_flags_of_missing_values_and_ids_by_field(tmp_path):
    (batch,) = clicks(tmp_path / "c", criteo(1, [5, "", -2, *[0] * 10], [7, 7, "", *range(23)]))
    logs = batch["numbers"][0, :13]
    assert logs[:4].tolist() == pytest.approx([np.log(6), 0, -np.log(3), 0])
    assert batch["numbers"][0, 13:].tolist() == [0, 1, *[0] * 11]
    assert batch["clicked"].tolist() == [1]
    ids = batch["ids"][0]
    assert len(set(ids.tolist())) == 26, "the same category of two fields is two ids, and a missing one is one too"
    (hashed,) = clicks(tmp_path / "c", criteo(), rows=5)
    assert hashed["ids"].min() >= 0
    assert hashed["ids"].max() < 5


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (criteo(2), "field 1 is '2', not the label 0 or 1"),
        (criteo(1, ["x", *range(12)]), "field 2 is 'x', not a whole number"),
        (criteo(1, [*range(12), "1.5"]), "field 14 is '1.5', not a whole number"),
        (criteo(1, ["9" * 19, *range(12)]), "not a whole number of at most 18 digits"),
        (criteo(1, range(13), ["g", *range(25)]), "field 15 is 'g', not a hexadecimal number"),
        (criteo(1, range(12)), "39 fields, not 40"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_field(line, said, tmp_path):
    import _clicks

    lines = clicks(tmp_path / "bad.txt", criteo() * 6 + line + criteo() * 3)
    assert len(lines.share(0, 0, 1)["clicked"]) == 4
    with pytest.raises(_clicks.BadLine, match=r"bad.txt, line 7: ") as raised:
        lines.share(1, 0, 1)
    assert said in str(raised.value)
    assert raised.value.line == 7
    assert len(lines.share(2, 0, 1)["clicked"]) == 2, "what follows the batch can be read"


# Positions and shares.


def made(tmp_path: Path, lines: int, form: str = "criteo") -> Path:
    import _planted

    path = tmp_path / f"{form}.txt"
    _planted.Planted(form, seed=1, ids=50).write(path, lines, part=0)
    return path


@pytest.mark.parametrize("form", ["criteo", "adult"])
@pytest.mark.parametrize("block", slow_except([1, 300, 1 << 20], 300, 1 << 20))
def test_it_resumes_at_the_next_batch_wherever_it_stopped(form, block, tmp_path, monkeypatch):
    import _clicks

    monkeypatch.setattr(_clicks, "BLOCK", block)
    path = made(tmp_path, 25, form)
    whole = list(clicks(path, path.read_bytes(), form))
    assert [len(batch["clicked"]) for batch in whole] == [4, 4, 4, 4, 4, 4, 1]
    for stop in range(len(whole) + 1):
        first, second = (clicks(path, path.read_bytes(), form) for _ in range(2))
        read = [first.share(step, 0, 1) for step in range(stop)]
        second.load_state_dict(first.state_dict())
        read += [second.share(step, 0, 1) for step in range(stop, 2 * len(whole))]
        assert all(map(same, read, 2 * whole)), "the next epoch begins at the first line"
        assert len(read) == 2 * len(whole)


def test_a_batch_may_be_shared_out_again(tmp_path):
    path = made(tmp_path, 25)
    whole = list(clicks(path, path.read_bytes()))
    lines = clicks(path, path.read_bytes())
    for step, workers in ((0, 3), (0, 2), (4, 2), (4, 3), (6, 2), (1, 1), (1, 4)):
        parts = [lines.share(step, rank, workers) for rank in range(workers)]
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        assert same(joined, whole[step])
    assert lines.state_dict()["step"] == 1, "who takes the state and shares it out need not read from the file's start"
    lines.load_state_dict(lines.state_dict())
    assert same(lines.share(1, 0, 1), whole[1]), "one that was read before the state was taken"


# What a prediction is worth.


def test_area_under_curve_counts_pairs_and_halves_ties():
    import _clicks

    draw = np.random.default_rng(0)
    scores, clicked = draw.integers(0, 8, 60).astype(float), (draw.random(60) < 0.4).astype(float)
    yes, no = scores[clicked == 1], scores[clicked == 0]
    pairs = ((yes[:, None] > no) + 0.5 * (yes[:, None] == no)).mean()
    assert _clicks.area_under_curve(scores, clicked) == pytest.approx(pairs, abs=1e-12)

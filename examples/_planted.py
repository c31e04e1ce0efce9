"""Clicks that nobody made: lines of Criteo's or Adult's format whose true probabilities are known.

Every category of a field has an effect, some pairs of fields one together, and some numbers one, too::

    clicked ~ Bernoulli(sigmoid(bias + sum of effects[category] + sum of <vector[category], vector[other]> + numbers))

Effects come from hashes, so they take no memory whatever the number of categories, and are the same in every file of a
seed. Categories are drawn from Zipf's law: a few are everywhere, most are rare. No model can rank the lines better than
the probabilities do, so their AUC is the ceiling.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from _clicks import Floats, Ints, area_under_curve, log_loss, mixed
from numpy.typing import NDArray

CHUNK = 8192
LATENT = 2
PAIRS = ((0, 1), (2, 3), (4, 5), (1, 6))


@dataclass(frozen=True, slots=True)
class Best:
    """What the true probabilities reach on a file's own labels, and the AUC that is to be expected of them."""

    auc: float
    log_loss: float
    expected_auc: float


@dataclass(frozen=True, slots=True)
class Planted:
    """What is planted: how many categories each field has, and how steep Zipf's law is."""

    form: str
    seed: int
    ids: int = 5_000
    zipf: float = 1.05

    @property
    def vocabularies(self) -> tuple[int, ...]:
        """Categories of each field: from a few to ``ids``."""
        if self.form == "adult":
            return tuple(len(words) for words in WORDS)
        return tuple(max(4, round(self.ids ** (0.2 + 0.8 * field / 25))) for field in range(26))

    def write(self, path: Path, lines: int, *, part: int) -> Best:
        """Write a file, whole or not at all, and what can be reached on it beside it; nothing if it is there.

        Files of different ``part`` share what is planted, and no line.
        """
        said, kept = {**asdict(self), "lines": lines, "part": part}, path.with_suffix(".best.json")
        if path.exists() and kept.exists():
            found = json.loads(kept.read_text())
            if found["of"] == said:
                return Best(**found["best"])
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        true, clicked = [], []
        with temporary.open("wb") as file:
            for text, probability, label in self.chunks(lines, part):
                file.write(text)
                true.append(probability)
                clicked.append(label)
        probabilities, labels = np.concatenate(true), np.concatenate(clicked)
        best = Best(
            area_under_curve(probabilities, labels),
            log_loss(probabilities, labels),
            area_under_curve(probabilities, probabilities),
        )
        kept.unlink(missing_ok=True)
        temporary.replace(path)
        kept.write_text(json.dumps({"of": said, "best": asdict(best)}))
        return best

    def chunks(self, lines: int, part: int) -> Iterator[tuple[bytes, Floats, Floats]]:
        """Text, true probabilities and labels of some lines at a time."""
        for number, first in enumerate(range(0, lines, CHUNK)):
            draw = np.random.default_rng([self.seed, part, number])
            count = min(CHUNK, lines - first)
            ranks = self._ranks(draw, count)
            numbers = self._numbers(draw, count)
            probability = 1 / (1 + np.exp(-self._odds(ranks, numbers)))
            clicked = (draw.random(count) < probability).astype(np.float64)
            write = _adult_lines if self.form == "adult" else _criteo_lines
            yield write(clicked, numbers, ranks), probability, clicked

    def _ranks(self, draw: np.random.Generator, count: int) -> Ints:
        """Return the category of each field by its rank, 0 the most frequent; MISSING for one in thirty."""
        columns = []
        for size in self.vocabularies:
            chances = np.cumsum(np.arange(1, size + 1, dtype=np.float64) ** -self.zipf)
            columns.append(np.searchsorted(chances, draw.random(count) * chances[-1]).clip(max=size - 1))
        ranks = np.stack(columns, 1)
        return np.where(draw.random(ranks.shape) < 1 / 30, -1, ranks)

    def _numbers(self, draw: np.random.Generator, count: int) -> Floats:
        if self.form == "adult":
            years = draw.integers(17, 80, count)
            schooling = draw.integers(1, 17, count)
            gains = np.where(draw.random((count, 2)) < 0.1, draw.integers(1, 5000, (count, 2)), 0)
            others = [years, draw.integers(20_000, 400_000, count), schooling, *gains.T, draw.integers(10, 80, count)]
            return np.stack(others, 1).astype(np.float64)
        numbers = np.floor(np.exp(draw.normal(2.0, 1.5, (count, 13)))) - 1
        return np.where(draw.random(numbers.shape) < 0.15, np.nan, numbers.clip(max=999_999))

    def _odds(self, ranks: Ints, numbers: Floats) -> Floats:
        """Return the logarithm of the odds of a click."""
        missing = np.isnan(numbers)
        steps = np.log1p(np.abs(np.where(missing, 0, numbers)))
        odds = -1.1 + 0.2 * (steps[:, 0] - steps[:, 2]) * (0.4 if self.form == "adult" else 1.0)
        odds += 0.4 * missing[:, 1]
        strength = 0.6 / np.sqrt(ranks.shape[1] / 8)
        for field in range(ranks.shape[1]):
            odds += strength * self._effect(field, ranks[:, field], 0)
        for one, other in PAIRS:
            for number in range(1, LATENT + 1):
                odds += 0.28 * self._effect(one, ranks[:, one], number) * self._effect(other, ranks[:, other], number)
        return odds

    def _effect(self, field: int, ranks: Ints, number: int) -> Floats:
        """About normal, from a hash of what it is the effect of."""
        whose = ((ranks + 1) << 16) + (field << 8) + (number << 4) + (self.seed << 40)
        bits = mixed(mixed(whose.view(np.uint64)) + np.uint64(0x9E3779B97F4A7C15))
        parts = sum(((bits >> np.uint64(16 * k)) & np.uint64(0xFFFF)).astype(np.float64) for k in range(4))
        return (parts / 65535 - 2.0) * np.sqrt(3.0)


# Lines. ---------------------------------------------------------------------------------------------------------------

_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)
_TAB, _NOTHING = 9, 0


def _criteo_lines(clicked: Floats, numbers: Floats, ranks: Ints) -> bytes:
    """Return a matrix of characters with room for the longest number, from which the room that is left over is then
    taken.
    """
    count = len(clicked)
    tab = np.full((count, 1), _TAB, np.uint8)
    columns = [48 + clicked[:, None].astype(np.uint8)]
    for value in numbers.T:
        columns += [tab, _decimal(value)]
    for field, rank in enumerate(ranks.T):
        hashed = mixed(((rank + 1) * 64 + field + 1).view(np.uint64)) >> np.uint64(32)
        digits = np.stack([_DIGITS[(hashed >> np.uint64(4 * k)) & np.uint64(15)] for k in range(7, -1, -1)], 1)
        columns += [tab, np.where(rank[:, None] < 0, _NOTHING, digits)]
    columns.append(np.full((count, 1), 10, np.uint8))
    text: NDArray[np.uint8] = np.concatenate(columns, 1).astype(np.uint8).reshape(-1)
    return text[text != _NOTHING].tobytes()


def _decimal(values: Floats) -> NDArray[np.uint8]:
    """Whole numbers above -10 and below 1,000,000, in 7 characters of which some may be nothing."""
    missing = np.isnan(values)
    size = np.abs(np.where(missing, 0, values)).astype(np.int64)
    powers = 10 ** np.arange(5, -1, -1)
    digits = 48 + size[:, None] // powers % 10
    digits[:, :5] = np.where(size[:, None] >= powers[:5], digits[:, :5], _NOTHING)
    sign = np.where(values < 0, ord("-"), _NOTHING)
    return np.where(missing[:, None], _NOTHING, np.concatenate([sign[:, None], digits], 1)).astype(np.uint8)


WORDS = tuple(
    line.split()
    for line in """
Private Self-emp-not-inc Local-gov State-gov Self-emp-inc Federal-gov Without-pay
HS-grad Some-college Bachelors Masters Assoc-voc 11th Assoc-acdm 10th 7th-8th Prof-school 9th Doctorate
Married-civ-spouse Never-married Divorced Separated Widowed Married-spouse-absent
Prof-specialty Craft-repair Exec-managerial Adm-clerical Sales Other-service Machine-op-inspct
Husband Not-in-family Own-child Unmarried Wife Other-relative
White Black Asian-Pac-Islander Amer-Indian-Eskimo Other
Male Female
United-States Mexico Philippines Germany Canada Puerto-Rico India Cuba England China
""".strip().splitlines()
)


def _adult_lines(clicked: Floats, numbers: Floats, ranks: Ints) -> bytes:
    lines = []
    for label, (age, weight, years, gain, loss, hours), row in zip(
        clicked.tolist(), numbers.astype(np.int64).tolist(), ranks.tolist(), strict=True
    ):
        work, school, married, job, kin, race, sex, country = (
            "?" if rank < 0 else words[rank] for words, rank in zip(WORDS, row, strict=True)
        )
        lines.append(
            f"{age}, {work}, {weight}, {school}, {years}, {married}, {job}, {kin}, {race}, {sex}, {gain}, {loss}, "
            f"{hours}, {country}, {'>50K' if label else '<=50K'}\n"
        )
    return "".join(lines).encode()

"""Uses of a model beside its steps: each equals the plain program's, or is refused by an error that names the table.

The uses, the moments and the life are those of ``model_uses.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from model_uses import CHANGES, KINDS, MODES, MOMENTS, Doing, close_tables, live, possible, reads_of, refuses

from anabranch.testing import LocalJob


@pytest.fixture(autouse=True)
def _tables_closed() -> Iterator[None]:
    yield
    close_tables()


@pytest.mark.quick_cases(40)
@pytest.mark.parametrize(("kind", "mode", "moment"), list(product(KINDS, MODES, MOMENTS)))
def test_what_is_read_is_the_plain_programs_or_refused(kind: str, mode: str, moment: str) -> None:
    live(kind, mode, {moment: (doing := Doing(reads_of(kind)))})
    plain = kind != "remote" and moment in ("before", "after close", "after an exception")
    assert not plain or not doing.refused, "the model is plain PyTorch then"


CASES = [case for case in product(CHANGES, KINDS, MODES, MOMENTS) if possible(case[0], case[1], case[3])]


@pytest.mark.quick_cases(40)
@pytest.mark.parametrize(("change", "kind", "mode", "moment"), CASES)
def test_a_change_counts_as_in_the_plain_program_or_is_refused(change: str, kind: str, mode: str, moment: str) -> None:
    doing = Doing({change: CHANGES[change]})
    try:
        live(kind, mode, {moment: doing})
    except ValueError as error:  # refused by the next run, the evaluation, or at the end
        if (change not in doing.answers and moment != "before") or not refuses(error, kind, change):
            raise


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "None"])
def test_each_use_by_two_workers_or_one_of_them_is_the_plain_programs_or_refused(mode: str) -> None:
    """Every mode has one job, which names the cases that went wrong."""
    result = LocalJob(2, servers=2, timeout=600.0).run(Path(__file__).with_name("model_uses_job.py"), mode)
    assert list(result.results) == [{}, {}], f"{result.exit_codes}\n{result.logs[0][-5000:]}\n{result.logs[1][-5000:]}"

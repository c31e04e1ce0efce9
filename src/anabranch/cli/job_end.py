"""The report on the terminal at the end of a job: the first failure and its log."""

from __future__ import annotations

from pathlib import Path

from anabranch.cli.messages import say, tell
from anabranch.launch.job_status import status_of
from anabranch.launch.supervision.outcome import Exit, JobOutcome
from anabranch.record.words import on_one_line


def show_end(outcome: JobOutcome, folder: Path, *, verbose: bool) -> None:
    """Print the first failure, the failures that followed from it, and the path of the newest checkpoint."""
    first = outcome.first_failure
    if first is not None:
        failures = [exit_ for exit_ in outcome.exits if not exit_.well and not exit_.stopped]
        alike = [exit_ for exit_ in failures if _reason(exit_) == _reason(first)]
        shown = alike[0] if alike else first  # rank 0's words are on the screen already
        _show_failure(shown)
        others = [exit_ for exit_ in failures if exit_ not in (shown, first, *alike)]
        lost = [] if verbose else [exit_ for exit_ in others if _lost(exit_, first)]
        same = [exit_ for exit_ in alike if exit_ is not shown]
        for folded, how in ((lost, f"lost {first.who}"), (same, "failed alike")):
            if folded:
                ranks = ", ".join(str(exit_.rank) for exit_ in folded)
                tell(f"{'rank' if len(folded) == 1 else 'ranks'} {ranks} {how}; the logs are in {folder}")
        for exit_ in others:
            if exit_ not in lost:
                _show_failure(exit_)
    if first is not None or outcome.interrupted is not None:
        _show_checkpoint(folder)


def _lost(failure: Exit, first: Exit) -> bool:
    """Return True if it follows from the first; if that one lost a server itself, it lost no worker."""
    return _blames_a_worker(failure) or (failure.is_consequence and not first.is_consequence)


def _blames_a_worker(failure: Exit) -> bool:
    return failure.error is not None and failure.error.blames_a_worker


def _reason(failure: Exit) -> tuple[object, ...]:
    """Return what failures that are alike have in common; the words of a loss differ in times."""
    error = failure.error
    if error is None:
        return failure.code, failure.last_words()
    return (error.type, error.lost) if error.is_loss else (error.type, error.message)


def _show_failure(failure: Exit) -> None:
    words = failure.last_words()
    # Rank 0's own words have been shown as it wrote them; those about another rank were held back.
    if words and failure.who == "rank 0" and not _blames_a_worker(failure):
        tell(f"{failure.describe()}. Its output is above")
    else:
        tell(f"{failure.describe()}. {'The end of its output:' if words else 'It wrote nothing.'}")
        if words:
            say(f"\n{words}\n")
    tell(f"the log of {failure.who}: {failure.log}")


def _show_checkpoint(folder: Path) -> None:
    try:
        found = status_of(folder)
    except ValueError:  # the folder was removed, or the disk is full
        return
    steps = max((role.steps for role in found.roles if role.steps is not None), default=None)
    if found.saved is not None:
        saved = on_one_line(found.saved)
        tell(f"the last checkpoint: {saved}" + ("" if steps is None else f" (the job was at step {steps})"))

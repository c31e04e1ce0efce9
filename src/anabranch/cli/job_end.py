"""The end of a job, as the terminal is told of it: what failed first, and where its log is."""

from __future__ import annotations

from pathlib import Path

from anabranch.cli.standard_streams import say
from anabranch.launch import Outcome
from anabranch.launch.status import status_of
from anabranch.launch.supervision.outcome import Exit

__all__ = ["show_end", "tell"]


def show_end(outcome: Outcome, folder: Path, *, verbose: bool) -> None:
    """Say what failed first, who only followed, and where the newest checkpoint lies."""
    first = outcome.first_failure
    if first is not None:
        _show_failure(first)
        others = [exit_ for exit_ in outcome.exits if exit_ is not first and not exit_.well and not exit_.stopped]
        lost = [] if verbose else [exit_ for exit_ in others if exit_.blames_another()]
        alike = [exit_ for exit_ in others if exit_ not in lost and _words(exit_) == _words(first)]
        for folded, how in ((lost, f"lost {first.who}"), (alike, "failed alike")):
            if folded:
                ranks = ", ".join(str(exit_.rank) for exit_ in folded)
                tell(f"{'rank' if len(folded) == 1 else 'ranks'} {ranks} {how}; the logs are in {folder}")
        for exit_ in others:
            if exit_ not in lost and exit_ not in alike:
                _show_failure(exit_)
    if first is not None or outcome.interrupted is not None:
        _show_checkpoint(folder)


def _words(failure: Exit) -> str:
    """Return its last words without its rank."""
    return failure.last_words().replace(f"[rank{failure.rank}]: ", "")


def _show_failure(failure: Exit) -> None:
    words = failure.last_words()
    # Rank 0's own words have been shown as it wrote them; those about another rank were held back.
    if words and failure.who == "rank 0" and not failure.blames_another():
        tell(f"{failure.describe()}. What it wrote is above")
    else:
        tell(f"{failure.describe()}. {'The end of its output:' if words else 'It wrote nothing.'}")
        if words:
            say(f"\n{words}\n")
    tell(f"the log of {failure.who}: {failure.log}")


def _show_checkpoint(folder: Path) -> None:
    try:
        found = status_of(folder)
    except ValueError:  # the folder was removed meanwhile, or the disk is full
        return
    steps = next((role.steps for role in found.roles if role.name == "worker 0"), None)
    if found.saved is not None:
        tell(f"the last checkpoint: {found.saved}" + ("" if steps is None else f" (the job was at step {steps})"))


def tell(line: str) -> None:
    """Say a line of the launcher's own, on stderr."""
    say(f"anabranch: {line}")

"""``anabranch keys``: certificates for the processes of one job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anabranch.cli.messages import plain_errors, tell
from anabranch.transport import make_keys
from anabranch.transport.certificates import EVERY_JOB


def keys(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write to; created with mode 0700.")],
    days: Annotated[float, typer.Option(min=0.001, metavar="N", help="How long the certificates are valid.")] = 365.0,
    job: Annotated[
        str, typer.Option(metavar="NAME", help="The job for which they are valid; `*` is every job of the authority.")
    ] = EVERY_JOB,
    authority: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Sign with the authority of this directory.")
    ] = None,
) -> None:
    """Make a private authority, and certificates for each role.

    DIR/authority.pem belongs on every host, DIR/ROLE.pem (worker, parameters, experts, directory) on the hosts of that
    role. DIR/authority.key signs further certificates: keep it where no server runs.

    Processes whose certificates name different jobs refuse each other.
    """
    with plain_errors("DIR"):
        for path in make_keys(directory, days=days, job=job, authority=authority).values():
            typer.echo(path)
    if job == EVERY_JOB:
        tell(
            "these certificates are valid for every job of this authority ('*'); "
            "--job NAME makes them valid for one only"
        )

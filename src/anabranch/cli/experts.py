"""``anabranch experts``: what a directory lists, and how the servers named there are."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from anabranch.cli.messages import plain_errors
from anabranch.cli.options import Insecure, Keys

__all__ = ["experts"]


def experts(
    directory: Annotated[
        str, typer.Argument(metavar="DIRECTORY", help="The endpoint of a directory, or the URL of a Redis.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    keys: Keys = None,
    insecure: Insecure = False,
) -> None:
    """List the experts that a directory knows.

    Of each its uid, the state of its server (running, stopped if it does not answer, or gone), the seconds until its
    announcement expires, and its endpoint. Exit code: 0, or 1 if the directory does not answer.
    """
    from anabranch.experts import Directory, RedisDirectory  # here, with torch
    from anabranch.launch.address_status import ask, state_of
    from anabranch.transport import Client
    from anabranch.transport.failures import printable
    from anabranch.transport.redis_directory import is_redis_url

    with plain_errors("DIRECTORY"), Client(keys=keys, insecure=insecure, retries=0) as client:
        kind = RedisDirectory if is_redis_url(directory) else Directory
        listed = [*kind(directory, keys=keys, insecure=insecure).announced()]
        endpoints = [*{one.endpoint: None for one in listed}]
        outcomes = ask(client, endpoints, "experts") if endpoints else []
    states = {at: state_of(one) or type(one).__name__ for at, one in zip(endpoints, outcomes, strict=True)}
    if as_json:
        records = [
            {"uid": uid, "endpoint": endpoint, "seconds_left": round(seconds, 3), "state": states[endpoint]}
            for uid, endpoint, seconds in listed
        ]
        typer.echo(json.dumps(records))
        return
    width = max((len(one.uid) for one in listed), default=0)
    for uid, endpoint, seconds in listed:
        typer.echo(printable(f"{uid:{width}}  {states[endpoint]:8}{seconds:7.0f} s  {endpoint}"))
    if not listed:
        typer.echo("the directory lists no experts", err=True)

"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def _name_workers(count: str | None) -> None:
    if count is not None:
        raise typer.BadParameter(f"the number of workers is --workers {count}")


Script = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="The Python file, or with -m the module, that every process runs.")
]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="Arguments for the script, passed in sys.argv unchanged.")
]
IsModule = Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as for `python -m`.")]
Workers = Annotated[int, typer.Option(min=1, metavar="N", help="How many worker processes.")]
Servers = Annotated[int, typer.Option(min=0, metavar="N", help="How many parameter servers.")]
Experts = Annotated[int, typer.Option(min=0, metavar="N", help="How many more processes of SCRIPT serve experts.")]
OfTorchrun = Annotated[
    str | None, typer.Option("-n", "--nproc-per-node", "--nproc_per_node", hidden=True, callback=_name_workers)
]
Keys = Annotated[Path | None, typer.Option(metavar="DIR", help="Certificates, from `anabranch keys`.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow TCP without certificates.")]

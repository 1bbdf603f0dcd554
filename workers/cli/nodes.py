"""`ttsv nodes` and `ttsv node`: the machines on which trials run, and making this one such."""

import os
from collections.abc import Iterable
from contextlib import closing
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workers.cli.client_options import Json, connected, console, print_json, print_table
from workers.cli.errors import plain_errors

if TYPE_CHECKING:
    from service.client import Client
    from service.schemas.experiments import ExperimentOut
    from service.schemas.service import NodeOut, NodeTrialOut

nodes_app = typer.Typer()

_MOST_LOOKED_AT = 50
_MOST_TRIALS = 8
_PROBLEM_WIDTH = 72
"""On a terminal, in columns: a row of several lines would be a screen of them, were each as long as its problem."""


@nodes_app.command()
@connected
def nodes(client: "Client", as_json: Json = False) -> None:
    """List the machines on which trials run, and those that left or were refused in the last day.

    Then how long trials have reported nothing, and what waits.
    """
    from workers.cli.tables import show_silences

    found = client.nodes()
    if as_json:
        print_json(found)
        return
    _show(found)
    show_silences(console(), [trial for one in found for trial in one.trials])
    for state in ("running", "queued"):
        found_open = client.experiments(specs=False, state=state, page_size=_MOST_LOOKED_AT + 1)
        _show_waiting(islice(found_open, _MOST_LOOKED_AT))
        if next(found_open, None) is not None:
            typer.echo(f"and more are {state}: ttsv ls --state {state} --limit 1000; ttsv show ID says why one waits")


@nodes_app.command()
@plain_errors
def node(
    head: Annotated[str, typer.Option(envvar="TTSV_HEAD", help="The head, HOST or HOST:PORT (6379).")],
    token_file: Annotated[
        Path, typer.Option(envvar="TTSV_TOKEN_FILE", help="The cluster's token: a copy of the head's.")
    ],
    address: Annotated[
        str | None, typer.Option(envvar="TTSV_NODE_ADDRESS", help="At which the others reach this machine.")
    ] = None,
    cpus: Annotated[
        int | None, typer.Option(min=1, envvar="TTSV_WORKER_CPUS", help="CPUs it gives; all by default.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, envvar="TTSV_WORKER_GPUS", help="GPUs it gives; all by default.")
    ] = None,
    ports: Annotated[str, typer.Option(envvar="TTSV_NODE_PORTS", help="Ports the others reach it at.")] = "6380-6879",
    mps: Annotated[
        bool, typer.Option("--mps", envvar="TTSV_WORKER_MPS", help="Run trials that share a GPU under NVIDIA's MPS.")
    ] = False,
) -> None:
    """Join a head's cluster with this machine, and leave it on Ctrl-C or SIGTERM.

    The machine is compared with the head first, and refused with the reason where it does not fit. It needs no
    database. When the head is away it waits, and joins again.
    """
    from service.errors import UserError
    from service.settings import Settings, ports_of
    from service.settings.logs import configure_logging
    from workers.node.cards import Cards
    from workers.node.machine import local_cpus, own_address
    from workers.node.membership import Membership, Offer
    from workers.node.mps import Mps

    settings = Settings()
    configure_logging(settings)
    address_of_head = head_address(head)
    try:
        chosen = ports_of(ports)
    except ValueError as error:
        raise UserError(f"--ports {ports}: {error}") from None
    with closing(Cards(gpus, os.environ)) as cards:
        offer = Offer(
            cpus=local_cpus() if cpus is None else cpus,
            gpus=cards.count,
            address=address and own_address(address, "--address"),
            ports=chosen,
            environment=cards.environment,
            data_dir=settings.data_dir if "data_dir" in settings.model_fields_set else None,
            mps=Mps(cards.names) if mps else None,
        )
        Membership(address_of_head, token_file, offer).run()


def head_address(head: str) -> str:
    """HOST:PORT of what `--head` says. Raises `UserError`."""
    from service.errors import UserError

    host, _, port = head.partition(":")
    if not host or not (port or "6379").isdecimal() or not 0 < int(port or "6379") < 2**16:
        raise UserError(f"--head {head}: must be HOST or HOST:PORT, of ports 1 to 65535")
    return f"{host}:{port or 6379}"


def _show(found: "list[NodeOut]") -> None:
    from collections import Counter

    from rich.table import Table
    from rich.text import Text

    table = Table("host", "state", "since (UTC)", "CPUs", "GPUs", "memory GiB", "GPU models", "runs trials", box=None)
    table.add_column("problem", max_width=_PROBLEM_WIDTH, overflow="fold")
    moment = datetime.now(UTC)
    for one in found:
        trials = [_working(trial, moment) for trial in one.trials[:_MOST_TRIALS]]
        models = Counter(f"{gpu.name} {gpu.memory_gib:g} GiB" for gpu in one.machine.gpus) if one.machine else {}
        table.add_row(
            Text(f"{one.host} (head)" if one.head else one.host),
            one.state.value,
            f"{one.left_at or one.joined_at:%Y-%m-%d %H:%M}",
            f"{one.cpus:g}",
            f"{one.gpus:g}",
            f"{one.memory_gib:g}",
            Text(", ".join(f"{count} x {name}" for name, count in models.items()) or "-"),
            Text(",\n".join(trials + ["..."] * (len(one.trials) > _MOST_TRIALS)) or "-"),
            Text(one.problem or "-"),
        )
    print_table(table)


def _working(trial: "NodeTrialOut", moment: datetime) -> str:
    """A trial, the GPUs that it has of its node, and for how long it has run, as far as that is known."""
    from service.queue.cluster import GPUS
    from workers.cli.tables import duration

    _, gpus, numbers = trial.place.partition(GPUS)
    details = [f"GPU {numbers.replace(', ', '+')}"] if gpus else []
    if trial.since is not None:
        details.append(duration(max(0.0, (moment - trial.since).total_seconds())))
    return f"{trial.id} ({', '.join(details)})" if details else str(trial.id)


def _show_waiting(experiments: "Iterable[ExperimentOut]") -> None:
    for one in experiments:
        if one.waiting is not None:
            typer.echo(f"experiment {one.id} ({one.name}) waits: {one.waiting}")

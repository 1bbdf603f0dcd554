"""`ttsv prune`: removes networks and checkpoints to make room, straight in database and data folder."""

import json
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from workers.cli.client_options import LONGEST_DAYS, Json, print_table
from workers.cli.errors import plain_errors
from workers.cli.findings import size

if TYPE_CHECKING:
    from service.upkeep.retention import Plan


@plain_errors
def prune(
    older_than: Annotated[
        float | None,
        typer.Option(min=0, max=LONGEST_DAYS, help="Networks of trials that ended more than so many days ago."),
    ] = None,
    best: Annotated[
        int | None, typer.Option(min=0, help="All but so many networks of each experiment, the best by accuracy.")
    ] = None,
    gib: Annotated[
        float | None, typer.Option("--size", min=0, help="The oldest until all networks have at most so many GiB.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing; list what would go.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also networks whose results boards show.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Remove networks and old checkpoints to make room; results and all other files stay.

    What any rule names goes, but for networks whose results count on a board, and those that a trial is to evaluate.
    Lists what goes and asks first. Without any rule those of TTSV_RETENTION_DAYS, _BEST and _GIB are taken.
    """
    from service.database.engine import Database
    from service.settings import Settings
    from service.upkeep import retention
    from service.upkeep.files import DataFolder
    from service.upkeep.home import refuse_elsewhere
    from service.upkeep.migrate import refuse_absent, refuse_unmigrated
    from service.upkeep.restore import refuse_half_restored

    settings = Settings()
    if (older_than, best, gib) == (None, None, None):
        older_than, best, gib = settings.retention_days, settings.retention_best, settings.retention_gib
    rules = retention.Rules(older_than, best, gib, force=force)
    folder = DataFolder.of(settings)
    refuse_half_restored(settings)
    refuse_absent(settings.url)
    with closing(Database(settings.url)) as database:
        refuse_unmigrated(database)
        refuse_elsewhere(database, settings, in_doubt=True)
        with database.read() as session:
            found = retention.plan(session, folder, rules)
        if not as_json:
            _show(found)
        if not dry_run and (found.networks or found.checkpoints):
            if not yes:
                typer.confirm(f"remove {size(found.size)} for good?", abort=True, err=True)
            listed, found = found, retention.prune(database, folder, found, force=force)
            kept = len(listed.networks) - len(found.networks) + len(listed.checkpoints) - len(found.checkpoints)
            if not as_json:
                typer.echo(f"removed: {_summary(found)}")
            if kept:
                why = "it is needed or shown by now, gone already, or may not be removed"
                typer.echo(f"ttsv: warning: {kept} of what was listed this did not remove: {why}", err=True)
    if as_json:
        typer.echo(json.dumps(asdict(found) | {"size": found.size, "removed": not dry_run}, indent=2, default=str))
    if found.too_much:
        over = f"networks have {size(found.too_much)} more than is allowed"
        typer.echo(f"ttsv: warning: {over}: boards show them, or what runs or waits needs them", err=True)


def _summary(found: "Plan") -> str:
    return f"{len(found.networks)} networks, checkpoints of {len(found.checkpoints)} trials, {size(found.size)}"


def _show(found: "Plan") -> None:
    from rich.table import Table

    from service.upkeep.retention import Checkpoints, Network

    table = Table("experiment", "trial", "what", "size", "accuracy", "ended", "why")
    going: list[Network | Checkpoints] = [*found.networks, *found.checkpoints]
    for one in going:
        what, value = ("network", one.accuracy) if isinstance(one, Network) else ("checkpoints", None)
        accuracy = "-" if value is None else f"{value:.4f}"
        ended = "-" if one.finished_at is None else f"{one.finished_at:%Y-%m-%d}"
        table.add_row(str(one.experiment_id), str(one.trial_id), what, size(one.size), accuracy, ended, one.reason)
    if going:
        print_table(table)
    typer.echo(_summary(found))
    if found.spared:
        typer.echo(f"{found.spared} more ({size(found.spared_size)}) stay, as boards show them: archive, or --force")

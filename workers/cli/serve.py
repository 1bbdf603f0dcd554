"""The commands that run the service: `ttsv serve`, `migrate`, `api`, `worker`, `ready`, `demo`."""

import gc
import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workers.cli.client_options import asking, console
from workers.cli.errors import UNFINISHED, plain_errors

if TYPE_CHECKING:
    from service.client import Client

serve_app = typer.Typer()


@serve_app.command()
@plain_errors
def serve(
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Instead of TTSV_PORT; 0 picks a free one.")
    ] = None,
) -> None:
    """Migrate, then serve the API and one worker until Ctrl-C."""
    from service.settings import Settings
    from workers.worker.single_machine import LocalStack

    screen = console()
    with LocalStack(Settings(), port=port) as stack:
        documents = f"{stack.url}/docs"
        screen.print(f"API on {stack.url} ({documents}), data in {stack.settings.data_dir}", soft_wrap=True)
        screen.print("Ctrl-C stops everything; what runs then goes on at the next start")
        stack.stay(lambda said: screen.print(said, style="red", markup=False, highlight=False, soft_wrap=True))


@serve_app.command()
@plain_errors
def migrate(
    here: Annotated[
        bool, typer.Option("--here", help="Also: the files of trials are now where TTSV_DATA_DIR or TTSV_STORAGE says.")
    ] = False,
) -> None:
    """Bring the database to the newest schema."""
    from service.database.engine import Database
    from service.settings import Settings
    from service.upkeep.home import move_here, refuse_lost
    from service.upkeep.migrate import migrate as run
    from service.upkeep.migrate import newest
    from service.upkeep.restore import refuse_half_restored

    settings = Settings()
    refuse_half_restored(settings)
    with closing(Database(settings.url)) as database:
        refuse_lost(database, settings)
        run(database)
        typer.echo(f"the database is at revision {newest()}")
        if here:
            typer.echo(f"the files of trials are in {move_here(database, settings)}")


@serve_app.command()
@plain_errors
def api(
    fd: Annotated[int | None, typer.Option(hidden=True, help="Listening socket inherited from `ttsv serve`.")] = None,
) -> None:
    """Serve the API on TTSV_HOST and TTSV_PORT (the database must be migrated)."""
    import uvicorn

    from service.access.keys import refuse_without_keys
    from service.database.engine import Database
    from service.settings import Settings
    from service.settings.logs import configure_logging
    from service.upkeep.home import refuse_link, refuse_lost, settle
    from service.upkeep.migrate import refuse_unmigrated
    from service.upkeep.restore import refuse_half_restored

    settings = Settings()
    configure_logging(settings)
    settings.refuse_open_network()
    refuse_half_restored(settings)
    with closing(Database(settings.url)) as database:
        refuse_unmigrated(database, newer=False)
        refuse_without_keys(database, settings)
        refuse_link(settings)
        refuse_lost(database, settings)
        settle(database, settings)
    uvicorn.run(
        "service.main:application",
        factory=True,
        fd=fd,
        host=settings.host,
        port=settings.port,
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=5,
        server_header=False,
    )


@serve_app.command()
@plain_errors
def worker(
    until_idle: Annotated[bool, typer.Option("--until-idle", help="Leave when there is nothing to run.")] = False,
    time_limit: Annotated[
        str | None,
        typer.Option(help="Leave a minute before this is over (90s, 30m, 4h, 1-12:00:00); in a Slurm job by its own."),
    ] = None,
    requeue: Annotated[
        bool, typer.Option("--requeue", help="Have Slurm run this job again if the time was too short.")
    ] = False,
) -> None:
    """Claim experiments and run them on Ray, until SIGTERM or Ctrl-C. Tells webhooks, where they are configured.

    Ends with 75 where its time was over before the work, unless the job was queued again.
    """
    from service.database.engine import Database
    from service.settings import Settings
    from service.settings.logs import configure_logging
    from service.upkeep.home import refuse_elsewhere, refuse_link, refuse_lost
    from service.upkeep.migrate import refuse_unmigrated
    from service.upkeep.restore import refuse_half_restored
    from workers.worker import job_time
    from workers.worker.poller import Worker
    from workers.worker.upkeep import Upkeep
    from workers.worker.webhooks import WebhookSender

    settings = Settings()
    configure_logging(settings)
    if requeue:
        job_time.job_of(os.environ)  # said now, and not when the time is over
    time_given = job_time.allocation(time_limit, os.environ, until_idle=until_idle)
    refuse_half_restored(settings)
    database = Database(settings.url)
    webhooks = WebhookSender(settings, database)  # says what is wrong in the settings
    refuse_unmigrated(database, newer=False)
    refuse_link(settings)
    refuse_lost(database, settings)
    refuse_elsewhere(database, settings)
    with webhooks, Upkeep(settings, database):
        polling = Worker(settings, database, allocation=time_given)
        gc.freeze()  # what was imported stays: to look through it for garbage takes three decisions' time
        unfinished = polling.run()
    if unfinished:
        if not requeue:
            raise typer.Exit(UNFINISHED)
        job_time.requeue(os.environ)


@serve_app.command()
@asking(retries=0, timeout=5)
def ready(
    client: "Client",
    worker: Annotated[
        bool, typer.Option("--worker", help="Also ask for a worker and a node of it, seen in the last minute.")
    ] = False,
) -> None:
    """Fail unless the service is ready: for health checks."""
    from datetime import UTC, datetime, timedelta

    from service.errors import UserError

    service = client.ready()
    if not worker:
        return
    lately = datetime.now(UTC) - timedelta(minutes=1)
    if service.worker_seen_at is None or service.worker_seen_at < lately:
        raise UserError("no worker was heard of in the last minute")
    if service.node_seen_at is None or service.node_seen_at < lately:
        raise UserError(
            "a worker is there, and no node on which trials can run: its Ray starts, or `ttsv doctor` says why it does "
            "not"
        )


@serve_app.command()
@plain_errors
def alive() -> None:
    """Fail unless the worker or node of this machine turns: for its container's health check."""
    from service.errors import UserError
    from workers.node.pulse import silence

    if (why := silence()) is not None:
        raise UserError(why)


@serve_app.command()
@plain_errors
def demo(
    spec: Annotated[Path, typer.Argument(help="The experiment to run.")] = Path("examples/quickstart.json"),
) -> None:
    """Start everything on a free port, run a grid, print its leaderboard, stop everything."""
    from service.settings import Settings
    from workers.cli.demo import run
    from workers.cli.experiments import read_spec

    run(Settings(), read_spec(spec), console(), str(spec))

"""What `ttsv doctor` looks at of the service: settings, database, workers, clocks, the API."""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from difflib import get_close_matches
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from ttsv.runtime.faults import VARIABLES
from workers.cli.findings import BACKUP, RESTORE, Check, Finding, ago

if TYPE_CHECKING:
    import httpx2 as httpx

    from service.database import ClusterNode
    from service.database.engine import Database
    from service.database.server import Server
    from service.queue.census import OpenExperiment, Sign
    from service.settings import Settings

_ELSEWHERE = (
    *("TTSV_URL", "TTSV_KEY", "TTSV_HEAD", "TTSV_TOKEN_FILE", "TTSV_NODE_ADDRESS"),
    *("TTSV_BIND", "TTSV_DATABASE_PORT", "TTSV_DATA", "TTSV_TOKEN"),
    *("TTSV_TORCH_INDEX", "TTSV_WORKER_MEMORY", "TTSV_POSTGRES_IMAGE", "TTSV_REVISION", "TTSV_FUZZ_CASES"),
    *VARIABLES,
)
"""Variables that are ours and no settings: of the command; of the compose files; of image and tests; fault points."""
_OLDEST_POSTGRES = 15
"""Its makers mend no older one."""
_WAL_BYTE, _WAL = 18, 2
"""Where the header of a SQLite file says how it is journalled, and what it says there of a write-ahead log."""
_APART, _FAR_APART = 5.0, 60.0
"""Seconds by which clocks may differ; further apart, nodes are refused, and what commands show is off."""
_SEEING_SECONDS = 30.0
"""So long it may take, once Ray has started, until the worker has seen a node of it."""
_MOST_LINES = 10
_NEWEST_FILES = 20
_MOST_NODES = 1000
_MOST_LETTERS = 300
_PATIENCE = 5.0
_SCHEMA_PATIENCE = 30.0
"""The API makes its schema, which has its version, when that is first asked for."""

_settings, _disk, _database, _workers, _clock, _api = map(
    Check, ("settings", "disk", "database", "workers", "clock", "api")
)
_RESTORE = "ttsv restore --force FILE  # a backup; docs/backup.md"
_CLOCK_MEND = "sudo timedatectl set-ntp true"


def look_at_settings() -> "tuple[Settings | None, list[Finding]]":
    """The settings, None where they cannot be read, and what is wrong with them."""
    from pydantic import ValidationError

    from service.settings import Settings

    known = {f"TTSV_{name.upper()}" for name in Settings.model_fields} | set(_ELSEWHERE)
    given = sorted(name for name in os.environ if name.upper().startswith("TTSV_"))
    findings = [_unknown(name, known) for name in given if name.upper() not in known]
    try:
        settings = Settings()
    except ValidationError as error:
        for fault in error.errors():
            name = f"TTSV_{str(fault['loc'][0]).upper()}"
            findings.append(_settings.wrong(f"{name}: {fault['msg']}", f"unset {name}"))
        return None, findings
    findings += _secrets(settings)
    if not findings:
        findings.append(_settings.ok(f"{len(given)} TTSV_ variables are set, all of them known and as they should be"))
    return settings, findings


def _unknown(name: str, known: set[str]) -> Finding:
    """A name close to one of ours is most likely a slip, so that the service runs with another setting than meant."""
    near = get_close_matches(name.upper(), known, n=1, cutoff=0.8)
    if near:
        return _settings.wrong(f"{name} is no setting and has no effect: {near[0]}?", f"unset {name}  # set {near[0]}")
    return _settings.warning(f"{name} is no setting and has no effect (docs/settings.md has them all)", f"unset {name}")


def _secrets(settings: "Settings") -> Iterator[Finding]:
    """What is wrong with files of secrets, and with who may use the API."""
    from service.access.security import SECRET
    from service.errors import UserError
    from workers.worker.webhooks import targets

    password = settings.database_password_file
    if password is not None:
        mend = f"ls -l {quote(str(password))}  # a file that this user may read, with the password alone"
        try:
            if not password.read_text().strip():
                yield _settings.wrong(f"TTSV_DATABASE_PASSWORD_FILE: {password} is empty", mend)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no text"
            yield _settings.wrong(f"TTSV_DATABASE_PASSWORD_FILE: {password} cannot be read: {reason}", mend)
    try:
        targets(settings)
    except UserError as error:
        mend = "python -c 'import secrets; print(secrets.token_hex())' > webhook-secret"
        yield _settings.wrong(str(error), mend if "SECRET" in str(error) else "unset TTSV_WEBHOOK_URL")
    try:
        settings.refuse_open_network()
    except UserError as error:
        yield _settings.wrong(str(error), "unset TTSV_REQUIRE_KEYS")
    secret = settings.data_dir / SECRET
    if secret.exists() and secret.stat().st_mode & 0o077:
        says = f"{secret}, under which keys are hashed, can be read by other users"
        yield _settings.wrong(says, f"chmod 600 {quote(str(secret))}")


def look_at_database(settings: "Settings", *, deep: bool) -> list[Finding]:
    """Database, workers and the database's clock; what is found in it only where it answers and is migrated."""
    from sqlalchemy.exc import SQLAlchemyError

    from service.database.engine import Database, is_damaged, said_by
    from service.errors import UserError
    from service.upkeep.migrate import fault_of
    from service.upkeep.restore import refuse_half_restored

    try:
        refuse_half_restored(settings)
    except UserError as error:  # until then nothing starts, and what is there may be of either
        says = str(error).partition(": run ")[0]
        return [_database.wrong(says, "ttsv restore FILE  # takes it back, or ends it, first")]
    try:
        file = _sqlite_file(settings)
    except (OSError, UnicodeDecodeError):  # of the password, which the settings' check tells
        return []
    if file is not None and (refused := _unsafe(file, settings)):
        return [refused]
    try:
        with closing(Database(settings.url)) as database:
            if (lost := _lost(settings, database)) is not None:
                return [lost]
            fault = fault_of(database)
            if fault is not None:
                says, _, command = fault.partition(": run ")
                return [_database.wrong(f"its schema is {says}", command.strip("`"))]
            return [
                *_inside(database, settings, file, deep=deep),
                *_files(database, settings),
                *_work(database, settings),
            ]
    except UserError as error:
        return [_database.wrong(str(error), "export TTSV_DATA_DIR=/a/folder/that/can/be/written")]
    except SQLAlchemyError as error:
        if is_damaged(error):
            return [_database.wrong(f"{file} is damaged: {said_by(error)}", _RESTORE)]
        return [_database.wrong(f"it does not answer: {said_by(error)}", _reaching(settings, file))]


def _sqlite_file(settings: "Settings") -> Path | None:
    """The file of SQLite; None: PostgreSQL."""
    url = settings.url
    return Path(str(url.database)) if url.get_backend_name() == "sqlite" else None


def _unsafe(file: Path, settings: "Settings") -> Finding | None:
    """Why a file is not opened: there is none, and a look would make it; or to open it could do harm."""
    from service.database.engine import keeps_wal, sqlite_driver

    try:
        with file.open("rb") as opened:
            header = opened.read(_WAL_BYTE + 1)
    except FileNotFoundError:
        none = _database.warning(f"there is none yet: {file} will be made", "ttsv migrate  # as `ttsv serve` does")
        return _lost(settings, None) or none
    except OSError as error:
        return _database.wrong(f"{file} cannot be read: {error.strerror}", f"ls -l {quote(str(file))}")
    if header[_WAL_BYTE:] == bytes([_WAL]) and not keeps_wal():
        says = f"{file} has a write-ahead log, which SQLite {sqlite_driver.sqlite_version} can corrupt"
        return _database.wrong(says, "pip install pysqlite3  # SQLite of 3.51.3 or newer")
    return None


def _lost(settings: "Settings", database: "Database | None") -> Finding | None:
    """Whether a new database, or one that is yet to be made, has the place of one whose trials left files."""
    from service.upkeep.home import lost_problem

    try:
        problem = lost_problem(settings, database)
    except OSError as error:
        says = f"whether files of trials are of this database cannot be told: {error}"
        return _disk.wrong(says, f"ls -ld {quote(str(settings.data_dir))}/trials")
    return None if problem is None else _database.wrong(problem, _RESTORE)


def _reaching(settings: "Settings", file: Path | None) -> str:
    """The command that shows whether the database is there."""
    if file is not None:
        return f"ls -l {quote(str(file))} && fuser -v {quote(str(file))}"
    return f"pg_isready --host {settings.url.host or '/var/run/postgresql'} --port {settings.url.port or 5432}"


def _inside(database: "Database", settings: "Settings", file: Path | None, *, deep: bool) -> Iterator[Finding]:
    """What a migrated database says of itself."""
    from service.access.keys import lacks_secret, refuse_without_keys
    from service.access.security import SECRET
    from service.database.engine import keeps_wal
    from service.database.server import damage, describe
    from service.errors import UserError

    with database.read() as session:
        server = describe(session)
        broken = damage(session) if deep else None
        locked = lacks_secret(session, settings.data_dir)
    if broken is not None:
        yield _database.wrong(f"{file} is damaged: {broken}", _RESTORE)
    if not database.takes_writes():
        mend = "psql --command 'SHOW default_transaction_read_only'"
        if file is not None:
            mend = f"chmod u+rw {quote(str(file))} && chmod u+rwx {quote(str(file.parent))}"
        yield _database.wrong("it is read-only: nothing can be stored", mend)
    if server.name == "PostgreSQL" and server.version[0] < _OLDEST_POSTGRES:
        # A newer server does not start on the folder of an older one.
        mend = f"{BACKUP}  # then start a newer server on a folder of its own, and {RESTORE}; docs/upgrade.md"
        yield _database.warning(f"{server.shown} is no longer mended by its makers", mend)
    elif server.name == "SQLite" and not keeps_wal():
        says = f"{server.shown} cannot be trusted with a write-ahead log: commits take four times as long as they need"
        yield _database.warning(says, "pip install pysqlite3  # SQLite of 3.51.3 or newer")
    else:
        yield _database.ok(f"{server.shown} at the newest schema" + (f" in {file}" if file is not None else ""))
    try:
        refuse_without_keys(database, settings)
    except UserError as error:
        yield _settings.wrong(str(error), "ttsv keys create PROJECT --owner NAME")
    if locked:
        secret = settings.data_dir / SECRET
        says = f"the database has keys, and {secret}, under which they are hashed, is not there: none opens anything"
        mend = f"(umask 077; unzip -p FILE files/{SECRET} > {quote(str(secret))})  # of a backup"
        if settings.storage is None:
            yield _settings.wrong(says, f"{mend}; if there is none, `ttsv keys revoke` all")
        else:  # whose worker may have a data folder of its own
            yield _settings.warning(f"{says}, if the API runs here", f"{mend}; nothing, where workers alone run")
    yield _database_clock(server)


def _files(database: "Database", settings: "Settings") -> Iterator[Finding]:
    """Whether these settings find what trials left last, which a worker with others may have written elsewhere."""
    from service.experiments.artifacts import is_kept, newest_artifacts
    from service.storage import bucket_problem, without_secrets
    from service.upkeep.home import problem_of

    if settings.storage is not None and "://" in settings.storage and bucket_problem(settings.storage) is not None:
        return  # which the look at the disk tells; to ask for each file would take minutes
    with database.read() as session:
        found = newest_artifacts(session, _NEWEST_FILES)
        session.expunge_all()
    place = "" if settings.storage is None else f", nor in the store {without_secrets(settings.storage)}"
    place, mend = (
        f"{settings.data_dir}{place}",
        "env | grep ^TTSV_  # TTSV_DATA_DIR and TTSV_STORAGE: of API and workers",
    )
    try:
        if (problem := problem_of(database, settings)) is not None:
            yield _disk.wrong(problem, mend)
            return
        missing = [one for one in found if not is_kept(settings, one)]
    except OSError as error:
        yield _disk.wrong(f"whether files of trials are in {place} cannot be told: {error}", mend)
        return
    if missing:
        newest = missing[0]
        says = f"of the {len(found)} newest files of trials {len(missing)} are not in {place}, as the {newest.kind} of"
        yield _disk.wrong(f"{says} trial {newest.trial_id}: removed, or written elsewhere by a worker", mend)
    elif found:
        yield _disk.ok(f"the {len(found)} newest files of trials are where they are served from")


def _database_clock(server: "Server") -> Finding:
    if server.ahead is None:
        return _clock.ok(f"{server.name} goes by the clock of this machine")
    return _difference(f"the database at {server.shown}", server.ahead)


def _difference(whose: str, ahead: float) -> Finding:
    apart = f"the clock of {whose} is {ago(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} ours"
    if abs(ahead) < _APART:
        return _clock.ok(f"the clock of {whose} agrees with ours")
    if abs(ahead) < _FAR_APART:
        return _clock.warning(apart, _CLOCK_MEND)
    return _clock.wrong(f"{apart}: nodes so far from their head are refused, and times are shown wrong", _CLOCK_MEND)


def _work(database: "Database", settings: "Settings") -> Iterator[Finding]:
    """Workers, when they were heard of, whether they have nodes, and the experiments that wait for them."""
    from service.database import now
    from service.experiments.transitions import HEARD_WITHIN
    from service.queue.census import last_signs, open_experiments
    from service.queue.nodes import listed

    with database.read() as session:
        signs, experiments = last_signs(session), open_experiments(session)
        nodes = listed(session, _MOST_NODES)
    here: list[tuple[Sign, float]] = []
    gone: list[tuple[Sign, float]] = []
    for sign in signs:
        silent = (now() - sign.seen_at).total_seconds()
        (here if silent < HEARD_WITHIN.total_seconds() else gone).append((sign, silent))
        if silent < -_APART:
            yield _difference(f"worker {sign.worker}", -silent)
    if here:
        yield from _there(here, nodes, settings)
    elif experiments:
        open_ones = "1 experiment is" if len(experiments) == 1 else f"{len(experiments)} experiments are"
        says = f"no worker was heard of in the last minute, and {open_ones} queued or running"
        yield _workers.wrong(says, "ttsv worker")
    else:
        yield _workers.warning("no worker was heard of in the last minute; nothing waits for one", "ttsv worker")
    # Where the next one was started already, whoever follows the mend would start a second one.
    newest = {_host(sign): sign.started_at for sign, _ in sorted(here, key=lambda one: one[0].started_at)}
    missed = [one for one in gone if newest.get(_host(one[0]), one[0].started_at) <= one[0].started_at]
    for sign, silent in missed[:_MOST_LINES]:
        yield _workers.warning(f"not heard of any more: {_shown(sign, silent)}", "ttsv worker  # on its machine")
    for node in [node for node in nodes if node.problem is not None][:_MOST_LINES]:
        says = f"machine {node.host} ({node.state}): {node.problem}"
        yield _workers.warning(says, "ttsv nodes  # docs/nodes.md")
    mend = "ttsv nodes  # those there are" if here else "ttsv worker"
    yield from _waiting([experiment for experiment in experiments if experiment.waiting is not None], mend)


def _there(
    here: "Sequence[tuple[Sign, float]]", nodes: "Sequence[ClusterNode]", settings: "Settings"
) -> Iterator[Finding]:
    """Workers that live: in order are those that have nodes, and those whose Ray may still be starting."""
    from service.database import now
    from service.specs.states import NodeState
    from workers.node.raylet import START_SECONDS

    alive = [node for node in nodes if node.state is NodeState.ALIVE]
    shown = []
    for sign, silent in here:
        # Of a cluster that several workers share, a node has the name of the one that told of it last.
        if any(node.worker == sign.worker or node.host == _host(sign) for node in alive):
            shown.append(_shown(sign, silent))
            continue
        left = [node.left_at for node in nodes if node.worker == sign.worker and node.left_at is not None]
        without = (now() - max([sign.started_at, *left])).total_seconds()
        if without < START_SECONDS + _SEEING_SECONDS:
            shown.append(f"{_shown(sign, silent)}, whose Ray starts")
            continue
        why, mend = _why_no_node(sign, settings)
        says = f"{_shown(sign, silent)}, without a node for {ago(without)}"
        if alive:
            yield _workers.warning(f"{says}, unless it shares another's{why}", mend)
        else:
            yield _workers.wrong(f"{says}: no trial can run{why}", mend)
    if shown:
        yield _workers.ok("; ".join(shown))


def _why_no_node(sign: "Sign", settings: "Settings") -> tuple[str, str]:
    """What a worker said last of what went wrong, where its log is here, and the command that shows more."""
    from service.settings.logs import errors_in

    logs = settings.data_dir / "logs"
    ray = logs / f"ray-{sign.worker.rpartition('-')[2]}.log"
    if socket.gethostname() != _host(sign) or not logs.is_dir():
        return "", f"tail --lines 20 {quote(str(ray))}  # on {_host(sign)}, and the log of its worker"
    log = logs / "worker.log"
    with suppress(OSError):
        # Workers that `ttsv serve` started one after the other wrote into one file.
        _, began, own = log.read_text(errors="replace").rpartition(f"worker {sign.worker}: ")
        if began and (errors := errors_in(own)):
            return f" (its log: {errors[-1][:_MOST_LETTERS]})", f"tail --lines 20 {quote(str(log))}"
    return "", f"tail --lines 20 {quote(str(ray))}  # and the log of `ttsv worker`"


def _host(sign: "Sign") -> str:
    """The machine of a worker, which is called after it and its process."""
    return sign.worker.rpartition("-")[0]


def _shown(sign: "Sign", silent: float) -> str:
    return f"{sign.worker} ({sign.cpus:g} CPUs, {sign.gpus:g} GPUs) {ago(silent)} ago"


def _waiting(experiments: "list[OpenExperiment]", mend_of_none: str) -> Iterator[Finding]:
    """Those that wait for their turn are in order; others wait for a worker or a node that may never come."""
    from service.queue.census import waiting_for

    for experiment in sorted(experiments, key=lambda one: not one.unfit)[:_MOST_LINES]:
        says = f"experiment {experiment.id} ({experiment.name}) waits: {experiment.waiting}"
        if experiment.unfit:
            mend = f"ttsv cancel {experiment.id}  # or start `ttsv worker` on a machine that has as much"
            yield _workers.warning(says, mend)
        elif waiting_for(experiment.waiting or "", unfit=False) == "worker":
            yield _workers.warning(says, mend_of_none)
        else:
            yield _workers.ok(says)
    if len(experiments) > _MOST_LINES:
        yield _workers.ok(f"{len(experiments) - _MOST_LINES} more experiments wait: ttsv ls --state queued")


def look_at_api() -> list[Finding]:
    """Whether the API of TTSV_URL answers, in our version, with our key and at our time."""
    import httpx2 as httpx

    from service.client.connection import DEFAULT_URL

    url = (os.environ.get("TTSV_URL") or DEFAULT_URL).rstrip("/")
    key = os.environ.get("TTSV_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(base_url=url, timeout=_PATIENCE, headers=headers) as client:
            return list(_answers(client, url))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        says = f"no API answers at {url}: {error or type(error).__name__}"
        if os.environ.get("TTSV_URL"):
            return [_api.wrong(says, f"curl --verbose {quote(url + '/livez')}")]
        return [_api.warning(f"{says} (TTSV_URL is not set)", "ttsv serve")]


def _answers(client: "httpx.Client", url: str) -> Iterator[Finding]:
    before = time.time()
    live = client.get("/livez")
    after = time.time()
    if live.status_code != 200 or live.json() != {"status": "ok"}:
        says = f"what answers at {url} with status {live.status_code} is no service of ours"
        yield _api.wrong(says, f"curl --include {quote(url + '/livez')}")
        return
    ready = client.get("/readyz")
    checks = ready.json()["checks"] if ready.status_code in (200, 503) else {"readiness": f"status {ready.status_code}"}
    for name, says in checks.items():
        if says != "ok":
            yield _api.wrong(f"{url} is not ready: {name}: {says}", _unready(name, says))
    asked = client.get("/v1/experiments", params={"limit": 1, "fields": "id"})
    if asked.status_code in (401, 403):
        detail = asked.json().get("detail", asked.reason_phrase)
        yield _api.wrong(f"{url} refuses the key in TTSV_KEY, or its absence: {detail}", "export TTSV_KEY=ttsv_...")
    ours, theirs = version("ttsv"), client.get("/openapi.json", timeout=_SCHEMA_PATIENCE).json()["info"]["version"]
    if theirs != ours:
        mend = "pip install --upgrade .  # the newer one on both sides, then start it again"
        yield _api.warning(f"{url} is of version {theirs}, this command of {ours}", mend)
    else:
        yield _api.ok(f"{url} answers, version {theirs} as here")
    if "Date" in live.headers:
        yield _difference(f"the API at {url}", _date_ahead(live.headers["Date"], before, after))


def _unready(check: str, says: str) -> str:
    """The command that mends what the API says of itself, or shows what does; to be run where the API runs."""
    where = "# where the API runs, in its environment"
    folder = '"${TTSV_DATA_DIR:-ttsv-data}"'
    if check == "schema":
        return f"ttsv migrate  {where}"
    if check == "disk":
        return f"du --human-readable --max-depth 1 {folder}  {where}: what takes the room"
    if check == "database" and "is damaged" in says:
        return f"{_RESTORE}; {where[2:]}"
    if check == "database" and says.startswith("read-only"):
        return (
            f"df {folder} && ls -l {folder}  {where}; PostgreSQL: psql --command 'SHOW default_transaction_read_only'"
        )
    if check == "database":
        return f'ls -l {folder}  {where}; PostgreSQL: pg_isready --dbname "$TTSV_DATABASE_URL"'
    return f"tail --lines 20 {folder}/logs/api.log  {where}; or docker compose logs api"


def _date_ahead(date: str, before: float, after: float) -> float:
    """By how much the API's clock is ahead; the header is cut to whole seconds, and up to a second old."""
    from service.database.clock import seconds_ahead

    theirs = parsedate_to_datetime(date)
    return seconds_ahead(theirs, datetime.fromtimestamp(before - 2, UTC), datetime.fromtimestamp(after, UTC))

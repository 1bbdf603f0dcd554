"""/livez and /readyz."""

import shutil
from weakref import WeakSet

from fastapi import APIRouter, Response
from sqlalchemy.exc import DBAPIError

from service.api.http.dependencies import Config, Db
from service.api.http.examples import Example, shown
from service.database.engine import Database, is_damaged
from service.experiments import store
from service.queue import nodes
from service.schemas.service import Liveness, Readiness
from service.settings import LEAST_FREE_BYTES

router = APIRouter(tags=["health"])

READINESS: Example = {
    "status": "ok",
    "checks": {"database": "ok", "schema": "ok", "disk": "ok"},
    "worker_seen_at": "2026-11-21T03:33:01.124077Z",
    "node_seen_at": "2026-11-21T03:32:57.871542Z",
}

_COMPLETE: "WeakSet[Database]" = WeakSet()
"""Databases that had all columns at the newest revision: none is taken away, and to look costs more than all else."""


@router.get("/livez", operation_id="getLiveness", responses=shown({"status": "ok"}), response_model=Liveness)
def live() -> Liveness:
    """The process answers."""
    return Liveness(status="ok")


@router.get(
    "/readyz",
    operation_id="getReadiness",
    response_model=Readiness,
    responses=shown(READINESS) | {503: {"model": Readiness}},
)
def ready(response: Response, database: Db, settings: Config) -> Readiness:
    """Whether requests can be served: database, its migrations, room on the disk. Workers are told, not required."""
    # Brings Alembic, which would make up a fifth of the API's start.
    from service.upkeep.migrate import newest, schema_fault

    checks = {"database": "ok", "schema": "ok", "disk": "ok"}
    worker_seen = node_seen = None
    try:
        with database.read() as session:
            head = store.database_head(session)
            worker_seen, node_seen = store.last_worker_sign(session), nodes.last_sign(session)
            fault = None
            if head != newest() or database not in _COMPLETE:
                fault = schema_fault(session.connection(), head)
        if fault is None:
            _COMPLETE.add(database)
        else:
            checks["schema"] = fault
        if not database.takes_writes():
            checks["database"] = "read-only: nothing can be stored until it, and the disk under it, can be written"
    except DBAPIError as error:
        fix = "does it run, and was `ttsv migrate` run?"
        if "unable to open database file" in str(error.orig):  # SQLite's
            fix = "its file must be there, and its folder and the disk under it writable"
        if is_damaged(error):
            fix = "it is damaged, and `ttsv restore --force FILE` puts a backup in its place"
        checks["database"] = f"{type(error.orig).__name__}: {fix}"
    free = shutil.disk_usage(settings.data_dir).free
    if free < LEAST_FREE_BYTES:
        checks["disk"] = f"{free // 2**20} MiB free in the data folder, at least {LEAST_FREE_BYTES // 2**20} wanted"
    ok = all(check == "ok" for check in checks.values())
    response.status_code = 200 if ok else 503
    status = "ok" if ok else "not ready"
    return Readiness(status=status, checks=checks, worker_seen_at=worker_seen, node_seen_at=node_seen)

"""/livez and /readyz."""

import shutil

from fastapi import APIRouter, Response
from sqlalchemy.exc import DBAPIError

from service.api.http.dependencies import Config, Db
from service.api.openapi_examples import Example, shown
from service.experiments import store
from service.schemas.service import Liveness, Readiness

router = APIRouter(tags=["health"])

READINESS: Example = {
    "status": "ok",
    "checks": {"database": "ok", "schema": "ok", "disk": "ok"},
    "worker_seen_at": "2026-11-21T03:33:01.124077Z",
}

_MIN_FREE_BYTES = 256 * 2**20


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
    from service.migrate import lacking_metrics, newest

    checks = {"database": "ok", "schema": "ok", "disk": "ok"}
    seen = None
    try:
        with database.read() as session:
            head = store.database_head(session)
            seen = store.last_worker_sign(session)
            lacking = lacking_metrics(session.connection()) if head == newest() else []
        if head != newest():
            checks["schema"] = f"at {head}, this code needs {newest()}: run `ttsv migrate`"
        elif lacking:
            checks["schema"] = f"no column for {', '.join(lacking)}: run `ttsv migrate`"
    except DBAPIError as error:
        checks["database"] = f"{type(error.orig).__name__}: does it run, and was `ttsv migrate` run?"
    free = shutil.disk_usage(settings.data_dir).free
    if free < _MIN_FREE_BYTES:
        checks["disk"] = f"{free // 2**20} MiB free in the data folder, at least {_MIN_FREE_BYTES // 2**20} wanted"
    ok = all(check == "ok" for check in checks.values())
    response.status_code = 200 if ok else 503
    return Readiness(status="ok" if ok else "not ready", checks=checks, worker_seen_at=seen)

"""SQL of projects, their keys and their quotas. Functions take a Session; callers commit."""

import hmac
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Select, and_, case, func, or_, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from service.access.security import SECRET, NewKey, Principal, Scope, installation_secret
from service.database import OPEN_TRIALS, ApiKey, Experiment, Person, Project, Tally, now
from service.database.engine import Database, is_postgres, upsert
from service.database.outages import is_away
from service.database.pagination import Order, Page
from service.errors import ConflictError, NotFoundError, QuotaError, SecretMissingError, UserError
from service.settings import Settings

_USED_EVERY = timedelta(minutes=1)
_RETRY_TRIALS, _RETRY_HOURS = 60, 3600
"""Seconds after which a project may have trials left again, or what an admin gave it."""


@dataclass(frozen=True)
class Usage:
    """What a project has used: trials that wait or run now, and GPU-hours of all attempts that ended."""

    open_trials: int
    gpu_hours: float


def create_project(
    session: Session,
    name: str,
    *,
    max_queued_trials: int | None = None,
    max_gpu_hours: float | None = None,
    weight: float = 1.0,
) -> Project:
    """A new project; raises `ConflictError` where the name is taken."""
    _refuse_taken(session, name)
    project = Project(name=name, max_queued_trials=max_queued_trials, max_gpu_hours=max_gpu_hours, weight=weight)
    session.add(project)
    session.flush()
    return project


def update_project(
    session: Session,
    project_id: int,
    name: str,
    *,
    max_queued_trials: int | None,
    max_gpu_hours: float | None,
    weight: float = 1.0,
) -> Project:
    """Changes name, quotas and weight; raises `NotFoundError`, and `ConflictError` where the name is another's."""
    project = get_project(session, project_id)
    if name != project.name:
        _refuse_taken(session, name, by_others_than=project_id)
    project.name, project.weight = name, weight
    project.max_queued_trials, project.max_gpu_hours = max_queued_trials, max_gpu_hours
    return project


def _refuse_taken(session: Session, name: str, *, by_others_than: int | None = None) -> None:
    """Raises `ConflictError` for a name that people would take for another project's: case and spaces tell none apart.

    The caller's transaction is the only one that names projects until it ends.
    """
    if is_postgres(session):  # (SQLite has one writer.)
        session.execute(text("SELECT pg_advisory_xact_lock(hashtextextended('ttsv names of projects', 0))"))
    for project_id, other in session.execute(select(Project.id, Project.name)):
        if project_id != by_others_than and _spoken(other) == _spoken(name):
            raise ConflictError("name", f"there is a project {other!r} already")


def _spoken(name: str) -> str:
    """A name as it is said: without what only the eye, or not even that, can see of it."""
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())


def list_projects(session: Session) -> Sequence[Project]:
    """All projects by name."""
    return session.scalars(select(Project).order_by(Project.name)).all()


def page_of_projects(session: Session, limit: int, cursor: str | None) -> Page[Project]:
    """At most `limit` projects by name, those after the cursor; raises `QueryError`."""
    found = Order("name", Project.name, Project.id).page(session, select(Project), cursor, limit)
    return Page([row[0] for row in found.rows], found.next)


def get_project(session: Session, project_id: int) -> Project:
    """A project; raises `NotFoundError`."""
    project = session.get(Project, project_id)
    if project is None:
        raise NotFoundError(f"there is no project {project_id}")
    return project


def project_named(session: Session, name: str) -> Project | None:
    """The project of that name."""
    return session.scalar(select(Project).where(Project.name == name))


def page_of_people(session: Session, project_id: int, limit: int, cursor: str | None) -> Page[Person]:
    """At most `limit` of those who have a key of a project, by name, with what each weighs, after the cursor.

    Raises `NotFoundError` and `QueryError`.
    """
    get_project(session, project_id)
    found = Order("owner", ApiKey.owner, ApiKey.owner).page(session, _people(project_id), cursor, limit)
    return Page([Person(project_id=project_id, owner=row[0], weight=row[1]) for row in found.rows], found.next)


def list_people(session: Session, project_id: int) -> Sequence[Person]:
    """All who have a key of a project, by name, with what each weighs."""
    rows = session.execute(_people(project_id).order_by(ApiKey.owner))
    return [Person(project_id=project_id, owner=row[0], weight=row[1]) for row in rows]


def _people(project_id: int) -> Select[Any]:
    """Owners of a project's keys, each once, and what they weigh."""
    is_theirs = and_(Person.project_id == ApiKey.project_id, Person.owner == ApiKey.owner)
    query = select(ApiKey.owner).add_columns(func.coalesce(Person.weight, 1.0)).outerjoin(Person, is_theirs)
    return query.where(ApiKey.project_id == project_id).group_by(ApiKey.owner, Person.weight)


def weigh(session: Session, project_id: int, owner: str, weight: float) -> Person:
    """Sets what a person weighs beside the others of a project.

    Raises `NotFoundError` where there is no such project, or nobody of that name has a key of it.
    """
    project = get_project(session, project_id)
    if session.scalar(select(ApiKey.id).where(ApiKey.project_id == project_id, ApiKey.owner == owner).limit(1)) is None:
        raise NotFoundError(f"project {project.name!r} has no key of {owner!r}: make one, or name who has one")
    person = Person(project_id=project_id, owner=owner, weight=weight)
    insert = upsert(session)(Person).values(project_id=project_id, owner=owner, weight=weight)
    key = [Person.project_id, Person.owner]
    session.execute(insert.on_conflict_do_update(index_elements=key, set_={"weight": weight}))
    return person


def usage(session: Session, project_id: int) -> Usage:
    """What a project has used; no trial is read."""
    gpus = Experiment.spec["resources"]["gpus"].as_float()
    still_open = case((Tally.state.in_(OPEN_TRIALS), Tally.trials), else_=0)
    used = select(func.sum(still_open), func.sum(Tally.run_seconds * gpus))
    mine = Experiment.project_id == project_id
    trials, seconds = session.execute(used.join(Experiment, Experiment.id == Tally.experiment_id).where(mine)).one()
    gone = session.scalar(select(Project.deleted_gpu_hours).where(Project.id == project_id)) or 0.0
    return Usage(int(trials or 0), float(seconds or 0.0) / 3600 + gone)


def check_quota(session: Session, principal: Principal, trials: int) -> None:
    """Raises `QuotaError` if the principal's project may not have so many more trials waiting, or used up its GPUs."""
    if principal.project_id is None or trials == 0:
        return
    # Locked, so that two requests at once do not both take the last place.
    project = session.scalar(select(Project).where(Project.id == principal.project_id).with_for_update(key_share=True))
    if project is None or (project.max_queued_trials is None and project.max_gpu_hours is None):
        return
    used = usage(session, project.id)
    limit = project.max_queued_trials
    if limit is not None and used.open_trials + trials > limit:
        # Of more than the quota itself no waiting helps.
        fix, seconds = ("wait for some to finish", _RETRY_TRIALS) if trials <= limit else ("post fewer", _RETRY_HOURS)
        raise QuotaError(
            f"project {project.name!r} may have {limit} trials waiting or running: {used.open_trials} are, and this "
            f"adds {trials}; {fix}, or ask an admin for a larger quota",
            seconds,
        )
    if project.max_gpu_hours is not None and used.gpu_hours >= project.max_gpu_hours:
        raise QuotaError(
            f"project {project.name!r} has used {used.gpu_hours:.1f} of its {project.max_gpu_hours:g} GPU-hours; "
            "ask an admin for more",
            _RETRY_HOURS,
        )


def add_key(
    session: Session,
    project_id: int,
    key: NewKey,
    *,
    owner: str,
    scopes: Collection[Scope],
    expires_at: datetime | None = None,
) -> ApiKey:
    """Stores a new key of a project; raises `NotFoundError`."""
    get_project(session, project_id)
    row = ApiKey(
        id=key.id,
        project_id=project_id,
        owner=owner,
        secret_hash=key.secret_hash,
        scopes=sorted(scopes),
        expires_at=expires_at,
    )
    session.add(row)
    session.flush()
    return row


def list_keys(session: Session) -> Sequence[ApiKey]:
    """All keys, oldest first."""
    return session.scalars(select(ApiKey).order_by(ApiKey.created_at, ApiKey.id)).all()


def page_of_keys(session: Session, limit: int, cursor: str | None) -> Page[ApiKey]:
    """At most `limit` keys, oldest first, those after the cursor; raises `QueryError`."""
    found = Order("created_at", ApiKey.created_at, ApiKey.id).page(session, select(ApiKey), cursor, limit)
    return Page([row[0] for row in found.rows], found.next)


def revoke_key(session: Session, key_id: str) -> ApiKey:
    """Makes a key useless from now on; again it changes nothing. Raises `NotFoundError`."""
    row = session.get(ApiKey, key_id)
    if row is None:
        raise NotFoundError(f"there is no key {key_id}")
    row.revoked_at = row.revoked_at or now()
    return row


def has_keys(session: Session) -> bool:
    """Whether any key could open the API."""
    valid = ApiKey.revoked_at.is_(None), or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > now())
    return session.scalar(select(ApiKey.id).where(*valid).limit(1)) is not None


def lacks_secret(session: Session, data_dir: Path) -> bool:
    """Whether keys are valid that are hashed under a secret that is not in this data folder.

    Another one would be made there, under which none of them opens anything.
    """
    return has_keys(session) and not (data_dir / SECRET).exists()  # in this order: the secret is made before a key


def secret_of_new_keys(session: Session, data_dir: Path) -> bytes:
    """The installation's secret, made where nothing is hashed under one yet; raises `SecretMissingError`."""
    if lacks_secret(session, data_dir):
        raise SecretMissingError(
            f"the database has keys, and {SECRET}, under which they are hashed, is not in the service's data folder: "
            "were another made, none of them would open anything. Put the file back from a backup; if it is lost, "
            "revoke the keys there are first (DELETE /v1/keys/{key_id}, or `ttsv keys revoke`)"
        )
    return installation_secret(data_dir)


def refuse_without_keys(database: Database, settings: Settings) -> None:
    """Raises `UserError` if the API would listen on a network that nobody could use it from.

    While the database is away nobody knows: the API starts, and says so until that is back.
    """
    if settings.on_loopback or not settings.keys_required:
        return
    try:
        with database.read() as session:
            usable, locked = has_keys(session), lacks_secret(session, settings.data_dir)
    except DBAPIError as error:
        if not is_away(error):
            raise
        return
    if not usable:
        raise UserError(
            f"{settings.reached_by}: requests from elsewhere need a key, and none is valid; make one "
            "with `ttsv keys create PROJECT --owner NAME`, or use 127.0.0.1"
        )
    if locked:
        raise UserError(
            f"{settings.reached_by}: requests from elsewhere need a key, and none opens anything without "
            f"{settings.data_dir / SECRET}, under which they are hashed: put it back from a backup"
        )


def authenticate(session: Session, key_id: str, secret_hash: str) -> Principal | None:
    """Who a key belongs to, or None if it is unknown, revoked, expired or not this secret's."""
    row = session.get(ApiKey, key_id)
    # Compared in every case and to the end, so that the time does not tell which ids there are, or how much was right.
    if not hmac.compare_digest(row.secret_hash if row else "0" * 64, secret_hash) or row is None:
        return None
    if row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= now()):
        return None
    scopes = frozenset(Scope(name) for name in row.scopes)
    return Principal(row.owner, None if Scope.ADMIN in scopes else row.project_id, scopes)


def needs_mark(session: Session, key_id: str) -> bool:
    """Whether a key's last use is worth writing down again."""
    used = session.scalar(select(ApiKey.last_used_at).where(ApiKey.id == key_id))
    return used is None or now() - used > _USED_EVERY


def mark_used(session: Session, key_id: str) -> None:
    """Notes that a key was used just now."""
    if row := session.get(ApiKey, key_id):
        row.last_used_at = now()

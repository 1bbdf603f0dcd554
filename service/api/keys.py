"""/v1/projects, /v1/keys and /v1/me: teams, their keys and their quotas."""

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Query
from pydantic import BaseModel, ConfigDict, Field, field_validator
from sqlalchemy.orm import Session

from service.access import keys
from service.access.security import Scope, new_key
from service.api.http.authentication import Admin, KeyHolder
from service.api.http.dependencies import LONGEST_CURSOR, MAX_ID, MOST, Config, Db, Limit
from service.api.http.examples import Example, kept, shown
from service.api.http.problems import RESPONSES, refusals
from service.api.http.query_filters import Instant
from service.api.http.responses import Answer
from service.database import Project, now
from service.schemas.service import KeyOut, MeOut, NewKeyOut, PersonOut, ProjectOut
from service.specs.patterns import KEY_ID, LONGEST_NAME, NAME, PRINTABLE

router = APIRouter(prefix="/v1", tags=["keys"], responses=RESPONSES)

Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME, pattern=NAME)]
Quota = Annotated[int | None, Field(ge=0, le=10_000_000, description="Trials that may wait or run; null: no limit.")]
Hours = Annotated[float | None, Field(ge=0, le=1e9, allow_inf_nan=False, description="GPU-hours; null: no limit.")]
Weight = Annotated[
    float,
    Field(gt=0, le=1000, allow_inf_nan=False, description="Twice as much is twice the share, where others want it."),
]
ProjectId = Annotated[int, Path(ge=1, le=MAX_ID, description="The project's number.")]
NextCursor = Annotated[
    str | None,
    Query(max_length=LONGEST_CURSOR, pattern=PRINTABLE, description="That of the address of the page before's Link."),
]
Owner = Annotated[
    str,
    Path(
        min_length=1,
        max_length=LONGEST_NAME,
        pattern=NAME,
        description="Who has a key of the project.",
        examples=["ada"],
    ),
]
KeyId = Annotated[str, Path(pattern=KEY_ID, description="The public part of a key.", examples=["5f0c1b2a3d4e5f60"])]


class ProjectIn(BaseModel):
    """A team to be made, or its quotas anew."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)  # true is no number

    name: Name = Field(description="Which no other project has.")
    max_queued_trials: Quota = None
    max_gpu_hours: Hours = None
    weight: Weight = 1.0


class PersonIn(BaseModel):
    """What a person of a project is to weigh beside its others."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    weight: Weight


class KeyIn(BaseModel):
    """A key to be made."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    project_id: int = Field(ge=1, le=MAX_ID, strict=True, description="Whose experiments it is to open.")
    owner: Name = Field(description="Who is to use it.")
    scopes: list[Scope] = Field(
        min_length=1, max_length=len(Scope), description="What it is to allow; `admin`: everything."
    )
    expires_at: Instant | None = Field(None, description="From when on it opens nothing; null: never.")

    @field_validator("expires_at")
    @classmethod
    def _not_yet(cls, moment: datetime | None) -> datetime | None:
        if moment is not None and moment <= now():
            raise ValueError(f"must be in the future, not {moment.isoformat()}: such a key would open nothing")
        return moment


PROJECT: Example = {
    "id": 1,
    "name": "vision",
    "max_queued_trials": 500,
    "max_gpu_hours": 1000.0,
    "weight": 1.0,
    "created_at": "2026-11-21T03:30:31.615887Z",
    "open_trials": 20,
    "gpu_hours": 12.5,
}
PERSON: Example = {"owner": "ada", "weight": 2.0}
KEY: Example = {
    "id": "5f0c1b2a3d4e5f60",
    "project_id": 1,
    "owner": "ada",
    "scopes": ["read", "submit"],
    "created_at": "2026-11-21T03:30:31.615887Z",
    "expires_at": None,
    "revoked_at": None,
    "last_used_at": None,
}
NEW_KEY: Example = KEY | {"key": "ttsv_5f0c1b2a3d4e5f60_" + 43 * "x"}


@router.get(
    "/me",
    operation_id="getMe",
    response_model=MeOut,
    responses=shown({"name": "ada", "project_id": 1, "scopes": ["read"]}),
)
def me(principal: KeyHolder) -> MeOut:
    """Who the key belongs to."""
    return MeOut(name=principal.name, project_id=principal.project_id, scopes=sorted(principal.scopes))


@router.get(
    "/projects",
    operation_id="listProjects",
    response_model=list[ProjectOut],
    responses=kept([PROJECT], "Link"),
)
def projects(answer: Answer, database: Db, _admin: Admin, limit: Limit = MOST, cursor: NextCursor = None) -> Any:
    """All projects with what they have used, by name. The header Link has the address of the next page."""
    with database.read() as session:
        found = keys.page_of_projects(session, limit, cursor)
        return answer([_project(session, project) for project in found.rows], following=found.next)


@router.post(
    "/projects",
    status_code=201,
    operation_id="createProject",
    response_model=ProjectOut,
    responses=shown(PROJECT, 201),
)
def create_project(
    body: Annotated[
        ProjectIn, Body(openapi_examples={"team": {"value": {"name": "vision", "max_queued_trials": 500}}})
    ],
    database: Db,
    _admin: Admin,
) -> ProjectOut:
    """A new project."""
    return database.write(lambda session: _project(session, keys.create_project(session, **body.model_dump())))


@router.put("/projects/{project_id}", operation_id="updateProject", response_model=ProjectOut, responses=shown(PROJECT))
def update_project(
    project_id: ProjectId,
    body: Annotated[ProjectIn, Body(openapi_examples={"team": {"value": {"name": "vision", "max_gpu_hours": 2000}}})],
    database: Db,
    _admin: Admin,
) -> ProjectOut:
    """Another name, other quotas or another weight; what waits already is left alone."""

    def work(session: Session) -> ProjectOut:
        return _project(session, keys.update_project(session, project_id, **body.model_dump()))

    return database.write(work)


@router.get(
    "/projects/{project_id}/people",
    operation_id="listPeople",
    response_model=list[PersonOut],
    responses=kept([PERSON], "Link"),
)
def people(
    project_id: ProjectId, answer: Answer, database: Db, _admin: Admin, limit: Limit = MOST, cursor: NextCursor = None
) -> Any:
    """Who has a key of a project, by name, with what they weigh. The header Link has the address of the next page."""
    with database.read() as session:
        found = keys.page_of_people(session, project_id, limit, cursor)
        return answer([PersonOut.model_validate(row) for row in found.rows], following=found.next)


@router.put(
    "/projects/{project_id}/people/{owner:path}",  # a name may have a slash
    operation_id="updatePerson",
    response_model=PersonOut,
    responses=shown(PERSON),
)
def update_person(
    project_id: ProjectId,
    owner: Owner,
    body: Annotated[PersonIn, Body(openapi_examples={"twice": {"value": {"weight": 2}}})],
    database: Db,
    _admin: Admin,
) -> PersonOut:
    """Another weight of a person: of the project's share, beside its other people."""
    return database.write(lambda session: PersonOut.model_validate(keys.weigh(session, project_id, owner, body.weight)))


@router.get("/keys", operation_id="listKeys", response_model=list[KeyOut], responses=kept([KEY], "Link"))
def index(answer: Answer, database: Db, _admin: Admin, limit: Limit = MOST, cursor: NextCursor = None) -> Any:
    """All keys, without their secrets, oldest first. The header Link has the address of the next page."""
    with database.read() as session:
        found = keys.page_of_keys(session, limit, cursor)
        return answer([KeyOut.model_validate(row) for row in found.rows], following=found.next)


@router.post(
    "/keys",
    status_code=201,
    operation_id="createKey",
    response_model=NewKeyOut,
    responses=shown(NEW_KEY, 201) | refusals(409),
)
def create(
    body: Annotated[
        KeyIn,
        Body(openapi_examples={"member": {"value": {"project_id": 1, "owner": "ada", "scopes": ["read", "submit"]}}}),
    ],
    database: Db,
    settings: Config,
    _admin: Admin,
) -> NewKeyOut:
    """A new key of a project: its text is in this answer and nowhere else.

    Where keys are valid and the secret under which they are hashed is missing, none is made (409).
    """
    with database.read() as session:
        key = new_key(keys.secret_of_new_keys(session, settings.data_dir))

    def work(session: Session) -> NewKeyOut:
        row = keys.add_key(
            session, body.project_id, key, owner=body.owner, scopes=set(body.scopes), expires_at=body.expires_at
        )
        return NewKeyOut(**KeyOut.model_validate(row).model_dump(), key=key.text)

    return database.write(work)


@router.delete("/keys/{key_id}", operation_id="revokeKey", response_model=KeyOut, responses=shown(KEY))
def revoke(key_id: KeyId, database: Db, _admin: Admin) -> KeyOut:
    """Makes a key useless at once; again it changes nothing."""
    return database.write(lambda session: KeyOut.model_validate(keys.revoke_key(session, key_id)))


def _project(session: Session, project: Project) -> ProjectOut:
    used = keys.usage(session, project.id)
    columns = {name: getattr(project, name) for name in ProjectOut.model_fields if hasattr(project, name)}
    return ProjectOut(**columns, open_trials=used.open_trials, gpu_hours=used.gpu_hours)

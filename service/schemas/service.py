"""What the service says of itself: what is wrong with a request, whether it is up, its projects and keys."""

from datetime import datetime
from typing import Annotated

from pydantic import Field

from service.access.security import Scope
from service.schemas.answers import Out
from service.specs.states import NodeState

Scopes = Annotated[list[Scope], Field(description="What the key allows; `admin`: everything.")]


class ProblemField(Out):
    """One field that is wrong, and what would be right."""

    field: str = Field(description="A path in the body, a query parameter or a header.")
    message: str = Field(description="What is wrong, or what would be right.")


class Problem(Out):
    """An error as RFC 9457 (`application/problem+json`) has it."""

    type: str = Field("about:blank", description="Address of what is said of such problems, and of what to do.")
    title: str = Field(description="The status in words.")
    status: int = Field(description="That of the answer.")
    detail: str = Field(description="What is wrong with this request, for people.")
    instance: str | None = Field(None, description="The path that was asked for.")
    errors: list[ProblemField] = Field([], description="The fields that are to blame, a hundred at most.")
    request_id: str | None = Field(None, description="Under which the service's log has the request.")


class Liveness(Out):
    """The process answers."""

    status: str = Field(description="Always `ok`.")


class Readiness(Out):
    """Whether requests can be served."""

    status: str = Field(description="`ok` or `not ready`.")
    checks: dict[str, str] = Field(description="Database, schema and disk: `ok`, or what is wrong.")
    worker_seen_at: datetime | None = Field(description="When any worker was last heard of; for people.")
    node_seen_at: datetime | None = Field(
        None, description="When a worker last saw a node on which trials can run; for people."
    )


class ProjectOut(Out):
    """A team with what it has used."""

    id: int = Field(description="Number by which other operations name it.")
    name: str = Field(description="Which no other project has.")
    max_queued_trials: int | None = Field(description="Trials that may wait or run; null: no limit.")
    max_gpu_hours: float | None = Field(description="GPU-hours it may use; null: no limit.")
    weight: float = Field(1.0, description="Of its share of the cluster, beside others' weights.")
    created_at: datetime = Field(description="When it was made.")
    open_trials: int = Field(description="Trials that wait or run now.")
    gpu_hours: float = Field(description="Of all attempts that ended.")


class PersonOut(Out):
    """Who has a key of a project."""

    owner: str = Field(description="As the keys have it.")
    weight: float = Field(description="Of the project's share, beside the weights of its other people.")


class KeyOut(Out):
    """A key without its secret."""

    id: str = Field(description="16 hex digits, which are part of the key.")
    project_id: int = Field(description="Whose experiments it opens.")
    owner: str = Field(description="Who uses it.")
    scopes: Scopes
    created_at: datetime = Field(description="When it was made.")
    expires_at: datetime | None = Field(description="From when on it opens nothing; null: never.")
    revoked_at: datetime | None = Field(description="When it was made useless; null: it was not.")
    last_used_at: datetime | None = Field(description="To a minute; null: never.")


class NewKeyOut(KeyOut):
    """A key that was just made."""

    key: str = Field(description="Its text, which is shown this once.")


class MeOut(Out):
    """Who the key belongs to, and what it allows."""

    name: str = Field(description="Of the key's owner; `anonymous` where no keys are asked for.")
    project_id: int | None = Field(description="Whose experiments it opens; null: all projects'.")
    scopes: Scopes


class GpuOut(Out):
    """A GPU as its driver names it."""

    name: str = Field(description="Its model.")
    memory_gib: float = Field(description="Its memory in GiB.")


class VersionsOut(Out):
    """What is the same on all nodes of a cluster."""

    package: str = Field(description="Of ttsv, with 12 digits of the SHA-256 of its code.")
    python: str = Field(description="Of Python.")
    ray: str = Field(description="Of Ray.")
    torch: str = Field(description="Of torch, without its build.")


class MachineOut(Out):
    """What a machine says of itself."""

    versions: VersionsOut = Field(description="Of what runs trials.")
    gpus: list[GpuOut] = Field(description="Its GPUs, in the order of their numbers.")
    memory_gib: float = Field(description="Its memory in GiB.")
    free_disk_gib: float = Field(description="What its disk has left, in GiB, when it was last asked.")
    bf16: bool | None = Field(description="Whether trials' processor has instructions for bf16; null: not known.")
    clock_seconds: float | None = Field(description="How far its clock is ahead of the worker's; null: not compared.")


class NodeTrialOut(Out):
    """A trial that runs on a node."""

    id: int = Field(description="The trial's number.")
    experiment_id: int = Field(description="The experiment whose trial it is.")
    place: str = Field(description="The host, and which of its GPUs.")
    since: datetime | None = Field(description="When its newest attempt began.")
    last_report_at: datetime | None = Field(
        None, description="When it last told anything of its work; null until it began."
    )
    hung_after: float | None = Field(
        None, description="Seconds without a report after which it is killed and tried again."
    )


class NodeOut(Out):
    """A node of a worker's cluster, or a machine that was refused."""

    id: str = Field(description="Of one stay in the cluster: a node that joins again has another.")
    worker: str = Field(description="The worker whose cluster it is.")
    host: str = Field(description="The machine's name.")
    address: str = Field(description="At which the cluster reaches it; empty of one that was refused.")
    head: bool = Field(description="Whether it is the cluster's head.")
    state: NodeState = Field(
        description="`alive`, `left` (stopped, or not heard of any more) or `refused` (see `problem`); "
        "what is not alive is shown for a day."
    )
    problem: str | None = Field(description="Why it was refused, or what is wrong with it now.")
    cpus: float = Field(description="CPUs that it gives to trials.")
    gpus: float = Field(description="GPUs that it gives to trials.")
    memory_gib: float = Field(description="Memory in GiB that it gives to trials that reserve some.")
    machine: MachineOut | None = Field(description="What it is; null until it said so.")
    joined_at: datetime = Field(description="Since when it is there; of one that was refused, when it first asked.")
    seen_at: datetime = Field(description="When its worker last saw it.")
    left_at: datetime | None = Field(description="When it left; null: it did not.")
    trials: list[NodeTrialOut] = Field([], description="What runs on it now, of what the key may see.")

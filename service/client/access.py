"""Requests about keys, projects and the health of the service."""

from collections.abc import Sequence
from datetime import datetime

from service.client.calls import Call, covers, parsed, parsed_list, text
from service.schemas.service import KeyOut, Liveness, MeOut, NewKeyOut, ProjectOut, Readiness


@covers("getMe")
def me() -> Call[MeOut]:
    """Who the key belongs to, and what it allows."""
    return Call("GET", "/v1/me", parsed(MeOut))


@covers("listProjects")
def projects() -> Call[list[ProjectOut]]:
    """All projects with what they have used."""
    return Call("GET", "/v1/projects", parsed_list(ProjectOut))


@covers("createProject")
def create_project(
    name: str, *, max_queued_trials: int | None = None, max_gpu_hours: float | None = None
) -> Call[ProjectOut]:
    """Makes a project. Sent once: after a lost answer look whether it is there."""
    body = {"name": name, "max_queued_trials": max_queued_trials, "max_gpu_hours": max_gpu_hours}
    return Call("POST", "/v1/projects", parsed(ProjectOut), json=body, repeatable=False)


@covers("updateProject")
def update_project(
    project_id: int, name: str, *, max_queued_trials: int | None = None, max_gpu_hours: float | None = None
) -> Call[ProjectOut]:
    """Gives a project a name and quotas; those left out are none."""
    body = {"name": name, "max_queued_trials": max_queued_trials, "max_gpu_hours": max_gpu_hours}
    return Call("PUT", f"/v1/projects/{project_id}", parsed(ProjectOut), json=body)


@covers("listKeys")
def keys() -> Call[list[KeyOut]]:
    """All keys, without their secrets."""
    return Call("GET", "/v1/keys", parsed_list(KeyOut))


@covers("createKey")
def create_key(
    project_id: int,
    owner: str,
    scopes: Sequence[str] = ("read", "submit", "cancel"),
    *,
    expires_at: datetime | None = None,
) -> Call[NewKeyOut]:
    """Makes a key, whose text is in the answer alone. Sent once: a lost answer must not leave a key behind unseen."""
    body = {
        "project_id": project_id,
        "owner": owner,
        "scopes": list(scopes),
        "expires_at": None if expires_at is None else expires_at.isoformat(),
    }
    return Call("POST", "/v1/keys", parsed(NewKeyOut), json=body, repeatable=False)


@covers("revokeKey")
def revoke_key(key_id: str) -> Call[KeyOut]:
    """Makes a key useless at once."""
    return Call("DELETE", f"/v1/keys/{key_id}", parsed(KeyOut))


@covers("getLiveness")
def alive() -> Call[Liveness]:
    """Whether the API's process answers."""
    return Call("GET", "/livez", parsed(Liveness))


@covers("getReadiness")
def ready() -> Call[Readiness]:
    """Whether the service is ready, and when a worker was last heard of."""
    return Call("GET", "/readyz", parsed(Readiness))


@covers("getServiceMetrics")
def service_metrics() -> Call[str]:
    """The service's own figures as Prometheus reads them."""
    return Call("GET", "/metrics", text)

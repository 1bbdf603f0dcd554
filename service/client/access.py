"""Keys, projects, nodes, and the health of the service."""

from collections.abc import Sequence
from datetime import datetime
from urllib.parse import quote

from service.client.connection import Connection, covers
from service.schemas.service import KeyOut, Liveness, MeOut, NewKeyOut, NodeOut, PersonOut, ProjectOut, Readiness


class Access(Connection):
    """Asks about keys, projects, nodes and health."""

    @covers("getMe")
    def me(self) -> MeOut:
        """Who the key belongs to, and what it allows."""
        return self._get(MeOut, "/v1/me")

    @covers("listProjects")
    def projects(self) -> list[ProjectOut]:
        """All projects with what they have used."""
        return self._list(ProjectOut, "/v1/projects")

    @covers("createProject")
    def create_project(
        self,
        name: str,
        *,
        max_queued_trials: int | None = None,
        max_gpu_hours: float | None = None,
        weight: float = 1.0,
    ) -> ProjectOut:
        """Makes a project. Sent once: after a lost answer look whether it is there."""
        body = _project(name, max_queued_trials, max_gpu_hours, weight)
        return self._post(ProjectOut, "/v1/projects", body, repeatable=False)

    @covers("updateProject")
    def update_project(
        self,
        project_id: int,
        name: str,
        *,
        max_queued_trials: int | None = None,
        max_gpu_hours: float | None = None,
        weight: float = 1.0,
    ) -> ProjectOut:
        """Gives a project a name, quotas and a weight; quotas left out are none."""
        body = _project(name, max_queued_trials, max_gpu_hours, weight)
        return self._answer(ProjectOut, "PUT", f"/v1/projects/{project_id}", json=body)

    @covers("listPeople")
    def people(self, project_id: int) -> list[PersonOut]:
        """Who has a key of a project, and what each weighs."""
        return self._list(PersonOut, f"/v1/projects/{project_id}/people")

    @covers("updatePerson")
    def update_person(self, project_id: int, owner: str, *, weight: float) -> PersonOut:
        """Gives a person of a project a weight: of the project's share, beside its other people."""
        path = f"/v1/projects/{project_id}/people/{quote(owner, safe='')}"
        return self._answer(PersonOut, "PUT", path, json={"weight": weight})

    @covers("listKeys")
    def keys(self) -> list[KeyOut]:
        """All keys, without their secrets."""
        return self._list(KeyOut, "/v1/keys")

    @covers("createKey")
    def create_key(
        self,
        project_id: int,
        owner: str,
        scopes: Sequence[str] = ("read", "submit", "cancel"),
        *,
        expires_at: datetime | None = None,
    ) -> NewKeyOut:
        """Makes a key, whose text is in the answer alone. Sent once: a lost answer must not leave one behind unseen."""
        body = {
            "project_id": project_id,
            "owner": owner,
            "scopes": list(scopes),
            "expires_at": None if expires_at is None else expires_at.isoformat(),
        }
        return self._post(NewKeyOut, "/v1/keys", body, repeatable=False)

    @covers("revokeKey")
    def revoke_key(self, key_id: str) -> KeyOut:
        """Makes a key useless at once."""
        return self._answer(KeyOut, "DELETE", f"/v1/keys/{key_id}")

    @covers("listNodes")
    def nodes(self) -> list[NodeOut]:
        """The machines on which trials run, and those that left or were refused in the last day."""
        return self._list(NodeOut, "/v1/nodes")

    @covers("getLiveness")
    def alive(self) -> Liveness:
        """Whether the API's process answers."""
        return self._get(Liveness, "/livez")

    @covers("getReadiness")
    def ready(self) -> Readiness:
        """Whether the service is ready, and when a worker was last heard of."""
        return self._get(Readiness, "/readyz")

    @covers("getServiceMetrics")
    def service_metrics(self) -> str:
        """The service's own figures as Prometheus reads them."""
        return self._text("/metrics")


def _project(name: str, max_queued_trials: int | None, max_gpu_hours: float | None, weight: float) -> dict[str, object]:
    quotas = {"max_queued_trials": max_queued_trials, "max_gpu_hours": max_gpu_hours}
    return {"name": name, **quotas, "weight": weight}

"""/v1/nodes: the machines on which trials run."""

from typing import Any

from fastapi import APIRouter
from sqlalchemy.orm import Session

from service.api.http.authentication import Reader
from service.api.http.dependencies import MOST, Db
from service.api.http.examples import Example, shown
from service.api.http.problems import RESPONSES
from service.queue import nodes
from service.queue.attempts import silences_since
from service.schemas.service import NodeOut, NodeTrialOut

router = APIRouter(prefix="/v1/nodes", tags=["nodes"], responses=RESPONSES)

NODE: Example = {
    "id": "c6416f7231edaf7ba7fcb49c5896eecc3c4a797d9c4dbab0fcbd1bdd",
    "worker": "gpu1-4711",
    "host": "gpu2",
    "address": "10.0.0.12",
    "head": False,
    "state": "alive",
    "problem": None,
    "cpus": 32.0,
    "gpus": 2.0,
    "memory_gib": 180.5,
    "machine": {
        "versions": {"package": "0.1.0+3fa9c2d41b77", "python": "3.11.9", "ray": "2.60.0", "torch": "2.9.1"},
        "gpus": [{"name": "NVIDIA H100 80GB HBM3", "memory_gib": 79.6}, {"name": "NVIDIA L4", "memory_gib": 22.5}],
        "memory_gib": 251.4,
        "free_disk_gib": 812.0,
        "bf16": True,
        "clock_seconds": 0.04,
    },
    "joined_at": "2026-11-21T03:30:31.615887Z",
    "seen_at": "2026-11-21T03:33:01.124077Z",
    "left_at": None,
    "trials": [
        {
            "id": 7,
            "experiment_id": 1,
            "place": "gpu2, GPU 0",
            "since": "2026-11-21T03:32:05.335151Z",
            "last_report_at": "2026-11-21T03:32:58.412203Z",
            "hung_after": 1800.0,
        }
    ],
}


@router.get("", operation_id="listNodes", responses=shown([NODE]), response_model=list[NodeOut])
def index(database: Db, who: Reader) -> Any:
    """The machines on which trials run. Heads come first, last those that left or were refused within a day.

    Of more than a thousand, the newest.
    """
    with database.read() as session:
        return nodes_out(session, who.project_id)


def nodes_out(session: Session, project_id: int | None) -> list[NodeOut]:
    """The nodes with what runs on them, of a project (None: of all) those trials that its people may see."""
    rows = nodes.listed(session, MOST)
    running = nodes.running_on(session, rows, project_id)
    every = [trial for there in running.values() for trial in there]
    silent = silences_since(
        session, {trial.id: (trial.experiment_id, trial.since) for trial in every if trial.since is not None}
    )
    found = []
    for row in rows:
        trials = []
        for trial in running.get(row.id, ()):
            said = vars(silent[trial.id]) if trial.id in silent else {}
            trials.append(NodeTrialOut.model_validate(trial).model_copy(update=said))
        found.append(NodeOut.model_validate(row).model_copy(update={"trials": trials}))
    return found

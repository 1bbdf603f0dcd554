"""The page of the pool: what runs on which card."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from service.api.nodes import NODE
from service.dashboard.pool import slots
from service.schemas.service import NodeOut


def test_every_trial_is_shown_on_its_cards() -> None:
    places = ["gpu2, GPU 0, 1", "gpu2, GPU GPU-bbbb", "gpu2 (c6416f72), GPU 1", "gpu2", "gpu2, GPU 7"]
    trials = [{"id": number, "experiment_id": 1, "place": place, "since": None} for number, place in enumerate(places)]
    node = NodeOut.model_validate(NODE | {"trials": trials})
    assert [(slot.name, [trial.id for trial in slot.trials]) for slot in slots(node)] == [
        ("GPU 0: NVIDIA H100 80GB HBM3", [0]),
        ("GPU 1: NVIDIA L4", [0, 2]),
        ("GPUs", [1, 4]),
        ("CPUs", [3]),
    ]


def test_trials_that_say_nothing_for_long_stand_out_first_whose_time_is_up_first() -> None:
    moment = datetime.now(UTC)

    def trial(number: int, silent: float | None, limit: float | None) -> dict[str, Any]:
        last = None if silent is None else moment - timedelta(seconds=silent)
        place = {"experiment_id": 1, "place": "gpu2, GPU 0", "since": moment - timedelta(hours=2)}
        return place | {"id": number, "last_report_at": last, "hung_after": limit}

    trials = [trial(1, 449, 1800), trial(2, 460, 1800), trial(3, None, None), trial(4, 900, 1800), trial(5, 900, 7200)]
    first = slots(NodeOut.model_validate(NODE | {"trials": trials}))[0]
    (group,) = first.groups
    assert [number for number, _ in group.stuck] == [4, 2]

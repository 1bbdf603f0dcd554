"""The page of the pool: what runs on which card."""

from __future__ import annotations

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

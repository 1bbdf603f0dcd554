"""What Ray reserves for a trial: a part of the class that Tune sends to trials' processes, each of which imports it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray import tune

from service.queue.shares import Amount, on_whole_cards

GIB = 2**30
NODE_ID = "ray.io/node-id"
"""A label that Ray gives to each node."""


@dataclass(frozen=True)
class Reservation:
    """What trials need, by which Tune reserves it for each of them."""

    needs: Amount

    def __call__(self, config: Mapping[str, Any]) -> tune.PlacementGroupFactory:
        """What is reserved for a configuration, and not on a node that is shunned: for one alone a whole card."""
        needs = on_whole_cards(self.needs) if config.get("job", {}).get("alone") else self.needs
        bundle = {"CPU": needs.cpus, "GPU": needs.gpus, "memory": needs.memory_gib * GIB}
        if not config.get("shunned"):
            return tune.PlacementGroupFactory([bundle])
        elsewhere = {NODE_ID: f"!in({', '.join(config['shunned'])})"}
        return tune.PlacementGroupFactory([bundle], bundle_label_selector=[elsewhere])

"""Examples of answers, taken from a run of examples/quickstart.json: what the OpenAPI document shows."""

from typing import Any

Plain = dict[str, Any]

EXPERIMENT: Plain = {
    "id": 1,
    "name": "quickstart",
    "state": "succeeded",
    "error": None,
    "priority": 0,
    "grid_points": 24,
    "trial_count": 20,
    "created_at": "2026-11-21T03:30:31.615887Z",
    "started_at": "2026-11-21T03:30:39.172659Z",
    "finished_at": "2026-11-21T03:33:05.378109Z",
    "progress": {
        "trials": {
            "queued": 0,
            "running": 0,
            "succeeded": 20,
            "early_stopped": 0,
            "failed": 0,
            "diverged": 0,
            "cancelled": 0,
        },
        "epochs_done": 240,
        "epochs": 240,
        "best_accuracy": 0.991643,
        "best_val_accuracy": 1.0,
        "seconds_left": None,
    },
    "spec": {
        "spec_version": 2,
        "name": "quickstart",
        "base": {
            "dataset": "digits",
            "model": "small-cnn",
            "layer": "tt",
            "constraint": "clip",
            "training": {
                "epochs": 12,
                "batch_size": 64,
                "optimizer": "sgd",
                "lr": 0.1,
                "momentum": 0.9,
                "weight_decay": 0.0005,
                "schedule": "cosine",
            },
            "clipping": {"every": 20, "rounds": 5, "rescale": True},
        },
        "grid": {"rank": [None, 4, 16], "lambda_ort": [0.1, 10.0], "delta": [None, 1.0], "seed": [0, 1]},
        "variants": [],
        "trials": [],
        "repeat": 1,
        "search": None,
        "scheduler": {"type": "fifo"},
        "resources": {"cpus": 1.0, "gpus": 0.0, "memory_gib": None},
        "timeout_seconds": None,
        "max_concurrent_trials": None,
        "priority": 0,
        "tags": [],
        "notes": "",
    },
    "tags": ["quickstart"],
    "owner": None,
    "stopping": False,
    "revision": 0,
    "archived_at": None,
}

SPEC: Plain = EXPERIMENT["spec"]

CREATED: Plain = EXPERIMENT | {
    "state": "queued",
    "started_at": None,
    "finished_at": None,
    "progress": {
        "trials": dict.fromkeys(EXPERIMENT["progress"]["trials"], 0) | {"queued": 20},
        "epochs_done": 0,
        "epochs": 240,
        "best_accuracy": None,
        "best_val_accuracy": None,
        "seconds_left": None,
    },
}

STREAM = (
    'event: event\ndata: {"id":1,"experiment_id":1,"trial_id":null,"at":"2026-11-21T03:30:31.615887Z",'
    '"actor":"anonymous","kind":"submitted","detail":{}}\nid: 1\n\n'
    'event: progress\ndata: {"id":1,"state":"running","error":null,"progress":{"trials":{"queued":12,"running":2,'
    '"succeeded":6,"early_stopped":0,"failed":0,"diverged":0,"cancelled":0},"epochs_done":84,"epochs":240,'
    '"best_accuracy":0.98,"best_val_accuracy":1.0,"seconds_left":61.2}}\n\n'
)

LOG = """2026-11-21T03:32:06.120Z INFO epoch 1/12: train loss 1.2301, validation accuracy 0.8811, 0.65 s
"""

EVENT: Plain = {
    "id": 31,
    "experiment_id": 1,
    "trial_id": 7,
    "at": "2026-11-21T03:32:12.296113Z",
    "actor": "node-1-4711",
    "kind": "trial_finished",
    "detail": {"number": 6, "attempt": 1},
}

PRESETS: list[Plain] = [
    {"name": "senderovich2022/table2", "title": "Clipping and division in WRN-16-10 on CIFAR-10"},
]

PRESET_SPEC: Plain = SPEC | {
    "name": "senderovich2022/figure-speedup (smoke, code)",
    "notes": "Time of the exact spectrum of a TT layer, n = 16.",
    "base": {"model": "single-conv", "layer": "tt", "training": {"epochs": 2, "steps": 2, "batch_size": 8}},
    "variants": [{"dataset": "synthetic:16x16x16:10:100"}, {"dataset": "synthetic:24x16x16:10:100"}],
    "grid": {"rank": [None, 0.25]},
}

READINESS: Plain = {
    "status": "ok",
    "checks": {"database": "ok", "schema": "ok", "disk": "ok"},
    "worker_seen_at": "2026-11-21T03:33:01.124077Z",
}


def shown(example: Plain | list[Plain], status: int = 200) -> dict[int | str, Plain]:
    """A route's `responses`, with the example for one status."""
    return {status: {"content": {"application/json": {"example": example}}}}


def page(item: Plain) -> Plain:
    """A page with one item."""
    return {"items": [item], "next": "djE6MA"}

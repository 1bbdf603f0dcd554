"""Examples of answers, taken from a run of examples/quickstart.json: what the OpenAPI document shows."""

from service.api.http.examples import Example

EXPERIMENT: Example = {
    "id": 1,
    "name": "quickstart",
    "state": "succeeded",
    "error": None,
    "waiting": None,
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
        "hung_after": None,
        "max_concurrent_trials": None,
        "order": "grid",
        "priority": 0,
        "preempt": False,
        "tags": [],
        "notes": "",
    },
    "tags": ["quickstart"],
    "owner": None,
    "stopping": False,
    "revision": 0,
    "archived_at": None,
}

SPEC: Example = EXPERIMENT["spec"]

CREATED: Example = EXPERIMENT | {
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

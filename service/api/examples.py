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
        "trials": {"queued": 0, "running": 0, "succeeded": 20, "failed": 0, "diverged": 0, "cancelled": 0},
        "epochs_done": 240,
        "epochs": 240,
        "best_accuracy": 0.991643,
        "best_val_accuracy": 1.0,
        "seconds_left": None,
    },
    "spec": {
        "spec_version": 1,
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
        "resources": {"cpus": 1.0, "gpus": 0.0},
        "max_concurrent_trials": None,
        "priority": 0,
        "notes": "",
    },
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

PROTOCOL: Plain = {
    "dataset": "digits",
    "dataset_sha256": "b4962e1929c4c377fdd20265c695ff630ffef36006df2db69774ab360db2235f",
    "split": {
        "test": "stratified, 0.2 of each class",
        "validation": "stratified, 0.1 of each class of the rest",
        "seed": 0,
        "images": {"train": 1295, "validation": 143, "test": 359},
        "evaluated": "test",
    },
    "preprocessing": {"pixels": "[0, 1]", "mean": [0.5], "std": [0.5]},
    "metrics": {
        "accuracy": "top-1",
        "loss": "mean cross-entropy, nats",
        "ece": {"bins": 15, "edges": "equal width, right-closed"},
        "singular_values": "periodic",
    },
    "weights": "last epoch",
    "precision": "float32",
}

TRIAL: Plain = {
    "id": 7,
    "experiment_id": 1,
    "number": 6,
    "fingerprint": "84a2cf0dbf1700f5b19acdde5867a598ed0f9d4f1f53989a0fa0b1327923bc23",
    "cell": "84a2cf0dbf1700f5b19acdde5867a598ed0f9d4f1f53989a0fa0b1327923bc23",
    "config": {
        "dataset": "digits",
        "model": "small-cnn",
        "layer": "tt",
        "rank": 4,
        "lambda_ort": 0.1,
        "constraint": "clip",
        "delta": 1.0,
        "seed": 0,
        "training": {
            "epochs": 12,
            "batch_size": 64,
            "optimizer": "sgd",
            "lr": 0.1,
            "momentum": 0.9,
            "weight_decay": 0.0005,
            "schedule": "cosine",
            "milestones": [],
            "gamma": 0.1,
        },
        "clipping": {"every": 20, "rounds": 5, "rescale": True},
    },
    "state": "succeeded",
    "attempts": 1,
    "epoch": 12,
    "epochs": 12,
    "failure": None,
    "error": None,
    "started_at": "2026-11-21T03:32:05.335151Z",
    "finished_at": "2026-11-21T03:32:12.295909Z",
    "result": {
        "protocol": "9a967f734e6707d8518306dcee017510fd7d6302d62519fb74bde2bb4acb63af",
        "accuracy": 0.961003,
        "loss": 0.143898,
        "ece": 0.047536,
        "max_singular_value": 1.0,
        "compression": 41.203855,
        "parameters": 2319,
        "multiply_accumulates": 24784,
        "train_seconds": 6.184204,
        "constraint_seconds": 1.08631,
        "step_seconds": 0.02287,
        "constraint_step_seconds": 0.00411,
        "eval_seconds": 0.051395,
        "spectrum_seconds": 0.008713,
        "latency_seconds": 0.000412,
        "batch_seconds": 0.003127,
        "peak_memory": None,
        "selected_epoch": 12,
    },
}

TRIAL_DETAIL: Plain = TRIAL | {
    "protocol": PROTOCOL,
    **{
        "epoch_metrics": [
            {
                "epoch": 12,
                "train_loss": 0.075993,
                "train_accuracy": 0.988417,
                "val_loss": 0.178736,
                "val_accuracy": 0.93007,
                "ort_loss": 0.0,
                "lr": 0.001704,
                "seconds": 0.651483,
                "constraint_seconds": 0.11332,
            }
        ],
        "layers": [
            {
                "name": "conv1",
                "kind": "TTConv2d",
                "shape": {"k1": [1, 1], "core": [4, 1, 3, 3], "k3": [4, 32]},
                "input_size": [8, 8],
                "largest": 0.993038,
                "smallest": 0.490231,
                "largest_before_projection": 0.993038,
            }
        ],
        "environment": {"python": "3.11.7", "torch": "2.15.0+cu132", "device": "cpu", "threads": 1},
        "artifacts": [
            {
                "kind": "model",
                "sha256": "09cf4c35acbacb7ec976e8af86f35980826d0f2d25f2affe4542d4925bebfdee",
                "size": 12636,
            }
        ],
    },
}

ROW: Plain = {
    "place": 1,
    "cell": "01779b46a560f580b089c4828e269b2bbcf76b63c416704d174168fbdadce62b",
    "config": {
        "dataset": "digits",
        "model": "small-cnn",
        "layer": "tt",
        "rank": 16,
        "lambda_ort": 0.1,
        "constraint": "clip",
        "delta": 1.0,
        "training": {
            "epochs": 12,
            "batch_size": 64,
            "optimizer": "sgd",
            "lr": 0.1,
            "momentum": 0.9,
            "weight_decay": 0.0005,
            "schedule": "cosine",
            "milestones": [],
            "gamma": 0.1,
        },
        "clipping": {"every": 20, "rounds": 5, "rescale": True},
    },
    "trials": 2,
    "seeds": 2,
    "complete": True,
    "metrics": {
        "accuracy": {"mean": 0.987465, "std": 0.00197, "min": 0.986072, "max": 0.988858},
        "loss": {"mean": 0.044848, "std": 0.001224, "min": 0.043982, "max": 0.045713},
        "ece": {"mean": 0.019163, "std": 0.003755, "min": 0.016507, "max": 0.021818},
        "max_singular_value": {"mean": 1.0, "std": 0.0, "min": 1.0, "max": 1.0},
        "compression": {"mean": 6.281388, "std": 0.0, "min": 6.281388, "max": 6.281388},
        "parameters": {"mean": 9819.0, "std": 0.0, "min": 9819.0, "max": 9819.0},
        "multiply_accumulates": {"mean": 210912.0, "std": 0.0, "min": 210912.0, "max": 210912.0},
        "train_seconds": {"mean": 10.921295, "std": 0.254217, "min": 10.741536, "max": 11.101053},
        "constraint_seconds": {"mean": 2.431959, "std": 0.100202, "min": 2.361105, "max": 2.502812},
        "step_seconds": {"mean": 0.03962, "std": 0.00093, "min": 0.03896, "max": 0.04028},
        "constraint_step_seconds": {"mean": 0.00921, "std": 0.00038, "min": 0.00894, "max": 0.00948},
        "eval_seconds": {"mean": 0.050919, "std": 0.024813, "min": 0.033373, "max": 0.068465},
        "spectrum_seconds": {"mean": 0.009104, "std": 0.000521, "min": 0.008736, "max": 0.009472},
        "latency_seconds": {"mean": 0.000434, "std": 0.000021, "min": 0.000419, "max": 0.000449},
        "batch_seconds": {"mean": 0.003321, "std": 0.000187, "min": 0.003189, "max": 0.003453},
    },
}

LEADERBOARD: Plain = {
    "dataset": "digits",
    "metric": "accuracy",
    "boards": [{"protocol": TRIAL["result"]["protocol"], "record": PROTOCOL, "rows": [ROW]}],
    "holes": [],
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

PROBLEM: Plain = {
    "type": "about:blank",
    "title": "Unprocessable Entity",
    "status": 422,
    "detail": "grid.rank[0]: must be finite and at least 1, or null, not 0",
    "instance": "/v1/experiments",
    "errors": [{"field": "grid.rank[0]", "message": "must be finite and at least 1, or null, not 0"}],
}


def shown(example: Plain | list[Plain], status: int = 200) -> dict[int | str, Plain]:
    """A route's `responses`, with the example for one status."""
    return {status: {"content": {"application/json": {"example": example}}}}


def page(item: Plain) -> Plain:
    """A page with one item."""
    return {"items": [item], "next": "djE6MA"}

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
    "run_seconds": 6.960758,
    "best_val_accuracy": 0.93007,
    "source_trial_id": None,
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
        "top5_accuracy": 0.997214,
        "max_calibration_error": 0.411256,
        "adaptive_ece": 0.049871,
        "brier": 0.062144,
        "temperature": 0.871,
        "scaled_ece": 0.021447,
        "scaled_loss": 0.131022,
        "robust_accuracy": None,
        "pgd_accuracy": None,
        "attack_seconds": None,
        "corruption_accuracy": None,
        "mce": None,
        "lipschitz_bound": None,
        "certified_36": None,
        "certified_72": None,
        "certified_108": None,
        "certified_255": None,
        "assumed_certified_36": None,
        "assumed_certified_72": None,
        "assumed_certified_108": None,
        "lipschitz_fgsm": None,
        "lipschitz_ascent": None,
        "merged_latency_seconds": None,
        "merged_batch_seconds": None,
        "valid": True,
        "violations": None,
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
                "id": 7,
                "kind": "model",
                "name": "trial-7-model.safetensors",
                "media_type": "application/octet-stream",
                "sha256": "09cf4c35acbacb7ec976e8af86f35980826d0f2d25f2affe4542d4925bebfdee",
                "size": 12636,
                "url": "/v1/artifacts/7",
            }
        ],
    },
}

ARTIFACTS: Plain = {"items": TRIAL_DETAIL["artifacts"]}

METRICS: Plain = {"items": TRIAL_DETAIL["epoch_metrics"], "next": None, "sampled": False}

RESULT: Plain = TRIAL["result"] | {
    "trial_id": 7,
    "protocol_record": PROTOCOL,
    "evaluation": {"temperature": {"value": 0.871, "fitted_on": "validation"}},
    "environment": TRIAL_DETAIL["environment"],
    "created_at": "2026-11-21T03:32:12.295909Z",
}

SPECTRA: Plain = {
    "trial_id": 7,
    "max_singular_value": TRIAL["result"]["max_singular_value"],
    "layers": TRIAL_DETAIL["layers"],
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

PROBLEM: Plain = {
    "type": "about:blank",
    "title": "Unprocessable Entity",
    "status": 422,
    "detail": "grid.rank[0]: must be finite and at least 1, or null, not 0",
    "instance": "/v1/experiments",
    "errors": [{"field": "grid.rank[0]", "message": "must be finite and at least 1, or null, not 0"}],
    "request_id": "3f6c1f0e9b2a4b1d8c7e5a4d3b2c1f0e",
}


def shown(example: Plain | list[Plain], status: int = 200) -> dict[int | str, Plain]:
    """A route's `responses`, with the example for one status."""
    return {status: {"content": {"application/json": {"example": example}}}}


def page(item: Plain) -> Plain:
    """A page with one item."""
    return {"items": [item], "next": "djE6MA"}

"""Examples of trials, their results and files, from the same run as `service.api.openapi_examples.experiments`."""

from service.api.http.examples import Example
from service.api.http.formats import Format
from service.api.openapi_examples.experiments import SPEC

PROTOCOL: Example = {
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

ATTEMPTS: Example = {
    "items": [
        {
            "number": 1,
            "started_at": "2026-11-22T10:15:31Z",
            "place": "node-1, GPU 0",
            "environment": {
                "ttsv": "0.1.0+3fa9c2d41b77",
                "python": "3.11.7",
                "torch": "2.15.0+cu132",
                "host": "node-1",
                "cpu": "AMD EPYC 9354 32-Core Processor",
                "gpus": ["NVIDIA H100 80GB HBM3"],
                "gpu_driver": "580.95.05",
                "packages": {"numpy": "2.4.0", "torch": "2.15.0+cu132"},
                "git_revision": "9be1b29c0ffee0123456789abcdef0123456789a",
                "git_dirty": False,
                "git_diff": None,
            },
        }
    ]
}

RESOURCES: Example = {
    "items": [
        {
            "number": 1,
            "started_at": "2026-11-22T10:15:31Z",
            "place": "node-1, GPU 0",
            "interval": 1.0,
            "points": [{"seconds": 1.0, "cpu": 101.9, "memory": 2310.5, "gpu": 93.0, "gpu_memory": 4096.0}],
        }
    ]
}

TRIAL: Example = {
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
        "training": SPEC["base"]["training"] | {"milestones": [], "gamma": 0.1},
        "clipping": SPEC["base"]["clipping"],
    },
    "state": "succeeded",
    "attempts": 1,
    "node": "gpu-1, GPU 0",
    "epoch": 12,
    "epochs": 12,
    "failure": None,
    "error": None,
    "started_at": "2026-11-21T03:32:05.335151Z",
    "finished_at": "2026-11-21T03:32:12.295909Z",
    "run_seconds": 6.960758,
    "last_report_at": None,
    "hung_after": None,
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
        "spectrum_memory": 86016,
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

TRIALS: Example = {
    "items": [TRIAL],
    "next": "djE6MA",
    "columns": [],
    "decided": [],
    "common": {"dataset": "digits", "model": "small-cnn", "layer": "tt", "rank": 4, "training.lr": 0.05},
}

TRIALS_TEXT = {
    Format.CSV: "id,experiment_id,number,state,training.lr,accuracy\r\n7,1,6,succeeded,0.05,0.961003\r\n",
    Format.MARKDOWN: "| id | lr | state | accuracy (%) |\n| --: | --: | --- | --: |\n| 7 | 0.05 | succeeded | 96.10 |",
    Format.LATEX: "\\begin{tabular}{rrlr}\n{7} & {0.05} & {succeeded} & 96.10 \\\\\n\\end{tabular}\n",
}

TRIAL_DETAIL: Example = TRIAL | {
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
        "rests_until": None,
    },
}

ARTIFACTS: Example = {"items": TRIAL_DETAIL["artifacts"]}

METRICS: Example = {"items": TRIAL_DETAIL["epoch_metrics"], "next": None, "sampled": False}

RESULT: Example = TRIAL["result"] | {
    "trial_id": 7,
    "protocol_record": PROTOCOL,
    "evaluation": {"temperature": {"value": 0.871, "fitted_on": "validation"}},
    "environment": TRIAL_DETAIL["environment"],
    "created_at": "2026-11-21T03:32:12.295909Z",
}

EPOCH_SPECTRA: Example = {
    "trial_id": 7,
    "shares": [0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0],
    "epochs": [1, 5],
    "layers": [
        {
            "name": "net.0",
            "values": [[0.11, 0.2, 0.41, 0.63, 0.88, 0.99, 1.0], [0.09, 0.18, 0.4, 0.66, 0.94, 1.0, 1.0]],
            "before": [None, [0.09, 0.18, 0.4, 0.66, 0.95, 1.08, 1.12]],
        }
    ],
}

SPECTRA: Example = {
    "trial_id": 7,
    "max_singular_value": TRIAL["result"]["max_singular_value"],
    "layers": TRIAL_DETAIL["layers"],
}

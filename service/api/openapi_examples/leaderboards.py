"""Examples of leaderboards and tables in the OpenAPI document: real answers, shortened."""

from service.api.http.examples import Example
from service.api.http.formats import Format
from service.api.openapi_examples.trials import PROTOCOL, TRIAL

ROW: Example = {
    "place": 1,
    "cell": "01779b46a560f580b089c4828e269b2bbcf76b63c416704d174168fbdadce62b",
    "config": {name: value for name, value in (TRIAL["config"] | {"rank": 16}).items() if name != "seed"},
    "trials": 2,
    "seeds": 2,
    "complete": True,
    "missing_seeds": [],
    "metrics": {
        "accuracy": {"seeds": 2, "mean": 0.987465, "std": 0.00197, "min": 0.986072, "max": 0.988858},
        "loss": {"seeds": 2, "mean": 0.044848, "std": 0.001224, "min": 0.043982, "max": 0.045713},
        "ece": {"seeds": 2, "mean": 0.019163, "std": 0.003755, "min": 0.016507, "max": 0.021818},
        "max_singular_value": {"seeds": 2, "mean": 1.0, "std": 0.0, "min": 1.0, "max": 1.0},
        "compression": {"seeds": 2, "mean": 6.281388, "std": 0.0, "min": 6.281388, "max": 6.281388},
        "parameters": {"seeds": 2, "mean": 9819.0, "std": 0.0, "min": 9819.0, "max": 9819.0},
        "multiply_accumulates": {"seeds": 2, "mean": 210912.0, "std": 0.0, "min": 210912.0, "max": 210912.0},
        "train_seconds": {"seeds": 2, "mean": 10.921295, "std": 0.254217, "min": 10.741536, "max": 11.101053},
        "constraint_seconds": {"seeds": 2, "mean": 2.431959, "std": 0.100202, "min": 2.361105, "max": 2.502812},
        "step_seconds": {"seeds": 2, "mean": 0.03962, "std": 0.00093, "min": 0.03896, "max": 0.04028},
        "constraint_step_seconds": {"seeds": 2, "mean": 0.00921, "std": 0.00038, "min": 0.00894, "max": 0.00948},
        "eval_seconds": {"seeds": 2, "mean": 0.050919, "std": 0.024813, "min": 0.033373, "max": 0.068465},
        "spectrum_seconds": {"seeds": 2, "mean": 0.009104, "std": 0.000521, "min": 0.008736, "max": 0.009472},
        "latency_seconds": {"seeds": 2, "mean": 0.000434, "std": 0.000021, "min": 0.000419, "max": 0.000449},
        "batch_seconds": {"seeds": 2, "mean": 0.003321, "std": 0.000187, "min": 0.003189, "max": 0.003453},
    },
    "group": None,
    "on_front": None,
    "difference": None,
    "paper": [],
    "fields": {"rank": 16},
    "missing": [],
    "best": [],
}

LEADERBOARD: Example = {
    "dataset": "digits",
    "metric": "accuracy",
    "boards": [
        {
            "protocol": TRIAL["result"]["protocol"],
            "record": PROTOCOL,
            "rows": [ROW],
            "total": 1,
            "unmeasured": 0,
            "apart": [],
            "front": None,
            "next": None,
            "columns": [{"field": "rank", "name": "rank"}],
            "common": {"dataset": "digits", "model": "small-cnn", "layer": "tt", "training.lr": 0.05},
            "decided": [],
            "pivot": None,
            "baseline": None,
        }
    ],
    "holes": [],
    "hole_count": 0,
    "invalid": [],
    "invalid_count": 0,
    "columns": [{"field": "rank", "name": "rank"}],
    "common": {"dataset": "digits", "model": "small-cnn", "layer": "tt", "training.lr": 0.05},
    "decided": [],
}

LEADERBOARD_TEXT = {
    Format.CSV: "status,reason,protocol,place,cell,model\r\nranked,,9a967f734e67,1,01779b46a560,small-cnn\r\n",
    Format.MARKDOWN: "| # | rank | accuracy (%) | seeds |\n| --: | --: | --: | --: |\n| 1 | 16 | 98.75 ± 0.20 | 2 |",
    Format.LATEX: "\\begin{tabular}{rrrr}\n1 & {16} & 98.75 $\\pm$ 0.20 & {2} \\\\\n\\end{tabular}\n",
}

TABLE: Example = {
    "name": "table2",
    "title": "Clipping and division in WRN-16-10 on CIFAR-10",
    "labels": ["method", "rank"],
    "columns": ["accuracy", "robust_accuracy", "corruption_accuracy", "ece", "speedup", "compression"],
    "protocols": {},
    "other_protocols": [],
    "rows": [
        {
            "labels": {"method": "clip to 1", "rank": 192},
            "status": "not run",
            "cell": None,
            "seeds": 0,
            "trials": 0,
            "metrics": {},
            "speedup": None,
            "memory_saving": None,
            "paper": {
                "accuracy": {"mean": 0.9525, "spread": None, "comparable": True, "decimals": 2},
                "robust_accuracy": {"mean": 0.517, "spread": None, "comparable": False, "decimals": 1},
                "speedup": {"mean": 4.1, "spread": None, "comparable": True, "decimals": 2},
                "compression": {"mean": 3.6, "spread": None, "comparable": True, "decimals": 2},
            },
            "notes": [],
        }
    ],
    "beside": "paper",
    "notes": [],
}

TABLE_TEXT = {
    Format.CSV: "method,rank,status,accuracy_mean,paper_accuracy_mean\r\nclip to 1,192,not run,,0.9525\r\n",
    Format.MARKDOWN: "| method | rank | accuracy (%) |\n| --- | ---: | ---: |\n| clip to 1 | 192 | - |\n",
    Format.LATEX: "\\begin{tabular}{lrrr}\n{clip to 1} & {192} & {-} & 95.25 \\\\\n\\end{tabular}\n",
}

PLANE: Example = {
    "dataset": "digits",
    "x_metric": "compression",
    "y_metric": "accuracy",
    "protocol": LEADERBOARD["boards"][0]["protocol"],
    "total": 1,
    "columns": [],
    "decided": [],
    "cell": [LEADERBOARD["boards"][0]["rows"][0]["cell"]],
    "x": [35.5],
    "x_error": [0.0],
    "y": [0.9312],
    "y_error": [0.0021],
    "seeds": [2],
    "trials": [2],
    "front": [True],
    "fields": {},
}
"""The answer of a plane."""

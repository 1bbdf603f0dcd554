"""An example of a comparison in the OpenAPI document."""

from service.api.http.examples import Example
from service.api.http.formats import Format
from service.api.openapi_examples.leaderboards import ROW
from service.api.openapi_examples.trials import PROTOCOL, TRIAL


def _measure(mean: float, std: float, **more: float | bool) -> Example:
    none = {"images": 359, "binomial": None, "difference": None, "error": None, "chance": None, "best": False}
    return {
        "protocol": 0,
        "seeds": 2,
        "trials": 2,
        "mean": mean,
        "std": std,
        "min": mean - std / 2**0.5,
        "max": mean + std / 2**0.5,
        **none,
        **more,
    }


def _side(cell: str, about: str, *drawn: int) -> Example:
    return {
        "key": cell,
        "name": f"cell {cell[:12]}",
        "about": about,
        "experiment_id": None,
        "states": {"succeeded": 2},
        "missing": {},
        "invalid": 0,
        "left_out": 0,
        "drawn": [*drawn],
    }


COMPARISON: Example = {
    "kind": "cells",
    "baseline": 0,
    "sides": [_side(TRIAL["cell"], "rank 4", 7, 8), _side(ROW["cell"], "rank 16", 9, 10)],
    "differing": [{"field": "rank", "name": "rank", "values": [[4.0], [16.0]], "counts": [1, 1]}],
    "axes": [],
    "common": {"dataset": "digits", "model": "small-cnn", "layer": "tt", "training.lr": 0.05},
    "metrics": ["accuracy"],
    "protocols": [{"protocol": TRIAL["result"]["protocol"], "record": PROTOCOL, "sides": [0, 1]}],
    "unequal": [],
    "rows": [
        {
            "fields": {},
            "trials": [2, 2],
            "metrics": {
                "accuracy": [
                    _measure(0.961, 0.0039),
                    _measure(0.9875, 0.002, difference=0.0265, error=0.0031, chance=0.0283, best=True),
                ]
            },
        }
    ],
    "row_count": 1,
}

COMPARISON_TEXT = {
    Format.CSV: "side,key,about,metric,protocol,seeds,trials,mean\r\nA,84a2cf0dbf17,rank 4,accuracy,9a96,2,2,0.961\r\n",
    Format.MARKDOWN: "| metric | A | B | B - A |\n| --- | --: | --: | --: |\n| accuracy (%) | 96.10 | 98.75 | 2.65 |",
    Format.LATEX: "\\begin{tabular}{lrrr}\n{accuracy (\\%)} & 96.10 & 98.75 & 2.65 \\\\\n\\end{tabular}\n",
}

"""What is said of a spec's fields that have no effect: an axis of such a field is a mistake that would go unseen."""

from service.plan import Plan
from service.spec import ExperimentSpec

_NEEDS = {
    "layer": "a rank",
    "rank": "layer: tt or soc-tt",
    "frames": "layer: tt and a rank",
    "lambda_ort": "layers with a rank, and free frames",
    "ort_normalizer": "a lambda_ort above 0",
    "constraint": "a delta to clip to, or a norm to divide by in division",
    "delta": "constraint: clip",
    "clipping": "constraint: clip and a delta",
    "division": "constraint: divide, and one of its conv, linear and batch_norm",
}


def warnings(spec: ExperimentSpec, plan: Plan) -> list[str]:
    """A sentence for every field of the spec that has no effect in any of its trials, with what it would need."""
    found = []
    for path in plan.idle:
        needs = _NEEDS.get(path) or _NEEDS.get(path.partition(".")[0], "other values of the fields beside it")
        trials = "none of the points tried" if spec.search else "no trial"
        found.append(f"{_place(spec, path)} has an effect in {trials}: it needs {needs}")
    return found


def _place(spec: ExperimentSpec, path: str) -> str:
    """Where the spec has the field."""
    if spec.search and path in spec.search.space:
        return f"search.space.{path}"
    return f"grid.{path}" if path in spec.grid else path

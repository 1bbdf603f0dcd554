"""What a spec would become, with nothing stored."""

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Query
from fastapi.responses import JSONResponse

from service.api.trial_examples import TRIAL
from service.db import Database
from service.estimate import Estimate, Estimator
from service.grid import ExperimentSpec, expand_grid
from service.idle_fields import warnings
from service.schemas_dry_run import SHOWN, DryRunOut, DryTotals, DryTrialOut
from service.security import Principal
from service.settings import Settings

DryRun = Annotated[
    bool, Query(description="Store nothing: answer (200) with the trials and what they would cost.", alias="dry_run")
]

_EXAMPLE = {
    "grid_points": 24,
    "trial_count": 20,
    "totals": {"steps": 5040, "seconds": None},
    "warnings": [],
    "trials": [
        {name: TRIAL[name] for name in ("fingerprint", "cell", "config")}
        | {
            "number": 0,
            "parameters": 2486,
            "compression": 35.5,
            "multiply_accumulates": 45_000,
            "steps": 252,
            "seconds": None,
            "basis": None,
            "reasons": ["nothing was measured yet from which the time could be told"],
        }
    ],
}

DRY_RUN: dict[int | str, dict[str, Any]] = {
    200: {
        "model": DryRunOut,
        "description": "With dry_run: what would be stored.",
        "content": {"application/json": {"example": _EXAMPLE}},
    }
}


def dry_run(spec: ExperimentSpec, who: Principal, database: Database, settings: Settings) -> JSONResponse:
    """The answer to a spec that is only to be looked at."""
    plan = expand_grid(spec, max_trials=settings.max_trials)
    with database.read() as session:
        estimator = Estimator(session, (planned.config for planned in plan.trials), who.project_id)
    estimates = [estimator.estimate(planned.config) for planned in plan.trials]
    trials = [
        DryTrialOut(
            number=number,
            fingerprint=planned.fingerprint,
            cell=planned.cell,
            config=planned.config.to_dict(),
            **asdict(estimate) | {"reasons": list(estimate.reasons)},
        )
        for number, (planned, estimate) in enumerate(zip(plan.trials[:SHOWN], estimates, strict=False))
    ]
    found = DryRunOut(
        grid_points=plan.points,
        trial_count=len(plan.trials),
        totals=_totals(estimates),
        warnings=warnings(spec, plan),
        trials=trials,
    )
    return JSONResponse(found.model_dump(mode="json"))


def _totals(estimates: list[Estimate]) -> DryTotals:
    steps = [estimate.steps for estimate in estimates]
    seconds = [estimate.seconds for estimate in estimates]
    return DryTotals(
        steps=None if None in steps or not steps else sum(step or 0 for step in steps),
        seconds=None if None in seconds or not seconds else sum(second or 0.0 for second in seconds),
    )

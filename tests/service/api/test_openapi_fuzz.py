"""Requests drawn from the OpenAPI document, right ones and wrong ones: never an error of the service, never an answer
that the document does not describe, nothing taken that it refuses.

`TTSV_FUZZ_CASES=10000` draws so many on each database instead of the few that every run can afford.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.generation import GenerationMode
from sqlalchemy.orm import Session

from service.database.engine import Database
from service.main import create_app
from service.queue.leases import Lease
from service.queue.trials import ArtifactFile, ProtocolRecord, hold
from service.settings import Settings
from tests.examples import PROFILE
from tests.held import reported

CASES = int(os.environ.get("TTSV_FUZZ_CASES", "200"))
KNOWN = {
    "experiment_id": 1,
    "trial_id": 1,
    "artifact_id": 1,
    "project_id": 1,
    "dataset": "digits",
    "paper": "senderovich2022",
    "name": "table2",
}
ENDLESS = {"streamExperiment"}
"""They answer until the experiment is final; tests/service/api/test_stream.py has them."""


@pytest.fixture
def app(
    database_url: str,
    database: Database,
    tmp_path: Path,
    submit: Callable[..., int],
    claim: Callable[..., Lease],
    finish: Callable[..., None],
    trial_result: Callable[..., dict[str, Any]],
    epoch_point: Callable[..., dict[str, Any]],
) -> FastAPI:
    """The API with an experiment that has everything: results, epochs, events, a file and a log."""
    app = create_app(Settings(database_url=database_url, data_dir=tmp_path / "data", host="127.0.0.1"))
    folder = tmp_path / "data" / "trials" / "1" / "1"
    folder.mkdir(parents=True)
    (folder / "trial.log").write_text("epoch 1\n")
    (folder / "model.safetensors").write_bytes(b"weights")
    submit(seeds=3)
    lease = claim()

    def work(session: Session) -> None:
        with hold(session, lease) as held:
            held.start_trial(1)
            for epoch in (1, 2, 3):
                held.add_epoch(1, reported(epoch_point(epoch)))
            file = ArtifactFile("model", "trials/1/1/model.safetensors", hashlib.sha256(b"weights").hexdigest(), 7)
            held.finish_trial(1, trial_result(), ProtocolRecord("p" * 64, {"split": "test"}), [file])

    database.write(work)
    finish(lease, 2, 0.25)
    # No key is asked for on loopback: a drawn Authorization would be as good as any other.
    document = app.openapi()
    document["components"].pop("securitySchemes")
    for methods in document["paths"].values():
        for operation in methods.values():
            operation.pop("security", None)
    return app


def cases(operation: Any, mode: GenerationMode) -> st.SearchStrategy[Any]:
    """Drawn requests; half of them about what is there."""
    drawn: st.SearchStrategy[Any] = operation.as_strategy(generation_mode=mode)
    names = [parameter.name for parameter in operation.path_parameters]
    if not names or not set(names) <= set(KNOWN):
        return drawn
    there = {name: KNOWN[name] for name in names}
    about: st.SearchStrategy[Any] = operation.as_strategy(generation_mode=mode, path_parameters=there)
    return drawn | about


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_service_does_what_its_document_says(app: FastAPI, database: Database) -> None:
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    found: Iterable[Any] = schema.get_all_operations()
    every = [result.ok() for result in found]
    every = [operation for operation in every if operation.definition.raw["operationId"] not in ENDLESS]
    assert len(every) >= 30
    statuses: Counter[int] = Counter()
    # What the document allows may still be refused for what no schema can say: a spec without a data set, a cursor of
    # another list, a field that is unknown, an Idempotency-Key that was used. And 7.0, which is an integer to JSON
    # Schema, is none to the service: where a whole number is asked for a fraction is a mistake.
    left_out = [schemathesis.checks.CHECKS.get_one("positive_data_acceptance")]
    modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
    if PROFILE != "deep" and database.engine.dialect.name == "postgresql":
        modes.pop()  # what is asked wrongly is refused before a database is asked for anything
    for operation in every:
        for mode in modes:

            @settings(
                max_examples=max(2, CASES // (2 * len(every))),
                deadline=None,
                database=None,
                phases=(Phase.generate,),
                suppress_health_check=list(HealthCheck),
            )
            @given(case=cases(operation, mode))
            def ask(case: Any) -> None:
                if case.query:
                    case.query.pop("follow", None)  # as endless as the streams
                response = case.call_and_validate(excluded_checks=left_out)
                statuses[response.status_code] += 1

            try:
                ask()
            except Unsatisfiable:  # an operation without parameters cannot be asked wrongly
                assert mode is GenerationMode.NEGATIVE
    print(f"{statuses.total()} cases: {dict(sorted(statuses.items()))}")
    assert statuses.total() >= CASES * len(modes) // 4
    assert {200, 404, 422} <= set(statuses)
    assert max(statuses) < 500

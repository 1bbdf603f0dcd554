"""All LaTeX that the API gives is read as a TeX would, of grids over fields that nobody named."""

from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from sqlalchemy.orm import Session

from service.database.engine import Database
from service.paper.presets import PAPER, Preset, presets
from service.paper.reference import preset_table
from service.queue import leases
from service.queue.trials import ProtocolRecord, hold
from tests import latex
from tests.held import unfinished_trials
from tests.machinery import Make

GRID = {
    "augmentation.flip": [False, True],
    "augmentation.padding": ["zeros", "symmetric"],
    "training.schedule": ["multistep", "cosine"],
    "training.milestones": [[1], [1, 2]],
    "model": ["wrn10-1", "wrn10-2"],
    "seed": [0, 1],
}
QUESTIONS = (
    "",
    "metrics=all",
    "metric=loss&metrics=ece,compression",
    "group_by=schedule",
    "sort=-flip",
    "pivot=flip,model",
    "pivot=milestones,padding",
    "pareto=accuracy,loss",
    "columns=lr,rank&hide=rank",
    "hide=flip,milestones",
    "where=model=wrn10-1",
    "where=lr>9",
    "metric=robust_accuracy",
    "metric=robust_accuracy&columns=lr,rank",
    "limit=1",
    "min_seeds=2",
)


@pytest.fixture
def filled(sqlite_api: TestClient, trial_result: Make) -> int:
    """Some cells complete, some lacking seeds, some holes of several kinds, an invalid result and two protocols."""
    base = {"dataset": "cifar10", "layer": "dense", "training": {"epochs": 3}}
    posted = sqlite_api.post("/v1/experiments", json={"name": "\\input{x} 50% & #1_2^3", "base": base, "grid": GRID})
    assert posted.status_code == 201, posted.text

    def work(session: Session) -> None:
        lease = leases.claim(session, "worker", None)
        assert lease is not None
        trials = unfinished_trials(session, lease)
        assert len(trials) > 20
        with hold(session, lease) as held:
            for index, trial in enumerate(trials[:-4]):
                held.start_trial(trial.id)
                protocol = ProtocolRecord("p" * 64, {"split": "a_b%"}) if index % 5 else ProtocolRecord("q" * 64, {})
                if index == 7:
                    held.fail_trial(trial.id, "diverged", "loss became nan & #_%")
                elif index == 8:
                    wrong = {"valid": False, "violations": ["accuracy_1 > 100 % & {x}"]}
                    held.finish_trial(trial.id, trial_result(0.5) | wrong, protocol)
                else:
                    held.finish_trial(trial.id, trial_result(0.5 + index / 100), protocol)

    database: Database = sqlite_api.app.state.database  # type: ignore[attr-defined]
    database.write(work)
    return int(posted.json()["id"])


@pytest.mark.slow
def test_leaderboards(sqlite_api: TestClient, filled: int, tmp_path: Path) -> None:
    documents = []
    for question in QUESTIONS:
        for chosen in ("", f"&experiment={filled}"):
            path = f"/v1/leaderboards/cifar10?format=latex&{question}{chosen}"
            plain = sqlite_api.get(path)
            assert plain.status_code == 200, plain.text
            whole = sqlite_api.get(f"{path}&standalone=true").text
            tables = latex.check(plain.text)
            assert latex.check(whole, standalone=True) == tables
            assert tables or question.startswith("where=lr"), path
            documents.append(whole)
    latex.compiled({"wide": latex.together(documents)}, tmp_path)


def test_a_baseline_and_an_empty_board(sqlite_api: TestClient, filled: int) -> None:
    cell = sqlite_api.get("/v1/leaderboards/cifar10").json()["boards"][0]["rows"][0]["cell"]
    text = sqlite_api.get(f"/v1/leaderboards/cifar10?format=latex&baseline={cell}").text
    assert latex.check(text)
    assert "difference: accuracy" in text
    empty = sqlite_api.get("/v1/leaderboards/svhn?format=latex&standalone=true").text
    assert latex.check(empty, standalone=True) == 0


@pytest.mark.parametrize("preset", presets(), ids=lambda preset: preset.name.removeprefix(f"{PAPER}/"))
def test_tables_of_the_paper(sqlite_api: TestClient, filled: int, preset: Preset, tmp_path: Path) -> None:
    table = preset_table(preset)  # all rows of all tables are made for it, which is not for whoever collects tests
    assert table is not None
    text = sqlite_api.get(f"/v1/tables/{PAPER}/{table.name}?format=latex&standalone=true").text
    assert latex.check(text, standalone=True) == 1
    latex.compiled({f"wide-{table.name}": text}, tmp_path)


def test_lists_of_trials(sqlite_api: TestClient, filled: int) -> None:
    for question in ("", "columns=lr,flip", "hide=milestones", "limit=1", "state=failed", "state=cancelled&columns=lr"):
        for path in ("/v1/trials", f"/v1/experiments/{filled}/trials"):
            assert latex.check(sqlite_api.get(f"{path}?format=latex&{question}").text) == 1

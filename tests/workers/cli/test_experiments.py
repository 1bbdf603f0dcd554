"""The command line against a real server: what it prints, for people and for scripts, and how it ends."""

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sqlalchemy.orm import Session
from typer.testing import CliRunner, Result

from service.client import Client
from service.database import Attempt, now
from service.database.engine import Database
from service.queue import leases, nodes
from service.queue.cluster import Gpu, Machine, Node, Versions
from service.queue.trials import ArtifactFile, ProtocolRecord, hold
from tests.held import reported, unfinished_trials
from tests.machinery import Make
from workers.cli.__main__ import app
from workers.worker.poller import Worker

Run = Callable[..., Result]
SPEC = {
    "name": "[bold]a name[/bold]",
    "base": {"dataset": "digits", "model": "small-cnn", "layer": "tt", "rank": 4},
    "grid": {"seed": [0, 1]},
}


@pytest.fixture
def run(server: str, tmp_path: Path) -> Run:
    """Runs a command; it must end with this code."""

    def run(*arguments: object, code: int = 0, stdin: str | None = None) -> Result:
        command = [str(argument) for argument in arguments]
        done = CliRunner().invoke(app, command, env={"TTSV_URL": server}, input=stdin)
        assert done.exit_code == code, (done.output, done.exception)
        return done

    return run


@pytest.fixture
def stored(sqlite_url: str) -> Iterator[Database]:
    database = Database(sqlite_url)
    yield database
    database.close()


@pytest.fixture
def finished(server: str, stored: Database, trial_result: Make, epoch_point: Make, tmp_path: Path) -> Callable[[], int]:
    """An experiment, posted and run: one trial failed."""

    def finished() -> int:
        with Client(server) as client:
            experiment_id = client.submit(SPEC).id

        def work(session: Session) -> None:
            lease = leases.claim(session, "worker", None)
            assert lease is not None
            good, bad = unfinished_trials(session, lease)
            folder = tmp_path / "data" / f"trials/{good.id}/1"
            folder.mkdir(parents=True)
            (folder / "model.safetensors").write_bytes(b"weights")
            (folder / "trial.log").write_text("one\ntwo\n")
            files = [
                ArtifactFile(kind, f"trials/{good.id}/1/{name}", hashlib.sha256(data).hexdigest(), len(data))
                for kind, name, data in (
                    ("model", "model.safetensors", b"weights"),
                    ("log", "trial.log", b"one\ntwo\n"),
                )
            ]
            with hold(session, lease) as held:
                for trial in (good, bad):
                    held.start_trial(trial.id)
                    held.add_epoch(trial.id, reported(epoch_point(1)))
                held.finish_trial(good.id, trial_result(0.875), ProtocolRecord("p" * 64, {}), files)
                held.fail_trial(bad.id, "oom", "out of memory")
            assert leases.complete(session, lease)

        stored.write(work)
        return experiment_id

    return finished


def rows(done: Result) -> list[list[str]]:
    return [line.split("\t") for line in done.stdout.splitlines()]


class TestSubmit:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "spec.json"
        path.write_text(json.dumps(SPEC | {"tags": ["a"]}))
        return path

    def test_from_a_file_or_standard_input(self, run: Run, file: Path) -> None:
        assert run("submit", file).stdout == "experiment 1: 2 trials; ttsv watch 1\n"
        assert run("submit", file, "--quiet").stdout == "2\n"
        assert json.loads(run("submit", "-", "--json", stdin=file.read_text()).stdout)["id"] == 3
        yaml = "name: y\nbase: {dataset: digits, model: small-cnn}\n"
        assert run("submit", "-", "-q", stdin=yaml).stdout == "4\n"

    def test_tags(self, run: Run, file: Path) -> None:
        found = json.loads(run("submit", file, "--tag", "b", "--tag", "a", "--json").stdout)
        assert sorted(found["tags"]) == ["a", "b"]
        first = json.dumps(SPEC | {"spec_version": 1})
        assert json.loads(run("submit", "-", "--tag", "b", "--json", stdin=first).stdout)["tags"] == ["b"]

    def test_dry(self, run: Run, file: Path) -> None:
        done = run("submit", file, "--dry-run")
        above, heading, first, second, total = rows(done)[:5]
        assert above == ["All rows: model small-cnn, layer tt, rank 4."]
        assert heading[:3] == ["#", "seed", "parameters"]
        assert (first[1], second[1]) == ("0", "1")
        assert total == ["2 grid points, 2 different trials; nothing was stored"]
        would = json.loads(run("submit", file, "--dry-run", "--json").stdout)
        memory = would["memory"]
        assert f"GPU memory of the largest trial: {memory['gib']:.2f} GiB, {memory['basis']}" in done.stdout
        assert str(would["trials"][0]["parameters"]) == first[2]
        hidden = rows(run("submit", file, "--dry-run", "--columns", "lr,seed", "--hide", "rank"))
        assert hidden[0] == ["All rows: model small-cnn, layer tt."]
        assert (hidden[1][:3], hidden[2][:3]) == (["#", "lr", "seed"], ["0", "0.05", "0"])
        assert (
            "there is no field 'sed'; the nearest is seed"
            in run("submit", file, "--dry-run", "--hide", "sed", code=1).stderr
        )
        assert rows(run("ls"))[1:] == []

    def test_fields_without_effect_are_warned_of(self, run: Run) -> None:
        spec = json.dumps(SPEC | {"base": {"dataset": "digits", "model": "small-cnn", "delta": 1.0}})
        for arguments in (["--dry-run"], ["--quiet"]):
            said = run("submit", "-", *arguments, stdin=spec).stderr.splitlines()
            assert "ttsv: warning: delta has an effect in no trial: it needs constraint: clip" in said

    def test_a_fraction_of_a_card_is_suggested(self, run: Run, stored: Database) -> None:
        machine = Machine(Versions("0.1.0", "3.11", "2.60", "2.9"), (Gpu("H100", 80.0),), 64.0, 100.0, True)
        node = Node("a" * 56, "one", "10.0.0.1", cpus=8, gpus=1, memory_gib=64, machine=machine)
        stored.write(lambda session: nodes.record(session, "w", [node]))
        spec = json.dumps(SPEC | {"resources": {"gpus": 0.001}})
        done = run("submit", "-", "--dry-run", stdin=spec)
        (note,) = [line for line in done.stdout.splitlines() if "side by side on a card of 80 GiB" in line]
        assert note.startswith("each of these trials needs ")
        (warning,) = [line for line in done.stderr.splitlines() if "it would run out of memory" in line]
        assert warning.startswith("ttsv: warning: each of these trials needs ")

    def test_what_is_wrong_is_said(self, run: Run, tmp_path: Path) -> None:
        wrong = json.dumps(SPEC | {"grid": {"rank": [0]}, "base": {"dataset": "digits", "model": "?"}})
        said = run("submit", "-", stdin=wrong, code=1).stderr
        assert "base.model" in said
        assert "grid.rank[0]" in said
        assert "no-such-file" in run("submit", tmp_path / "no-such-file", code=1).stderr
        run("submit", "-", "--tag", code=2)


class TestLooking:
    def test_ls(self, run: Run, finished: Callable[[], int]) -> None:
        done, other = finished(), 2
        run("submit", "-", "-q", "--tag", "t", stdin=json.dumps(SPEC | {"name": "other"}))
        assert [row[:3] for row in rows(run("ls"))] == [
            ["id", "name", "state"],
            [str(other), "other", "queued"],
            [str(done), "[bold]a name[/bold]", "failed"],
        ]
        assert rows(run("ls"))[2][3:6] == ["2", "1", "70.00%"]  # of the validation
        for options, ids in (
            (("--state", "failed"), [done]),
            (("--state", "failed", "--state", "queued", "--sort", "id"), [done, other]),
            (("--tag", "t"), [other]),
            (("--name", "NAME"), [done]),
            (("--limit", 1), [other]),
            (("--archived", "true"), []),
        ):
            found = json.loads(run("ls", "--json", *options).stdout)
            assert [experiment["id"] for experiment in found] == ids, options
        run("ls", "--state", "nonsense", code=2)

    def test_show_and_trial(self, run: Run, finished: Callable[[], int]) -> None:
        number = finished()
        lines = run("show", number).stdout.splitlines()
        assert lines[0] == f"{number} [bold]a name[/bold]"
        assert lines[1].startswith("failed    | trials 2/2 (0 running) | epochs ")
        assert lines[3] == "All rows: model small-cnn, layer tt, rank 4."
        assert lines[4] == "id\tseed\tstate\tepoch\taccuracy (%)"
        assert lines[5].split("\t")[-1] == "87.50"
        assert lines[-1] == "trial 2: oom: out of memory"
        whole = json.loads(run("show", number, "--json").stdout)
        assert [item["id"] for item in whole] == [number, 1, 2]
        assert len(json.loads(run("show", number, "--json", "--state", "failed").stdout)) == 2
        whole = json.loads(run("show", number, "--json", "--sort=-seed", "--where", "rank=4").stdout)
        assert [item["id"] for item in whole] == [number, 2, 1]
        assert len(json.loads(run("show", number, "--json", "--where", "seed=1", "--where", "lr<1").stdout)) == 2
        assert "the nearest is lr" in run("show", number, "--sort", "learning_rate", code=1).stderr
        assert rows(run("trial", 1))[3][:2] == ["epoch", "train loss"]
        assert json.loads(run("trial", 1, "--json").stdout)["result"]["accuracy"] == 0.875

    def test_how_long_a_trial_is_silent(self, run: Run, stored: Database) -> None:
        number = int(run("submit", "-", "-q", stdin=json.dumps(SPEC)).stdout)
        assert "last report" not in run("show", number).stdout + run("trial", 1).stdout

        def work(session: Session) -> None:
            lease = leases.claim(session, "worker", None)
            assert lease is not None
            with hold(session, lease) as held:
                held.start_trial(1, now() - timedelta(minutes=12))

        stored.write(work)
        for command in (("show", number), ("trial", 1)):
            said = [line for line in run(*command).stdout.splitlines() if "last report" in line]
            assert said == ["trial 1: last report 12 min ago; killed and tried again after 30 min without one"]

    def test_in_a_terminal_there_are_tables(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        run("submit", "-", stdin=json.dumps(SPEC))
        screen = Console(force_terminal=True, width=100, record=True)
        monkeypatch.setattr("workers.cli.client_options.console", lambda: screen)
        run("ls")
        shown = screen.export_text()
        assert "┃ id ┃" in shown
        assert "[bold]a name[/bold]" in shown

    def test_watch(self, run: Run, finished: Callable[[], int]) -> None:
        number = finished()
        line, above, headings, *trials = run("watch", number, code=1).stdout.splitlines()
        assert line.startswith("failed    | trials 2/2")
        assert above == "All rows: model small-cnn, layer tt, rank 4."
        assert headings == "id\tseed\tstate\tepoch\taccuracy (%)"
        assert sorted(row.split("\t")[:3] for row in trials) == [["1", "0", "succeeded"], ["2", "1", "failed (oom)"]]
        chosen = run("watch", number, "--columns", "layer,lr", "--hide", "layer", code=1).stdout.splitlines()
        assert chosen[2] == "id\tlr\tstate\tepoch\taccuracy (%)"
        assert "the nearest is layer" in run("watch", number, "--hide", "layr", code=1).stderr
        (line,) = run("watch", number, "--json", code=1).stdout.splitlines()
        assert json.loads(line)["state"] == "failed"

    def test_watch_tells_trials_apart_as_the_whole_grid_does(self, run: Run) -> None:
        """The twelve that it shows are alike in two fields of the grid, and differ in a third one with the seed."""
        grid = {"augmentation.pad": [0, 2], "training.lr": [0.1, 0.2], "seed": [*range(12)]}
        number = run("submit", "-", "--quiet", stdin=json.dumps(SPEC | {"grid": grid})).stdout.strip()
        run("cancel", number)
        _, above, headings, *trials = run("watch", number, code=1).stdout.splitlines()
        assert above == "All rows: model small-cnn, layer tt, rank 4."
        assert headings.split("\t")[:4] == ["id", "seed", "lr", "pad"]
        assert [row.split("\t")[1:4] for row in trials] == [[str(seed), "0.2", "2"] for seed in reversed(range(12))]

    def test_watch_in_a_terminal(self, run: Run, finished: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
        """Trials stand below the bar while they run, and stay at the end, once and whole."""
        screen = Console(force_terminal=True, width=60, record=True)
        for module in ("client_options", "experiments"):
            monkeypatch.setattr(f"workers.cli.{module}.console", lambda: screen)
        number = finished()
        run("watch", number, "--columns", "seed,layer,rank,lr,epochs,delta,lambda_ort", code=1)
        text = screen.export_text()
        assert text.count("All rows: model small-cnn.") >= 2, "below the bar, and at the end"
        end = text.rpartition("failed    |")[2].splitlines()
        assert [line.split()[:2] for line in end[-2:]] == [["2", "1"], ["1", "0"]]
        assert all("…" not in line for line in end[1:]), end

    def test_watch_in_a_terminal_too_narrow_for_all_fields(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        """While trials run their states are seen, and it is said which fields are not; at the end all are there."""
        screen = Console(force_terminal=True, width=70, record=True)
        for module in ("client_options", "experiments"):
            monkeypatch.setattr(f"workers.cli.{module}.console", lambda: screen)
        base = {"dataset": "synthetic:3x32x32:10:2000"}
        odd = {"training": {"optimizer": "adamw", "clip_gradient": 0.5, "label_smoothing": 0.125, "weight_decay": 0.25}}
        trials = [{"model": "wrn16-10"}, {"model": "small-cnn"} | odd, {"model": "wrn16-10", "training": {"ema": 0.5}}]
        for place, one in enumerate((*odd["training"].items(), ("batch_size", 96))):
            trials.append({"model": ["wrn22-8", "vgg11"][place % 2], "training": dict([one])})
        spec = {"name": "wide", "base": base, "trials": trials}
        number = run("submit", "-", "--quiet", stdin=json.dumps(spec)).stdout.strip()
        run("cancel", number)
        run("watch", number, code=1)
        live, _, end = screen.export_text().rpartition("cancelled |")
        assert "No room for: " in live
        assert "No room for: " not in end
        *_, headings = (line.split() for line in live.splitlines() if line.startswith("id"))  # drawn again and again
        assert headings[:2] == ["id", "model"]
        assert headings[-3:] == ["state", "epoch", "(%)"]
        assert "weight_decay" not in headings
        assert "weight_decay" in end

    def test_logs(self, run: Run, finished: Callable[[], int]) -> None:
        finished()
        assert run("logs", 1).stdout == "one\ntwo\n"
        assert run("logs", 1, "--tail", 1).stdout == "two\n"
        assert run("logs", 1, "--follow").stdout == "one\ntwo\n"
        for how in ((), ("--follow",)):
            assert "experiment 1 has no log" in run("logs", 1, "--experiment", *how, code=1).stderr

    def test_artifacts(self, run: Run, finished: Callable[[], int], tmp_path: Path) -> None:
        finished()
        assert [row[:3] for row in rows(run("artifacts", "ls", 1))] == [
            ["kind", "name", "bytes"],
            ["log", "trial-1-log.log", "8"],
            ["model", "trial-1-model.safetensors", "7"],
        ]
        target = tmp_path / "new" / "folder"
        assert run("artifacts", "get", 1, "model", "--to", target).stdout == f"{target}/trial-1-model.safetensors\n"
        assert (target / "trial-1-model.safetensors").read_bytes() == b"weights"
        assert len(run("artifacts", "get", 1, "--to", target).stdout.splitlines()) == 2
        assert "left no 'x'; there are log, model" in run("artifacts", "get", 1, "x", code=1).stderr

    def test_boards(self, run: Run, finished: Callable[[], int]) -> None:
        finished()
        shown = run("leaderboard", "digits").stdout
        assert "digits: by accuracy" in shown
        assert "All rows: model small-cnn, layer tt, rank 4." in shown
        assert "Missing: model small-cnn, layer tt, rank 4: seed 1 failed (oom)." in shown
        as_json = json.loads(run("leaderboard", "digits", "--json").stdout)
        assert json.loads(run("leaderboard", "digits", "--format", "json").stdout) == as_json
        assert as_json["boards"][0]["rows"][0]["metrics"]["accuracy"]["mean"] == 0.875
        assert "0.875" in run("leaderboard", "digits", "--format", "csv", "--pareto", "accuracy,compression").stdout
        for name, ending, sign in (("latex", "tex", r"\toprule"), ("markdown", "md", "**digits")):
            text = run("leaderboard", "digits", "--format", name).stdout
            assert sign in text
            assert run("leaderboard", "digits", "--format", ending).stdout == text
        assert "there is no metric 'x'" in run("leaderboard", "digits", "--metrics", "x", code=1).stderr
        beside = run("compare", 1, 2, "--metrics", "accuracy,ece").stdout
        assert "accuracy (%) 87.50" in " ".join(beside.split())
        assert "single trials have no error" in beside
        assert json.loads(run("compare", 1, 2, "--baseline", 2, "--json").stdout)["baseline"] == 1
        assert run("compare", 1, 2, "--format", "csv").stdout.startswith("side,key,about,metric")
        assert "names 1 different experiment" in run("compare", "--experiments", 1, code=1).stderr
        cell = as_json["boards"][0]["rows"][0]["cell"]
        assert "names 1 different cell" in run("compare", cell, cell, code=1).stderr
        assert "**table2" in run("table", "senderovich2022/table2").stdout
        assert json.loads(run("table", "senderovich2022/table2", "--json").stdout)["name"] == "table2"

    def test_update(self, run: Run) -> None:
        run("submit", "-", stdin=json.dumps(SPEC))
        changed = json.loads(run("update", 1, "--name", "n", "--tag", "a", "--priority", 3, "--json").stdout)
        assert (changed["name"], changed["tags"], changed["priority"]) == ("n", ["a"], 3)


class TestEnds:
    @pytest.mark.slow
    def test_nobody_answers(self) -> None:
        done = CliRunner().invoke(app, ["ls", "--url", "http://127.0.0.1:9"])
        assert done.exit_code == 3
        assert "http://127.0.0.1:9 does not answer" in done.stderr

    def test_health_checks_do_not_wait(self, run: Run, stored: Database) -> None:
        run("ready")
        assert "no worker was heard of" in run("ready", "--worker", code=1).stderr
        stored.write(lambda session: leases.greet(session, "worker", 1, 0))
        assert "no node on which trials can run" in run("ready", "--worker", code=1).stderr
        node = Node("a" * 56, "host", "10.0.0.1", cpus=1, gpus=0, memory_gib=1)
        stored.write(partial(nodes.record, worker="worker", seen=[node]))
        run("ready", "--worker")
        began = time.monotonic()
        assert CliRunner().invoke(app, ["ready", "--url", "http://127.0.0.1:9"]).exit_code == 3
        assert time.monotonic() - began < 1.5, "asked once"

    def test_the_key_is_sent(self, run: Run, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[str | None] = []
        init = Client.__init__

        def spy(self: Client, url: str | None = None, *, key: str | None = None, **more: Any) -> None:
            seen.append(key)
            init(self, url, key=key, **more)

        monkeypatch.setattr(Client, "__init__", spy)
        run("ls", "--key", "a")
        monkeypatch.setenv("TTSV_KEY", "b")
        run("ls")
        assert seen == ["a", "b"]

    def test_wrong_settings_are_said(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("TTSV_DATA_DIR", str(tmp_path))
        monkeypatch.setenv("TTSV_WEBHOOK_URL", "https://example.com")
        done = CliRunner().invoke(app, ["worker"])
        assert (done.exit_code, "TTSV_WEBHOOK_SECRET_FILE" in done.stderr) == (1, True)

    def test_who_cannot_be_requeued_hears_it_at_once(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("TTSV_DATA_DIR", str(tmp_path))
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        monkeypatch.setattr(Worker, "__init__", lambda worker, *_, **__: pytest.fail("it started"))
        done = CliRunner().invoke(app, ["worker", "--requeue", "--time-limit", "4h"])
        assert (done.exit_code, "there is no SLURM_JOB_ID here" in done.stderr) == (1, True)

    @pytest.mark.parametrize(("unfinished", "code"), [(True, 75), (False, 0)])
    def test_a_worker_says_whether_it_should_come_back(
        self, unfinished: bool, code: int, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TTSV_DATA_DIR", str(tmp_path))
        monkeypatch.setenv("TTSV_DATABASE_URL", sqlite_url)
        monkeypatch.setattr(Worker, "run", lambda worker: unfinished)
        done = CliRunner().invoke(app, ["worker", "--until-idle", "--time-limit", "2m"])
        assert done.exit_code == code, done.output

    def test_completion_is_offered(self) -> None:
        assert "--install-completion" in CliRunner().invoke(app, ["--help"]).stdout


def test_ls_starts_quickly(server: str) -> None:
    """By CPU seconds of the fastest of three: other processes' load is no matter of ours."""
    program = (
        "import sys, time\nfrom workers.cli.__main__ import app\n"
        "try:\n    app(['ls'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'sqlalchemy', 'fastapi', 'torch', 'ray', 'pandas', 'numpy', 'pydantic_settings', 'mlflow'}\n"
        "print(time.process_time(), sorted(heavy & set(sys.modules)))"
    )
    seconds = []
    for _ in range(3):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={"TTSV_URL": server})
        used, _, loaded = done.stdout.splitlines()[-1].partition(" ")
        assert loaded == "[]"
        seconds.append(float(used))
    assert min(seconds) < 1.5, "half a second on a machine that has nothing else to do"


def test_what_trials_used_is_shown(run: Run, finished: Callable[[], int], stored: Database) -> None:
    experiment_id = finished()
    assert "GPU" not in run("show", experiment_id).stdout
    series = {
        "interval": 2.0,
        "seconds": [2.0, 4.0],
        "cpu": [100.0, 200.0],
        "memory": [500.0, 700.0],
        "gpu": [None, None],
        "gpu_memory": [None, None],
    }

    def work(session: Session) -> None:
        values = {"trial_id": 1, "fence": 1, "place": "node-1", "started_at": now(), "environment": None}
        session.add_all([Attempt(number=1, resources=None, **values), Attempt(**_later(values), resources=series)])

    stored.write(work)
    for command in (("show", experiment_id, "--resources"), ("trial", 1)):
        (heading, first, second) = [
            line for line in run(*command).stdout.splitlines() if "CPU %" in line or line.endswith("node-1")
        ]
        assert heading.split("\t")[:4] == ["trial", "attempt", "seconds", "CPU %"]
        assert first.split("\t") == ["1", "1", "-", "-", "-", "-", "-", "-", "-", "node-1"]
        assert second.split("\t") == ["1", "2", "4", "150", "600", "700", "-", "-", "-", "node-1"]
    *_, attempt = json.loads(run("show", experiment_id, "--resources", "--json").stdout)
    assert attempt["points"][1] == {"seconds": 4.0, "cpu": 200.0, "memory": 700.0, "gpu": None, "gpu_memory": None}


def _later(values: dict[str, Any]) -> dict[str, Any]:
    return values | {"number": 2, "started_at": now()}

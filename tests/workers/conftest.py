import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import select

from service.database import Artifact, Attempt, ClusterNode, EpochPoint, Event, Experiment, Result, Trial, TrialState
from service.database.engine import Database
from service.database.experiments import ResourceSeries
from service.experiments import store, submission
from service.experiments.submission import Draft
from service.queue import nodes
from service.settings import Settings
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from service.specs.states import NodeState
from workers.node.raylet import free_ports
from workers.worker.ray_cluster import LocalCluster

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> Any:
    """The condition's first true value. The longer it takes the rarer is asked: to look at all processes costs much.

    A minute or more is no demand but patience, of which a machine that has much else to do gets more.
    """
    deadline = time.monotonic() + (seconds if seconds < 60 else 3 * seconds)
    pause = 0.05
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(pause)
        pause = min(1.2 * pause, 0.4)
    return value


@dataclass
class Lab:
    """A database, a data folder and worker processes over them."""

    data_dir: Path
    database: Database
    settings: dict[str, str]
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    wait_for = staticmethod(wait_for)

    def post(
        self, seeds: Sequence[int], *, epochs: int = 3, seconds: float = 0.05, sources: Sequence[int] = (), **spec: Any
    ) -> int:
        """An experiment of these seeds; of none where the spec searches. `sources`: what each of them evaluates."""
        base = {"dataset": "digits", "model": "small-cnn", "training": {"epochs": epochs, "lr": seconds}}
        grid = {"seed": list(seeds)} if seeds else {}
        parsed = ExperimentSpec.model_validate({"name": "test", "base": base, "grid": grid} | spec)
        plan = expand_grid(parsed, max_trials=1000)
        aims = {planned.fingerprint: source for planned, source in zip(plan.trials, sources, strict=False)} or None
        return self.database.write(lambda session: submission.submit(session, Draft(parsed, plan, sources=aims)).id)

    def start_worker(self, **environment: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "OMP_NUM_THREADS": "1", **self.settings, **environment}
        with (self.data_dir / "worker.log").open("ab") as log:
            command = [sys.executable, str(HERE / "fake_worker.py")]
            worker = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        self.workers.append(worker)
        return worker

    def processes(self) -> list[psutil.Process]:
        """Workers, drivers and clusters that belong to this data folder."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                ours = {environment.get("TTSV_DATA_DIR"), environment.get("RAY_AUTH_TOKEN_PATH")}
                if ours & {str(self.data_dir), str(self.data_dir / "token")}:
                    found.append(process)
        return found

    def drivers(self) -> list[psutil.Process]:
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if "fake_driver.py" in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def experiment(self, experiment_id: int) -> Experiment:
        with self.database.read() as session:
            return store.get_experiment(session, experiment_id)

    def trials(self, experiment_id: int) -> list[Trial]:
        with self.database.read() as session:
            query = select(Trial).where(Trial.experiment_id == experiment_id).order_by(Trial.number)
            return list(session.scalars(query))

    def points(self, experiment_id: int) -> list[tuple[int, int]]:
        with self.database.read() as session:
            query = (
                select(EpochPoint.trial_id, EpochPoint.epoch).join(Trial).where(Trial.experiment_id == experiment_id)
            )
            return sorted((row[0], row[1]) for row in session.execute(query))

    def results(self, experiment_id: int) -> list[Result]:
        with self.database.read() as session:
            query = select(Result).join(Trial).where(Trial.experiment_id == experiment_id)
            return list(session.scalars(query))

    def artifact_paths(self, trial_id: int) -> list[str]:
        with self.database.read() as session:
            return list(session.scalars(select(Artifact.path).where(Artifact.trial_id == trial_id)))

    def used(self, experiment_id: int) -> list[ResourceSeries]:
        """What attempts at its trials have told of what they use."""
        with self.database.read() as session:
            query = select(Attempt.resources).join(Trial).where(Trial.experiment_id == experiment_id)
            return [series for series in session.scalars(query) if series is not None]

    def suggested(self, trial_id: int) -> dict[str, Any]:
        """The point that a search tried as this trial, from its event."""
        with self.database.read() as session:
            query = select(Event.detail).where(Event.trial_id == trial_id, Event.kind == "trial_suggested")
            (detail,) = session.scalars(query)
            point: dict[str, Any] = detail["point"]
            return point

    def pids(self, experiment_id: int) -> dict[int, int]:
        """Trial -> process, of the trials that are running."""
        running = [trial.id for trial in self.trials(experiment_id) if trial.state == TrialState.RUNNING]
        found = {}
        for trial_id in running:
            files = (self.data_dir / "trials" / str(trial_id)).glob("*/pid")
            for file in sorted(files, key=lambda file: file.stat().st_mtime_ns):
                if text := file.read_text():
                    found[trial_id] = int(text)
        return found

    def nodes_of(self, experiment_id: int) -> set[str]:
        """Ray's nodes on which its trials ran."""
        folders = [self.data_dir / "trials" / str(trial.id) for trial in self.trials(experiment_id)]
        return {file.read_text() for folder in folders for file in folder.glob("*/node")}

    def driver_log(self, experiment_id: int) -> str:
        """What its drivers said."""
        files = (self.data_dir / "logs").glob(f"experiment-{experiment_id}-*.log")
        return "".join(file.read_text() for file in sorted(files))

    @staticmethod
    def all_gone(pids: Iterable[int]) -> bool:
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    return False
        return True

    def wait_for_epochs(self, experiment_id: int, count: int, seconds: float = 120) -> None:
        wait_for(lambda: len(self.points(experiment_id)) >= count, seconds)

    def wait_until_final(self, experiment_id: int, seconds: float = 150) -> Experiment:
        wait_for(lambda: self.experiment(experiment_id).state not in ("queued", "running"), seconds)
        return self.experiment(experiment_id)

    def assert_whole(self, experiment_id: int) -> None:
        """Every trial succeeded once, no epoch is missing, and each network is that of an undisturbed run."""
        trials = self.trials(experiment_id)
        assert {trial.state for trial in trials} == {TrialState.SUCCEEDED}
        assert sorted(result.trial_id for result in self.results(experiment_id)) == [trial.id for trial in trials]
        expected = [(trial.id, epoch) for trial in trials for epoch in range(1, trial.epochs + 1)]
        assert self.points(experiment_id) == expected
        assert self.experiment(experiment_id).state == "succeeded"
        for trial in trials:
            assert self.model(trial.id) == self.weights(trial.seed, trial.epochs)

    @staticmethod
    def weights(seed: int, epochs: int) -> str:
        """What the network of a fake trial holds that ran each epoch once, in its order."""
        chain = hashlib.sha256(str(seed).encode()).hexdigest()
        for epoch in range(1, epochs + 1):
            chain = hashlib.sha256(f"{chain} {epoch}".encode()).hexdigest()
        return f"weights {chain}"

    def model(self, trial_id: int) -> str:
        """What the trial's network holds, in the data folder."""
        (path,) = self.artifact_paths(trial_id)
        return (self.data_dir / path).read_text()

    def close(self) -> None:
        for worker in self.workers:
            if worker.poll() is None:
                worker.terminate()
        for worker in self.workers:
            try:
                worker.wait(40)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        self.database.close()


@pytest.fixture
def database(tmp_path: Path, sqlite_template: Path) -> Iterator[Database]:
    shutil.copyfile(sqlite_template, tmp_path / "ttsv.db")
    database = Database(Settings(data_dir=tmp_path).url)
    yield database
    database.close()


@pytest.fixture
def lab(tmp_path: Path, database: Database) -> Iterator[Lab]:
    """Workers of this lab start a cluster of their own."""
    settings = {
        "TTSV_DATA_DIR": str(tmp_path),
        "TTSV_POLL_SECONDS": "0.2",
        "TTSV_BEAT_SECONDS": "1",
        "TTSV_LEASE_SECONDS": "15",
        "TTSV_WORKER_CPUS": "1",
        "TTSV_WORKER_GPUS": "0",
    }
    lab = Lab(tmp_path, database, settings)
    yield lab
    lab.close()
    wait_for(lambda: not lab.processes(), 15)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    cluster = LocalCluster(tmp_path_factory.mktemp("cluster"), cpus=2, gpus=0)
    cluster.start()
    try:
        wait_for(cluster.ready)
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def quick_lab(lab: Lab, cluster: LocalCluster) -> Lab:
    """Workers of this lab share one cluster with the other tests."""
    lab.settings |= {"RAY_ADDRESS": cluster.address, **cluster.env()}
    return lab


class Machines:
    """Machines that join the cluster of a lab's worker, each by the command `ttsv node`."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.token = folder / "token"
        # Ray puts Unix sockets there, whose paths end at 107 characters.
        self.temporary = Path(tempfile.mkdtemp(prefix="n"))
        (self.port,) = free_ports(1)
        first = 20_000 + os.getpid() % 100 * 100
        lab.settings |= {
            "TTSV_HEAD_ADDRESS": "127.0.0.1",
            "TTSV_HEAD_PORT": str(self.port),
            "TTSV_NODE_PORTS": f"{first}-{first + 49}",
        }
        self.ports = f"{first + 50}-{first + 99}"
        self.children: list[subprocess.Popen[bytes]] = []

    def start(
        self, name: str, *, token: Path | None = None, before: Sequence[str] = (), **environment: str
    ) -> subprocess.Popen[bytes]:
        """Joins, with what it says in a log of this name; it knows nothing of the lab but address and token.

        `before`: what its command is an argument of.
        """
        own = {key: value for key, value in os.environ.items() if not key.startswith(("TTSV_", "RAY_"))}
        env = own | {"PYTHONPATH": str(ROOT), "TTSV_WORKER_CPUS": "1", "TTSV_WORKER_GPUS": "2"}
        env |= {"TMPDIR": str(self.temporary)} | environment
        options = ["--head", f"127.0.0.1:{self.port}", "--token-file", str(token or self.token), "--ports", self.ports]
        with (self.folder / name).open("wb") as log:
            command = [*before, sys.executable, "-m", "workers.cli", "node", *options]
            child = subprocess.Popen(command, env=env, cwd=self.folder, stdout=log, stderr=log)
        self.children.append(child)
        return child

    def said(self, name: str) -> str:
        return (self.folder / name).read_text()

    def complain(self, problem: str | None) -> None:
        """Has every node's note say so, as a probe of one that does not fit any more does."""
        code = (
            "import dataclasses, sys; from workers.node.notes import Notes; shelf = Notes(sys.argv[1]).nodes\n"
            "for name in shelf.names():\n"
            "    shelf.put(name, dataclasses.replace(shelf.get(name), problem=sys.argv[2] or None))"
        )
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token)}
        command = [sys.executable, "-c", code, f"127.0.0.1:{self.port}", problem or ""]
        subprocess.run(command, env=os.environ | token, cwd=ROOT, check=True, timeout=120)

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("RAY_AUTH_TOKEN_PATH") == str(self.token):
                    found.append(process)
            except psutil.Error:
                pass
        return found

    def seen(self, *states: NodeState) -> list[ClusterNode]:
        """What the database says, without the head."""
        with self.lab.database.read() as session:
            return [row for row in nodes.listed(session, 100) if row.state in states and not row.head]

    def close(self) -> None:
        for child in self.children:
            if child.poll() is None:
                child.terminate()
                child.wait(20)
        shutil.rmtree(self.temporary)


@pytest.fixture
def machines(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    machines = Machines(lab, tmp_path_factory.mktemp("machines"))
    yield machines
    machines.close()
    lab.wait_for(lambda: not machines.processes(), 10)

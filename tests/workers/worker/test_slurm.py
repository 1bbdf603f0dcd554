"""The batch scripts under Slurm itself, with daemons of our own on this machine.

They need root and Debian's `slurmctld slurmd slurm-client munge`. Job times are whole minutes, hence their length.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from service.specs.states import NodeState
from tests.workers.conftest import ROOT, wait_for
from workers.node.raylet import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.workers.conftest import Lab, Machines

SCRIPTS = ROOT / "docker" / "slurm"
MISSING = [name for name in ("munged", "slurmctld", "slurmd", "sbatch", "srun") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.deep,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)} (apt-get install slurmctld slurmd munge)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="the daemons of Slurm run as root"),
]

# `ttsv` as the jobs find it: its trials sleep and leave a hash chain. Two of its nodes are on one machine here, so that
# those that join have ports of their own.
TTSV = """#!{python}
import os, sys
from workers.worker.poller import Worker
if sys.argv[1] == "node":
    os.environ["TTSV_NODE_PORTS"] = "{ports}"
Worker.__init__.__kwdefaults__["driver"] = (sys.executable, "{driver}")
from workers.cli.__main__ import main
main()
"""
CONFIGURATION = """ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
NodeName=127.0.0.[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]},{ports[2]}] CPUs=2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A controller and two nodes on this machine, and the lab whose scripts they run."""

    def __init__(self, folder: Path, lab: Lab, ports: str, stack: ExitStack) -> None:
        self.folder, self.lab = folder, lab
        key = folder / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        text = CONFIGURATION.format(host=socket.gethostname().partition(".")[0], ports=free_ports(3), folder=folder)
        (folder / "slurm.conf").write_text(text)
        (folder / "state").mkdir()
        program = folder / "ttsv"
        driver = ROOT / "tests" / "workers" / "fake_driver.py"
        program.write_text(TTSV.format(python=sys.executable, ports=ports, driver=driver))
        program.chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TTSV_", "RAY_", "SLURM_"))}
        self.daemons = kept | {"SLURM_CONF": str(folder / "slurm.conf")}
        self.environment = self.daemons | lab.settings
        self.environment |= {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TTSV_DATABASE_URL": f"sqlite:///{lab.data_dir}/ttsv.db",
        }
        names = {"key-file": "key", "socket": "munge", "pid-file": "pid", "seed-file": "seed", "log-file": "munge.log"}
        options = [f"--{name}={folder / file}" for name, file in names.items()]
        # "force": a temporary folder is writable by others than its owner.
        self._start(stack, "munged", "--foreground", "--force", *options)
        wait_for((folder / "munge").exists, 20)
        self._start(stack, "slurmctld", "-D")
        for name in ("127.0.0.1", "127.0.0.2"):
            self._start(stack, "slurmd", "-D", "-N", name)
        wait_for(lambda: self.says("sinfo", "--noheader", "--format=%T %D") == "idle 2", 60)
        stack.callback(self._cancel)

    def _start(self, stack: ExitStack, *command: str) -> None:
        with (self.folder / f"{command[0]}.out").open("ab") as log:
            daemon = subprocess.Popen(command, env=self.daemons, stdout=log, stderr=log)
        stack.callback(daemon.wait, 30)
        stack.callback(daemon.terminate)

    def _cancel(self) -> None:
        self.says("scancel", "--user=root")
        wait_for(lambda: not self.says("squeue", "--noheader"), 60)

    def says(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False, timeout=60)
        return (done.stdout or done.stderr).strip()

    def submit(self, script: str, *options: str) -> str:
        """Queues one of the scripts, which ask for more than is here: GPUs, memory, CPUs; the number of its job."""
        text = re.sub(r"#SBATCH --(gpus-per-node|mem)=\S+\n", "", (SCRIPTS / script).read_text())
        (self.folder / script).write_text(text)
        said = self.says(
            "sbatch",
            "--parsable",
            "--cpus-per-task=1",
            f"--output={self.folder}/%j.log",
            *options,
            f"{self.folder}/{script}",
        )
        assert said.isdecimal(), said
        return said

    def job(self, number: str, field: str) -> str:
        found = re.search(rf"\b{field}=(\S*)", self.says("scontrol", "show", "job", number))
        return found[1] if found else ""

    def log(self, number: str) -> str:
        return (self.folder / f"{number}.log").read_text()


@pytest.fixture
def slurm(lab: Lab, machines: Machines) -> Iterator[Slurm]:
    # Not that of the test: paths of Unix sockets end at 107 characters.
    with tempfile.TemporaryDirectory(prefix="s") as folder, ExitStack() as stack:
        yield Slurm(Path(folder), lab, machines.ports, stack)


def test_a_worker_leaves_in_time_and_comes_back_in_a_later_job(lab: Lab, slurm: Slurm) -> None:
    experiment = lab.post([0], epochs=90, seconds=1)
    job = slurm.submit("worker.sbatch", "--time=2")
    lab.wait_for(lambda: lab.pids(experiment), 60)
    lab.wait_for(lambda: slurm.job(job, "Restarts") == "1", 120)
    # Slurm counts the restart before its program has answered the worker, which is then ended.
    lab.wait_for(lambda: f"job {job} is queued again" in slurm.log(job), 30)
    said = slurm.log(job)
    assert "this worker leaves in" in said
    assert "stopping" in said
    assert "TIME LIMIT" not in said
    lab.wait_for(lambda: not lab.processes(), 10)
    (trial,) = lab.trials(experiment)
    assert trial.state == "queued"
    reported = len(lab.points(experiment))
    assert 0 < reported < 90

    lab.wait_for(lambda: slurm.job(job, "Reason") == "BeginTime", 60)  # Slurm lets it wait for two minutes
    assert slurm.says("scontrol", "update", f"JobId={job}", "StartTime=now", "TimeLimit=30") == ""
    assert lab.wait_until_final(experiment, 240).state == "succeeded"
    lab.assert_whole(experiment)
    (trial,) = lab.trials(experiment)
    assert (trial.deaths, trial.error) == (0, None)
    (file,) = (lab.data_dir / "trials" / str(trial.id)).glob("*/trained")
    assert len(file.read_text().split()) <= 91, "an epoch at most was trained again"
    lab.wait_for(lambda: slurm.job(job, "JobState") == "COMPLETED", 120)
    assert slurm.job(job, "Restarts") == "1", "nothing was left to run, and so it was not queued again"


def test_the_nodes_of_a_job_are_one_pool(lab: Lab, machines: Machines, slurm: Slurm) -> None:
    experiment = lab.post([2000, 2001], epochs=20, seconds=0.5)  # each waits for the other to begin
    job = slurm.submit("pool.sbatch", "--time=30")
    lab.wait_for(lambda: machines.seen(NodeState.ALIVE), 120)
    assert lab.wait_until_final(experiment, 180).state == "succeeded"
    lab.assert_whole(experiment)
    assert len(lab.nodes_of(experiment)) == 2
    lab.wait_for(lambda: slurm.job(job, "JobState") == "COMPLETED", 180)
    lab.wait_for(lambda: not lab.processes(), 20)


def test_a_job_that_is_cancelled_gives_back_what_it_runs(lab: Lab, slurm: Slurm) -> None:
    experiment = lab.post([0], epochs=600, seconds=0.5)
    job = slurm.submit("worker.sbatch", "--time=30")
    lab.wait_for_epochs(experiment, 2)
    assert slurm.says("scancel", job) == ""
    lab.wait_for(lambda: not lab.processes(), 30)
    (trial,) = lab.trials(experiment)
    assert (trial.state, trial.deaths, trial.error) == ("queued", 0, None)
    assert lab.experiment(experiment).state == "queued"
    lab.wait_for(lambda: slurm.job(job, "JobState") == "CANCELLED", 60)
    assert slurm.job(job, "Restarts") == "0", "who cancels a job does not want it back"

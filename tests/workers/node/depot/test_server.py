"""The depot as a process of Ray."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.worker.ray_cluster import LocalCluster

_ASKED = """
import sys
from pathlib import Path

import ray

from service.settings import Settings
from ttsv.data.shared import locked
from workers.node.depot.data_sets import FOLDER
from workers.node.depot.home import light_beacon
from workers.node.depot.server import THREADS, find_depot

ray.init(address=sys.argv[1], log_to_driver=False)
folder = Path(sys.argv[2])
home = light_beacon(Settings(data_dir=folder), folder / "drivers", ray.get_runtime_context().get_node_id())
depot = find_depot(home)
with locked("digits", folder / FOLDER):  # as whoever reads it for the first time
    asked = [depot.data_set.remote("digits") for _ in range(2 * THREADS)]
    print(ray.get(depot.call.remote("size", "trials/1/model.pt"), timeout=60))
    done, _ = ray.wait(asked, num_returns=len(asked), timeout=0)
    print(len(done))
print({found.name for found in ray.get(asked, timeout=120)})
ray.kill(depot)
"""


@pytest.mark.slow
def test_files_are_stored_while_all_wait_for_a_data_set(cluster: LocalCluster, tmp_path: Path) -> None:
    """A large one is read for minutes at its first use, for as many trials as begin with it."""
    (tmp_path / "trials/1").mkdir(parents=True)
    (tmp_path / "trials/1/model.pt").write_bytes(b"weights")
    command = [sys.executable, "-c", _ASKED, cluster.address, str(tmp_path)]
    done = subprocess.run(
        command, env=os.environ | cluster.env(), capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout.split("\n")[:3] == ["7", "0", "{'digits'}"], done.stdout + done.stderr

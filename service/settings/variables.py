"""Settings of the service and its workers: environment variables `TTSV_...`, nothing read at import."""

import ipaddress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from service.errors import UserError
from service.storage import problem_of

LEAST_FREE_BYTES = 256 * 2**20
"""With less room in the data folder the service is not ready."""


class LogFormat(StrEnum):
    """How logs are written."""

    TEXT = "text"
    JSON = "json"


def _names(value: Any) -> Any:
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


LEAST_PORTS = 20
"""Of a node: two of Ray's own, and one for each process that it runs or keeps ready."""


def ports_of(text: str) -> range:
    """The ports of `FIRST-LAST`, both included. Raises `ValueError`."""
    first, dash, last = text.partition("-")
    if not (dash and first.strip().isdecimal() and last.strip().isdecimal()):
        raise ValueError("must be two ports with a dash between: 6380-6879")
    ports = range(int(first), int(last) + 1)
    if len(ports) < LEAST_PORTS or not 1024 <= ports[0] <= ports[-1] <= 65535:
        raise ValueError(f"must be {LEAST_PORTS} ports or more, from 1024 to 65535")
    return ports


_DRIVERS = {
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite+pysqlite",
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}
"""What a database's URL may begin with, and what SQLAlchemy calls it."""


class Settings(BaseSettings):
    """Where things are and how long they may take. Each field is the variable `TTSV_<FIELD>`."""

    # The database's URL may hold a password.
    model_config = SettingsConfigDict(env_prefix="TTSV_", extra="ignore", frozen=True, hide_input_in_errors=True)

    data_dir: Annotated[Path, AfterValidator(Path.absolute)] = Field(
        Path("ttsv-data"), validate_default=True, description="The one folder that holds everything we write."
    )
    database_url: str | None = Field(
        None,
        description="SQLAlchemy URL (sqlite or postgresql); by default a SQLite file in the data folder.",
    )
    database_password_file: Path | None = Field(
        None, description="File with the database's password, so that it stands in no environment and no URL."
    )
    host: str = Field("127.0.0.1", description="Address the API listens on.")
    published: str | None = Field(
        None,
        description="Address at which others reach the API where that is not its own: a container's published port.",
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_names)] = Field(
        (),
        validate_default=True,
        description="More names that requests may use for the API (Host), separated by commas; * allows every name.",
    )
    port: int = Field(8000, ge=0, le=65535, description="Port the API listens on; 0 picks a free one.")
    require_keys: bool | None = Field(
        None, description="Whether requests need a key; by default where the API listens on more than loopback."
    )
    trust_network: bool = Field(
        False, description="Allow an address other than loopback without keys: a proxy in front authenticates."
    )
    max_body_bytes: int = Field(262_144, ge=1024, description="Largest request body.")
    max_trials: int = Field(20_000, ge=1, description="Largest grid of one experiment, before deduplication.")

    log_format: LogFormat = Field(LogFormat.TEXT, description="How logs are written: text, or json (one per line).")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe level that is logged; the API logs every request at info."
    )

    poll_seconds: float = Field(
        0.5, gt=0, allow_inf_nan=False, description="Pause between two looks of a worker into the queue."
    )
    beat_seconds: float = Field(
        10,
        gt=0,
        allow_inf_nan=False,
        description="Time between two heartbeats of a lease; unless set, at most a sixth of the lease.",
    )
    lease_seconds: float = Field(
        60, gt=0, allow_inf_nan=False, description="A heartbeat standing still this long loses the lease."
    )
    max_experiments: int | None = Field(
        None,
        ge=1,
        description="Experiments one worker runs side by side; by default as many as its machine has memory and cores "
        "for, 8 at least.",
    )
    unfit_seconds: float | None = Field(
        None,
        gt=0,
        description="How long trials may wait that fit no node there is, until they fail; for ever by default, as "
        "larger nodes may join.",
    )
    worker_cpus: int | None = Field(None, ge=1, description="CPUs a worker's Ray cluster offers; all by default.")
    tensorboard: bool = Field(
        False, description="Write every trial's numbers for TensorBoard into `tensorboard/` in the data folder."
    )
    retention_days: float | None = Field(
        None,
        gt=0,
        le=100_000,
        description="Workers remove networks of trials that ended longer ago, unless a board shows them.",
    )
    retention_best: int | None = Field(
        None, ge=0, description="Workers remove all but so many networks of each experiment, the best by accuracy."
    )
    retention_gib: float | None = Field(
        None, ge=0, description="Workers remove the oldest networks until all together have no more GiB."
    )
    worker_gpus: int | None = Field(None, ge=0, description="GPUs a worker's Ray cluster offers; all by default.")
    worker_mps: bool = Field(
        False, description="Run trials that share a GPU under NVIDIA's MPS, whose daemon the worker starts and ends."
    )

    head_address: str | None = Field(
        None, description="Address of this machine at which further nodes join a worker's cluster; unset, none can."
    )
    head_port: int = Field(6379, ge=1, le=65535, description="Port at which further nodes join.")
    node_ports: str = Field(
        "6380-6879",
        description="Ports that a worker's cluster uses for further nodes on each machine: two, and one a process.",
    )
    shared_data: bool = Field(
        False, description="All nodes see the data folder at the same path: a machine that does not is refused."
    )

    storage: str | None = Field(
        None,
        description="Where files of trials are kept, if not in the data folder: the path of a folder that all nodes "
        "see, or s3://BUCKET/PREFIX with options of pyarrow behind a question mark.",
    )

    webhook_url: str | None = Field(
        None, description="Address (https) that is told of experiments that became final; several: spaces between."
    )
    webhook_secret_file: Path | None = Field(
        None, description="File with the secret under which webhooks are signed, 16 characters at least."
    )
    webhook_trials: bool = Field(False, description="Tell webhooks of trials that failed or diverged, too.")
    webhook_loopback: bool = Field(
        False, description="Allow webhooks to this machine itself, also by http: for a relay, and for trying them."
    )

    @field_validator("node_ports")
    @classmethod
    def _ports_apart(cls, value: str, info: ValidationInfo) -> str:
        """Refuses what is no range of ports, and one with the port at which nodes join."""
        try:
            ports = ports_of(value)
        except ValueError as error:
            raise PydanticCustomError("ports", "{reason}", {"reason": str(error)}) from None
        if info.data.get("head_port") in ports:
            raise PydanticCustomError("ports", "must be without TTSV_HEAD_PORT")
        return value

    @field_validator("storage")
    @classmethod
    def _known_storage(cls, value: str | None) -> str | None:
        """Refuses what is neither a path nor a bucket."""
        if not value:
            return None
        if problem := problem_of(value):
            raise PydanticCustomError("storage", "{reason}", {"reason": problem})
        return value

    @field_validator("database_url")
    @classmethod
    def _known_database(cls, value: str | None) -> str | None:
        """Refuses what is neither SQLite nor PostgreSQL; the URL, which may hold a password, is not repeated.

        Nor may SQLite be without a file: every process would have a database of its own, that ends with it.
        """
        if value is None:
            return None
        try:
            url = make_url(value)
            kind = _DRIVERS.get(url.drivername)
        except (ArgumentError, ValueError):  # ValueError: of a port that is no number
            kind = None
        if kind is None:
            raise PydanticCustomError(
                "database",
                "must be a URL of SQLite or PostgreSQL, as sqlite:////folder/ttsv.db or postgresql://user@host/name",
            )
        if kind.startswith("sqlite") and url.database in (None, "", ":memory:"):
            raise PydanticCustomError(
                "database",
                "must name the file of SQLite's database, as sqlite:////folder/ttsv.db; unset, it is ttsv.db in the "
                "data folder",
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _beats_within(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Where only the lease was made short, heartbeats follow."""
        if "lease_seconds" not in values or "beat_seconds" in values:
            return values
        try:
            beat = min(float(cls.model_fields["beat_seconds"].default), float(values["lease_seconds"]) / 6)
        except (TypeError, ValueError):  # which the lease's own check says better
            return values
        return values | {"beat_seconds": beat} if beat > 0 else values

    @field_validator("lease_seconds")
    @classmethod
    def _longer_than_beats(cls, value: float, info: ValidationInfo) -> float:
        """Refuses a lease that one late heartbeat would lose."""
        beat = info.data.get("beat_seconds")
        if beat is not None and value < 2 * beat:
            raise PydanticCustomError(
                "lease",
                "is {lease}, must be at least twice TTSV_BEAT_SECONDS, which is {beat}",
                {"lease": f"{value:g}", "beat": f"{beat:g}"},
            )
        return value

    @property
    def url(self) -> URL:
        """URL of the database; a PostgreSQL URL without a driver gets psycopg's, one without a password the file's."""
        if self.database_url is None:
            return URL.create("sqlite", database=str(self.data_dir / "ttsv.db"))
        url = make_url(self.database_url)
        url = url.set(drivername=_DRIVERS[url.drivername])
        if self.database_password_file is not None and url.password is None:
            url = url.set(password=self.database_password_file.read_text().strip())
        return url

    @property
    def ports(self) -> range:
        """Those of `node_ports`, of step 1."""
        return ports_of(self.node_ports)

    @property
    def keys_required(self) -> bool:
        """Whether requests need a key."""
        if self.require_keys is not None:
            return self.require_keys
        return not self.on_loopback and not self.trust_network

    @property
    def on_loopback(self) -> bool:
        """Whether the API is reached from this machine alone."""
        address = (self.host if self.published is None else self.published).strip("[]")
        try:
            return ipaddress.ip_address(address).is_loopback
        except ValueError:
            return address == "localhost"

    @property
    def reached_by(self) -> str:
        """By which setting, and where, others reach the API."""
        return f"TTSV_HOST = {self.host!r}" if self.published is None else f"TTSV_PUBLISHED = {self.published!r}"

    def refuse_open_network(self) -> None:
        """Raises `UserError` if the API would be open to everyone who reaches the machine."""
        if not (self.on_loopback or self.keys_required or self.trust_network):
            raise UserError(
                f"{self.reached_by} with TTSV_REQUIRE_KEYS=false: everyone who reaches this machine could use "
                "the API; leave TTSV_REQUIRE_KEYS out, or set TTSV_TRUST_NETWORK=true behind a proxy that authenticates"
            )

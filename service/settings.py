"""Settings of the service and its workers: environment variables `TTSV_...`, nothing read at import."""

import ipaddress
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy import URL, make_url


class Settings(BaseSettings):
    """Where things are and how long they may take. Each field is the variable `TTSV_<FIELD>`."""

    model_config = SettingsConfigDict(env_prefix="TTSV_", extra="ignore", frozen=True)

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
    port: int = Field(8000, ge=0, le=65535, description="Port the API listens on; 0 picks a free one.")
    trust_network: bool = Field(
        False, description="Allow an address other than loopback although requests carry no key."
    )
    max_body_bytes: int = Field(262_144, ge=1024, description="Largest request body.")
    max_trials: int = Field(20_000, ge=1, description="Largest grid of one experiment, before deduplication.")

    poll_seconds: float = Field(0.5, gt=0, description="Pause between two looks of a worker into the queue.")
    beat_seconds: float = Field(10, gt=0, description="Time between two heartbeats of a lease.")
    lease_seconds: float = Field(60, gt=0, description="A heartbeat standing still this long loses the lease.")
    max_experiments: int = Field(2, ge=1, description="Experiments one worker runs side by side.")
    worker_cpus: int | None = Field(None, ge=1, description="CPUs a worker's Ray cluster offers; all by default.")
    worker_gpus: int | None = Field(None, ge=0, description="GPUs a worker's Ray cluster offers; all by default.")

    @property
    def url(self) -> URL:
        """URL of the database; a PostgreSQL URL without a driver gets psycopg's, one without a password the file's."""
        if self.database_url is None:
            return URL.create("sqlite", database=str(self.data_dir / "ttsv.db"))
        url = make_url(self.database_url)
        if url.drivername in ("postgres", "postgresql"):
            url = url.set(drivername="postgresql+psycopg")
        if self.database_password_file is not None and url.password is None:
            url = url.set(password=self.database_password_file.read_text().strip())
        return url

    def refuse_open_network(self) -> None:
        """Raises `ValueError` if the API would be open to others: it has no keys yet."""
        try:
            loopback = ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            loopback = self.host == "localhost"
        if not loopback and not self.trust_network:
            raise ValueError(
                f"TTSV_HOST = {self.host!r}: the API asks for no key, so it listens on loopback only; put it behind "
                "a proxy that authenticates and set TTSV_TRUST_NETWORK=true, or use TTSV_HOST=127.0.0.1"
            )

"""The network to which a data set's mean corruption error is relative: its accuracies, kept beside the data set."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ttsv.data.record import file_name, write_json
from ttsv.errors import ConfigError, DataError
from ttsv.metrics.corruption import CorruptionRecord, mce


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A stored record of corruption accuracies, and the SHA-256 (hex) of its file."""

    record: CorruptionRecord
    sha256: str

    @classmethod
    def find(cls, folder: Path, dataset: str) -> "Baseline | None":
        """That of a data set in the folder of the data sets; None without one. Raises `DataError` for a damaged one."""
        path = baseline_path(folder, dataset)
        try:
            content = path.read_bytes()
            record = CorruptionRecord(**json.loads(content)["corruptions"])
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}; let who runs trials read it") from error
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is cut or altered ({error!r}): remove it, and store the baseline again") from error
        return cls(record=record, sha256=hashlib.sha256(content).hexdigest())

    @staticmethod
    def store(folder: Path, dataset: str, record: CorruptionRecord, model: str) -> Path:
        """Makes a record the data set's baseline, whole or not at all; `model` says whose it is."""
        path = baseline_path(folder, dataset)
        write_json(path, {"dataset": dataset, "model": model, "corruptions": asdict(record)})
        return path

    def compare(self, record: CorruptionRecord) -> tuple[float | None, str | None]:
        """Mean corruption error, or None and why: measured on other images, or the baseline errs nowhere of a kind."""
        try:
            return mce(record, self.record), None
        except ConfigError as error:
            return None, str(error)


def baseline_path(folder: Path, dataset: str) -> Path:
    """Where the baseline of a data set lies in the folder of the data sets."""
    return folder / f"{file_name(dataset)}-corruption-baseline.json"

"""The API and its migration where nothing is installed but what the image of the API has: run by test_compose.py.

python tests/e2e/without_trials.py MODULE... : these, and all below them, are not to be found
"""

import contextlib
import io
import json
import sys
import zipfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = ("/", "/experiments/1", "/trials/1", "/leaderboards/digits", "/docs", "/openapi.json", "/metrics")
DATA = ("/v1/experiments/1", "/v1/trials/1", "/v1/leaderboards/digits", "/v1/presets", "/v1/nodes")


class _Without:
    """What finds modules, but for some."""

    def __init__(self, finder: Any, names: set[str]) -> None:
        self._finder, self._names = finder, names

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found: ModuleSpec | None = None
        if name.partition(".")[0] not in self._names:
            found = self._finder.find_spec(name, path, target)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def _write_archive(path: Path, side: int) -> None:
    """20 images of one channel, of two classes."""
    images, labels = bytes(20 * side * side), bytes([0, 1] * 10)
    with zipfile.ZipFile(path, "w") as archive:
        for name, shape, content in (("x", f"(20, 1, {side}, {side})", images), ("y", "(20,)", labels)):
            header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
            archive.writestr(f"{name}_train.npy", b"\x93NUMPY\1\0" + bytes([len(header), 0]) + header + content)


def main() -> None:
    sys.meta_path[:] = [_Without(finder, set(sys.argv[1:])) for finder in sys.meta_path]
    from starlette.testclient import TestClient

    from service.main import create_app
    from service.settings import Settings
    from service.storage import open_storage
    from workers.cli.__main__ import main as ttsv

    sys.argv = ["ttsv", "migrate"]
    with contextlib.suppress(SystemExit):
        ttsv()
    sys.argv = ["ttsv", "doctor", "--json"]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as said:
        ttsv()
    findings = json.loads(said.getvalue())["findings"]
    assert not [finding for finding in findings if "error of ours" in (finding["mend"] or "")], findings
    assert [finding["status"] for finding in findings if finding["check"] == "trials"] == ["warning"]
    assert {"database", "disk", "api"} <= {finding["check"] for finding in findings}
    with TestClient(create_app(Settings()), base_url="http://localhost") as client:
        spec = json.loads((ROOT / "examples" / "quickstart.json").read_text())
        assert client.post("/v1/experiments?dry_run=true", json=spec).status_code == 200
        assert client.post("/v1/experiments", json=spec).status_code == 201
        for path in (*PAGES, *DATA):
            assert client.get(path).status_code == 200, path
        spec["base"]["model"] = "torchvision:resnet18"
        (warning,) = client.post("/v1/experiments?dry_run=true", json=spec).json()["warnings"]
        assert warning.startswith("model: 1 network of torchvision could not be tried here: "), warning
        spec["base"] |= {"model": "wrn10-1", "dataset": "npz:mine"}
        place = Settings().data_dir / "datasets"
        place.mkdir()
        _write_archive(place / "mine.npz", 6)
        _write_archive(place / "other.npz", 8)
        (problem,) = client.post("/v1/experiments?dry_run=true", json=spec).json()["errors"]
        assert problem["field"] == "model"
        assert "cannot take the images of npz:mine" in problem["message"], problem
        own = {"name": "own", "base": {"dataset": "npz:other", "model": "small-cnn"}}
        posted = client.post("/v1/experiments", json=own)
        assert posted.status_code == 201, posted.text
        spec["base"]["layer"] = "bcop"
        spec["base"]["model"] = "wrn-16-10"
        assert client.post("/v1/experiments?dry_run=true", json=spec).status_code == 422
    # As at its first use.
    record = {"dataset": "npz:other", "sha256": "0" * 64, "files": {"other.npz": "0" * 64}}
    (place / "npz-other.sha256.json").write_text(json.dumps(record))
    backup = Settings().data_dir.parent / "without.backup"
    sys.argv = ["ttsv", "backup", str(backup), "--json"]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as said:
        ttsv()
    files = {one["path"] for one in json.loads(said.getvalue())["files"]}
    assert {"datasets/other.npz", "datasets/npz-other.sha256.json"} <= files, files
    backup.unlink()
    assert open_storage("s3://results/ttsv?endpoint_override=127.0.0.1:9&scheme=http")  # as TTSV_STORAGE may name one


if __name__ == "__main__":
    main()

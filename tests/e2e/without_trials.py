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


def main() -> None:
    sys.meta_path[:] = [_Without(finder, set(sys.argv[1:])) for finder in sys.meta_path]
    from starlette.testclient import TestClient

    from service.main import create_app
    from service.settings import Settings
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
        # An archive of 20 images of 1x6x6, of two classes.
        place = Settings().data_dir / "datasets"
        place.mkdir()
        with zipfile.ZipFile(place / "mine.npz", "w") as archive:
            for name, shape, content in (("x", "(20, 1, 6, 6)", bytes(720)), ("y", "(20,)", bytes([0, 1] * 10))):
                header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
                archive.writestr(f"{name}_train.npy", b"\x93NUMPY\1\0" + bytes([len(header), 0]) + header + content)
        (problem,) = client.post("/v1/experiments?dry_run=true", json=spec).json()["errors"]
        assert problem["field"] == "model"
        assert "cannot take the images of npz:mine" in problem["message"], problem
        spec["base"]["layer"] = "bcop"
        spec["base"]["model"] = "wrn-16-10"
        assert client.post("/v1/experiments?dry_run=true", json=spec).status_code == 422


if __name__ == "__main__":
    main()

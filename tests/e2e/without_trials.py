"""The API and its migration where nothing is installed but what the image of the API has: run by test_compose.py.

python tests/e2e/without_trials.py MODULE... : these, and all below them, are not to be found
"""

import contextlib
import io
import json
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PAGES = ("/", "/experiments/1", "/trials/1", "/leaderboards/digits", "/docs", "/openapi.json", "/metrics")
DATA = ("/v1/experiments/1", "/v1/trials/1", "/v1/leaderboards/digits", "/v1/presets", "/v1/nodes")


class _Missing:
    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in self._names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def main() -> None:
    sys.meta_path.insert(0, _Missing(set(sys.argv[1:])))
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
        spec["base"]["layer"] = "bcop"
        spec["base"]["model"] = "wrn-16-10"
        assert client.post("/v1/experiments?dry_run=true", json=spec).status_code == 422


if __name__ == "__main__":
    main()

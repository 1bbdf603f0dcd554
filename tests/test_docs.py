"""The documents say what the code does."""

import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from service.grid import ExperimentSpec, expand_grid

ROOT = Path(__file__).parent.parent


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["spec.md", "settings.md", "openapi.json"])
def test_reference_pages_are_what_the_code_gives(name: str) -> None:
    pages: dict[Path, str] = _generator().pages()
    path = ROOT / "docs" / name
    assert path.read_text() == pages[path], "run `make docs` and look at the difference"


def test_specs_in_readme_and_examples_expand() -> None:
    blocks = re.findall(r"```json\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    texts = [*blocks, *(path.read_text() for path in (ROOT / "examples").glob("*.json"))]
    assert len(texts) >= 2
    for text in texts:
        plan = expand_grid(ExperimentSpec.model_validate(json.loads(text)), max_trials=1000)
        assert len(plan.trials) >= 10


def test_quickstart_has_what_it_promises() -> None:
    spec = ExperimentSpec.model_validate_json((ROOT / "examples" / "quickstart.json").read_text())
    configs = [planned.config for planned in expand_grid(spec, max_trials=1000).trials]
    assert {config.layer for config in configs} == {"dense", "tt"}
    assert len({config.rank for config in configs if config.layer == "tt"}) >= 2
    assert len({config.lambda_ort for config in configs if config.layer == "tt"}) >= 2
    assert any(config.constraint == "clip" for config in configs)
    assert len({config.seed for config in configs}) >= 2


def test_commands_in_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"\bmake (\w+)", text)) - {"and"}
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


def test_curl_lines_of_the_readme_name_routes_of_the_api() -> None:
    paths = json.loads((ROOT / "docs" / "openapi.json").read_text())["paths"]
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith("curl ")]
    assert len(lines) >= 6
    for line in lines:
        words = shlex.split(line, comments=True)
        url = next(word for word in words if word.startswith("$URL"))
        route = url.removeprefix("$URL").partition("?")[0]
        pattern = re.compile("|".join(re.sub(r"\{\w+\}", "[^/]+", path) + "$" for path in paths))
        assert pattern.match(route), route

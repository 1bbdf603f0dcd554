"""The documents say what the code does."""

import hashlib
import importlib.util
import json
import re
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from service.specs.documents import read_yaml
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec

ROOT = Path(__file__).parent.parent


@cache
def _pages() -> dict[Path, str]:
    """The reference pages, made once for all tests."""
    made: dict[Path, str] = _generator().pages()
    return made


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    found: dict[str, str] = _generator().pages()
    return found


@pytest.mark.parametrize("name", ["spec.md", "settings.md", "cli.md", "metrics.md", "api.md"])
def test_reference_pages_are_what_the_code_gives(name: str, pages: dict[str, str]) -> None:
    assert (ROOT / "docs" / name).read_text() == pages[name], "run `make docs` and look at the difference"


def test_a_running_service_serves_the_schema_of_the_page(openapi: dict[str, Any]) -> None:
    text = json.dumps(openapi, sort_keys=True, separators=(",", ":"))
    assert f"`{hashlib.sha256(text.encode()).hexdigest()}`" in (ROOT / "docs" / "api.md").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "examples").iterdir()), ids=lambda path: path.name)
def test_examples_expand(path: Path) -> None:
    read = json.loads if path.suffix == ".json" else read_yaml
    plan = expand_grid(ExperimentSpec.model_validate(read(path.read_text())), max_trials=1000)
    assert len(plan.trials) >= 4


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
    targets = set(re.findall(r"(?:^|`)make (\w+)", text, re.MULTILINE))
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


def test_documents_name_modules_that_exist() -> None:
    for page in (ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").glob("*.md")):
        names = re.findall(r"(?<![\w/.-])(?:ttsv|service|workers)(?:\.\w+)+", page.read_text())
        for name in {name for name in names if not name.endswith((".db", ".dump", ".example.org", ".md"))}:
            place, parts = ROOT, name.split(".")
            while parts and (place / parts[0]).is_dir():
                place /= parts.pop(0)
            module = place / f"{parts.pop(0)}.py" if parts and (place / f"{parts[0]}.py").is_file() else None
            text = (module or place / "__init__.py").read_text()
            assert all(re.search(rf"\b{part}\b", text) for part in parts), f"{page.relative_to(ROOT)}: {name}"


def test_ci_runs_what_the_readme_says() -> None:
    told = re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    run = re.findall(r"^make (.+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert set(told) <= {word for line in run for word in line.split() if not word.startswith("-")}


def test_the_picture_of_the_house_has_every_room_in_its_order() -> None:
    picture = (ROOT / "docs" / "design.md").read_text().split("```")[1]
    drawn = [name for line in picture.splitlines() for name in line[:24].replace(",", "").split()]
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    contracts = {contract["containers"][0]: contract["layers"] for contract in linter if "containers" in contract}
    for package, layers in contracts.items():
        rooms = [name for name in layers if (ROOT / package / name / "__init__.py").is_file()]
        assert [name for name in drawn if (ROOT / package / name).is_dir() and name in rooms] == rooms
        assert {path.parent.name for path in (ROOT / package).glob("*/__init__.py")} <= set(drawn)


def test_figures_in_the_readme_are_the_records() -> None:
    lines = (ROOT / "benchmarks" / "records.jsonl").read_text().splitlines()
    records = {record["name"]: record for record in map(json.loads, lines)}
    rows = {row.split("|")[1].strip(): row for row in (ROOT / "README.md").read_text().splitlines() if row[:2] == "| "}
    mix, certified = records["clipping mix"], records["spectra"]["rank 192"]
    steps = records["training"]["steps"]
    wanted = {
        "clip all of WRN-16-10, dense": _beside(mix["dense"], "ours", "theirs over ours"),
        "clip all of WRN-16-10, TT rank 192": _beside(mix["rank 192"], "ours", "theirs over ours"),
        "largest singular value with a proof, TT rank 192": _beside(certified, "certified", "certified ratio"),
        "training WRN-16-10, dense, float32": _trained(steps["wrn16-10 dense"]),
        "training WRN-16-10, TT rank 192, float32": _trained(steps["wrn16-10 tt rank 192"]),
        "training LipConvNet-5, SOC-TT rank 256, float32": _trained(steps["lipconvnet-5 soc-tt rank 256"]),
    }
    for name, figures in wanted.items():
        assert [cell.strip() for cell in rows[name].split("|")[2:5]] == figures, name
    text = " ".join((ROOT / "README.md").read_text().split())
    path = records["first_path"]
    assert f"The API starts in {path['api_start_seconds']:.1f} s" in text
    assert f"1,000 trials is stored in {path['post_1000_trials_seconds']:.2f} s" in text
    assert (
        f"after {path['first_epoch_seconds']:.1f} s, each further trial costs {path['further_trial_seconds']:.2f} s"
        in text
    )
    served = {kind: records[f"serving {kind}"]["figures"] for kind in ("sqlite", "postgres", "mlflow")}
    quick = {kind: f"{served[kind]['leaderboard']['p95'] * 1000:.0f}" for kind in ("sqlite", "postgres")}
    assert f"a leaderboard takes {quick['sqlite']} ms on SQLite and {quick['postgres']} ms on PostgreSQL (p95)" in text
    beside = served["mlflow"]
    assert f"the 50 best are told {beside['answer_ratio']:.0f} times as fast as by MLflow" in text
    alone = beside["mlflow"]["record_seconds"] / beside["ttsv"]["record_alone_seconds"]
    recorded = (
        f"a run is recorded {beside['record_ratio']:.0f} times as fast among many, {alone:.0f} times if waited for"
    )
    assert recorded in text
    assert records["bounds"]["cases"] == 10_000
    assert not records["bounds"]["broken"]


def _beside(total: dict[str, float], ours: str, ratio: str) -> list[str]:
    return [f"{total['theirs']:.1f} s", f"{total[ours]:.1f} s", f"{total[ratio]:.1f} times"]


def _trained(step: dict[str, Any]) -> list[str]:
    speed = step["images_per_second"]
    return [f"{speed['theirs']:.1f} images/s", f"{speed['float32']:.1f} images/s", f"{step['ratio']:.2f} times"]

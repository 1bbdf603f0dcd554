"""The plan of the house, kept by tests."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("ttsv", "service", "workers", "migrations")
MODULES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@functools.cache
def tree(module: Path) -> ast.Module:
    return ast.parse((ROOT / module).read_text(), str(module))


@functools.cache
def nodes(module: Path) -> list[ast.AST]:
    return list(ast.walk(tree(module)))


def calls(module: Path) -> Iterator[tuple[str, ast.Call]]:
    """Every call by the name that is called, as written: `torch.load`."""
    for node in nodes(module):
        if isinstance(node, ast.Call):
            yield written(node.func), node


def written(node: ast.expr) -> str:
    """As `ast.unparse` has it, which takes long for what most calls are: names and attributes of names."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{written(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ast.unparse(node)


def imports(module: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of every import, wherever it stands."""
    for node in nodes(module):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def after(statement: str) -> dict[str, Any]:
    """What a fresh interpreter has loaded after a statement."""
    program = f"import json, sys\n{statement}\nprint(json.dumps({{'modules': sorted(sys.modules)}}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


LIGHT = (
    "import ttsv.config.trial, ttsv.results, ttsv.trial, ttsv.metrics.catalog",
    "import service.client",
    "import service.upkeep.migrate",
    "import service.main",
    "from service.main import create_app; create_app.__module__",
)
IN_TURN = """
import json, os, sys, time

def count():
    start, counted = time.process_time(), 0
    for number in range(3_000_000):
        counted += number
    return time.process_time() - start

spent, found = 0.0, []
for statement in sys.argv[1:]:
    counting, start = count(), time.process_time()
    exec(statement)
    spent += (time.process_time() - start) / (counting + count())
    found.append({"modules": sorted(sys.modules), "spent": spent, "files": os.listdir(".")})
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What an interpreter in an empty folder has loaded, spent and made after each statement, one after the other.

    In times that it takes to count to six million: processors differ, and one that others use as well is slower.
    """
    command, environment = [sys.executable, "-c", IN_TURN, *LIGHT], {**os.environ, "PYTHONPATH": str(ROOT)}
    empty = tmp_path_factory.mktemp("empty")
    done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=True)
    return dict(zip(LIGHT, json.loads(done.stdout), strict=True))


class TestImports:
    @pytest.mark.slow
    @pytest.mark.parametrize("statement", LIGHT)
    def test_light_modules_stay_light(self, light: dict[str, dict[str, Any]], statement: str) -> None:
        found = light[statement]
        assert {"torch", "torchvision", "ray", "sklearn", "numpy"}.isdisjoint(found["modules"])
        assert found["spent"] < 30  # seen: 9 to 12

    @pytest.mark.slow
    @pytest.mark.parametrize("module", ["workers.worker.poller", "workers.node.membership", "workers.node.notes"])
    def test_workers_and_nodes_leave_ray_to_their_children(self, module: str) -> None:
        assert {"torch", "ray"}.isdisjoint(after(f"import {module}")["modules"])

    def test_a_node_knows_no_database(self) -> None:
        assert "service.database" not in after("import workers.node.membership, workers.node.probe")["modules"]

    @pytest.mark.slow
    def test_a_trials_process_knows_no_database(self, tmp_path: Path) -> None:
        """Nor torch before it is told whether it has a card: drivers import it too, and compute nothing.

        The class that Tune makes, pickled, has all that the driver gave to it.
        """
        from ray import cloudpickle, tune

        from service.specs.spec import Fifo, Resources
        from workers.driver.tuner import Passes

        spec = SimpleNamespace(resources=Resources(gpus=0.5), scheduler=Fifo())
        work: Any = SimpleNamespace(
            spec=spec, data_dir=tmp_path, folder=tmp_path, home=None, feed=mock.Mock(), earlier=(), board_folder=None
        )
        with mock.patch.object(tune, "Tuner") as tuner:
            Passes(mock.Mock(), mock.Mock())._tuner(work, mock.Mock(), mock.Mock())
        sent = cloudpickle.dumps(tuner.call_args.args[0])  # type: ignore[no-untyped-call]
        found = after(f"from ray import cloudpickle; cloudpickle.loads({sent!r}).default_resource_request({{}})")
        assert {"ray", "workers.node.depot.home", "workers.trial_process.trainable"} <= set(found["modules"])
        assert {"sqlalchemy", "torch"}.isdisjoint(found["modules"])

    @pytest.mark.slow
    def test_a_driver_loads_no_logger_of_other_programs(self) -> None:
        found = after(
            "from unittest import mock\n"
            "from ray.air._internal.usage import tag_callbacks\n"
            "from ray.tune import Callback\n"
            "from workers.driver import tuner\n"
            "with mock.patch('ray.init'), mock.patch('ray.air._internal.usage.record_extra_usage_tag'):\n"
            "    tuner.connect('')\n"
            "    tag_callbacks([Callback()])"
        )
        assert "ray.air.integrations.mlflow" in found["modules"]
        assert not [name for name in found["modules"] if name.startswith("mlflow.")]

    @pytest.mark.slow
    def test_a_node_starts_ray_without_what_serves_models(self) -> None:
        found = after(
            "from contextlib import redirect_stdout, suppress\n"
            "from io import StringIO\n"
            "from workers.node.raylet import _RAY\n"
            "sys.argv = ['ray', 'start', '--help']\n"
            "with redirect_stdout(StringIO()) as said, suppress(SystemExit):\n"
            "    exec(_RAY)\n"
            "assert '--head' in said.getvalue()"
        )
        assert "ray.scripts.scripts" in found["modules"]
        assert "pandas" not in found["modules"]

    def test_ttsv_knows_no_database_and_no_web(self) -> None:
        found = after("import ttsv.config.trial, ttsv.trial")
        assert {"sqlalchemy", "pydantic", "fastapi", "service", "workers"}.isdisjoint(found["modules"])

    def test_what_compiles_kernels_loads_no_torch(self) -> None:
        """It is a process of its own, and would spend most of its time on that."""
        assert "torch" not in after("import ttsv.winograd.jit")["modules"]

    @pytest.mark.slow
    def test_a_trial_loads_no_compiler(self, tmp_path: Path) -> None:
        """Nor scikit-learn, whose digits it trains on: either takes two seconds of each trial's process."""
        base = {"dataset": "digits", "model": "small-cnn", "layer": "tt", "rank": 4}
        statement = (
            "from pathlib import Path; from ttsv.config.trial import TrialConfig; from ttsv.trial import run_trial\n"
            f"folder = Path({str(tmp_path)!r})\n"
            "for name in ('sgd', 'adam', 'adamw'):\n"
            "    training = {'epochs': 1, 'steps': 2, 'optimizer': name, 'momentum': 0.0}\n"
            f"    config = TrialConfig.from_dict({base} | {{'training': training}})\n"
            "    trial = run_trial(config, data_dir=folder, folder=folder / name)\n"
            "    if name != 'adamw':\n"
            "        next(trial), trial.close()\n"
            "        continue\n"
            "    *_, last = trial\n"
            "    assert last.multiply_accumulates > 0 and last.artifacts['model'].exists()\n"
            "import pickle; (folder / 'result').write_bytes(pickle.dumps(last))"
        )
        loaded = set(after(statement)["modules"])
        assert {"torch", "ttsv.training.loop", "ttsv.metrics.cost"} <= loaded
        assert {"torch._dynamo", "torch._inductor", "sympy", "sklearn", "scipy", "pandas"}.isdisjoint(loaded)
        # Its driver, which reads the result, has no use for torch.
        read = after(f"import pickle; pickle.load(open({str(tmp_path / 'result')!r}, 'rb'))")
        assert "ttsv.results" in read["modules"]
        assert "torch" not in read["modules"]

    @pytest.mark.parametrize("statement", LIGHT)
    def test_nothing_is_made_at_import(self, light: dict[str, dict[str, Any]], statement: str) -> None:
        assert light[statement]["files"] == []

    def test_the_contracts_hold(self) -> None:
        linter = Path(sys.executable).parent / "lint-imports"
        done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert " 0 broken" in done.stdout


class TestModules:
    """Each rule over all modules at once; what is wrong is told of each that breaks it."""

    def test_there_are_some(self) -> None:
        assert Path("service/queue/trials.py") in MODULES
        assert Path("ttsv/spectral/singular_values.py") in MODULES

    def test_each_says_what_it_is_for(self) -> None:
        silent = [str(module) for module in MODULES if not ast.get_docstring(tree(module))]
        assert not silent, f"without a docstring: {silent}"

    def test_each_door_says_what_may_enter(self) -> None:
        """In a sentence that has "may be imported"; import-linter holds the order, the sentence says what it is for."""
        doors = [m for m in MODULES if m.name == "__init__.py" and len(m.parts) > 2 and m.parts[0] != "migrations"]
        assert len(doors) > 25
        silent = [
            str(m) for m in doors if "may be imported" not in " ".join((ast.get_docstring(tree(m)) or "").split())
        ]
        assert not silent, f"do not say what may be imported: {silent}"

    @pytest.mark.parametrize(("package", "most"), [("ttsv", 20), ("service", 18), ("workers", 6)])
    def test_the_root_of_a_package_is_seen_at_a_glance(self, package: str, most: int) -> None:
        """The package's door and its mark that it is typed included."""
        entries = {m.relative_to(package).parts[0] for m in MODULES if m.parts[0] == package}
        marks = {mark.name for mark in (ROOT / package).glob("*.typed")}
        assert len(entries | marks) <= most

    def test_nothing_is_unpickled(self) -> None:
        found = []
        for module in MODULES:
            if ("pickle", "load") in set(imports(module)):
                found.append(f"{module} imports pickle.load")
            for name, call in calls(module):
                if name in ("pickle.load", "pickle.loads", "cloudpickle.loads", "joblib.load"):
                    found.append(f"{module}:{call.lineno}: {name}")
                safe = [k for k in call.keywords if k.arg == "weights_only" and ast.unparse(k.value) == "True"]
                if name == "torch.load" and not safe:
                    found.append(f"{module}:{call.lineno}: torch.load without weights_only=True")
        assert not found

    def test_sql_stands_where_the_plan_says(self) -> None:
        """In the rooms that a sentence of docs/design.md names, and in each of these."""
        (sentence,) = re.findall(r"SQL stands in (.*?), HTTP", (ROOT / "docs" / "design.md").read_text(), re.DOTALL)
        rooms = {Path("service") / name for name in re.findall(r"`(\w+)`", sentence)}
        makers = {"select", "insert", "update", "delete", "text"}
        found, used = [], set()
        for module in MODULES:
            taken = {name for source, name in imports(module) if source.startswith("sqlalchemy")} & makers
            run = [
                f"{call.lineno}: {name}"
                for name, call in calls(module)
                if name.rpartition(".")[2] in ("execute", "scalars", "scalar")
            ]
            if module.parts[0] == "migrations" or not (taken or run):
                continue
            room = Path(*module.parts[:2]).with_suffix("")
            used.add(room)
            if room not in rooms:
                found.append(f"{module}: {[*sorted(taken), *run]}")
        assert not found
        assert used == rooms

    def test_each_has_a_name_of_its_own(self) -> None:
        vague = {"utils", "helpers", "common", "core", "manager", "misc"}
        assert not [str(module) for module in MODULES if vague & {module.stem, module.parent.name}]


class TestSettings:
    def test_every_field_says_what_it_is(self) -> None:
        from service.settings import Settings

        for name, field in Settings.model_fields.items():
            assert field.description, f"TTSV_{name.upper()} is not documented"
            assert field.description[0].isupper()
            assert field.description.endswith(".")

"""Every script of the repository starts the way the documents say, and what the benchmarks keep is small and whole."""

import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.mps import write_stand_ins
from tests.pretended import PretendedCards
from ttsv.layers import TTConv2d
from ttsv.models import create_model
from ttsv.spectral import clip_conv

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
MODULES = sorted(BENCHMARKS.glob("*.py"))
SCRIPTS = [path for path in MODULES if '__name__ == "__main__"' in path.read_text()]
RECORDS = BENCHMARKS / "records.jsonl"
TAKE_LONGEST = ("first_path", "gpu", "pages", "reporting", "scheduling", "serving", "training", "trajectories")
"""Those that start services, servers, or a process for each part, or train network after network."""
STARTED_BY_OTHER_TESTS = {
    "docs/notebook.py": "tests/test_doc_blocks.py",
    "docs/pictures.py": "tests/browser/test_pages.py",
}


def started(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python ...` from the root of a checkout, on one thread and without the authors' programs."""
    environment = {name: value for name, value in os.environ.items() if name != "AUTHORS"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.deep
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_runs_and_a_quick_run_keeps_no_record(script: Path) -> None:
    kept = RECORDS.read_text()
    done = started(str(script.relative_to(ROOT)), "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip(), "prints no figure"
    assert RECORDS.read_text() == kept


IN_TURN = """
import contextlib, io, json, runpy, sys, traceback
sys.path.insert(0, "benchmarks")
for script in sys.argv[1:]:
    sys.argv, printed, code = [script, "--quick"], io.StringIO(), 0
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as left:
        code = int(left.code or 0)
    except Exception:
        code = traceback.format_exc()
    print(json.dumps([script, code, printed.getvalue()]), flush=True)
"""


@pytest.mark.slow
def test_quick_runs_of_one_process_print_figures_and_keep_no_record() -> None:
    """All that take but seconds, one after the other: most of what one by itself costs is to load torch."""
    kept = RECORDS.read_text()
    scripts = [str(path.relative_to(ROOT)) for path in SCRIPTS if path.stem not in TAKE_LONGEST]
    done = started("-c", IN_TURN, *scripts)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(script, code) for script, code, _ in found] == [(script, 0) for script in scripts], done.stderr
    assert [script for script, _, printed in found if not printed.strip()] == [], "print no figure"
    assert RECORDS.read_text() == kept


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A benchmark as a module of this process, without the authors'."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delenv("AUTHORS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return importlib.import_module(request.param)


def called(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """What it ends with, given these arguments."""
    monkeypatch.setattr(sys, "argv", [str(script.__file__), *arguments])
    threads = torch.get_num_threads()
    try:
        return int(script.main())
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("script", ["training"], indirect=True)
def test_a_peak_is_all_that_a_process_prints_where_bf16_is_left_out(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process that asked for it reads it as JSON."""
    monkeypatch.setattr(script, "computes_bf16", lambda: False)
    assert called(script, monkeypatch, "--quick", "--peak", "float32", "0") == 0
    assert json.loads(capsys.readouterr().out) > 0


@pytest.mark.slow
@pytest.mark.parametrize("script", ["scheduling"], indirect=True)
def test_a_workers_whole_decision_is_timed_while_its_nodes_are_full(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the clock of the worker's thread too, which is what a bound can be held to beside other programs."""
    monkeypatch.setattr(script, "WARM_UP", 4)
    with script.databases("sqlite", tmp_path) as url:
        database = script.Database(url)
        script.migrate(database)
        script._fill(database, 10, 200)
        found = script._shared(database, 2)
        database.close()
    assert found["share running"] > 500
    assert min(found.values()) > 0


@pytest.mark.parametrize("script", ["trajectories"], indirect=True)
def test_trajectories_say_what_they_lack(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, and without stopping `make bench`."""
    kept = RECORDS.read_text()
    assert called(script, monkeypatch) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("left out: needs --authors DIR, a checkout of")
    assert RECORDS.read_text() == kept


@pytest.mark.parametrize("script", ["trajectories"], indirect=True)
def test_a_checkout_of_the_authors_may_be_named_by_a_variable(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTHORS", str(tmp_path))
    with pytest.raises(SystemExit, match=re.escape(f"--authors {tmp_path}: has no src/utils.py")):
        called(script, monkeypatch)


@pytest.mark.parametrize("script", ["trajectories"], indirect=True)
def test_the_switches_of_trajectories_change_the_clip_of_tt_layers(script: ModuleType) -> None:
    layer = TTConv2d(8, 4, 3, 4, 2, 1)
    before = [factor.detach().clone() for factor in (layer.k1, layer.core, layer.k3)]
    clip = script.ClipAsTheirs([script.Switch.NO_QR, script.Switch.SWAPPED])
    clip.bind(layer, 8, in_channels=8)
    clip.project(layer, script.EVERY)
    swapped = clip_conv(before[1].transpose(0, 1), script.DELTA, 8, stride=2).transpose(0, 1)
    for factor, expected in zip((layer.k1, layer.core, layer.k3), (before[0], swapped, before[2]), strict=True):
        torch.testing.assert_close(factor.detach(), expected)


def test_every_module_is_a_benchmark_or_shared_by_some() -> None:
    imported = {name for path in MODULES for name in re.findall(r"^from (\w+) import", path.read_text(), re.MULTILINE)}
    assert {path.stem for path in MODULES} - {path.stem for path in SCRIPTS} <= imported


def test_every_benchmark_is_told_of_and_made() -> None:
    table = re.findall(r"^\| `(\w+)\.py` \|", (BENCHMARKS / "README.md").read_text(), re.MULTILINE)
    assert sorted(table) == [path.stem for path in SCRIPTS]
    command = ["make", "--dry-run", "--assume-old=.venv/.installed", "bench"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (names,) = re.findall(r"for name in ([\w ]+);.*python benchmarks/\$name\.py", done.stdout)
    assert sorted(names.split()) == [path.stem for path in SCRIPTS]
    for path in SCRIPTS:
        assert f"python benchmarks/{path.name}" in path.read_text(), f"{path.name} does not say how it is started"


def test_documents_name_scripts_that_exist() -> None:
    pages = [ROOT / "README.md", BENCHMARKS / "README.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for name in re.findall(r"\b((?:benchmarks|docs)/[a-z]\w*\.(?:py|jsonl?))\b", page.read_text()):
            assert (ROOT / name).is_file(), f"{page.relative_to(ROOT)} names {name}"


@pytest.mark.slow
def test_the_reference_pages_are_made_as_the_makefile_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = ROOT / "docs" / "generate.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--into", str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    for page in tmp_path.glob("*.md"):
        assert page.read_text() == (ROOT / "docs" / page.name).read_text(), f"run `make docs`: {page.name} differs"
    assert len(list(tmp_path.glob("*.md"))) >= 5


def test_no_script_is_forgotten() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no checkout of git")
    scripts = [name for name in listed.stdout.split() if name.partition("/")[0] in ("benchmarks", "docs", "examples")]
    known = {str(path.relative_to(ROOT)) for path in MODULES} | {"docs/generate.py", *STARTED_BY_OTHER_TESTS}
    assert set(scripts) <= known
    assert all(Path(script).name in (ROOT / test).read_text() for script, test in STARTED_BY_OTHER_TESTS.items())


def test_a_record_is_one_compact_line() -> None:
    lines = RECORDS.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    names = [record["name"] for record in records]
    assert names == sorted(set(names))
    for line, record in zip(lines, records, strict=True):
        assert line == json.dumps(record, separators=(",", ":"))
        assert len(line) < 3000, record["name"]
        assert {"command", "date", "machine", "python"} <= record.keys()
        assert "instructions" in record or record["date"] < "2026-11-23", "older ones did not say"
        assert (ROOT / record["command"].split()[1]).is_file()
    # What is measured on a GPU is kept beside, and only there.
    kept_by = {name.partition(" ")[0] for name in names}
    assert kept_by == {path.stem for path in SCRIPTS} - {"gpu"}
    kept = list(BENCHMARKS.glob("*.json"))
    assert kept in ([], [BENCHMARKS / "gpu.json"])
    for path in kept:
        parts = [part for part in json.loads(path.read_text()).values() if isinstance(part, dict) and "command" in part]
        assert parts
        assert all({"cuda", "date", "machine", "torch"} <= part.keys() for part in parts)


# --- the one of a GPU ---


@pytest.mark.slow
@pytest.mark.parametrize("script", ["gpu"], indirect=True)
def test_parts_that_fail_are_noted_and_the_others_go_on(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a card that is not there."""
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    kept = sorted(path for path in BENCHMARKS.iterdir() if path.name != "__pycache__")
    assert called(script, monkeypatch, "--toy", "--device", "cuda", "--parts", "spectra", "attack") == 1
    printed = capsys.readouterr().out
    assert re.findall(r'^== (\w+): \{.*"failed": "exit status 1: ', printed, re.MULTILINE) == ["spectra", "attack"]
    assert "failed: spectra, attack" in printed
    assert sorted(path for path in BENCHMARKS.iterdir() if path.name != "__pycache__") == kept


@pytest.mark.parametrize("script", ["gpu"], indirect=True)
def test_no_part_is_begun_without_time(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(script, monkeypatch, "--toy", "--device", "cpu", "--minutes", "0.01") == 0
    assert capsys.readouterr().out.count('{"left_out": "no time was left"}') == 8


@pytest.mark.deep
@pytest.mark.parametrize("script", ["gpu"], indirect=True)
def test_processes_share_a_card_under_mps_where_that_is_installed(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its programs are stand-ins, and the card is the processor."""
    toy = script.Bench(torch.device("cpu"), True, None, tmp_path / "toy.json", tmp_path)
    monkeypatch.setenv("PATH", os.defpath)
    if shutil.which("nvidia-cuda-mps-control") is None:
        assert script.mps(toy) == {"left_out": "not measured: nvidia-cuda-mps-control is not installed"}
    write_stand_ins(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.defpath}")
    monkeypatch.setenv("STAND_IN_JOURNAL", str(tmp_path / "journal"))
    assert called(script, monkeypatch, "--toy", "--device", "cpu", "--parts", "mps") == 0
    (printed,) = re.findall(r"^== mps: (.*)$", capsys.readouterr().out, re.MULTILINE)
    found = json.loads(printed)
    assert {"1", "2", "best"} <= found.keys()
    assert all(found[count]["trials_an_hour"] > 0 for count in "12")
    ((pid, env),) = map(json.loads, (tmp_path / "journal").read_text().splitlines())
    assert not Path(env["CUDA_MPS_PIPE_DIRECTORY"]).exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    monkeypatch.setenv("STAND_IN_MPS", "die")
    with pytest.raises(RuntimeError, match=r"nvidia-cuda-mps-control does not serve: \["):
        script.mps(toy)


AUTHORS = {
    "src/__init__.py": "",
    "src/utils.py": "",
    "src/SOTT.py": """
def orthogonal_loss(model):
    return sum((weight.square().sum() - 1) ** 2 for weight in model.parameters()), 1
""",
    "src/WideResNet.py": """
from torch import nn
def wide_resnet16_10(num_classes):
    return nn.Sequential(nn.Conv2d(3, 4, 3, 4), nn.Flatten(), nn.Linear(256, num_classes))
""",
    "src/tt_dec_layer.py": "def conv2tt(model, decomposition_rank): model.rank = decomposition_rank",
    "src/SOC/__init__.py": "",
    "src/SOC/robust_net.py": """
from src.WideResNet import wide_resnet16_10
def LipNet_n(kind, in_channels, num_blocks, num_classes, **rest):
    assert (kind, rest) in [("skew", {}), ("sott", {"decomposition_rank": 256})]
    return wide_resnet16_10(num_classes)
""",
}
"""Their package, as far as it is called: of the same names, with a network of one convolution."""


@pytest.mark.slow
@pytest.mark.parametrize("script", ["gpu"], indirect=True)
def test_a_gpu_that_is_pretended_is_measured_beside_the_authors_code(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor lies on the wrong device, in no part, and what is kept is whole."""
    for name, text in AUTHORS.items():
        (tmp_path / "authors" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "authors" / name).write_text(text)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(script, "RECORD", tmp_path / "gpu.json")
    monkeypatch.setitem(script.IMAGES, "cuda", "synthetic:3x32x32:10:100")

    def small(case: Any) -> torch.nn.Module:
        layer, rank = case.layer, case.rank and 2
        return create_model("single-conv", num_classes=10, layer=layer, rank=rank, std=(0.25,))

    with PretendedCards():
        toy = script.Bench(torch.device("cuda"), True, None, tmp_path / "toy.json", tmp_path)
        found = {name: getattr(script, name)(toy) for name in ("spectra", "training", "clipping", "attack")}
        # What all of it is but for the sizes: networks of the paper's names, beside the authors'.
        whole = script.Bench(torch.device("cuda"), False, tmp_path / "authors", tmp_path / "whole.json", tmp_path)
        monkeypatch.setattr(script.Bench, "load", script.Load(whole.device, 2, 1, 1, 0))
        monkeypatch.setattr(importlib.import_module("training"), "model_of", small)
        try:
            found["training"] = script.training(whole)
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] == "src"]:
                del sys.modules[name]
        options = SimpleNamespace(device="cuda", authors=None, minutes=10.0)
        script._keep({**found, "device": "cuda"}, options)
        part = SimpleNamespace(device="cuda", toy=True, part="spectra", authors=None, into=tmp_path / "part.json")
        assert script._run_part(part) == 0
        assert script._busy("cuda") is None or shutil.which("nvidia-smi")
    assert "'failed'" not in str(found)
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert record.keys() >= {"device", "floors", *found}
    assert all({"cuda", "command", "date"} <= record[part].keys() for part in found)
    told = {name: verdict for name, verdict in record["floors"].items() if name.startswith("training")}
    assert len(told) == 9
    assert set(told.values()) <= {"met", "missed"}
    for rates in found["training"].values():
        assert rates["float32, deterministic"]["of_float32"] > 0
        assert rates["float32, deterministic"]["ratio"] is None, "it costs time to measure theirs once more"
        assert rates["bf16, step by step"]["of_bf16"] > 0


@pytest.mark.parametrize("script", ["gpu"], indirect=True)
def test_a_card_of_several_is_the_only_one_that_parts_see(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert script.shown_alone("cuda:2") == ("cuda", {"CUDA_VISIBLE_DEVICES": "2"})
    assert script.shown_alone("cuda") == ("cuda", {})
    assert script.shown_alone("cpu") == ("cpu", {})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-4f,GPU-5a")
    assert script.shown_alone("cuda:1") == ("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-5a"})


@pytest.mark.parametrize("script", ["gpu"], indirect=True)
def test_a_part_that_is_cut_keeps_what_it_counted_and_makes_the_run_fail(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = tmp_path / "test_slow.py"
    slow.write_text("""
import pytest, time
@pytest.mark.gpu
@pytest.mark.parametrize("seconds", [0, 0, 100])
def test_it(seconds):
    time.sleep(seconds)
""")
    monkeypatch.setattr(script, "TESTS", (str(slow),))
    into = tmp_path / "found.json"
    bench = script.Bench(torch.device("cpu"), True, None, into, tmp_path)
    kept: list[dict[str, Any]] = []

    class Cut(Exception):
        """Where the part would be ended."""

    def cut(_bench: Any, found: dict[str, Any]) -> None:
        kept.append(dict(found))
        if found.get("passed") == 2:
            raise Cut

    def ended(process: Any, *_: object) -> None:
        process.kill()
        process.stdout.close()
        process.wait()

    monkeypatch.setattr(script.Bench, "keep", cut)
    monkeypatch.setattr(subprocess.Popen, "__exit__", ended)
    with pytest.raises(Cut):
        script.tests(bench)
    assert kept == [{"passed": 1}, {"passed": 2}], "each as it came, not in the end"
    assert script._judged({"tests": {**kept[-1], "cut": "after 120 s"}}, toy=True) == 1
    assert "failed: tests" in capsys.readouterr().out


@pytest.mark.parametrize("script", ["gpu"], indirect=True)
def test_the_tests_of_a_card_are_named(script: ModuleType) -> None:
    """To find them among all would cost a card a minute."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if 'card: "Cards"' in path.read_text()]
    assert sorted(script.TESTS) == sorted(str(path.relative_to(ROOT)) for path in files if path != Path(__file__))


def test_floors_are_met_missed_or_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    gpu = importlib.import_module("gpu")
    floors = {floor.says: floor for floor in gpu.floors()}
    assert len(floors) == 8 + 9 + 2 + 1
    clip = floors["clip of WRN-16-10 dense, mix, seconds"]
    speed = floors["training wrn16-10 tt rank 192 in bf16 over theirs"]
    equal = floors["resumed training, bit-equal"]
    assert {floor.verdict({}) for floor in floors.values()} == {"not measured"}
    for seconds, verdict in ((0.9, "met"), (1.0, "met"), (1.1, "missed")):
        assert clip.verdict({"spectra": {"dense, mix": {"clip_seconds": seconds}}}) == verdict
    for ratio, verdict in ((3.0, "met"), (2.9, "missed"), (None, "not measured")):
        assert speed.verdict({"training": {"wrn16-10 tt rank 192": {"bf16": {"ratio": ratio}}}}) == verdict
    for found, verdict in ((True, "met"), (False, "missed")):
        assert equal.verdict({"resume": {"bit_equal": found}}) == verdict
    names = {case.name for case in gpu.CASES}
    assert all(floor.path[1] in names for floor in floors.values() if floor.path[0] in ("training", "clipping"))

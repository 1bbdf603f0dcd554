"""What one GPU makes of all this, in ten minutes: whether it is right there, and whether it is as fast as it should be.

    python benchmarks/gpu.py [--authors PATH_OF_THEIR_CHECKOUT] [--parts PART ...] [--minutes 10] [--device cuda:N]
    python benchmarks/gpu.py --toy --device cpu

Each part is a process of its own, so that one that fails, hangs or breaks the card's context is noted, and the others
go on. What a part has measured when its time is over is kept. `--toy` (or `--quick`) takes toy sizes; then, and on a
CPU, nothing is kept: the record, gpu.json beside this file, is of a GPU alone, and parts measured anew replace their
own. In the end all floors are printed, met or missed or not measured; one that is missed makes the exit status 1, as
does a part that failed or was cut short. It takes ttsv, its dependencies and, for the part `tests`, pytest,
pytest-timeout and hypothesis. Of several cards `--device cuda:N` shows the parts that one alone: the authors' code
takes whatever comes first.

- tests: `pytest -m gpu` over those of the library's tests that are of a card.
- spectra: one clip of all convolutions of WRN-16-10, dense and at TT rank 192, and all their singular values, for
  weights as trained (mix) and as drawn (kaiming); each the second time.
- training: images a second of the whole engine, batches of 128, in bf16, TF32 and float32, beside the authors' code in
  the same precision (`training.py` says what is theirs); and ours alone in float32 by deterministic algorithms, and in
  bf16 without CUDA graphs, beside ours in float32 and bf16: what these cost, and gain.
- clipping: what one clip every 100 steps takes of the training in bf16, weights as 100 steps left them, and its norms,
  which a checkpoint asks for once an epoch.
- resume: whether a training that was killed and resumed leaves the bytes of one that was not.
- attack: AutoAttack's images a second, on images that the network gets right.
- sharing: 1, 2, 4 and 8 processes side by side, each with its share of the memory: trials an hour.
- mps: the same as clients of NVIDIA's MPS, where that is installed; its control daemon is the part's own.

The share of the time in which the card is busy is asked for twice a second while each part runs.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from measuring import circumstances, parser, rounded
from networks import DELTA, Layer, weights
from training import CASES, IMAGES, TOYS, Case, Load, case_config, model_of, our_rounds, their_rounds
from ttsv.config.memory import allocator_share
from ttsv.config.training import TrainingConfig
from ttsv.config.trial import TrialConfig
from ttsv.constraints import Clip, Constraint, Orthogonal
from ttsv.data import load_dataset
from ttsv.data.loading import Dataset
from ttsv.hardware.mps import (
    FOREGROUND,
    PIPES,
    PROGRAM,
    comes_up,
    control_environment,
    quit_daemon,
)
from ttsv.hardware.mps import environment as client_environment
from ttsv.layers import TTConv, layer_kernel
from ttsv.metrics.attacks.autoattack import autoattack
from ttsv.models import create_model
from ttsv.results import EpochMetrics
from ttsv.spectral.geometry import Convolution
from ttsv.spectral.network import layer_input_sizes, model_spectra, spectral_layers
from ttsv.training.loop import fit
from ttsv.trial import run_trial

HERE = Path(__file__)
RECORD = HERE.with_suffix(".json")
ROOT = HERE.parent.parent
PARTS = {
    "tests": 0.2,
    "spectra": 0.15,
    "training": 0.3,
    "clipping": 0.15,
    "resume": 0.15,
    "attack": 0.15,
    "sharing": 0.25,
    "mps": 0.25,
}
"""Each part, and the most of the time that it may take."""

TESTS = (
    "tests/ttsv/test_gpu.py",
    "tests/ttsv/training/test_graph.py",
    "tests/ttsv/data/test_augment.py",
    "tests/ttsv/spectral/test_bounds.py",
    "tests/ttsv/spectral/test_krylov.py",
    "tests/ttsv/spectral/test_norms.py",
    "tests/ttsv/spectral/test_tridiagonal.py",
    "tests/ttsv/tt/test_decomposition.py",
)
"""Those that a card runs; to collect all the others takes most of a minute."""
PRECISIONS = ("bf16", "tf32", "float32")
DETERMINISTIC, STEPWISE = "float32, deterministic", "bf16, step by step"
BESIDE = {DETERMINISTIC: "float32", STEPWISE: "bf16"}
"""Ways to train that are measured after the precision beside which it is told what they cost; ours alone."""
LEAST_SECONDS = 10.0
"""A part is not begun with less."""
STEPS_BETWEEN_CLIPS = 100
STEPS_OF_AN_EPOCH = 352
"""Of CIFAR with batches of 128: once in so many a checkpoint asks for the norms that a clip leaves to be measured."""


@dataclass(frozen=True)
class Floor:
    """What is asked of a figure, which is found in the record by these names: no more or, if `least`, no less."""

    says: str
    path: tuple[str, ...]
    bound: float
    least: bool = False

    def verdict(self, record: Mapping[str, Any]) -> str:
        """Met, missed or not measured."""
        found: Any = record
        for name in self.path:
            found = found.get(name) if isinstance(found, Mapping) else None
        if found is None:
            return "not measured"
        return "met" if (found >= self.bound if self.least else found <= self.bound) else "missed"


def floors() -> list[Floor]:
    """All that is asked of one card."""
    found = []
    for network, clip, values in (("dense", 1.0, 10.0), ("tt rank 192", 0.3, 3.0)):
        for kind in ("mix", "kaiming"):
            name = f"{network}, {kind}"
            found.append(Floor(f"clip of WRN-16-10 {name}, seconds", ("spectra", name, "clip_seconds"), clip))
            found.append(Floor(f"spectra of WRN-16-10 {name}, seconds", ("spectra", name, "values_seconds"), values))
    for case, least in zip(CASES, (2.5, 3.0, None, 3.0), strict=True):
        if least is not None:
            for precision in PRECISIONS:
                says = f"training {case.name} in {precision} over theirs"
                found.append(Floor(says, ("training", case.name, precision, "ratio"), least, least=True))
    for case, share in zip(CASES[:2], (0.1, 0.05), strict=True):
        found.append(Floor(f"clipping of {case.name}, share of training", ("clipping", case.name, "share"), share))
    found.append(Floor("resumed training, bit-equal", ("resume", "bit_equal"), True, least=True))
    return found


@dataclass(frozen=True)
class Bench:
    """What a part is told, and where it leaves what it has found so far."""

    device: torch.device
    toy: bool
    authors: Path | None
    into: Path
    folder: Path

    @property
    def cases(self) -> tuple[Case, ...]:
        """The networks."""
        return TOYS if self.toy else CASES

    @property
    def load(self) -> Load:
        """How many steps of how many images are timed."""
        if self.toy:
            return Load(self.device, 2, 1, 1, 0)
        return Load(self.device, 128, 10, 3, 1)

    def data(self) -> Dataset:
        """Synthetic images of CIFAR's shape."""
        return load_dataset(IMAGES["cpu" if self.toy else "cuda"], self.folder)

    def keep(self, found: Mapping[str, Any]) -> None:
        """Leaves what is known by now: a part whose time is over is not heard any more."""
        partial = self.into.with_suffix(".partial")
        partial.write_text(json.dumps(found))
        partial.replace(self.into)

    def wait(self) -> None:
        """Waits for all that the device has been given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        """What it takes, on the wall, until the device is done."""
        self.wait()
        started = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - started


def main() -> int:
    options = _options()
    if options.part:
        return _run_part(options)
    if options.device == "cpu" and not options.toy:
        print("left out: needs a GPU; --toy --device cpu shows that it works")
        return 0
    ends = time.monotonic() + 60 * options.minutes
    known = {field.name for field in fields(TrainingConfig)}
    record: dict[str, Any] = {"device": options.device, "without": sorted({"tf32", "deterministic"} - known)}
    for part in options.parts:
        left = ends - time.monotonic()
        if left < LEAST_SECONDS:
            record[part] = {"left_out": "no time was left"}
        else:
            record[part] = _supervised(part, options, min(left, 60 * options.minutes * PARTS[part]))
        print(f"== {part}: {json.dumps(rounded(record[part]))}", flush=True)
        if not options.toy and torch.cuda.is_available():
            _keep(record, options)
    return _judged(record, toy=options.toy)


def _options() -> argparse.Namespace:
    shared = parser(__doc__, authors=True)
    shared.add_argument("--toy", dest="quick", action="store_true", help="the same as --quick")
    shared.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    shared.add_argument("--minutes", type=float, default=10.0, help="all parts together take no longer")
    shared.add_argument("--device", help="cuda, cuda:N or cpu; by default a GPU if there is one")
    shared.add_argument("--part", choices=[*PARTS, "trial", "share"], help=argparse.SUPPRESS)
    shared.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    shared.add_argument("--share", type=float, help=argparse.SUPPRESS)
    options = shared.parse_args()
    options.toy = options.quick
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return options


def _run_part(options: argparse.Namespace) -> int:
    """Inside the process of one part."""
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # which `cuda` alone has not
    else:
        torch.set_num_threads(1)
    if options.part == "trial":  # it is killed, and goes on in the same folder
        _trial(options.into, device, toy=options.toy)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(device, options.toy, options.authors, options.into, Path(folder))
        if options.part == "share":
            _share(bench, options.share)
            return 0
        parts: dict[str, Callable[[Bench], dict[str, Any]]] = {
            "tests": tests,
            "spectra": spectra,
            "training": training,
            "clipping": clipping,
            "resume": resume,
            "attack": attack,
            "sharing": sharing,
            "mps": mps,
        }
        bench.keep(parts[options.part](bench))
    return 0


def _command(part: str, device: str, *, toy: bool, into: Path | None = None) -> list[str]:
    command = [sys.executable, str(HERE), "--part", part, "--device", device]
    return command + (["--toy"] if toy else []) + (["--into", str(into)] if into else [])


def _supervised(part: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """What a part measured in a process of its own, how busy the card was, and why it ended early if it did."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "found.json"
        device, shown = shown_alone(options.device)
        command = _command(part, device, toy=options.toy, into=into)
        command += ["--authors", str(options.authors)] if options.authors else []
        started = time.monotonic()
        with _watched(options.device) as busy, (Path(folder) / "errors").open("w+") as errors:
            ended = _ended_in_time(command, seconds, errors, {**_environment(), **shown})
            errors.seek(0)
            said = errors.read()
        found: dict[str, Any] = json.loads(into.read_text()) if into.exists() else {}
        found["seconds"] = time.monotonic() - started
        if busy:
            found["busy_percent"] = statistics.mean(busy)
        if ended is None:
            found["cut"] = f"after {seconds:.0f} s"
        elif ended:
            found["failed"] = f"exit status {ended}: {said[-1500:]}"
        return found


def shown_alone(device: str) -> tuple[str, dict[str, str]]:
    """What a process is told so that it has this card and no other, as which device and in its environment."""
    number = torch.device(device).index
    return (device, {}) if number is None else ("cuda", {"CUDA_VISIBLE_DEVICES": _identity(number)})


def _identity(number: int) -> str:
    """What the environment calls a card that torch has at this number."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return visible[number] if number < len(visible) and visible[number] else str(number)


def _ended_in_time(command: list[str], seconds: float, errors: Any, environment: dict[str, str]) -> int | None:
    """The exit status of a command; None where its time was over, and it was ended with all it started."""
    with subprocess.Popen(command, cwd=ROOT, stderr=errors, env=environment, start_new_session=True) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None


def _environment() -> dict[str, str]:
    """Scripts beside this one and the library are found; cuBLAS is as deterministic training needs it."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ, "PYTHONPATH": path}


@contextmanager
def _watched(device: str) -> Iterator[list[float]]:
    """Percentages of the time in which the card is busy, gathered while the context lasts; none without a card."""
    found: list[float] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.5):
            value = _busy(device)
            if value is None:
                return
            found.append(value)

    if device == "cpu":
        yield found
        return
    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join(10)


def _busy(device: str) -> float | None:
    """Percentage of the last moment in which the card was busy, or None where nobody knows."""
    if importlib.util.find_spec("pynvml"):
        with contextlib.suppress(Exception):  # whatever is wrong with the driver, the benchmark goes on
            return float(torch.cuda.utilization(torch.device(device)))
    if not (program := shutil.which("nvidia-smi")):
        return None
    identity = _identity(torch.device(device).index or 0)
    command = [program, f"--id={identity}", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)
        return float(done.stdout.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _keep(record: dict[str, Any], options: argparse.Namespace) -> None:
    """Writes the record of a card. Parts of an earlier run of the same card, which this one lacks, stay."""
    name = torch.cuda.get_device_name(options.device)
    before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if before.get("device") != name:
        before = {}
    command = f"python benchmarks/gpu.py{' --authors DIR' if options.authors else ''} --minutes {options.minutes:g}"
    facts = {"command": command, **circumstances(), "cuda": torch.version.cuda}
    measured = {part: {**found, **facts} if part in PARTS else found for part, found in record.items()}
    kept = {**before, **measured, "device": name, "delta": DELTA}
    kept["floors"] = {floor.says: floor.verdict(kept) for floor in floors()}
    partial = RECORD.with_suffix(".partial")
    partial.write_text(json.dumps(rounded(kept), indent=1) + "\n")
    partial.replace(RECORD)


def _judged(record: Mapping[str, Any], *, toy: bool) -> int:
    failed = [part for part in PARTS if "'failed'" in str(record.get(part)) or "'cut'" in str(record.get(part))]
    print(f"failed: {', '.join(failed)}" if failed else "no part failed")
    if toy:  # whose figures are not of these networks
        return int(bool(failed))
    verdicts = [(floor, floor.verdict(record)) for floor in floors()]
    for floor, verdict in verdicts:
        bound = "yes" if floor.bound is True else f"at {'least' if floor.least else 'most'} {floor.bound:g}"
        print(f"{verdict}: {floor.says}: {bound}")
    return int(bool(failed) or any(verdict == "missed" for _, verdict in verdicts))


# --- parts ---


def tests(bench: Bench) -> dict[str, Any]:
    """How many of the tests that are marked `gpu` passed, told as they come; of a toy run, of those of one file."""
    command = [sys.executable, "-u", "-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider"]
    command += TESTS[-1:] if bench.toy else TESTS
    found: dict[str, Any] = {}
    with subprocess.Popen(
        command, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if outcome := re.search(r"::.* (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b.*\[ *\d+%\]", line):
                found[outcome[1].lower()] = found.get(outcome[1].lower(), 0) + 1
                bench.keep(found)
    last = next((line for line in reversed(said) if re.search(r"\d+ \w+|no tests", line)), "")
    found |= {"exit_status": process.returncode, "summary": last.strip("= \n")}
    if process.returncode:
        found["failed"] = "".join(said)[-2000:]
    return found


def spectra(bench: Bench) -> dict[str, Any]:
    """Seconds of one clip of all convolutions, and of all singular values."""
    found: dict[str, Any] = {}
    for case in bench.cases[:2]:
        for kind in ("mix", "kaiming"):
            name = "dense" if case.rank is None else f"tt rank {case.rank}"
            found[f"{name}, {kind}"] = _spectra(bench, case, kind)
            bench.keep(found)
    return found


@torch.no_grad()
def _spectra(bench: Bench, case: Case, kind: str) -> dict[str, float]:
    size = 8 if bench.toy else 32
    model = create_model(case.model, num_classes=10, image_size=size, layer=case.layer, rank=case.rank)
    model.to(bench.device)
    clip = Clip(DELTA)
    clip.bind(model, size, in_channels=3)
    sizes, taken = layer_input_sizes(model, size, in_channels=3), []
    for _ in range(2):  # the first call loads kernels
        for name, layer in spectral_layers(model).items():
            if isinstance(layer, TTConv | Convolution) and layer.kernel_size == (3, 3):
                kernel = layer_kernel(layer)
                shape = Layer(kernel.shape[1], kernel.shape[0], sizes[name][0], layer.stride[0], 1)
                kernel.copy_(weights(shape, kind))
        taken.append(bench.seconds(lambda: (clip.project(model, 1, force=True), clip.report())))
    norms = clip.report().layers.values()
    values = [bench.seconds(partial(model_spectra, model, size, in_channels=3)) for _ in range(2)]
    found = {"clip_seconds": taken[-1], "values_seconds": values[-1]}
    return found | {"norm_before": max(n.before for n in norms), "norm_after": max(n.after for n in norms)}


def training(bench: Bench) -> dict[str, Any]:
    """Images a second of both sides, by turns, in each precision."""
    found: dict[str, Any] = {}
    data = bench.data()
    for case in bench.cases:
        found[case.name] = {}
        for precision in (*PRECISIONS, *BESIDE):
            try:
                found[case.name][precision] = _rates(bench, case, data, precision)
            except Exception:
                found[case.name][precision] = {"failed": traceback.format_exc()[-800:]}
            bench.keep(found)
        for way, precision in BESIDE.items():
            ours = [found[case.name][name].get("ours") for name in (way, precision)]
            if all(ours):
                found[case.name][way][f"of_{precision}"] = ours[0] / ours[1]
    return found


def _rates(bench: Bench, case: Case, data: Dataset, precision: str) -> dict[str, float | None]:
    load = bench.load
    sides: dict[str, Iterator[float]] = {"ours": _our_rounds(bench, case, data, precision)}
    if bench.authors and not bench.toy and precision not in BESIDE:
        autocast: Callable[[], AbstractContextManager[object]] = partial(
            torch.autocast, bench.device.type, torch.bfloat16
        )
        around = autocast if precision == "bf16" else nullcontext
        sides["theirs"] = their_rounds(case, data, bench.authors, load, around=around)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(load.rounds + load.warm_up):
        for name, side in sides.items():
            with tensor_float(precision == "tf32"):
                taken = next(side)
            if turn >= load.warm_up:
                seconds[name].append(taken)
    for side in sides.values():
        side.close()  # type: ignore[attr-defined]
    rates = {name: load.batch / statistics.median(taken) for name, taken in seconds.items()}
    return {**rates, "ratio": rates["ours"] / rates["theirs"] if "theirs" in rates else None}


@contextmanager
def tensor_float(allowed: bool) -> Iterator[None]:
    """Products and convolutions of float32 are in TensorFloat-32 inside, or are not."""
    settings = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "tf32" if allowed else "ieee"
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision


def _our_config(bench: Bench, case: Case, precision: str, *, rounds: int) -> TrialConfig:
    """In a version whose trainings know of TF32 and determinism, they are told; an earlier one does without."""
    config = case_config(case, bench.load, "bf16" if precision in ("bf16", STEPWISE) else "float32", rounds=rounds)
    ways = {"tf32": {"tf32": True}, DETERMINISTIC: {"deterministic": True}, STEPWISE: {"cuda_graph": False}}
    wanted = ways.get(precision, {})
    return replace(config, training=with_known(config.training, **wanted))


def with_known(training: TrainingConfig, **wanted: Any) -> TrainingConfig:
    """The fields among those wanted that this version has."""
    known = {field.name for field in fields(TrainingConfig)}
    return replace(training, **{name: value for name, value in wanted.items() if name in known})


def _our_rounds(bench: Bench, case: Case, data: Dataset, precision: str) -> Iterator[float]:
    rounds = bench.load.rounds + bench.load.warm_up + 1
    config = _our_config(bench, case, precision, rounds=rounds)
    if bench.device.type == "cpu":  # oneDNN knows no bf16 on many processors
        config = replace(config, training=replace(config.training, precision="float32"))
    return our_rounds(case, data, bench.load, config=config)


def clipping(bench: Bench) -> dict[str, Any]:
    """A clip beside the steps between two, in bf16 as far as the device knows it."""
    found: dict[str, Any] = {}
    data = bench.data()
    for case in bench.cases[:2]:
        steps = bench.load.steps
        rounds = 2 if bench.toy else STEPS_BETWEEN_CLIPS // steps
        config = _our_config(bench, case, "float32" if bench.toy else "bf16", rounds=rounds)
        config = replace(config, training=replace(config.training, lr=0.1))
        model, constraint = model_of(case), Orthogonal(case.lambda_ort, normalizer="code")
        clip = Clip(DELTA)
        for _ in range(2):  # the second as trainings have them: what 100 steps made of a clipped network
            epochs = [m.seconds / steps for m in fit(model, data, config, constraint, device=bench.device)]
            clip.bind(model, 32, in_channels=3)
            taken = bench.seconds(partial(clip.project, model, 1, force=True))
            asked = bench.seconds(clip.report)
        whole = STEPS_BETWEEN_CLIPS * epochs[-1]
        clipping = taken + asked * STEPS_BETWEEN_CLIPS / STEPS_OF_AN_EPOCH
        found[case.name] = {
            "clip_seconds": taken,
            "report_seconds": asked,
            "steps_seconds": whole,
            "share": clipping / (clipping + whole),
        }
        bench.keep(found)
    return found


def resume(bench: Bench) -> dict[str, Any]:
    """Whether the weights of a training that was killed after its second epoch are, resumed, those of an unbroken one.

    Each side is a process of its own; the first is killed, SIGKILL, while its third epoch is trained.
    """
    broken, whole = bench.folder / "broken", bench.folder / "whole"
    commands = {into: _command("trial", str(bench.device), toy=bench.toy, into=into) for into in (broken, whole)}
    with subprocess.Popen(commands[broken], cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        epochs = []
        for line in first.stdout:
            epochs.append(line.split())
            if len(epochs) == 2:
                first.kill()
                break
    killed = first.wait()
    if killed != -signal.SIGKILL:
        raise RuntimeError(f"the first trial ended with {killed}, not by a kill")
    rest = [_epochs_of(commands[into]) for into in (broken, whole)]
    contents = [next(into.rglob("model.safetensors")).read_bytes() for into in (broken, whole)]
    return {
        "bit_equal": contents[0] == contents[1],
        "deterministic": "deterministic" in {field.name for field in fields(TrainingConfig)},
        "epochs_after_the_kill": len(rest[0]),
        "losses_equal": rest[1][-1] == rest[0][-1],
    }


def _epochs_of(command: list[str]) -> list[str]:
    done = subprocess.run(command, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()


def _trial(folder: Path, device: torch.device, *, toy: bool) -> None:
    """A whole small trial under a constraint; tells of each epoch."""
    model, rank, steps = ("small-cnn", 4, 2) if toy else ("wrn16-4", 48, 15)
    training = TrainingConfig(epochs=4, steps=steps, batch_size=16 if toy else 128, lr=0.05)
    config = TrialConfig(
        dataset="synthetic:3x16x16:10:200" if toy else IMAGES["cuda"],
        model=model,
        layer="tt",
        rank=rank,
        lambda_ort=1.0,
        constraint="clip",
        delta=DELTA,
        training=with_known(training, deterministic=True),
    )
    folder.mkdir(exist_ok=True)
    for item in run_trial(config, data_dir=folder / "data", folder=folder / "trial", device=str(device)):
        if isinstance(item, EpochMetrics):
            print(item.epoch, item.train_loss, flush=True)


def attack(bench: Bench) -> dict[str, Any]:
    """Images a second under the attacks of AutoAttack. Labels are what the network says, so that all are attacked."""
    found: dict[str, Any] = {}
    count = 4 if bench.toy else 256
    for case in bench.cases[:2]:
        model = model_of(case).to(bench.device).eval()
        pixels = torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(bench.device)
        with torch.no_grad():
            labels = model(pixels).argmax(1)
        # As in the paper's tables; a toy falls at once, as who withstands costs thousands of passes.
        attacked = partial(autoattack, model, pixels, labels, eps=8.0 if bench.toy else 0.5, batch_size=count)
        seconds = bench.seconds(attacked)
        found[case.name] = {"images": count, "seconds": seconds, "images_per_second": count / seconds}
        bench.keep(found)
    return found


def sharing(bench: Bench) -> dict[str, Any]:
    """Without MPS: where no daemon is, a process does without, even if one serves this machine."""
    return _side_by_side(bench, {**_environment(), PIPES: str(bench.folder / "nobody")}, str(bench.device))


def mps(bench: Bench) -> dict[str, Any]:
    """With MPS, as clients of a daemon that is started for this."""
    if shutil.which(PROGRAM) is None:
        return {"left_out": f"not measured: {PROGRAM} is not installed"}
    if bench.device.type == "cpu":  # a toy, to see that it works
        with _served([]) as clients:
            return _side_by_side(bench, clients, "cpu")
    with _served([f"GPU-{torch.cuda.get_device_properties(bench.device).uuid}"]) as clients:
        return _side_by_side(bench, clients, "cuda")  # of which they see this one alone


@contextmanager
def _served(cards: list[str]) -> Iterator[dict[str, str]]:
    """The environment of clients, while the control daemon lives."""
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:  # a short path, for the daemon's sockets
        pipes, logs, log = (Path(folder) / name for name in ("pipe", "log", "said"))
        pipes.mkdir()
        logs.mkdir()
        clients = {**_environment(), **client_environment(pipes, logs, cards)}
        control = control_environment(clients, {})
        with log.open("w") as said:
            daemon = subprocess.Popen(
                FOREGROUND, env=control, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
            )
        try:
            if not comes_up(daemon, control, 15):
                raise RuntimeError(f"{PROGRAM} does not serve: {log.read_text()[-1000:]}")
            yield clients
        finally:
            quit_daemon(daemon, control, 10)
            daemon.kill()
            daemon.wait()


def _side_by_side(bench: Bench, environment: Mapping[str, str], device: str) -> dict[str, Any]:
    """Trials an hour of so many processes side by side. They begin together, once all have loaded everything."""
    found: dict[str, Any] = {}
    # As trials have it that reserve one CPU: with all cores for each, processes are measured that wait for threads.
    alone = {**environment, "OMP_NUM_THREADS": "1"}
    for count in (1, 2) if bench.toy else (1, 2, 4, 8):
        command = [*_command("share", device, toy=bench.toy), "--share", str(1 / count)]
        started = [
            subprocess.Popen(command, cwd=ROOT, env=alone, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]
        try:
            said = [_line(process) for process in started]
            if said != ["ready"] * count:
                raise RuntimeError(f"{count} processes: some did not begin: {said}")
            for process in started:
                assert process.stdin is not None
                print("go", file=process.stdin, flush=True)
            seconds = [float(_line(process)) for process in started]
            hourly = count * 3600 / max(seconds)
            found[str(count)] = {"seconds": max(seconds), "trials_an_hour": hourly}
        except (RuntimeError, ValueError) as error:
            found[str(count)] = {"failed": str(error)}
        finally:
            for process in started:
                process.kill()
                process.communicate()
        bench.keep(found)
    best = max((v["trials_an_hour"], name) for name, v in found.items() if "trials_an_hour" in v)
    return {**found, "best": best[1]}


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _share(bench: Bench, share: float) -> None:
    """One of several: a training that is begun at a word, after a first one that loads everything; says its seconds."""
    if bench.device.type == "cuda" and share < 1:
        card = torch.cuda.get_device_properties(bench.device).total_memory
        torch.cuda.set_per_process_memory_fraction(allocator_share(share, card))
    data = load_dataset("synthetic:3x16x16:10:200" if bench.toy else IMAGES["cuda"], bench.folder)
    steps = 2 if bench.toy else 31
    config = TrialConfig(
        dataset=IMAGES["cuda"],
        model="small-cnn" if bench.toy else "wrn16-4",
        layer="tt",
        rank=4 if bench.toy else 48,
        training=TrainingConfig(epochs=1, steps=steps, batch_size=16 if bench.toy else 128, lr=0.01),
    )
    constraint: Constraint = Orthogonal(1.0)

    def train(epochs: int) -> None:
        model = create_model(
            config.model, num_classes=10, image_size=data.info.image_size, layer=config.layer, rank=config.rank
        )
        longer = replace(config, training=replace(config.training, epochs=epochs))
        for _ in fit(model, data, longer, constraint, device=bench.device):
            pass

    train(1)
    print("ready", flush=True)
    sys.stdin.readline()
    print(bench.seconds(lambda: train(1 if bench.toy else 5)), flush=True)


if __name__ == "__main__":
    sys.exit(main())

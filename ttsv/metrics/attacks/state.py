"""An attack that can be interrupted after any batch: what it has found so far, in memory and in a file."""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from ttsv.errors import ConfigError, DataError
from ttsv.metrics.attacks.network import AttackedNetwork
from ttsv.metrics.attacks.record import AttackCounts, AttackProgress, AttackRecord, Threat, perturbation

Perturb = Callable[[Tensor, Tensor], Tensor]
"""What an attack makes of images (b, channels, height, width) and labels (b,), on the network's device."""


@dataclass
class AttackState:
    """What has been found so far; tensors are on the CPU.

    `robust` (images,): withstands so far. `attack` numbers the attack under way (-1 before the first), `targets` (t,)
    are the images it is tried on, fixed at its start, and `batch` batches of them are done. `broken_*` as
    `AttackRecord.adversarial_*`, but in the order in which they were found.
    """

    batch_size: int
    classes: int
    clean_accuracy: float
    robust: Tensor
    broken_indices: Tensor
    broken_images: Tensor
    broken_classes: Tensor
    targets: Tensor
    attack: int = -1
    batch: int = 0
    seconds: float = 0.0
    counts: dict[str, AttackCounts] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, images: Tensor, correct: Tensor, *, batch_size: int, classes: int) -> "AttackState":
        """Before the first attack: those images are robust that are classified correctly, `correct` (images,)."""
        none = torch.zeros(0, dtype=torch.int64)
        return cls(
            batch_size=batch_size,
            classes=classes,
            clean_accuracy=float(correct.double().mean()),
            robust=correct.clone(),
            broken_indices=none,
            broken_images=images[:0].cpu(),
            broken_classes=none,
            targets=none,
        )

    def begin(self, number: int, name: str) -> None:
        """Goes on to an attack, on all images that are still robust, unless it is under way."""
        if number != self.attack:
            self.attack, self.batch = number, 0
            self.targets = self.robust.nonzero()[:, 0]
            self.counts[name] = AttackCounts(0, 0, 0.0)

    def batches(self) -> list[Tensor]:
        """The images of each batch of the attack under way that is still to do."""
        starts = range(self.batch * self.batch_size, len(self.targets), self.batch_size)
        return [self.targets[start : start + self.batch_size] for start in starts]

    def attack_batch(
        self, name: str, network: AttackedNetwork, chosen: Tensor, images: Tensor, labels: Tensor, perturb: Perturb
    ) -> None:
        """Attacks the images `chosen` (b,), and notes which are classified as others than their labels then."""
        started = time.perf_counter()
        x, y = (part[chosen.to(part.device)].to(network.device) for part in (images, labels))
        found = perturb(x, y)
        predicted = network(found).argmax(1)
        network.require_finite()
        broken, adversarial, classes = (predicted != y).cpu(), found.cpu(), predicted.cpu()
        took = time.perf_counter() - started
        self.robust[chosen[broken]] = False
        self.broken_indices = torch.cat([self.broken_indices, chosen[broken]])
        self.broken_images = torch.cat([self.broken_images, adversarial[broken]])
        self.broken_classes = torch.cat([self.broken_classes, classes[broken]])
        counts = self.counts[name]
        self.counts[name] = AttackCounts(
            counts.attacked + len(chosen), counts.broken + int(broken.sum()), counts.seconds + took
        )
        self.batch += 1
        self.seconds += took

    def progress(self, name: str, seconds_left: float) -> AttackProgress:
        """Where the attack under way is."""
        return AttackProgress(
            attack=name,
            batch=self.batch,
            batches=math.ceil(len(self.targets) / self.batch_size),
            robust=int(self.robust.sum()),
            images=len(self.robust),
            seconds=self.seconds,
            seconds_left=seconds_left,
        )

    def record(
        self, images: Tensor, threat: Threat, *, attack: str, version: str, package: str, targets: dict[str, int]
    ) -> AttackRecord:
        """The record of a finished attack on `images`."""
        order = self.broken_indices.argsort()
        indices, adversarial = self.broken_indices[order], self.broken_images[order]
        by = torch.repeat_interleave(
            torch.tensor([counts.broken for counts in self.counts.values()], dtype=torch.int64)
        )
        changes = perturbation(adversarial, images.cpu()[indices], threat.norm)
        return AttackRecord(
            attack=attack,
            norm=threat.norm,
            eps=float(threat.eps),
            version=version,
            seed=int(threat.seed),
            package=package,
            package_version=_installed(package),
            targets=targets,
            batch_size=self.batch_size,
            clean_accuracy=self.clean_accuracy,
            robust_accuracy=float(self.robust.double().mean()),
            robust=self.robust,
            adversarial_indices=indices,
            adversarial_images=adversarial,
            adversarial_classes=self.broken_classes[order],
            adversarial_attacks=by[order],
            largest_perturbation=float(changes.max()) if len(changes) else 0.0,
            counts=self.counts,
            warnings=tuple(self.warnings),
            seconds=self.seconds,
        )


_TENSORS = ("robust", "broken_indices", "broken_images", "broken_classes", "targets")


class StateFile:
    """Keeps the state of one attack in a safetensors file, replaced as a whole, its plain part in the header.

    `identity` (JSON-ready) says what is attacked, and how; the file of another attack is refused. Torch's random
    numbers are part of it: a randomised network goes on with those that it would have drawn. Raises `ConfigError`
    where there is no folder to keep it in.
    """

    def __init__(self, path: Path, identity: Mapping[str, object], device: torch.device) -> None:
        if not path.parent.is_dir():
            raise ConfigError("state_path", str(path), f"must lie in a folder that is there: make {path.parent}")
        self.path = path
        self.identity = identity
        self.device = device

    def save(self, state: AttackState) -> None:
        """Replaces the file: a process killed at any moment leaves the old state or the new one."""
        tensors = {name: getattr(state, name) for name in _TENSORS} | {"random": torch.get_rng_state()}
        if self.device.type == "cuda":
            tensors["random_cuda"] = torch.cuda.get_rng_state(self.device)
        plain = {name: value for name, value in asdict(state).items() if name not in _TENSORS}
        body = json.dumps({"identity": self.identity, "state": plain})
        content = save(tensors, metadata={"body": body, "sha256": _digest(body, tensors)})
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)

    def load(self) -> AttackState | None:
        """The state, torch's random numbers set to go on from it; None without a file.

        Raises `ConfigError` for another attack's file, `DataError` for one that is cut or altered, and `OSError` where
        the disk does not give it: that says nothing of what is in it.
        """
        if not self.path.exists():
            return None
        try:
            content = self.path.read_bytes()
            with safetensors.safe_open(self.path, "pt") as file:
                metadata = file.metadata()
            tensors = load(content)
            body = json.loads(metadata["body"])
            if metadata["sha256"] != _digest(metadata["body"], tensors):
                raise ValueError("its SHA-256 differs")
        except (FileNotFoundError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
            raise DataError(f"{self.path} is no whole state of an attack ({error}): remove it to start anew") from error
        for name, value in self.identity.items():
            if body["identity"].get(name) != value:
                raise ConfigError("state_path", str(self.path), f"has another {name}: name another file, or remove it")
        torch.set_rng_state(tensors.pop("random"))
        random_cuda = tensors.pop("random_cuda", None)
        if random_cuda is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(random_cuda, self.device)
        counts = {name: AttackCounts(**counts) for name, counts in body["state"]["counts"].items()}
        return AttackState(**body["state"] | tensors | {"counts": counts})


def fingerprint(*tensors: Tensor) -> str:
    """SHA-256 (hex) over types, shapes and values."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode("ascii"))
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def model_fingerprint(model: nn.Module) -> str:
    """SHA-256 (hex) of what tells one of our networks from another, the same in every process.

    By name: parameters and buffers, those that are not saved too; of every submodule its class, its `extra_repr`, and
    its attributes that are plain values. Nothing is known of hooks, functions and tensors that are plain attributes: a
    trial's state lies in its own folder, and `ttsv evaluate` names its file by the network's.
    """
    digest = hashlib.sha256()
    for path, module in model.named_modules(remove_duplicate=False):
        lines = [f"{path} {type(module).__module__}.{type(module).__qualname__} {module.extra_repr()}"]
        lines += [f"{path}.{name} = {value!r}" for name, value in sorted(vars(module).items()) if _is_plain(value)]
        digest.update("\n".join(lines).encode())
    for name, value in (model.state_dict() | dict(model.named_buffers())).items():
        if isinstance(value, Tensor):
            digest.update(f"{name} {fingerprint(value)}\n".encode())
    return digest.hexdigest()


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _digest(body: str, tensors: dict[str, Tensor]) -> str:
    return hashlib.sha256((body + fingerprint(*(tensors[name] for name in sorted(tensors)))).encode()).hexdigest()


def _installed(package: str) -> str:
    """The version of a package; "none" of a checkout that is not installed, as benchmarks may run."""
    try:
        return package_version(package)
    except PackageNotFoundError:
        return "none"

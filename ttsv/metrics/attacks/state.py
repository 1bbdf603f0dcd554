"""An attack that can be interrupted after any batch: what it has found so far, in memory and in a file."""

import hashlib
import json
import math
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from ttsv.errors import ConfigError, DataError
from ttsv.metrics.attacks.network import AttackedNetwork
from ttsv.metrics.attacks.record import AttackCounts, AttackProgress, AttackRecord, perturbation
from ttsv.runtime import random_state


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

    def add(self, name: str, chosen: Tensor, broken: Tensor, adversarial: Tensor, classes: Tensor, took: float) -> None:
        """Notes a batch: the images `chosen` (b,) were attacked for `took` seconds.

        Those that `broken` (b,) marks became `adversarial` (b, ...), which the network takes for `classes` (b,).
        """
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

    def record(self, images: Tensor, *, norm: str, **settings: Any) -> AttackRecord:
        """The record of a finished attack on `images`; `settings` are those of its fields that are not found here."""
        order = self.broken_indices.argsort()
        indices, adversarial = self.broken_indices[order], self.broken_images[order]
        by = torch.repeat_interleave(
            torch.tensor([counts.broken for counts in self.counts.values()], dtype=torch.int64)
        )
        changes = perturbation(adversarial, images.cpu()[indices], norm)
        return AttackRecord(
            norm=norm,
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
            **settings,
        )


_TENSORS = ("robust", "broken_indices", "broken_images", "broken_classes", "targets")


class StateFile:
    """Keeps the state of one attack in a safetensors file, replaced as a whole, its plain part in the header.

    `identity` (JSON-ready) says what is attacked, and how, `known_by` what the network answers, see `answers`; the file
    of another attack is refused. Torch's random numbers are part of it: a randomised network goes on with those that
    it would have drawn. Raises `ConfigError` where there is no folder to keep it in.
    """

    def __init__(self, path: Path, identity: dict[str, Any], known_by: Tensor, device: torch.device) -> None:
        if not path.parent.is_dir():
            raise ConfigError("state_path", str(path), f"must lie in a folder that is there: make {path.parent}")
        self.path = path
        self.identity = identity
        self.known_by = known_by
        self.device = device

    def save(self, state: AttackState) -> None:
        """Replaces the file: a process killed at any moment leaves the old state or the new one."""
        tensors = {name: getattr(state, name) for name in _TENSORS}
        tensors |= {"answers": self.known_by, "random": torch.get_rng_state()}
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

        Raises `ConfigError` for another attack's file and `DataError` for one that is cut or altered.
        """
        if not self.path.exists():
            return None
        try:
            with safetensors.safe_open(self.path, "pt") as file:
                metadata = file.metadata()
            tensors = load(self.path.read_bytes())
            body = json.loads(metadata["body"])
            if metadata["sha256"] != _digest(metadata["body"], tensors):
                raise ValueError("its SHA-256 differs")
        except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
            raise DataError(f"{self.path} is no whole state of an attack ({error}): remove it to start anew") from error
        others = [name for name, value in self.identity.items() if body["identity"].get(name) != value]
        if others or not _alike(tensors.pop("answers"), self.known_by):
            what = others[0] if others else "model"
            raise ConfigError("state_path", str(self.path), f"has another {what}: name another file, or remove it")
        torch.set_rng_state(tensors.pop("random"))
        random_cuda = tensors.pop("random_cuda", None)
        if random_cuda is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(random_cuda, self.device)
        plain: dict[str, Any] = body["state"] | tensors
        plain["counts"] = {name: AttackCounts(**counts) for name, counts in plain["counts"].items()}
        return AttackState(**plain)


def fingerprint(*tensors: Tensor) -> str:
    """SHA-256 (hex) over types, shapes and values."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode("ascii"))
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def model_fingerprint(model: nn.Module) -> str:
    """SHA-256 (hex) of a module's weights and of what it shows of how it computes.

    By name: parameters and buffers, those that are not saved too; of every submodule its class's name; and the
    module's text. What else decides, such as plain attributes, hooks and the source of classes, shows in its `answers`.
    """
    digest = hashlib.sha256(_ADDRESS.sub("", repr(model)).encode())
    for path, module in model.named_modules(remove_duplicate=False):
        digest.update(f"{path} {type(module).__qualname__}\n".encode())
    tensors = model.state_dict() | dict(model.named_buffers())
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            digest.update(f"{name} {fingerprint(value)}\n".encode())
    return digest.hexdigest()


def answers(network: AttackedNetwork, images: Tensor, batch_size: int | None = None) -> Tensor:
    """Logits (asked, classes), on the CPU, of some of the images that are attacked, and of as many drawn ones.

    By these a network is known: one of the same weights that computes something else differs somewhere, though by
    less than `_DEVIATION` it counts as the same. At most `batch_size` images are taken at once. Random numbers stay as
    they were.
    """
    asked = images[:: -(-len(images) // _ASKED)]
    drawn = torch.rand(asked.shape, generator=torch.Generator().manual_seed(0))
    with random_state(0, network.device):  # a randomised network answers alike, too
        batches = (batch for kind in (asked, drawn) for batch in torch.split(kind, batch_size or _ASKED))
        return torch.cat([network(batch.to(network.device)).detach().cpu() for batch in batches])


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""Where an object lies in memory, which is another place in every process."""

_ASKED = 64
"""At most so many images of each kind: a small part of what one step of an attack takes."""

_DEVIATION = 1e-2
"""Of the largest logit: what one network's may differ by on another machine, in half precision say."""


def _alike(kept: Tensor, found: Tensor) -> bool:
    """Whether two tensors of answers may be those of one network."""
    largest = kept.nan_to_num(posinf=0, neginf=0).abs().max().item()
    return kept.shape == found.shape and torch.allclose(found, kept, 0, _DEVIATION * largest, equal_nan=True)


def _digest(body: str, tensors: dict[str, Tensor]) -> str:
    return hashlib.sha256((body + fingerprint(*(tensors[name] for name in sorted(tensors)))).encode()).hexdigest()

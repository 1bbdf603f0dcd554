"""AutoAttack: the robust accuracy of a network, by its authors' code, in pixels of [0, 1].

Driven batch by batch, so that it can be watched, and interrupted anywhere.
"""

import logging
import math
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version as package_version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ttsv.checks import check_choice
from ttsv.config.evaluation import ATTACK_VERSIONS
from ttsv.errors import ConfigError
from ttsv.metrics.accuracy import run_to_end
from ttsv.metrics.attacks.network import AttackedNetwork, under_attack
from ttsv.metrics.attacks.record import (
    AttackProgress,
    AttackRecord,
    Progress,
    Threat,
    attack_inputs,
    require_tiles,
)
from ttsv.metrics.attacks.state import AttackState, StateFile, fingerprint, model_fingerprint

if TYPE_CHECKING:
    from pyautoattack import AutoAttack

PACKAGE = "pyautoattack"


def autoattack(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    norm: str = "L2",
    eps: float = 0.5,
    version: str = "standard",
    seed: int = 0,
    batch_size: int | None = None,
    state_path: Path | str | None = None,
    progress: Progress | None = None,
) -> AttackRecord:
    """Finds which images withstand every attack of AutoAttack (Croce, Hein, 2020; L1: 2021).

    With equal seed and batch size it is the authors' `run_standard_evaluation`, image for image and, on one CPU, bit
    for bit; where the network is randomised, after `torch.manual_seed(seed)` there. An image that is misclassified or
    broken is not attacked again.

    `images` (count, channels, height, width), uint8 or pixels in [0, 1], and `labels` (count,), on any device; `model`
    is any module that takes such pixels, and is attacked in evaluation mode. `norm`: L2, Linf or L1; `eps`: the radius
    in pixels; `version`: standard, plus or rand (for randomised networks). Where the targeted attacks' 9 other classes
    (5 for APGD under L1) are more than there are, they try all. `batch_size`: None takes 256; random numbers
    depend on it. `state_path`: the file that has everything found after each batch, and from which the same
    call goes on to the same record; give each network one of its own, as hooks and functions that it holds are not
    compared with what the file was made with. `progress` is called after each batch, its state saved.

    Raises `ConfigError` naming the argument: unknown norm or version, eps that is not positive, images outside [0, 1],
    labels that are no class, a logit that is not finite, fewer classes than the DLR loss needs (four, or three for
    rand), an image size that Square Attack cannot tile, the state of another attack. Raises `DataError` for a
    state that is cut or altered.
    """
    threat = Threat(norm=norm, eps=eps, seed=seed, batch_size=batch_size)
    return run_to_end(autoattack_steps(model, images, labels, threat, version=version, state_path=state_path), progress)


@torch.no_grad()
def autoattack_steps(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    threat: Threat,
    *,
    version: str = "standard",
    state_path: Path | str | None = None,
) -> Generator[AttackProgress, None, AttackRecord]:
    """`autoattack` batch by batch: yields where it is, its state saved, and returns the record.

    Between two steps the model's weights are constants and torch's random numbers are the attack's; both are as
    before once the generator ends or is closed.
    """
    images, labels = attack_inputs(images, labels)
    check_choice("version", version, ATTACK_VERSIONS)
    if version != "rand" and threat.norm != "Linf":
        require_tiles(images, threat.norm)
    batch_size = threat.images_at_once
    with under_attack(model, images, int(threat.seed)) as network:
        official, messages = _official(network, threat, version)
        file = None
        if state_path is not None:
            file = StateFile(Path(state_path), _identity(model, images, labels, threat, version), network.device)
        state = file.load() if file else None
        if state is None:
            state = _start(official, network, images, labels, batch_size)
        elif batch_size != state.batch_size:
            fix = f"has another batch_size, {state.batch_size}: name another file, or remove it"
            raise ConfigError("state_path", str(state_path), fix)
        else:
            messages[:] = state.warnings
        state.warnings = messages
        targets = _limit_targets(official, state.classes)
        for step in _attack(official, network, images, labels, state):
            if file:
                file.save(state)
            yield step
        _check_square(official, state)
        if file:
            file.save(state)
    return state.record(images, threat, attack="AutoAttack", version=version, package=PACKAGE, targets=targets)


def _official(network: AttackedNetwork, threat: Threat, version: Any) -> tuple["AutoAttack", list[str]]:
    """The authors' object, and the list that gets its warnings, each text once."""
    from pyautoattack import AutoAttack

    norm: Any = threat.norm
    budget = {"norm": norm, "eps": float(threat.eps), "seed": int(threat.seed)}
    official = AutoAttack(network, **budget, version=version, device=network.device)
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if (message := record.getMessage()) not in messages:
                messages.append(message)

    # Not the package's own logger: that one is the process's, and gets the warnings of other evaluations too.
    logger = logging.Logger(PACKAGE, logging.WARNING)
    logger.addHandler(Collect())
    official.logger = official.apgd.logger = official.apgd_targeted.logger = logger
    return official, messages


def _identity(model: nn.Module, images: Tensor, labels: Tensor, threat: Threat, version: str) -> dict[str, object]:
    """What a state file belongs to."""
    return {
        "format": 1,
        PACKAGE: package_version(PACKAGE),
        "model": model_fingerprint(model),
        "images": fingerprint(images),
        "labels": fingerprint(labels),
        "norm": threat.norm,
        "eps": float(threat.eps),
        "version": version,
        "seed": int(threat.seed),
    }


def _start(
    official: "AutoAttack", network: AttackedNetwork, images: Tensor, labels: Tensor, batch_size: int
) -> AttackState:
    """AutoAttack's checks of the network, in its order, and the images that are classified correctly."""
    from pyautoattack import checks

    first, first_labels = (part[:batch_size].to(network.device) for part in (images, labels))
    if official.version != "rand":
        checks.check_randomized(network, first, first_labels, bs=batch_size, logger=official.logger)
    classes = int(checks.check_range_output(network, first, logger=official.logger))
    with _tracing(), torch.enable_grad():
        checks.check_dynamic(network, first, False, logger=official.logger)
    if labels.max() >= classes:
        raise ConfigError("labels", int(labels.max()), f"must be classes of the model, 0 to {classes - 1}")
    if classes < (needed := 4 if "apgd-t" in official.attacks_to_run else 3):
        fix = f"needs {needed} classes or more, for its DLR loss; the model has {classes}: use pgd"
        raise ConfigError("version", official.version, fix)
    predicted = [network(batch.to(network.device)).argmax(1).cpu() for batch in torch.split(images, batch_size)]
    network.require_finite()
    return AttackState.start(images, torch.cat(predicted) == labels.cpu(), batch_size=batch_size, classes=classes)


def _limit_targets(official: "AutoAttack", classes: int) -> dict[str, int]:
    """Has the targeted attacks try no more classes than there are; returns how many each tries."""
    found = {}
    for name, attack in (("apgd-t", official.apgd_targeted), ("fab-t", official.fab)):
        if name in official.attacks_to_run:
            attack.n_target_classes = min(attack.n_target_classes, classes - 1)
            found[name] = attack.n_target_classes
    return found


def _attack(
    official: "AutoAttack", network: AttackedNetwork, images: Tensor, labels: Tensor, state: AttackState
) -> Iterator[AttackProgress]:
    """One batch of one attack after another, from where the state is; each seeds torch's random numbers itself."""
    names = official.attacks_to_run
    passes = {name: _passes(official, name, state.classes) for name in names}
    first = max(state.attack, 0)
    for number, name in enumerate(names[first:], start=first):
        state.begin(number, name)
        for chosen in state.batches():
            state.attack_batch(name, network, chosen, images, labels, partial(_perturb, official, network, name))
            done = sum(counts.attacked * passes[other] for other, counts in state.counts.items())
            left = (len(state.targets) - state.counts[name].attacked) * passes[name]
            left += int(state.robust.sum()) * sum(passes[other] for other in names[number + 1 :])
            yield state.progress(name, state.seconds * left / done)
    state.attack = len(names)


def _perturb(official: "AutoAttack", network: AttackedNetwork, name: str, x: Tensor, y: Tensor) -> Tensor:
    """What one attack makes of a batch, set up as the authors' evaluation sets it up."""
    if _is_tied(official, network, name, x, y):
        return x
    attack = {
        "apgd-ce": official.apgd,
        "apgd-dlr": official.apgd,
        "apgd-t": official.apgd_targeted,
        "fab": official.fab,
        "fab-t": official.fab,
        "square": official.square,
    }[name]
    if attack is official.apgd:
        attack.loss = name.removeprefix("apgd-")
    if attack is official.fab:
        attack.targeted = name == "fab-t"
    if name == "fab-t":
        attack.n_restarts = 1
    found: Tensor = attack.perturb(x, y)
    return found


def _is_tied(official: "AutoAttack", network: AttackedNetwork, name: str, x: Tensor, y: Tensor) -> bool:
    """Whether another logit equals the label's for every image of the batch, which Square Attack then leaves as it is.

    Under L2 and L1 the authors' fails on that, for a network of constant logits, say.
    """
    if name != "square" or official.norm == "Linf":
        return False
    # A randomised network's numbers are the attack's.
    with torch.random.fork_rng([network.device] if network.device.type == "cuda" else []):
        logits = network(x)
    return bool((logits.gather(1, y[:, None]) <= logits.scatter(1, y[:, None], -math.inf).amax(1, keepdim=True)).all())


def _passes(official: "AutoAttack", name: str, classes: int) -> int:
    """About how many passes through the network, forward or backward, an attack takes for an image it fails on."""
    apgd, targeted, fab, square = official.apgd, official.apgd_targeted, official.fab, official.square
    passes = {
        "apgd-ce": 2 * apgd.n_restarts * apgd.n_iter_orig * apgd.eot_iter,
        "apgd-dlr": 2 * apgd.n_restarts * apgd.n_iter_orig * apgd.eot_iter,
        "apgd-t": 2 * targeted.n_target_classes * targeted.n_restarts * targeted.n_iter_orig * targeted.eot_iter,
        "fab": (2 + classes) * fab.n_restarts * fab.n_iter,
        "fab-t": 3 * fab.n_target_classes * fab.n_iter,
        "square": square.n_restarts * square.n_queries,
    }
    return int(passes[name])


def _check_square(official: "AutoAttack", state: AttackState) -> None:
    """AutoAttack's last check: a black-box attack that breaks what gradients did not is a bad sign."""
    from pyautoattack import checks

    images, robust = len(state.robust), round(state.clean_accuracy * len(state.robust))
    accuracies = {"clean": state.clean_accuracy}
    for name, counts in state.counts.items():
        robust -= counts.broken
        if counts.attacked:
            accuracies[name] = robust / images
    checks.check_square_sr(accuracies, logger=official.logger)


@contextmanager
def _tracing() -> Iterator[None]:
    """For the check of dynamic defences, which counts calls for the whole process and drops a debugger's trace."""
    from pyautoattack import checks

    trace = sys.gettrace()
    checks.funcs.update(dict.fromkeys(checks.funcs, 0))
    try:
        yield
    finally:
        sys.settrace(trace)

"""Projected gradient descent: a quick attack for smoke runs. What withstands it may still not be robust."""

from collections.abc import Generator
from functools import partial

import torch
from torch import Tensor, nn

from ttsv.checks import check_count
from ttsv.errors import ConfigError
from ttsv.metrics.accuracy import odds_against, run_to_end
from ttsv.metrics.attacks.network import AttackedNetwork, under_attack
from ttsv.metrics.attacks.record import AttackProgress, AttackRecord, Progress, Threat, attack_inputs
from ttsv.metrics.attacks.state import AttackState

_TINY = 1e-12
_ORDERS = {"L2": 2.0, "Linf": float("inf")}


def pgd(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    norm: str = "L2",
    eps: float = 0.5,
    steps: int = 20,
    seed: int = 0,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> AttackRecord:
    """Which images withstand one run of PGD on the cross-entropy: no bound on what a better attack breaks.

    Madry et al., Towards deep learning models resistant to adversarial attacks (2018): a random start in the ball,
    then `steps` of 2.5 eps / steps along the normalised gradient (L2) or its sign (Linf), each followed by projection
    onto the ball and the pixels of [0, 1]; an image is broken as soon as it is misclassified. Arguments, record
    and errors otherwise as for `autoattack`; norm L2 or Linf. The gradient is that of `odds_against`: of one direction
    with the cross-entropy's, which float32 loses where a network is sure of an image (its record says so).
    """
    threat = Threat(norm=norm, eps=eps, seed=seed, batch_size=batch_size)
    return run_to_end(pgd_steps(model, images, labels, threat, steps=steps), progress)


@torch.no_grad()
def pgd_steps(
    model: nn.Module, images: Tensor, labels: Tensor, threat: Threat, *, steps: int = 20
) -> Generator[AttackProgress, None, AttackRecord]:
    """`pgd` batch by batch: yields where it is and returns the record, see `autoattack_steps`."""
    images, labels = attack_inputs(images, labels)
    if threat.norm not in _ORDERS:
        raise ConfigError("norm", threat.norm, "must be L2 or Linf for PGD")
    check_count("steps", steps)
    steps = int(steps)
    with under_attack(model, images, int(threat.seed)) as network:
        state = _start(network, images, labels, threat.images_at_once)
        state.begin(0, "pgd")
        for chosen in state.batches():
            state.attack_batch("pgd", network, chosen, images, labels, partial(_run, network, threat, steps))
            attacked = state.counts["pgd"].attacked
            yield state.progress("pgd", state.seconds * (len(state.targets) - attacked) / attacked)
    return state.record(
        images, threat, attack="PGD", version=f"{steps} steps along log-odds", package="ttsv", targets={}
    )


def _start(network: AttackedNetwork, images: Tensor, labels: Tensor, batch_size: int) -> AttackState:
    """The images that are classified correctly."""
    logits = torch.cat([network(batch.to(network.device)).cpu() for batch in torch.split(images, batch_size)])
    network.require_finite()
    if logits.shape[1] < 2:
        raise ConfigError("model", f"{tuple(logits.shape)} logits", "must give two classes at least")
    if labels.max() >= logits.shape[1]:
        raise ConfigError("labels", int(labels.max()), f"must be classes of the model, 0 to {logits.shape[1] - 1}")
    correct = logits.argmax(1) == labels.cpu()
    return AttackState.start(images, correct, batch_size=batch_size, classes=logits.shape[1])


def _run(network: AttackedNetwork, threat: Threat, steps: int, x: Tensor, y: Tensor) -> Tensor:
    """The first misclassified image on each one's way, else the last."""
    norm, eps = threat.norm, threat.eps
    noise = torch.rand(x.shape) * 2 - 1 if norm == "Linf" else torch.randn(x.shape)  # the same on every device
    found = (x + _project(eps * _direction(noise.to(x.device), norm), eps, norm)).clamp(0, 1)
    for _ in range(steps):
        at = found.clone().requires_grad_()
        with torch.enable_grad():
            logits = network(at)
            # The direction, which is all that counts, is the cross-entropy's, which loses it where the network is sure.
            (gradient,) = torch.autograd.grad(odds_against(logits, y).sum(), at)
        moved = found + 2.5 * eps / steps * (gradient.sign() if norm == "Linf" else _direction(gradient, norm))
        moved = (x + _project(moved - x, eps, norm)).clamp(0, 1)
        standing = (logits.argmax(1) == y).view(-1, 1, 1, 1)
        found = torch.where(standing, moved, found)
    return found


def _direction(change: Tensor, norm: str) -> Tensor:
    """Of norm 1, or 0."""
    return change / _norm(change, norm)


def _project(change: Tensor, eps: float, norm: str) -> Tensor:
    """The nearest change within the ball."""
    if norm == "Linf":
        return change.clamp(-eps, eps)
    return change * (eps / _norm(change, norm)).clamp(max=1)


def _norm(change: Tensor, norm: str) -> Tensor:
    """(count, 1, 1, 1), positive."""
    found: Tensor = torch.linalg.vector_norm(change, _ORDERS[norm], dim=(1, 2, 3), keepdim=True)
    return found.clamp(min=_TINY)

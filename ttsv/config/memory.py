"""What a trial takes of a card's memory: the network, what training holds beside it, the images, and the evaluation."""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ttsv.config.evaluation import ATTACK_BATCH
from ttsv.config.trial import TrialConfig
from ttsv.data.catalog import DatasetInfo, dataset_info, part_images
from ttsv.errors import ConfigError
from ttsv.models import ModelArguments
from ttsv.models.memory import NetworkMemory, network_memory

WORKSPACES = 128 << 20
"""Bytes that libraries take of torch's own memory: 32 MiB are cuBLAS's; the rest is an allowance for cuDNN's kernels,
which take more where there is more and do with less."""

CONTEXT_BYTES = 1 << 29
"""What CUDA takes of a card for each process beside torch's memory: some 0.5 GiB, more or less by card and driver."""
GRADIENTS_AT_ONCE = 8 << 20
"""Bytes of gradients after which parameters are stepped within the backward pass."""
_CLIPPING_PART, _CLIPPING_TIMES = 3 << 27, 10
"""Bytes of matrices that clipping works on at once on a card, and how many times as much it holds meanwhile."""
_SPECTRA_PART, _SPECTRA_TIMES = 1 << 26, 4
"""The same of singular values."""
_PREDICTED, _ASCENT_BATCH = 256, 100
"""Images at once where a network is evaluated, and where its Lipschitz constant is searched for."""
_MOMENTS = {"sgd": 1, "adam": 2, "adamw": 2}
_PASSES = 2
"""How many times its widest operation a pass without gradients holds: a series or a shortcut is beside it."""
_LABEL, _DRAWN = 8, 9
"""Bytes of a label, and of an image's place in an epoch's order and whether it is flipped."""


@dataclass(frozen=True)
class TrialMemory:
    """Bytes of a card: the most at any moment of the training, and of the evaluation in the end.

    `images`: of both, the share of images that stay in the machine's memory where they would take more than half of
    what there is (`ttsv.training.feed`).
    """

    training: int
    evaluation: int
    images: int

    @property
    def most(self) -> int:
        """What a trial takes that has its images on the card."""
        return max(self.training, self.evaluation)

    def within(self, room: float) -> float:
        """What it takes of so many bytes."""
        training = self.training - (self.images if self.images > room / 2 else 0)
        return max(training, self.evaluation)


def allocator_share(gpus: float, card: float) -> float:
    """Which part of a card of so many bytes torch's allocator may fill, of a process that has a fraction of it.

    CUDA's context comes beside it: without room for that, processes that fill their shares would take more than all.
    """
    return max(0.0, gpus - CONTEXT_BYTES / card)


class _Decides(NamedTuple):
    """All of a trial that its memory depends on."""

    dataset: str
    model: str
    layer: str
    rank: float | None
    frames: str
    batch_size: int
    half: bool
    moments: int
    copies: int
    whole_gradients: bool
    validates_on_test: bool
    clips: bool
    attacked: int
    ascended: bool
    keeps_best: bool


def trial_memory(config: TrialConfig) -> TrialMemory | None:
    """Of a canonical trial; None where its network or its images are known only once they are read or built."""
    training, evaluation = config.training, config.evaluation
    moments = _MOMENTS[training.optimizer]
    if training.optimizer == "sgd":
        moments = int(training.momentum > 0)
    keeps = training.keep_best
    return _memory(
        _Decides(
            config.dataset,
            config.model,
            config.layer,
            config.rank,
            config.frames,
            training.batch_size,
            training.precision != "float32",
            moments + training.amsgrad,
            (training.ema is not None) + (keeps or training.select == "best"),
            training.clip_gradient is not None or training.precision == "fp16",
            training.validation == "test",
            config.constraint == "clip",
            (evaluation.batch_size or ATTACK_BATCH) if evaluation.attack != "none" else 0,
            evaluation.lipschitz != "none",
            keeps,
        )
    )


@lru_cache(maxsize=65_536)
def _memory(of: _Decides) -> TrialMemory | None:
    info, parts = dataset_info(of.dataset), part_images(of.dataset)
    if info is None or parts is None:
        return None
    try:
        step = _network(of, info, of.batch_size, half=of.half)
        predicted = _network(of, info, _PREDICTED)
        searched = max((of.attacked, _ASCENT_BATCH * of.ascended))
        attacked = _network(of, info, searched, evaluating=True) if searched else None
    except ConfigError:  # which says what is wrong where the trial is planned
        return None
    if step is None or predicted is None:
        return None
    train, held_out, test = parts
    trained, validation = (train + held_out, test) if of.validates_on_test else (train, held_out)
    pixels = info.channels * info.image_size**info.dims
    images = (trained + validation) * pixels
    labels = trained * (_LABEL + _DRAWN + _LABEL * info.dims) + validation * _LABEL
    weights = step.parameters + step.buffers
    gradients = step.parameters if of.whole_gradients else min(step.parameters, GRADIENTS_AT_ONCE + step.largest)
    backward = gradients + step.largest  # which is computed in one layout and kept in another
    # Without gradients and in float32. A better epoch's weights are copied before the former are let go.
    validated = max(_PASSES * predicted.widest * of.batch_size // _PREDICTED, weights)
    clipping = _CLIPPING_TIMES * min(step.symbol, _CLIPPING_PART) if of.clips else 0
    # Clipped kernels are kept until their norms are asked for.
    training = weights * (1 + of.copies + of.clips) + step.parameters * of.moments + images + labels
    spectra = _SPECTRA_TIMES * min(step.symbol, _SPECTRA_PART)
    evaluation = weights * (1 + of.keeps_best) + (held_out + test) * (pixels + _LABEL)
    return TrialMemory(
        WORKSPACES + training + max(step.step + backward, validated, clipping),
        WORKSPACES + evaluation + max(_PASSES * predicted.widest, spectra, attacked.step if attacked else 0),
        images,
    )


def _network(
    of: _Decides, info: DatasetInfo, batch_size: int, *, half: bool = False, evaluating: bool = False
) -> NetworkMemory | None:
    network = ModelArguments(
        name=of.model,
        num_classes=info.classes,
        in_channels=info.channels,
        image_size=info.image_size,
        layer=of.layer,
        rank=of.rank,
        frames=of.frames,
    )
    return network_memory(network, batch_size, half=half, evaluating=evaluating)

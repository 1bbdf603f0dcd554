"""What is evaluated, and what an evaluation is told beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from ttsv.config.evaluation import EVALUATION, EvaluationConfig
from ttsv.config.trial import TrialConfig
from ttsv.constraints import ConstraintReport
from ttsv.data.loading import Dataset


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A network that takes pixels in [0, 1], and the data set on whose test images it is evaluated.

    `mean` and `std`: what the network normalises pixels with. `trained`: the configuration that it was trained by; None
    where that is not known. `report`: what the constraint achieved that it was trained under just now. `said`: what the
    protocol says of its training, by subject, in words.
    """

    model: nn.Module
    data: Dataset
    mean: Sequence[float]
    std: Sequence[float]
    trained: TrialConfig | None = None
    report: ConstraintReport | None = None
    said: Mapping[str, str] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where the network's parameters are; the CPU for one without any."""
        return next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """What is measured, of what, and where files are.

    `folder` is that of the data sets. `images`: only so many, the first of the test split. `state`: the file in which
    AutoAttack keeps what it has found, to go on from there; `renew_state`: one that is damaged, or another attack's, is
    replaced. `cost`: the results say what the network and its evaluation cost, which is a stage of its own. `layers`:
    every layer's spectrum and record are taken, and the cost beside them.
    """

    folder: Path
    config: EvaluationConfig = EVALUATION
    images: int | None = None
    state: Path | None = None
    renew_state: bool = False
    cost: bool = False
    layers: bool = False

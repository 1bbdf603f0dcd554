"""Constraints that stand beside others: frames kept near orthonormal by a term of the loss, and several as one."""

from dataclasses import replace

from torch import Tensor, nn

from ttsv.checks import check_number
from ttsv.config.trial import TrialConfig
from ttsv.constraints.clip import Clip
from ttsv.constraints.divide import Divide
from ttsv.constraints.protocol import (
    Constraint,
    ConstraintReport,
    ConstraintState,
    LayerNorms,
    Unconstrained,
    projects_after,
    settle,
    settle_statistics,
)
from ttsv.errors import ConfigError
from ttsv.layers import orthogonal_loss
from ttsv.layers.frames import check_normalizer
from ttsv.spectral.symbol import Size

_METHODS = ("bind", "penalty", "project", "report", "state_dict", "load_state_dict")


class Compose:
    """Several constraints as one: penalties add up, projections follow each other in the order given."""

    def __init__(self, *constraints: Constraint) -> None:
        for part in constraints:
            if not all(callable(getattr(part, method, None)) for method in _METHODS):
                raise ConfigError("constraints", part, f"must be constraints, which have {', '.join(_METHODS)}")
        self.constraints = constraints

    def bind(self, model: nn.Module, input_size: Size, *, in_channels: int | None = None) -> None:
        """Binds every part."""
        for part in self.constraints:
            part.bind(model, input_size, in_channels=in_channels)

    def penalty(self, model: nn.Module) -> Tensor | float:
        """Returns the sum of the parts' penalties."""
        total: Tensor | float = 0.0
        for part in self.constraints:
            total = total + part.penalty(model)
        return total

    def projects_after(self, step: int) -> bool:
        """Tells whether a part is known to project after the step."""
        return any(projects_after(part, step) for part in self.constraints)

    def project(self, model: nn.Module, step: int, *, force: bool = False) -> None:
        """Projects with every part."""
        for part in self.constraints:
            part.project(model, step, force=force)

    def settle(self, model: nn.Module, step: int, *, changed: bool, project: bool) -> str | None:
        """Has every part make the weights ready for evaluation; says what they say."""
        told = [settle(part, model, step, changed=changed, project=project) for part in self.constraints]
        return "; ".join(one for one in told if one is not None) or None

    def settle_statistics(self, model: nn.Module, step: int) -> None:
        """Has every part project what reads statistics of batch norm."""
        for part in self.constraints:
            settle_statistics(part, model, step)

    def report(self) -> ConstraintReport:
        """Returns norms before the first and after the last part that projected a layer, and the sums of the rest.

        `measure` and `smallest` are the last part's.
        """
        layers: dict[str, LayerNorms] = {}
        reports = [part.report() for part in self.constraints]
        for report in reports:
            for name, norms in report.layers.items():
                layers[name] = replace(norms, before=layers.get(name, norms).before)
        seconds = sum(report.seconds for report in reports)
        return ConstraintReport(layers, seconds, sum(report.projections for report in reports))

    def state_dict(self) -> ConstraintState:
        """Returns the states of the parts, in order."""
        parts = [part.state_dict() for part in self.constraints]
        return {"layers": {}, "seconds": 0.0, "projections": 0, "parts": parts}

    def load_state_dict(self, state: ConstraintState) -> None:
        """Hands each part its state. Raises `ConfigError` for another number of parts."""
        if len(state["parts"]) != len(self.constraints):
            raise ConfigError("state.parts", len(state["parts"]), f"must be {len(self.constraints)}")
        for part, saved in zip(self.constraints, state["parts"], strict=True):
            part.load_state_dict(saved)


class Orthogonal(Unconstrained):
    """Keeps the frames of TT layers near orthonormal: the penalty `lambda_ort` times the orthogonal loss.

    `normalizer`: "paper" (eq. orthloss) or "code", to which the published lambda_ort belong (see
    `ttsv.layers.orthogonal_loss`). Without free frames the penalty is 0.0.
    """

    def __init__(self, lambda_ort: float, *, normalizer: str = "paper") -> None:
        super().__init__()
        fix = "must be a finite number of at least 0"
        check_number("lambda_ort", lambda_ort, fix)
        if not 0 <= lambda_ort < float("inf"):
            raise ConfigError("lambda_ort", lambda_ort, fix)
        check_normalizer(normalizer)
        self.lambda_ort = lambda_ort
        self.normalizer = normalizer

    def penalty(self, model: nn.Module) -> Tensor | float:
        """Returns `lambda_ort` times the orthogonal loss."""
        loss = orthogonal_loss(model, self.normalizer) if self.lambda_ort else None
        return 0.0 if loss is None else self.lambda_ort * loss


def make_constraint(config: TrialConfig) -> Constraint:
    """Composes the orthogonal loss with the trial's weight, and its clipping or division if it has one."""
    parts: list[Constraint] = [Orthogonal(config.lambda_ort, normalizer=config.ort_normalizer)]
    if config.constraint == "clip" and config.delta is not None:
        parts.append(Clip(config.delta, **vars(config.clipping)))
    if config.constraint == "divide":
        options = vars(config.division)
        parts.append(Divide(**options | {"power_iterations": options["power_iterations"] or "exact"}))
    return Compose(*parts)

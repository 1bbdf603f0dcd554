"""What a training loop calls, and what a constraint reports."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import NotRequired, Protocol, TypedDict, cast, runtime_checkable

from torch import Tensor, nn

from ttsv.spectral.symbol import Size


@dataclass(frozen=True)
class LayerNorms:
    """Largest singular value of a layer before and after the last projection, and what these numbers are.

    `measure` says of which operator they are and what they are worth; `smallest` is the smallest singular value
    after the projection, of the periodic operator, where a floor was asked for.
    """

    before: float
    after: float
    smallest: float | None = None
    measure: str = "periodic norm"


@dataclass(frozen=True)
class ConstraintReport:
    """What a constraint achieved: norms per layer, wall-clock seconds spent, number of projections so far."""

    layers: dict[str, LayerNorms] = field(default_factory=dict)
    seconds: float = 0.0
    projections: int = 0


class NormsState(TypedDict):
    """The fields of a `LayerNorms`."""

    before: float
    after: float
    smallest: NotRequired[float | None]
    measure: NotRequired[str]


class ConstraintState(TypedDict):
    """State of a constraint, to save with a checkpoint: JSON-ready but for `vectors`, tensors by name."""

    layers: dict[str, NormsState]
    seconds: float
    projections: int
    parts: list["ConstraintState"]
    vectors: NotRequired[dict[str, Tensor]]


class Constraint(Protocol):
    """Controls singular values in training: a term of the loss, and a projection of the weights after each step.

    A training loop binds it to its network before the first step.
    """

    def bind(self, model: nn.Module, input_size: Size, *, in_channels: int | None = None) -> None:
        """Takes note of the model's layers; `input_size` (pixels) and `in_channels` are those of its images."""

    def penalty(self, model: nn.Module) -> Tensor | float:
        """Returns a term of the loss: a differentiable 0-d tensor, or 0.0."""

    def project(self, model: nn.Module, step: int, *, force: bool = False) -> None:
        """Projects the weights after an optimizer step; `step` have been taken (from 1). `force`: whatever the step."""

    def report(self) -> ConstraintReport:
        """Returns what the last projection achieved."""

    def state_dict(self) -> ConstraintState:
        """Returns everything that training on needs, plain data and tensors."""

    def load_state_dict(self, state: ConstraintState) -> None:
        """Continues from a saved state; `bind` is called before."""


@runtime_checkable
class Scheduled(Protocol):
    """A constraint that says beforehand after which steps it projects; of others that is not known."""

    def projects_after(self, step: int) -> bool:
        """Whether `project`, not forced, writes weights after the step (from 1)."""


def projects_after(constraint: Constraint, step: int) -> bool:
    """Whether a constraint is known to project after a step (from 1)."""
    return isinstance(constraint, Scheduled) and constraint.projects_after(step)


@runtime_checkable
class Settling(Protocol):
    """A constraint that says itself what is done to the weights that are evaluated; others are projected, forced."""

    def settle(self, model: nn.Module, step: int, *, changed: bool, project: bool) -> str | None:
        """Makes the weights that were left after `step` steps ready for evaluation; says what was done, if anything.

        `changed`: something wrote into them after that step, such as an average. `project`: False to write nothing.
        """

    def settle_statistics(self, model: nn.Module, step: int) -> None:
        """Projects what reads statistics of batch norm, which were taken anew once the weights were settled."""


def settle(
    constraint: Constraint, model: nn.Module, step: int, *, changed: bool = False, project: bool = True
) -> str | None:
    """Has any constraint make weights ready for evaluation, see `Settling.settle`."""
    if isinstance(constraint, Settling):
        return constraint.settle(model, step, changed=changed, project=project)
    if project:
        constraint.project(model, step, force=True)
    return None


def settle_statistics(constraint: Constraint, model: nn.Module, step: int) -> None:
    """Has any constraint project what reads statistics of batch norm, see `Settling.settle_statistics`."""
    if isinstance(constraint, Settling):
        constraint.settle_statistics(model, step)
    else:
        constraint.project(model, step, force=True)


class Unconstrained:
    """Constrains nothing; other constraints refine it."""

    def __init__(self) -> None:
        self._report = ConstraintReport()

    def bind(self, model: nn.Module, input_size: Size, *, in_channels: int | None = None) -> None:
        """Takes note of nothing."""

    def penalty(self, model: nn.Module) -> Tensor | float:
        """Returns 0.0: nothing is added to the loss."""
        return 0.0

    def project(self, model: nn.Module, step: int, *, force: bool = False) -> None:
        """Does nothing."""

    def report(self) -> ConstraintReport:
        """Returns what the last projection achieved; an empty report without one."""
        return self._report

    def state_dict(self) -> ConstraintState:
        """Returns the report as plain data."""
        report = self._report
        layers = {name: cast(NormsState, asdict(norms)) for name, norms in report.layers.items()}
        return {"layers": layers, "seconds": report.seconds, "projections": report.projections, "parts": []}

    def load_state_dict(self, state: ConstraintState) -> None:
        """Takes up the saved report."""
        layers = {name: LayerNorms(**norms) for name, norms in state["layers"].items()}
        self._report = ConstraintReport(layers, state["seconds"], state["projections"])

    def _add_to_report(self, layers: Mapping[str, LayerNorms], seconds: float) -> None:
        """Replaces the layers' norms and counts one projection."""
        past = self._report
        self._report = ConstraintReport(dict(layers), past.seconds + seconds, past.projections + 1)

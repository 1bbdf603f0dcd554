"""How far a network's tensors move for a unit step of its input, and the steps that say why."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ttsv.certification.linear_maps import LinearMap, rounded_up
from ttsv.errors import ConfigError

SHORTEST_STEP = 1e-5
"""L2 distance in pixels that a bound takes any two images to be apart, were they nearer: what jumps is bounded so."""


@dataclass(frozen=True, kw_only=True)
class Factor:
    """One step of a bound: the module (its path; "" is the network itself) and what it did.

    `bound`: by how much the bound grew over the largest of its inputs'; `total`: the bound from pixels to the step's
    result; `how` says where it comes from.
    """

    name: str
    kind: str
    bound: float
    total: float
    how: str


@dataclass(frozen=True)
class Reach:
    """How far a tensor moves for a unit step of the input: `base`, times `scale` (channels,) in each channel.

    For a step of another length d by no more than `max(d, SHORTEST_STEP)` times that.
    The difference of two values is, channel by channel, `scale` times that of something with the bound `base`.
    """

    base: float
    scale: Tensor | None = None

    @property
    def total(self) -> float:
        """The bound for the whole tensor."""
        return self.base if self.scale is None else rounded_up(self.base * self.scale.max().item())


class Affine:
    """The reach of a linear map's output, computed when it is asked for: scales that follow are put into the map.

    Made by `ttsv.certification.trace.Trace.mapped`, whose `record` lists what was computed.
    """

    scale = None

    def __init__(self, record: Callable[..., float], name: str, kind: str, linear: LinearMap, source: Reach) -> None:
        self.record, self.name, self.kind = record, name, kind
        self.linear, self.source = linear, source
        self._total: float | None = None

    @property
    def total(self) -> float:
        """The bound for the map as it is."""
        if self._total is None:
            self._total = self.scaled(None, "")
        return self._total

    @property
    def base(self) -> float:
        """The same: no scale is left outside."""
        return self.total

    def scaled(self, behind: Tensor | None, name: str) -> float:
        """The bound for the map followed by one factor per channel, those of the module `name`."""
        try:
            norm = self.linear.norm(self.source.scale, behind)
        except ConfigError as error:
            raise ConfigError(f"{self.name or 'model'} ({self.kind})", error.value, error.fix) from error
        total = rounded_up(self.source.base * norm)
        how = self.linear.how
        if self.source.scale is not None:
            how += ", the scales of its input folded in"
        if behind is not None:
            how += f", the scales of {name} folded in"
        return self.record(self.kind, [self.source], total, how, name=self.name)

"""How singular values are controlled in training: parts of a trial, torch-free."""

from dataclasses import dataclass

from ttsv.config.fields import Checked, Number, OneOf, at_default, field

CONSTRAINTS = ("none", "clip", "divide")
OPERATORS = ("periodic", "zero-padded")


@dataclass(frozen=True, kw_only=True)
class ClippingConfig(Checked):
    """How singular values are clipped (constraint "clip")."""

    path = "clipping."

    every: int = field(100, "optimizer steps between two clips", Number(1))
    rounds: int = field(1, "alternations of clip and truncation to the kernel's support", Number(1, 1000))
    rescale: bool = field(True, "end with a norm of at most delta, by dividing what truncation left")
    operator: str = field(
        "periodic",
        "whose norm is brought to delta by rescale: periodic, or zero-padded (what the layer applies)",
        OneOf(OPERATORS),
    )
    floor: float | None = field(None, "raise smaller singular values to this; null: leave them", Number(0, above=True))
    linear: bool = field(False, "clip linear layers as well")

    def canonical(self) -> "ClippingConfig":
        """The same clipping with every field that has no effect set to its default."""
        return self if self.rescale else at_default(self, ["operator"])


@dataclass(frozen=True, kw_only=True)
class DivisionConfig(Checked):
    """How layers are divided by what their norms exceed (constraint "divide")."""

    path = "division."

    conv: float | None = field(None, "largest norm of a convolution; null: left alone", Number(0, above=True))
    linear: float | None = field(None, "largest norm of a linear layer; null: left alone", Number(0, above=True))
    batch_norm: float | None = field(
        None, "largest max |gamma| / sqrt(var + eps) of batch norm; null: left alone", Number(0, above=True)
    )
    every: int = field(1, "optimizer steps between two divisions", Number(1))
    power_iterations: int | None = field(
        1, "steps of the power iteration, from the vector of the last time; null: exact norms", Number(1, 10_000)
    )
    operator: str = field("zero-padded", "whose norm: periodic, or zero-padded", OneOf(OPERATORS))
    batch_norm_eps: float | None = field(
        None, "in place of the layers' own eps (the paper's authors: 1e-6)", Number(0, above=True)
    )

    def canonical(self) -> "DivisionConfig":
        """The same division with every field that has no effect set to its default."""
        unused: list[str] = []
        if self.conv is None and self.linear is None:
            unused += ["power_iterations"]
        if self.conv is None:
            unused += ["operator"]
        if self.batch_norm is None:
            unused += ["batch_norm_eps"]
        return at_default(self, unused)


CLIPPING = ClippingConfig()
DIVISION = DivisionConfig()
"""The defaults."""

"""What is asked of a network's singular values during training: one protocol, composable.

A constraint is bound once, before the optimizer exists; its penalty is added to the loss; it projects the weights
after an optimizer step and once more, forced, before evaluation, so that what is reported holds. The training
loop calls all three unconditionally. Projections write into the parameters in place and leave the optimizer's
state (momentum) as it is.

Layers, spectral, tt, configurations and what they rest on may be imported, nothing of metrics or training.
"""

from ttsv.constraints.clip import Clip
from ttsv.constraints.compose import Compose, Orthogonal, make_constraint
from ttsv.constraints.divide import Divide
from ttsv.constraints.protocol import Constraint, ConstraintReport, ConstraintState, LayerNorms, Unconstrained

__all__ = [
    "Clip",
    "Compose",
    "Constraint",
    "ConstraintReport",
    "ConstraintState",
    "Divide",
    "LayerNorms",
    "Orthogonal",
    "Unconstrained",
    "make_constraint",
]

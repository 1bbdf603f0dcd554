"""Proofs about a network: a Lipschitz bound in pixels, and the images whose class no L2 attack of a radius changes.

What is proved holds for the network that the weights define in exact arithmetic, evaluated in float64 with rounding
counted; what has no rule is refused by name. `trace` follows a network, `rules`, `layers` and `pooling` bound its
functions. Layers and what computes on them may be imported, nothing of training.
"""

from ttsv.certification.certificates import (
    Certificates,
    LipschitzBound,
    assumed_certified_accuracy,
    assumed_lipschitz,
    certificates,
    certified_accuracy,
    lipschitz_bound,
)

__all__ = [
    "Certificates",
    "LipschitzBound",
    "assumed_certified_accuracy",
    "assumed_lipschitz",
    "certificates",
    "certified_accuracy",
    "lipschitz_bound",
]

"""Proofs about a network: a Lipschitz bound in pixels, and the images whose class no L2 attack of a radius changes.

The contract. Let f be the function that the weights define in exact arithmetic, in evaluation mode; what a
parametrization makes of weights counts as its own precision makes it.

- `lipschitz_bound` gives a `value` with |f(x) - f(y)| <= value max(|x - y|, 1e-5) for any two images of the shape, in
  the L2 norm of pixels; the 1e-5 is for softplus, which jumps. The bound is computed in float64, its rounding added.
- `certificates` gives radii with argmax f(y) = label for all |y - x| < radius. The logits at x itself are those of
  float64, and each margin loses twice what the model's own precision changes there, and at least 1e-12 of the logits.
  This is the one part that is measured, not proved; nothing is claimed of floating-point passes at other images.
- Refused, by a `ConfigError` that names it: a function or layer without a rule, a branch on a value, writing into a
  tensor that is seen elsewhere too, random numbers, compiled parts, what mixes the images of a batch, weights that are
  not finite, and every bound that a few passes refute.
- Trusted: that torch computes what it documents, and that code of the network that touches no tensor (a clock, a file,
  a global variable) does the same on every pass.

`trace` follows a network; `rules`, `normalization`, `layers` and `pooling` bound its functions, `linear_maps` its
linear maps. Layers, metrics, configurations and what they rest on may be imported, nothing of training.
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

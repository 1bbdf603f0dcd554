"""Metrics of a trained network; each works alone on any module that takes pixels in [0, 1].

Constraints, layers, models, data and configurations may be imported; nothing of training. Importing this package loads
no torch and no library of attacks or corruptions: what is asked of it does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ttsv.metrics.attacks.autoattack import autoattack
    from ttsv.metrics.calibration import expected_calibration_error
    from ttsv.metrics.corruption import corruption_accuracy
    from ttsv.metrics.cost import compression
    from ttsv.metrics.lipschitz import empirical_lipschitz

__all__ = ["autoattack", "compression", "corruption_accuracy", "empirical_lipschitz", "expected_calibration_error"]

_HOMES = {
    "autoattack": "attacks.autoattack",
    "compression": "cost",
    "corruption_accuracy": "corruption",
    "empirical_lipschitz": "lipschitz",
    "expected_calibration_error": "calibration",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

"""Evaluation of trained networks: one path, which trials and `ttsv evaluate` share.

`measure` is that path; `evaluate` takes a saved network through it; `ttsv.evaluation.sanity` looks for what cannot be
true; `ttsv.evaluation.protocol` says how it was measured; `ttsv.evaluation.artifacts` writes what is kept as files.
"""

from ttsv.evaluation.saved import evaluate
from ttsv.evaluation.stages import Measured, measure

__all__ = ["Measured", "evaluate", "measure"]

"""Evaluation of trained networks: one path, which trials and `ttsv evaluate` share.

`evaluate_network` is that path: it measures (`measure`), takes cost and spectra, says how (`protocol`) and where, and
its result writes the files (`artifacts`, `plots`). `trial_result` takes a trial's network through it, `evaluate` a
saved one, which `load_saved` reads; `sanity` looks for what cannot be true.

Every room of the library but `trial` may be imported.
"""

from ttsv.evaluation.evaluated import Evaluated, evaluate_network
from ttsv.evaluation.saved import evaluate, load_saved
from ttsv.evaluation.stages import Measured, measure
from ttsv.evaluation.subject import EvaluationOptions, Subject

__all__ = [
    "Evaluated",
    "EvaluationOptions",
    "Measured",
    "Subject",
    "evaluate",
    "evaluate_network",
    "load_saved",
    "measure",
]

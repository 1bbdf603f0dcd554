"""From a configuration and a data set to trained weights, resumable to the same numbers after every epoch.

`loop` has the whole loop; `feed`, `optimizers`, `checkpoint` and `record` (what is noted of a training for those who
evaluate its network later) what it needs. Constraints, models, data, certified radii and what they rest on may be
imported, of metrics only accuracy and loss, and nothing of evaluation.
"""

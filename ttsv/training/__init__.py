"""From a configuration and a data set to trained weights, resumable to the same numbers after every epoch.

`loop` has the whole loop on one screen; `feed`, `optimizers`, `checkpoint` and `facts` (what is noted of a training for
those who evaluate its network later) what it needs. Nothing of evaluation beyond accuracy and loss may be imported.
"""

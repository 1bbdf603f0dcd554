"""Attacks on a network: AutoAttack by the official code, step by step and resumable, and PGD.

`record` says what an attack found, `state` keeps it on disk, `network` is what an attack sees of a model. Importing a
module loads no attack library; running an attack does.

What metrics may import may be imported, and the metrics beside it.
"""

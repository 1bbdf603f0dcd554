"""The paper as data (Senderovich et al., NeurIPS 2022): its numbers, its experiments as specs, its tables made anew.

`reference` has the printed rows and what is comparable, `recipes` how the networks are trained, `presets` the specs,
`reproduction` and `sheets` the tables. Leaderboards and specs may be imported.
"""

"""What a trial is: frozen dataclasses with a range and a meaning for every field, torch-free.

`trial` has the whole configuration and its fingerprint; `training`, `constraints` and `evaluation` are parts of it, and
`fields` is how ranges are declared and checked. Errors, and the plain-data catalogues of data sets and networks, may be
imported.
"""

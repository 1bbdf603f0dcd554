"""What a trial is: frozen dataclasses with a range and a meaning for every field, torch-free.

`trial` has the whole configuration and its fingerprint, `evaluation` the part that says what is measured, `fields`
how ranges are declared and checked. Errors, and the plain-data catalogues of data sets and networks, may be imported.
"""

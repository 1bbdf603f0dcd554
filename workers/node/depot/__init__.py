"""The head's data folder for machines that do not see it: its files travel through Ray.

`server` is the process beside the folder, `remote` its `Store` on the other nodes, `home` where a trial's files belong,
`courier` carries what a trial writes there while it trains, `data_sets` brings data sets.

The node's other modules may be imported, which know nothing of it, and what its room may; no database.
"""

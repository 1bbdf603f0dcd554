"""Leaderboards: cells ranked by their means over seeds, one board per protocol, and their exports.

`counted_results` says which results count, `cell_scores` keeps scores as they come in, `materialized` reads them,
`on_demand` adds up others; `metrics` says what ranks and how it is read, `missing` why cells have holes. Specs and the
database may be imported.
"""

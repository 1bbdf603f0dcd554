"""Specs of experiments: what may be posted, and the trials that it becomes. Pure functions, no database.

`spec` has the fields, `grid` expands them, `planner` makes canonical trials, `search` describes spaces to draw from,
`documents` reads JSON and YAML strictly; `states` are those of what a spec became. Only errors may be imported.
"""

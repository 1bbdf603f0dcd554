"""The process that runs trials, one after the other: no database, only messages to its driver and files in a folder.

`depot`, `node`, the service's storage and the library may be imported; what trains is imported when a trial runs.
"""

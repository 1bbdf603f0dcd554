"""One machine of a cluster: what it has, its processes, its part of Ray, and how it joins a head and leaves it.

`membership` is `ttsv node`, `probe` compares the machine with the head's before it joins, `observer` is the worker's
eye on all nodes, `notes` is what they leave for each other in Ray's head. `raylet` starts Ray, here and for the worker;
`cards` are the GPUs that one process books, `pulse` is by what a health check knows that it turns; `depot` brings files
to nodes that do not see the head's folder. No database is known here, and outside the depot Ray is imported by the
children `probe` and `observer` alone.

Hardware, the service's storage, settings and errors, data sets, and what the queue says of nodes as plain data may be
imported.
"""

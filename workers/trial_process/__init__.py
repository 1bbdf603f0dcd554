"""The process that runs trials, one after the other: no database, only messages to its driver and files in a folder."""

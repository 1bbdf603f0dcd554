"""The process that runs one claimed experiment: Ray Tune over its unfinished trials, and the one writer of results.

`__main__` is its loop; `tuner`, `search`, `callback`, `tensorboard` and `watchdog` are Tune's parts; `recorder` and
`lease_keeper` talk to the database.

`trial_process` and the rooms below it, the service's queue, experiments, specs and storage may be imported, no web.
"""

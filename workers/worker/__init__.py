"""The worker's process: it keeps one Ray cluster, claims experiments, and watches over the drivers that run them.

`poller` is its loop, `scheduler` divides the cluster among experiments, `drivers` are the processes that run one each,
`ray_cluster` is what it starts, `observation` what it knows of the cluster's nodes, `job_time` how long it may stay,
`single_machine` it and the API together; `webhooks` tells others what happened, `upkeep` removes what was deleted. No
torch and no Ray is imported in this process.

Every room below the command may be imported but `driver`, which it starts, and of the service all but API and pages.
"""

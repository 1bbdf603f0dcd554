"""The workers' side of the database: claims under leases, what drivers write and read of trials, a census of all.

Every write of a trial first locks its experiment's row under the lease's fence. Functions take a Session; callers
commit. Experiments, leaderboards (whose scores a result touches) and the database may be imported.
"""

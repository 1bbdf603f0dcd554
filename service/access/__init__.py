"""Who may do what: projects, keys, scopes and quotas. Functions take a Session; callers commit.

Of this package only specs' errors, settings and the database may be imported.
"""

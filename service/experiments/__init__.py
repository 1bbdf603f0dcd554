"""Experiments and trials as people see and change them: SQL on their tables, by subject.

`submission` makes experiments, `drafts` one of another, `actions` are what people do with them, `transitions` the
changes of state that workers make, too; `store`, `listing`, `epoch_points`, `epoch_spectra`, `artifacts`, `logs` read;
`events` says what happened, `subscriptions` and `webhooks` who is told. Functions take a Session; callers commit.
Leaderboards, access, specs and the database may be imported.
"""

"""What keeps an installation in order over the years: its schema, backups of it, and what of it goes.

`migrate` brings a database to the newest schema and fills what follows from its results. `home` has all who share a
database keep files in one place.
`files` is the only module here that touches the data folder, `rows` the only one that copies the database; `archive`
is the file that a backup is, which `backup` writes and `restore` reads: into the database that `target` is, and onto
the `shelves` where files of trials lie, by renames (`moves`) that are written down first.

Queue, experiments, leaderboards, access, the database and storage may be imported, neither API nor pages.
"""

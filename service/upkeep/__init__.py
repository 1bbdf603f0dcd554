"""What keeps an installation in order over the years: backups of it, and what of it goes.

`files` is the only module here that touches the data folder, `rows` the only one that copies the database; `archive`
is the file that a backup is, which `backup` writes and `restore` reads.

Queue, experiments, leaderboards, access, migrations, the database and storage may be imported, neither API nor pages.
"""

"""Alembic's entry: runs the migrations over the connection that `service.upkeep.migrate` hands in."""

from alembic import context

from service.database import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,  # SQLite changes a table by copying it
    compare_type=True,
)
with context.begin_transaction():
    context.run_migrations()

"""The schema's history (Alembic). `service.migrate` runs it; nothing else changes tables."""

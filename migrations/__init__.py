"""The schema's history (Alembic). `service.upkeep.migrate` runs it; nothing else changes tables."""

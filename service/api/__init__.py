"""The REST API: one module per resource; a route calls the store, nothing between."""

"""Examples in the API's schema, all from one run of the quickstart."""

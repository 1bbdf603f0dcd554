"""The REST API: one module per resource, whose routes call the rooms below and hold no SQL.

`http` has what every resource shares, `openapi_examples` what the schema shows. `submission` makes experiments for
several resources, `spec_warnings` says what a spec lacks and `dry_run` what it would become. The application puts it
together.

The rooms of the service below it may be imported, and of `ttsv` what is torch-free; the pages above it may not.
"""

"""The REST API: one module per resource, whose routes call the rooms below and hold no SQL.

`http` has what every resource shares, `openapi_examples` what the schema shows. The application puts it together.
"""

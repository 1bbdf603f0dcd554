"""Examples in the API's schema, all from one run of the quickstart.

Of the service only `http`'s form of an example may be imported.
"""

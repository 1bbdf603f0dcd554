"""What goes in and out of the API, as pydantic models: API, pages, client and the terminal share them.

Plain data of every room below may be imported; no HTTP.
"""

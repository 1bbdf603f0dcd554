"""The pages: the same store as the API's, read by people. Plain HTML that needs no script to be read."""

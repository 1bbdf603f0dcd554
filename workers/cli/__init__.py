"""The command `ttsv`: a module for each group of commands, and what they share.

`__main__` puts them together; `client_options` gives a command its client, `errors` says what its ending means,
`tables` how a terminal shows things. Modules import what they need when a command runs, so that `ttsv ls` is quick.

Every room may be imported but the API and the pages, which a command asks by the client.
"""

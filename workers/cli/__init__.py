"""The command `ttsv`: a module for each group of commands, and what they share.

`__main__` puts them together; `client_options` gives a command its client, `errors` says what its ending means,
`tables` how a terminal shows things. Modules import what they need when a command runs, so that `ttsv ls` is quick.
"""

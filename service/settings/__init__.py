"""What operators set of a process: the variables TTSV_* (`variables`), and the form of its logs (`logs`).

Of the service only storage and errors may be imported.
"""

from service.settings.variables import LEAST_FREE_BYTES, LogFormat, Settings, ports_of

__all__ = ["LEAST_FREE_BYTES", "LogFormat", "Settings", "ports_of"]

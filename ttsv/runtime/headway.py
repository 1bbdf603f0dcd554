"""How often the work of this process got on: whoever looks can tell what takes long from what hangs."""

_counted = 0


def get_on() -> None:
    """Counts one more step, pass through a network, or layer: something that no work takes long for."""
    global _counted
    _counted += 1


def headway() -> int:
    """Returns how often the work of this process got on until now."""
    return _counted

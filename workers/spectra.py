"""How a terminal shows the spectra of a saved network."""

from rich.table import Table

from ttsv.evaluation.saved_spectra import SavedSpectra


def spectra_table(spectra: SavedSpectra) -> Table:
    """One line per layer: what it is, how many singular values it has, largest, deciles and smallest."""
    deciles = [f"{100 - 10 * tenth} %" for tenth in range(1, 10)]
    table = Table("layer", "kind", "sees", "values", "largest", *deciles, "smallest")
    for column in table.columns[3:]:
        column.justify = "right"
    for layer in spectra.layers:
        numbers = [layer.largest, *reversed(layer.deciles), layer.smallest]
        table.add_row(
            layer.name or "(model)",
            layer.kind,
            "x".join(map(str, layer.input_size)) or "-",
            str(len(layer.values)),
            *(f"{number:.4g}" for number in numbers),
        )
    return table

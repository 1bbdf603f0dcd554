"""`ttsv spectrum`: the singular values of a saved network."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttsv.errors import ConfigError
from workers.cli.errors import plain_errors
from workers.cli.output import is_standard_output, write_text, written_whole

if TYPE_CHECKING:
    from rich.table import Table

    from ttsv.evaluation.saved_spectra import SavedSpectra


@plain_errors
def spectrum(
    model: Annotated[Path, typer.Argument(help="The model.safetensors that a trial left.")],
    input_size: Annotated[
        str | None, typer.Option(help="Pixels a side, such as 32, or per axis, 32x48, instead of the trial's.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every singular value here; - prints.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw every layer's spectrum here, .png or .svg.")] = None,
) -> None:
    """Show the singular values of every layer of a saved network."""
    from rich.console import Console

    from ttsv.evaluation.saved_spectra import saved_spectra

    spectra = saved_spectra(model, None if input_size is None else _pixels(input_size))
    if json_file is not None:
        write_text(json_file, json.dumps(spectra.to_json(), indent=1) + "\n")
    if plot is not None:
        from ttsv.evaluation.plots import plot_spectra

        if plot.suffix.lower() not in (".png", ".svg"):
            raise ConfigError("--plot", str(plot), "must end in .png or .svg")
        with written_whole(plot) as part:
            plot_spectra({layer.name: layer.values for layer in spectra.layers}, part, str(model))
    # The table is wide: on a narrow terminal, or into a file, its lines are kept whole.
    Console(width=max(Console().width, 160), stderr=is_standard_output(json_file)).print(spectra_table(spectra))


def _pixels(text: str) -> int | tuple[int, ...]:
    """`32`: a side; `32x48`: per axis."""
    sides = text.split("x")
    if not all(side.isascii() and side.isdigit() and int(side) for side in sides):
        raise ConfigError("--input-size", text, "must be pixels, a side or per axis, such as 32, 32x48 or 16x32x32")
    sizes = tuple(map(int, sides))
    return sizes if len(sizes) > 1 else sizes[0]


def spectra_table(spectra: "SavedSpectra") -> "Table":
    """One line per layer: what it is, how many singular values it has, largest, deciles and smallest."""
    from rich.table import Table

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

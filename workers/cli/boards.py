"""`ttsv leaderboard`, `ttsv compare` and `ttsv table`: results as tables for people, spreadsheets and papers."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from workers.cli.client_options import Json, connected, console, print_json

if TYPE_CHECKING:
    from service.client import Client
    from service.client.boards import BoardQuestion, CompareQuestion, TableQuestion

boards_app = typer.Typer()


class TextForm(StrEnum):
    """Forms of a table, by their names or as files end; by default one for people to read."""

    JSON = "json"
    CSV = "csv"
    MARKDOWN = "markdown"
    MD = "md"
    LATEX = "latex"
    TEX = "tex"


Form = Annotated[TextForm | None, typer.Option("--format", help="Print it in this form instead.")]


@boards_app.command()
@connected
def leaderboard(
    client: "Client",
    dataset: Annotated[str, typer.Argument(help="The data set's name.")],
    metric: Annotated[str, typer.Option(help="What the rows are ranked by.")] = "accuracy",
    metrics: Annotated[str | None, typer.Option(help="Metrics shown, separated by commas.")] = None,
    experiment: Annotated[int | None, typer.Option(help="Only this experiment's trials.")] = None,
    tag: Annotated[str | None, typer.Option(help="Only experiments with this tag.")] = None,
    model: Annotated[str | None, typer.Option(help="Only this network.")] = None,
    layer: Annotated[str | None, typer.Option(help="Only this kind of layer.")] = None,
    constraint: Annotated[str | None, typer.Option(help="Only this constraint.")] = None,
    rank: Annotated[str | None, typer.Option(help="Only this rank; none: not decomposed.")] = None,
    min_seeds: Annotated[int | None, typer.Option(help="Only cells with so many results.")] = None,
    where: Annotated[list[str], typer.Option(help="A condition: lr<=0.1; may be given several times.")] = [],  # noqa: B006
    sort: Annotated[str | None, typer.Option(help="A field to order by; - before it: largest first.")] = None,
    pivot: Annotated[str | None, typer.Option(help="Two fields: a matrix over both.")] = None,
    group_by: Annotated[str | None, typer.Option(help="Only the best cell of every value of this field.")] = None,
    pareto: Annotated[str | None, typer.Option(help="Metrics, separated by commas: marks who is best in all.")] = None,
    baseline: Annotated[str | None, typer.Option(help="A cell: differences to it are shown.")] = None,
    columns: Annotated[str | None, typer.Option(help="Fields shown, by commas; else those that differ.")] = None,
    hide: Annotated[str | None, typer.Option(help="Fields that are not shown.")] = None,
    limit: Annotated[int, typer.Option(help="Rows of every board.")] = 100,
    form: Form = None,
    as_json: Json = False,
) -> None:
    """Rank the cells of a data set by their mean over seeds."""
    from workers.cli.tables import show_leaderboard

    question: BoardQuestion = {
        "metric": metric,
        "metrics": metrics,
        "experiment_id": experiment,
        "tag": tag,
        "model": model,
        "layer": layer,
        "constraint": constraint,
        "rank": rank,
        "min_seeds": min_seeds,
        "where": where or None,
        "group_by": group_by,
        "sort": sort,
        "pivot": pivot,
        "pareto": pareto,
        "baseline": baseline,
        "columns": columns,
        "hide": hide,
        "limit": limit,
    }
    if as_json or form is TextForm.JSON:
        print_json(client.leaderboard(dataset, **question))
    elif form is not None:
        typer.echo(client.leaderboard_text(dataset, format=form.value, **question), nl=False)
    else:
        found = client.leaderboard(dataset, **question)
        show_leaderboard(console(), found, metrics.split(",") if metrics else ())


@boards_app.command()
@connected
def compare(
    client: "Client",
    named: Annotated[list[str], typer.Argument(help="Two to ten: by number, cells by fingerprint.", metavar="TRIAL")],
    experiments: Annotated[bool, typer.Option("--experiments", help="The numbers are those of experiments.")] = False,
    baseline: Annotated[str | None, typer.Option(help="To which differences are taken; else the first.")] = None,
    metrics: Annotated[str | None, typer.Option(help="Metrics shown, separated by commas; all: every one.")] = None,
    protocol: Annotated[str | None, typer.Option(help="Only results under this protocol.")] = None,
    limit: Annotated[int, typer.Option(help="Rows of matching configurations.")] = 100,
    form: Form = None,
    as_json: Json = False,
) -> None:
    """Compare trials, cells or experiments: what differs, results, differences with errors."""
    from workers.cli.tables import show_comparison

    numbers = all(one.isdecimal() and len(one) < 64 for one in named)
    question: CompareQuestion = {"baseline": baseline, "metrics": metrics, "protocol": protocol, "limit": limit}
    if numbers:
        question["experiments" if experiments else "trials"] = list(map(int, named))
    else:
        question["cells"] = named
    if as_json or form is TextForm.JSON:
        print_json(client.compare(**question))
    elif form is not None:
        typer.echo(client.compare_text(format=form.value, **question), nl=False)
    else:
        show_comparison(console(), client.compare(**question))


@boards_app.command()
@connected
def table(
    client: "Client",
    name: Annotated[str, typer.Argument(help="senderovich2022/table1 ... table4, or a figure's name.")],
    experiment: Annotated[int | None, typer.Option(help="Only this experiment's trials.")] = None,
    smoke: Annotated[bool, typer.Option(help="From an experiment's small stand-ins.")] = False,
    form: Form = None,
    as_json: Json = False,
) -> None:
    """Show a table of the paper beside what was measured here."""
    question: TableQuestion = {"experiment_id": experiment, "scale": "smoke" if smoke else None}
    if as_json or form is TextForm.JSON:
        print_json(client.table(name, **question))
    else:
        typer.echo(client.table_text(name, format=(form or TextForm.MARKDOWN).value, **question), nl=False)

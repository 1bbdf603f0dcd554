"""`ttsv doctor`: what whoever runs the service can get wrong, and the command that mends it.

`doctor_service`, `doctor_files` and `doctor_machine` look, `findings` says what a finding is. Nothing is changed and
nothing made.
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated

import typer

from workers.cli.client_options import Json
from workers.cli.errors import plain_errors
from workers.cli.findings import Check, Finding, Status, worst

_MARKS = {Status.OK: typer.colors.GREEN, Status.WARNING: typer.colors.YELLOW, Status.WRONG: typer.colors.RED}

Look = Callable[[], list[Finding]]


@plain_errors
def doctor(
    deep: Annotated[
        bool, typer.Option("--deep", help="Also read data sets and a SQLite file whole, and compare checksums.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Look at everything that can be wrong with an installation, and name the command that mends it.

    Ends with 1 if anything is wrong; warnings alone end with 0.
    """
    findings = examine(deep=deep)
    bad = worst(findings)
    if as_json:
        typer.echo(json.dumps({"status": bad, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _print(findings)
    if bad is Status.WRONG:
        raise typer.Exit(1)


def examine(*, deep: bool) -> list[Finding]:
    """All findings, in the order in which they are best mended. What waits for others waits beside the rest."""
    from concurrent.futures import ThreadPoolExecutor

    from workers.cli import doctor_files as files
    from workers.cli import doctor_machine as machine
    from workers.cli import doctor_service as service

    settings, findings = service.look_at_settings()
    looks: dict[str, Look] = {}
    if settings is None:
        hidden = "disk, database, workers, Ray and data sets are not looked at until the settings can be read"
        findings.append(Check("settings").warning(hidden, "ttsv doctor  # again, once they are mended"))
    else:
        looks = {
            "disk": lambda: files.look_at_disk(settings),
            "database": lambda: service.look_at_database(settings, deep=deep),
            "data": lambda: files.look_at_data(settings, deep=deep),
            "ray": lambda: machine.look_at_ray(settings),
        }
    looks |= {
        "gpus": lambda: machine.look_at_gpus(settings),
        "versions": machine.look_at_versions,
        "api": service.look_at_api,
    }
    if not _runs_trials():
        says = "no trial can run here, as in the image of the API, which has neither torch nor Ray: see where they run"
        findings.append(Check("trials").warning(says, "docker compose exec worker ttsv doctor"))
        looks = {name: look for name, look in looks.items() if name not in ("data", "ray", "gpus")}
    with ThreadPoolExecutor(len(looks)) as pool:
        pending = [pool.submit(_safely, name, look) for name, look in looks.items()]
        return [*findings, *(finding for done in pending for finding in done.result())]


def _runs_trials() -> bool:
    """Whether anything of what trials need is installed: of a part that is missing the looks say so."""
    from importlib.util import find_spec

    for name in ("torch", "ray"):
        with suppress(ModuleNotFoundError):
            if find_spec(name) is not None:
                return True
    return False


def _safely(name: str, look: Look) -> list[Finding]:
    """What a look finds; one that fails hides none of the others."""
    try:
        return look()
    except Exception as error:
        says = f"could not be looked at: {type(error).__name__}: {error}"
        return [Check(name).wrong(says, f"ttsv doctor --json  # report this of `{name}`, it is an error of ours")]


def _print(findings: list[Finding]) -> None:
    width = max(len(finding.check) for finding in findings)
    color = False if os.environ.get("NO_COLOR") else None  # None: in a terminal
    for finding in findings:
        mark = typer.style(f"{finding.status:<7}", fg=_MARKS[finding.status], bold=finding.status is not Status.OK)
        typer.echo(f"{mark}  {finding.check:<{width}}  {finding.says}", color=color)
        if finding.mend is not None:
            typer.echo(f"{'':{width + 11}}{typer.style(finding.mend, bold=True)}", color=color)
    count = [sum(finding.status is status for finding in findings) for status in (Status.WRONG, Status.WARNING)]
    typer.echo(f"\n{count[0]} wrong, {count[1]} to look at, {len(findings) - sum(count)} in order")

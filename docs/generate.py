"""Writes the reference pages from the code (`make docs`): spec, settings, command line, metrics, operations of the API.

    python docs/generate.py [--into FOLDER]

Beside them it writes openapi.json, which is not kept in the repository: a running service gives it.
"""

import argparse
import dataclasses
import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import typer
from typer.cli import get_docs_for_click

from service.main import create_app
from service.settings import Settings
from ttsv.config.fields import FieldInfo
from ttsv.config.trial import field_infos
from ttsv.metrics.catalog import METRICS
from ttsv.results import EpochMetrics, TrialResult
from workers.cli.__main__ import app

HERE = Path(__file__).parent

SPEC = """# The spec

A spec is a JSON object, or the YAML that says the same; unknown keys are refused.

| key | meaning | default |
| --- | --- | --- |
| `spec_version` | 1 or 2; version 1 has no `trials`, `repeat`, `search`, `scheduler`, `timeout_seconds`, `tags` | 2 |
| `name` | for people; need not be unique | required |
| `base` | fields that all trials share (nested: `{{"training": {{"lr": 0.05}}}}`) | `{{}}` |
| `grid` | axes by dotted path (`"training.lr": [0.05, 0.1]`), each a non-empty list | `{{}}` |
| `variants` | partial trials, each laid over `base`; the grid multiplies every one of them | `[]`: `base` alone |
| `trials` | partial trials, each laid over `base`: one trial each, besides the grid's | `[]` |
| `repeat` | each trial so many times, with the seeds that follow its own; not with a `seed` axis | 1 |
| `search` | trials that Ray Tune's searchers find (below), instead of the four above | null |
| `scheduler` | `{{"type": "fifo"}}`, or `{{"type": "asha"}}` (below) | every trial runs to its end |
| `resources` | `cpus`, `gpus`, `memory_gib` that Ray reserves for a trial; fractions of a GPU share it | 1, 0, none |
| `timeout_seconds` | an attempt that takes longer, its waits apart, is killed; its trial fails | null: no limit |
| `hung_after` | a trial silent, and without a step, for so many seconds is tried again | null: by its own pace |
| `max_concurrent_trials` | at most so many trials at a time | null: as many as fit |
| `order` | `grid`, `random`, or `seeds-last`: one seed of every cell first | `grid` |
| `priority` | -1000 to 1000, higher runs first among one's own ([shares](shares.md)) | 0 |
| `preempt` | whether running trials give way to others at their newest checkpoint | false |
| `tags` | words by which experiments are found | `[]` |
| `notes` | free text | empty |

A name that is no field is refused with the nearest one (`lr` is `training.lr`), a value of another kind with what to
write: `milestones: 1` is `[1]`, and `constraint: null` is `"none"`, a word.

A field of `grid` stands neither in `base` nor in a variant; a variant's field replaces that of `base`. All
points together are at most `TTSV_MAX_TRIALS`. `ttsv presets` has the paper's tables and figures as specs.

## Searches and schedulers

`search`: `algorithm` (`random` or `optuna`), `trials` (so many at most), `space` (dotted paths, each with
`{{"uniform": [low, high]}}`, `{{"loguniform": [low, high]}}`, `{{"int": [low, high]}}`, both included, or
`{{"choice": [...]}}`), `metric` (`val_accuracy` or `val_loss`, after a trial's last epoch), `seed`. A point that was
tried before is not tried again. The event `trial_suggested` has each trial's point.

`scheduler` of type `asha`: trials are compared by `metric` after `grace_epochs` (1) and each time that `reduction` (4)
times as many epochs are done, up to `max_epochs`; those that are not among the best 1 / `reduction` of all that came as
far become `early_stopped`. Such a trial has its epochs and no result, and counts on no leaderboard.

## Fields of a trial

| field | meaning | values | default |
| --- | --- | --- | --- |
{fields}

## Which trials become one

Fields without effect are reset before trials are compared: `layer: "tt"` without a rank is a dense network (`"soc-tt"`
one of SOC layers); a network without TT layers has no rank, no frames and no `lambda_ort`, and frames held orthonormal
have no `lambda_ort`; without a `delta`, or with another constraint than `clip`, nothing is clipped and `clipping`
means nothing, and likewise `division` without a target; `clipping.operator` is that of `rescale`; `milestones` and
`gamma` belong to the schedule `multistep`, which is `constant` without a milestone before the last epoch; `mean` and
`std` of equal values are one value, and of 0.5 those of every data set, however they are written; `momentum` and
`nesterov` belong to the optimizer `sgd`, `amsgrad` and `eps` to the others.
"""

SETTINGS = """# Settings

Environment variables of the service and its workers.

| variable | meaning | default |
| --- | --- | --- |
{settings}

`ttsv` reads `TTSV_URL` (default `http://127.0.0.1:8000`) to find the service. A worker joins the Ray cluster at
`RAY_ADDRESS` if that is set, and starts one of its own otherwise.

`TTSV_FAULTS` and `TTSV_FAULTS_ONCE` have processes killed, failed or held up at named
[points](reliability.md#fault-points): to try what happens then, and for nothing else.

## In Docker

`docker compose` takes settings from its environment, or from a file `.env` beside the compose file, and gives API,
worker and [node](nodes.md) each those that it reads. What is not set there has its default; an empty value is a value,
which numbers refuse. These are not passed on:

| variable | what to do |
| --- | --- |
| `TTSV_DATA_DIR` | the volume `data` is the data folder; on a node a folder can be, which `TTSV_DATA` names |
| `TTSV_DATABASE_URL`, `TTSV_DATABASE_PASSWORD_FILE` | the database is the one of the compose file |
| `TTSV_HOST`, `TTSV_PUBLISHED` | `TTSV_BIND` is the address at which `TTSV_PORT` is published |
| `TTSV_TRUST_NETWORK` | say it in an override file, where only a proxy reaches what is published |
| `TTSV_HEAD_ADDRESS`, `TTSV_HEAD_PORT`, `TTSV_NODE_PORTS` | a worker has them by `docker/head.yml` |
| `TTSV_SHARED_DATA`, `TTSV_WEBHOOK_LOOPBACK` | likewise: there it is in the machine's own network |
| `RAY_ADDRESS` | run the worker without Docker, on a machine of that cluster |

A file or folder that a setting names has to be mounted under that path: the folder of
[`TTSV_STORAGE`](nodes.md#a-store), the secret of [webhooks](webhooks.md).
"""

METRICS_PAGE = """# Metrics

Every column of a trial's result, as it is stored and as the API gives it: fractions in [0, 1], seconds, bytes. Tables
for people print the unit of the third column. All of them are of the **test** images, which no choice has seen, unless
the protocol says otherwise. A column is null where the trial's `evaluation` did not ask for it. What decides whether
two numbers may be compared, beside data set and split, is the part of the [protocol](protocols.md) named in the fifth
column.
{groups}

## Per epoch

`GET /v1/trials/{{id}}/metrics` has, for every epoch, {epochs}. The columns `train_*` are means over the epoch's batches
while the weights change, `train_loss` without the orthogonal loss; `val_*` are measured after the epoch on what
`training.validation` names; `ort_loss` is the orthogonal loss, unweighted, null without free frames; `lr` is that of
the epoch's first step; `seconds` are those of its steps, `constraint_seconds` the part of the constraint.

`GET /v1/trials/{{id}}/spectra/epochs` has quantiles of every layer's singular values where `training.spectra_every`
asked for them: `values` right after the last projection of an epoch (at its end, where there was none), `before` right
before.
"""


API = """# The operations of the API

A running service gives their schema, with an example for each, as `/openapi.json` and shows it at `/docs`; `make docs`
writes it beside this page. The last column begins the SHA-256 of what the schema says of an operation, bodies and
answers included: where it changes, so does what clients see.

| operation | what it does | name | schema |
| --- | --- | --- | --- |
{operations}

SHA-256 of the whole schema (compact JSON, sorted keys): `{sha256}`.
"""


def schema() -> dict[str, Any]:
    """The OpenAPI schema of the service with its default settings."""
    with tempfile.TemporaryDirectory() as folder:
        return create_app(Settings(data_dir=Path(folder))).openapi()


def pages() -> dict[str, str]:
    """Name of a page -> what it should hold."""
    fields = "\n".join(_field_row(info) for info in field_infos().values())
    settings = "\n".join(
        f"| `TTSV_{name.upper()}` | {info.description} | {'' if info.default is None else f'`{info.default}`'} |"
        for name, info in Settings.model_fields.items()
    )
    return {
        "spec.md": SPEC.format(fields=fields),
        "settings.md": SETTINGS.format(settings=settings),
        "metrics.md": metrics_page(),
        "cli.md": _command_line(),
        "api.md": _operations(schema()),
    }


def _operations(document: dict[str, Any]) -> str:
    rows = [
        f"| `{method.upper()} {path}` | {operation['summary']} | `{operation['operationId']}` "
        f"| `{_sha256([operation, *_reached(operation, document).items()])[:12]}` |"
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    return API.format(operations="\n".join(rows), sha256=_sha256(document))


def _reached(part: Any, document: dict[str, Any]) -> dict[str, Any]:
    """The components that a part of the schema refers to, and those that they refer to, by reference."""
    found: dict[str, Any] = {}
    todo = [part]
    while todo:
        for reference in re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(todo.pop())):
            if reference not in found:
                component: Any = document
                for name in reference.split("/"):
                    component = component[name]
                found[reference] = component
                todo.append(component)
    return dict(sorted(found.items()))


def _sha256(part: Any) -> str:
    return hashlib.sha256(json.dumps(part, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _field_row(info: FieldInfo) -> str:
    default = "required" if info.default is dataclasses.MISSING else f"`{json.dumps(info.default)}`"
    return f"| `{info.path}` | {info.doc} | {_values(info)} | {default} |"


def _values(info: FieldInfo) -> str:
    schema = info.schema()
    if "enum" in schema:
        return ", ".join(f"`{name}`" for name in schema["enum"])
    if "anyOf" in schema and info.types == (str,):
        return str(info.check and info.check.fix("")).removeprefix("must be ")
    if "anyOf" in schema:
        return "; or ".join(map(_words, schema["anyOf"]))
    words = _words(schema | {"type": _NAMES[info.types[0]]})
    return words + ("; or null" if type(None) in info.types else "")


def metrics_page() -> str:
    """Every column of a result: metrics by their sections, and what stands beside them."""
    sections: dict[str, list[str]] = {}
    for info in METRICS.values():
        row = _metric_row(info.name, info.definition, info.title, info.best, info.protocol, info.source)
        sections.setdefault(info.group, []).append(row)
    sections["Beside the numbers"] = [
        _metric_row(field.name, shown="", best="", **field.metadata)
        for field in dataclasses.fields(TrialResult)
        if field.name not in METRICS
    ]
    text = ""
    for title, rows in sections.items():
        text += f"\n## {title}\n\n| column | definition | in tables | best | protocol | source |\n"
        text += "| --- | --- | --- | --- | --- | --- |\n" + "".join(rows)
    unserved = ("epochs", "spectra")  # the trial's, and what has a resource of its own
    epochs = ", ".join(f"`{field.name}`" for field in dataclasses.fields(EpochMetrics) if field.name not in unserved)
    return METRICS_PAGE.format(groups=text.rstrip("\n"), epochs=epochs)


def _metric_row(name: str, definition: str, shown: str, best: str, protocol: str, source: str) -> str:
    return f"| `{name}` | {definition} | {shown} | {best} | {protocol and f'`{protocol}`'} | {source} |\n"


def _command_line() -> str:
    """Typer's own description of every command."""
    command = typer.main.get_command(app)
    text: str = get_docs_for_click(obj=command, ctx=typer.Context(command), name="ttsv", title="The command line")
    return text.replace("```console\n$ ", "```text\n").rstrip("\n") + "\n"


_NAMES = {int: "integer", float: "number", bool: "boolean", tuple: "array"}
_READ = {"integer": "whole number", "number": "number", "boolean": "true or false", "null": "null"}


def _words(schema: dict[str, Any]) -> str:
    if schema["type"] == "array":
        return "list; each: " + _words(schema["items"])
    words = [_READ[schema["type"]]]
    words += [f"at least {schema['minimum']:g}"] if "minimum" in schema else []
    words += [f"above {schema['exclusiveMinimum']:g}"] if "exclusiveMinimum" in schema else []
    words += [f"below {schema['exclusiveMaximum']:g}"] if "exclusiveMaximum" in schema else []
    words += [f"at most {schema['maximum']:.15g}"] if "maximum" in schema else []
    return ", ".join(words)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--into", type=Path, default=HERE)
    into = parser.parse_args().into
    document = json.dumps(schema(), indent=1, sort_keys=True) + "\n"
    for name, text in {**pages(), "openapi.json": document}.items():
        (into / name).write_text(text)

"""Writes the reference pages from the code: docs/spec.md, docs/settings.md, docs/openapi.json (`make docs`)."""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from service.main import create_app
from service.settings import Settings
from ttsv.config import field_infos
from ttsv.fields import FieldInfo

HERE = Path(__file__).parent

SPEC = """# The spec

A spec is a JSON object; unknown keys are refused.

| key | meaning | default |
| --- | --- | --- |
| `spec_version` | 1 | 1 |
| `name` | for people; need not be unique | required |
| `base` | fields that all trials share (nested: `{{"training": {{"lr": 0.05}}}}`) | `{{}}` |
| `grid` | axes by dotted path (`"training.lr": [0.05, 0.1]`), each a non-empty list | `{{}}` |
| `variants` | partial trials, each laid over `base`; the grid multiplies every one of them | `[]`: `base` alone |
| `resources` | `cpus` and `gpus` that Ray reserves for one trial; fractions of a GPU share it | 1 and 0 |
| `max_concurrent_trials` | at most so many trials at a time | null: as many as fit |
| `priority` | -1000 to 1000, higher is claimed first | 0 |
| `notes` | free text | empty |

A field of `grid` stands neither in `base` nor in a variant; a variant's field replaces that of `base`. Variants times
grid have at most `TTSV_MAX_TRIALS` points. `ttsv presets` has the paper's tables and figures as specs.

## Fields of a trial

| field | meaning | values | default |
| --- | --- | --- | --- |
{fields}

## Which trials become one

Fields without effect are reset before trials are compared: `layer: "tt"` without a rank is a dense network (`"soc-tt"`
one of SOC layers); a network without TT layers has no rank, no frames and no `lambda_ort`, and frames held orthonormal
have no `lambda_ort`; without a `delta`, or with another constraint than `clip`, nothing is clipped and `clipping`
means nothing, and likewise `division` without a target; `milestones` and `gamma` belong to the schedule `multistep`,
`momentum` and `nesterov` to the optimizer `sgd`, `amsgrad` and `eps` to the others.
"""

SETTINGS = """# Settings

Environment variables of the service and its workers.

| variable | meaning | default |
| --- | --- | --- |
{settings}

`ttsv` reads `TTSV_URL` (default `http://127.0.0.1:8000`) to find the service. A worker joins the Ray cluster at
`RAY_ADDRESS` if that is set, and starts one of its own otherwise.
"""


def pages() -> dict[Path, str]:
    """File -> what it should hold."""
    with tempfile.TemporaryDirectory() as folder:
        document = create_app(Settings(data_dir=Path(folder))).openapi()
    fields = "\n".join(_field_row(info) for info in field_infos().values())
    settings = "\n".join(
        f"| `TTSV_{name.upper()}` | {info.description} | {'' if info.default is None else f'`{info.default}`'} |"
        for name, info in Settings.model_fields.items()
    )
    return {
        HERE / "spec.md": SPEC.format(fields=fields),
        HERE / "settings.md": SETTINGS.format(settings=settings),
        HERE / "openapi.json": json.dumps(document, indent=1, sort_keys=True) + "\n",
    }


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
    for path, text in pages().items():
        path.write_text(text)

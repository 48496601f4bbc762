#!/usr/bin/env bash
# soak.sh SECONDS: half of the time `kill -9` of a loaded server (at least 200 times), half of it
# simulated crashes. What fails prints how to see it again.
set -euo pipefail
cd "$(dirname "$0")/.."
half=$(($1 / 2))

echo "== kill -9 under load, at least 200 rounds and $half s"
DBS_KILL_ROUNDS=${ROUNDS:-200} DBS_KILL_SECONDS=$half \
    cargo test --locked --release -p dbs-cli --test kill -- --nocapture
echo "== simulation, $half s"
cargo run --locked --release -p dbs-sim -- soak --seconds "$half"

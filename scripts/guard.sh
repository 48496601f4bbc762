#!/usr/bin/env bash
# guard.sh [accept]: holds what requests cost to benches/guard/baseline.json, or makes a new one.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# -eq 0 ] && ! command -v valgrind >/dev/null; then
    echo "SKIPPED guard of the hot path: needs valgrind (apt-get install valgrind)"
    exit 0
fi
# Flags of one's own make other code.
unset RUSTFLAGS
exec "${CARGO:-cargo}" run -q --locked --profile guard -p dbs-guard -- "$@"

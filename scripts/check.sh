#!/usr/bin/env bash
# check.sh CRATE [TEST...]: what a change in one crate must pass before anything else: format, clippy, and the tests of
# the crate, or those whose programs are named: `lib`, or a folder or file in its `tests`.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
if [ $# -eq 0 ]; then
    echo "which crate? make check CRATE=$("$cargo" metadata --no-deps --format-version 1 \
        | grep -o '"name":"[a-z-]*","version"' | cut -d'"' -f4 | paste -sd'|')" >&2
    exit 2
fi
crate=$1
shift
only=()
for test in "$@"; do
    if [ "$test" = lib ]; then only+=(--lib); else only+=(--test "$test"); fi
done
"$cargo" fmt -p "$crate" --check
"$cargo" clippy --locked -p "$crate" --all-targets -q -- -D warnings
"$cargo" test --locked -p "$crate" "${only[@]}"
echo "$crate passed, in $SECONDS s"

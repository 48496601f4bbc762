#!/usr/bin/env bash
# test.sh: everything a change must pass. Warnings are errors here and nowhere else.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUSTFLAGS="${RUSTFLAGS:-} -D warnings" RUSTDOCFLAGS="${RUSTDOCFLAGS:-} -D warnings"
cargo=${CARGO:-cargo}

step() {
    printf '\n== %s (%s s)\n' "$1" "$SECONDS"
    shift
    "$@"
}

step "programs" scripts/programs.sh
step "format" "$cargo" fmt --all --check
step "clippy" "$cargo" clippy --locked --workspace --all-targets -q
step "documentation" "$cargo" doc --locked --workspace --no-deps --document-private-items -q
step "dependencies" scripts/deny.sh
step "tests" "$cargo" test --locked --workspace
printf '\nall passed in %s s\n' "$SECONDS"

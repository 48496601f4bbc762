#!/usr/bin/env bash
# test.sh: everything a change must pass. Warnings are errors here and nowhere else.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUSTFLAGS="${RUSTFLAGS:-} -D warnings" RUSTDOCFLAGS="${RUSTDOCFLAGS:-} -D warnings"
cargo=${CARGO:-cargo}
log=$(mktemp)
trap 'rm -f "$log"' EXIT

step() {
    printf '\n== %s (%s s)\n' "$1" "$SECONDS"
    shift
    "$@"
}

tests() {
    "$cargo" test --locked --workspace -- --show-output 2>&1 | tee -a "$log"
}

guard() {
    scripts/guard.sh 2>&1 | tee -a "$log"
}

manifests() {
    scripts/k8s.sh 2>&1 | tee -a "$log"
}

# With the `dbs` that the tests have just built; `make vm` takes static ones, and more time.
machine() {
    DBS=${CARGO_TARGET_DIR:-target}/debug/dbs LONGHORN=${CARGO_TARGET_DIR:-target}/debug/longhorn \
        scripts/vm/run.sh --quick 2>&1 | tee -a "$log"
}

step "programs" scripts/programs.sh
step "format" "$cargo" fmt --all --check
step "clippy" "$cargo" clippy --locked --workspace --all-targets -q
step "documentation" "$cargo" doc --locked --workspace --no-deps --document-private-items -q
step "dependencies" scripts/deny.sh
step "manifests" manifests
step "hot path" guard
step "tests" tests
step "virtual machine" machine
# What passing tests print is easily missed: these did not do what their names say.
if grep -iE '^skipped' "$log"; then
    printf 'the above was skipped; '
fi
printf 'all that ran passed, in %s s\n' "$SECONDS"

#!/usr/bin/env bash
# test.sh: everything a change must pass. Warnings are errors here and nowhere else.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUSTDOCFLAGS="${RUSTDOCFLAGS:-} -D warnings"
cargo=${CARGO:-cargo}
built=${CARGO_TARGET_DIR:-target}/debug
LOG=$(mktemp)
export LOG
trap 'rm -f "$LOG"' EXIT
# A machine this slow would not end in the time that continuous integration has.
deadline=4800

# step NAME MINUTES COMMAND...: no step can hang, or leave a process behind.
step() {
    local limit=$(($2 * 60)) rest=$((deadline - SECONDS))
    printf '\n== %s (%s s)\n' "$1" "$SECONDS"
    scripts/watched.sh $((limit < rest ? limit : rest)) "${@:3}"
}

scripts/watched-test.sh
step "programs" 10 scripts/programs.sh
step "format" 1 "$cargo" fmt --all --check
step "clippy" 20 "$cargo" clippy --locked --workspace --all-targets -q -- -D warnings
step "documentation" 10 "$cargo" doc --locked --workspace --no-deps --document-private-items -q
step "dependencies" 10 scripts/deny.sh
step "manifests" 1 scripts/k8s.sh
step "hot path" 15 scripts/guard.sh
step "tests" 50 "$cargo" test --locked --workspace -- --show-output
# With what the tests have just built, and the module beside it.
step "python" 15 env DBS_PYTHON_BUILD="--workspace --lib --tests" scripts/python.sh
# With the `dbs` that the tests have just built; `make vm` takes static ones, and more time.
step "virtual machine" 15 env DBS="$built/dbs" LONGHORN="$built/longhorn" scripts/vm/run.sh --quick
# What passing tests print is easily missed: these did not do what their names say.
if grep -iE '^skipped' "$LOG"; then
    printf 'the above was skipped; '
fi
printf 'all that ran passed, in %s s\n' "$SECONDS"

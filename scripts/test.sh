#!/usr/bin/env bash
# test.sh: everything a change must pass. Warnings are errors here and nowhere else.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUSTDOCFLAGS="${RUSTDOCFLAGS:-} -D warnings"
cargo=${CARGO:-cargo}
built=${CARGO_TARGET_DIR:-target}/debug
LOG=$(mktemp)
export LOG
beside=$(mktemp -d)
pid=
# A machine this slow would not end in the time that continuous integration has.
deadline=4800

# failures: what tests said that failed, once more and last: all of them have printed much since.
failures() {
    printf '\n== failed, in %s s\n' "$SECONDS"
    awk '/^failures:$/ { shown = 1 } /^test result: / { shown = 0 } shown; /^error: .*(failed|`)/' "$LOG" | tail -n 300
}

# What fails here would be how the script ends, whatever it has found.
leave() {
    local code=$?
    set +e
    [ -z "$pid" ] || kill "$pid" 2>/dev/null
    [ "$code" -eq 0 ] || failures
    rm -rf "$LOG" "$beside"
}
trap leave EXIT

# step NAME MINUTES COMMAND...: no step can hang, or leave a process behind. The minutes are for a machine that
# others load as well: many times what a step takes.
step() {
    local limit=$(($2 * 60)) rest=$((deadline - SECONDS))
    printf '\n== %s (%s s)\n' "$1" "$SECONDS"
    scripts/watched.sh $((limit < rest ? limit : rest)) "${@:3}"
}

# beside NAME MINUTES COMMAND...: a step that goes on while others do; one at a time.
beside() {
    local limit=$(($2 * 60)) rest=$((deadline - SECONDS))
    rm -f "$beside/log"
    LOG=$beside/log scripts/watched.sh $((limit < rest ? limit : rest)) "${@:3}" >"$beside/out" 2>&1 &
    pid=$!
    name=$1
}

# joined: the end of the step beside, and what it said.
joined() {
    local code=0
    printf '\n== %s (until %s s)\n' "$name" "$SECONDS"
    wait "$pid" || code=$?
    pid=
    cat "$beside/out"
    cat "$beside/log" >>"$LOG"
    return "$code"
}

scripts/watched-test.sh
step "programs" 35 scripts/programs.sh
step "circles" 10 scripts/circles.py
step "format" 15 "$cargo" fmt --all --check
# It counts instructions, so that others may work beside it: it is built by one compiler at a time, mostly.
beside "hot path" 60 scripts/guard.sh
step "clippy" 50 "$cargo" clippy --locked --workspace --all-targets -q -- -D warnings
step "documentation" 30 "$cargo" doc --locked --workspace --no-deps --document-private-items -q
step "dependencies" 20 scripts/deny.sh
step "manifests" 10 scripts/k8s.sh
joined
step "tests" 70 scripts/tests.sh
# With the `dbs` that the tests have just built; `make vm` takes static ones, and more time.
beside "virtual machine" 60 env DBS="$built/dbs" LONGHORN="$built/longhorn" scripts/vm/run.sh --quick
# With what the tests have just built, and the module beside it.
step "python" 60 env DBS_PYTHON_BUILD="--workspace --lib --tests" scripts/python.sh
joined
# What passing tests print is easily missed: these did not do what their names say.
if grep -iE '^skipped' "$LOG"; then
    printf 'the above was skipped; '
fi
printf 'all that ran passed, in %s s\n' "$SECONDS"

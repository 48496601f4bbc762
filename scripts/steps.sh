#!/usr/bin/env bash
# steps.sh, sourced by lint.sh and test.sh: runs their steps so that none can hang, and prints failures again at the end.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cargo=${CARGO:-cargo}
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

# passed: the end of it all. What passing steps print is easily missed: these did not do what their names say.
passed() {
    if grep -iE '^skipped' "$LOG"; then
        printf 'the above was skipped; '
    fi
    printf 'all that ran passed, in %s s\n' "$SECONDS"
}

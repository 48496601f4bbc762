#!/usr/bin/env bash
# watched-test.sh: does watched.sh find what it is there for?
set -uo pipefail
watched=$(dirname "$0")/watched.sh
export WATCHED_GRACE=2
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# expect CODE TEXT SECONDS COMMAND...
expect() {
    local code=0 text=$2
    LOG=$log "$watched" "$3" bash -c "$4" >"$log.out" 2>&1 || code=$?
    if [ "$code" -ne "$1" ] || ! grep -q "$text" "$log.out"; then
        echo "watched.sh $3 bash -c '$4': exit code $code, not $1, or without '$text':"
        cat "$log.out"
        exit 1
    fi
    rm -f "$log.out"
}

began=$SECONDS
expect 0 fine 200 'echo fine'
expect 3 wrong 200 'echo wrong; exit 3'
expect 1 'left behind' 200 'sleep 1000 & echo gone'
expect 1 'left behind' 200 'setsid sleep 1000 >/dev/null 2>&1 & echo gone'
expect 124 'not done after 1 s' 1 'echo begun; sleep 1000'
grep -q fine "$log" && [ $((SECONDS - began)) -lt 900 ] || {
    echo "watched.sh: slow, or nothing logged"
    exit 1
}

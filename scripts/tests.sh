#!/usr/bin/env bash
# tests.sh: all tests of the workspace. Their programs run beside each other, as most of them wait for sockets, disks and
# processes; each one's output is printed when it has ended. JOBS: how many at a time, by default one more than there
# are cores.
set -uo pipefail
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
jobs=${JOBS:-$(($(nproc) + 1))}
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

# Those that take longest come first, so that none of them is left over at the end.
longest="thresholds sim histories process allocations quick sabotage agent path damage faults kill engine interleave view mount powercut"

# One that hangs is ended (exit code 124): the slowest takes some 250 s on two idle cores.
limit=1500

# run DIRECTORY PROGRAM: as `cargo test` does it. Exit code 255 would end xargs.
run() {
    local name begun=$SECONDS code=0
    name=$(basename "$2")
    # Simulations give back and ask for the same memory all the time: a tenth of their time if it goes to the kernel meanwhile.
    case $2 in */sim-* | */interleave-* | */thresholds-* | */histories-* | */stress-*)
        export MALLOC_TRIM_THRESHOLD_=$((1 << 30)) MALLOC_MMAP_THRESHOLD_=$((64 << 20)) ;;
    esac
    (cd "$1" && CARGO_MANIFEST_DIR=$1 timeout "$limit" "$2" --show-output) >"$place/$name" 2>&1 || code=$?
    (
        flock 9
        printf '     Running %s (%s), %s s\n' "$name" "$(basename "$1")" "$((SECONDS - begun))"
        cat "$place/$name"
        if [ "$code" -ne 0 ]; then
            printf 'error: exit code %s of `%s`\n' "$code" "$2" | tee -a "$place/failed"
        fi
    ) 9>>"$place/lock"
}
export -f run
export limit place

# Messages of cargo: of each artifact, the manifest of its package and the program, if it is one of tests.
"$cargo" test --locked --workspace --no-run --message-format=json >"$place/messages" || exit
sed -n '/"overflow_checks":[a-z]*,"test":true}/ s/.*"manifest_path":"\([^"]*\)\/Cargo.toml".*"executable":"\([^"]*\)".*/\1\t\2/p' \
    "$place/messages" >"$place/all"
for name in $longest; do
    grep "/$name-[0-9a-f]*$" "$place/all"
done >"$place/ordered"
grep -vxFf "$place/ordered" "$place/all" >>"$place/ordered"
xargs -d '\n' -P "$jobs" -I '{}' bash -c 'run "${0%%	*}" "${0##*	}"' '{}' <"$place/ordered" || exit
"$cargo" test --locked --workspace --doc || echo 'error: doc tests failed' | tee -a "$place/failed"
! [ -e "$place/failed" ]

#!/usr/bin/env bash
# coverage.sh [--missing]: which lines of format, recovery and parsers run, by the tests and the fuzzer's
# corpus together; --missing names those that do not. Tests inside a file are not counted. Everything is
# built once more into target/coverage (or DBS_COVERAGE_DIR), and takes a quarter of an hour.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
cargo=${CARGO:-cargo}
missing=${1:-}
built=${DBS_COVERAGE_DIR:-$root/target/coverage}
raw=$built/raw

tools=$(rustc --print sysroot)/lib/rustlib/$(rustc -vV | sed -n 's/^host: //p')/bin
[ -x "$tools/llvm-cov" ] || rustup component add llvm-tools
mkdir -p "$built"
rm -rf "$raw"
export CARGO_TARGET_DIR=$built CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_OPT_LEVEL=1
export RUSTC_WORKSPACE_WRAPPER=$root/scripts/instrumented.sh
export LLVM_PROFILE_FILE=$raw/%p-%m.profraw
# What is counted is which lines run, not how often: fewer images than usual.
export DBS_SIM_IMAGES=${DBS_SIM_IMAGES:-5000}

# What reaches the areas below.
suites=(
    "-p dbs-core --tests"
    "-p dbs-sim --lib --test histories --test suite"
    "-p dbs-nbd --lib --test nbd"
    "-p dbs-transfer --lib"
    "-p dbs-control --lib"
    "-p dbs-backup --lib --test suite"
    "-p longhorn-wire --lib"
    "-p longhorn-data --lib --test dataconn"
    "-p longhorn-sync --lib --test ssync"
    "-p longhorn-controller --lib --test path --test sim"
    "-p dbs-fuzz-targets --tests"
)
objects=()
for suite in "${suites[@]}"; do
    read -ra words <<<"$suite"
    printf '== cargo test %s\n' "$suite"
    while read -r program; do
        objects+=(--object "$program")
    done < <("$cargo" test -q --locked "${words[@]}" --no-run --message-format=json |
        grep -o '"executable":"[^"]*"' | cut -d'"' -f4)
    log=$built/log
    if ! "$cargo" test -q --locked "${words[@]}" </dev/null >"$log" 2>&1; then
        tail -n 60 "$log"
        exit 1
    fi
done

# A process that was killed may have left a file cut short.
"$tools/llvm-profdata" merge -sparse --failure-mode=all -o "$built/profile" "$raw" 2>"$built/log"
"$tools/llvm-cov" export -format=lcov -instr-profile="$built/profile" -skip-expansions \
    -ignore-filename-regex='/(\.cargo|rustc|rustup|target)/' "${objects[@]}" >"$built/lines" 2>>"$built/log"
awk -v root="$root/" -v missing="$missing" -f scripts/coverage.awk "$built/lines"

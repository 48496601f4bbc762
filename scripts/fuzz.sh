#!/usr/bin/env bash
# fuzz.sh SECONDS [TARGET...]: each target for so long, from its corpus on, under AddressSanitizer; then
# a table of what was done. What fails is kept in fuzz/artifacts, and printed with how to see it again.
# fuzz.sh merge [TARGET...]: makes the committed corpus the fewest inputs, of it and of what was found
# since, that reach all that both reach.
# Needs cargo-fuzz, which it installs, and a nightly toolchain, or makes do with the pinned one.
# SANITIZER=none looks at more inputs, for panics alone.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=$1
shift
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(image repair restore journal ops v1 backup nbd control stream vhost dataconn ssync)

command -v cargo-fuzz >/dev/null || cargo install cargo-fuzz --locked
if rustup toolchain list 2>/dev/null | grep -q '^nightly'; then
    export RUSTUP_TOOLCHAIN=nightly
else
    export RUSTC_BOOTSTRAP=1
fi
# A large quarantine of freed memory makes every input touch new pages, and long stacks of who took it
# cost more than taking it.
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=0:quarantine_size_mb=1:malloc_context_size=4}
built=${CARGO_TARGET_DIR:-target}/fuzz
programs=$built/$(rustc -vV | sed -n "s/^host: //p")/release
# Our limits for an input and for the process.
limits=(-timeout=10 -rss_limit_mb=1024 -malloc_limit_mb=512 -detect_leaks=0)
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# Only what a target needs is compiled: the store alone is done in a fraction of the time. Where records
# and checksums are made by the target itself, watching every comparison finds little and costs much.
options() {
    case $1 in
    image | repair | restore | ops | journal | v1) echo --no-trace-compares ;;
    backup) echo --features=backup ;;
    nbd | control | stream | vhost) echo --features=server ;;
    *) echo --features=engine ;;
    esac
}

# Longer inputs are cut off: where payloads count, none that the corpus has.
length() {
    case $1 in
    nbd | dataconn) echo 49152 ;;
    stream | vhost | ssync) echo 8192 ;;
    *) echo 4096 ;;
    esac
}

build() {
    mapfile -t option < <(options "$1")
    cargo fuzz build --fuzz-dir fuzz --target-dir "$built" --sanitizer "${SANITIZER:-address}" \
        "${option[@]}" "$1"
    mkdir -p "$built/corpus/$1" "fuzz/corpus/$1" "fuzz/regressions/$1" "fuzz/artifacts/$1"
}

if [ "$seconds" = merge ]; then
    for target in "${targets[@]}"; do
        build "$target"
        mkdir "$logs/merged"
        "$programs/$target" -merge=1 "${limits[@]}" -max_len="$(length "$target")" \
            "$logs/merged" "fuzz/corpus/$target" "$built/corpus/$target" </dev/null 2>&1 | grep '^MERGE' || true
        [ -n "$(ls "$logs/merged")" ]
        rm -r "fuzz/corpus/$target"
        mv "$logs/merged" "fuzz/corpus/$target"
        du -sh --apparent-size "fuzz/corpus/$target"
    done
    exit
fi

failed=()
# Processor time: where others work as well, that of the clock says little.
TIMEFORMAT='%U %S'
for target in "${targets[@]}"; do
    build "$target"
    printf '\n== %s, %s s\n' "$target" "$seconds"
    # What it finds grows in the build's directory; the committed corpus is only read.
    if ! { time "$programs/$target" -max_total_time="$seconds" "${limits[@]}" \
        -max_len="$(length "$target")" -print_final_stats=1 \
        -reload=0 -use_value_profile=0 -artifact_prefix="fuzz/artifacts/$target/" \
        "$built/corpus/$target" "fuzz/corpus/$target" "fuzz/regressions/$target" \
        </dev/null >"$logs/$target" 2>&1; } 2>"$logs/$target.time"; then
        failed+=("$target")
        tail -n 40 "$logs/$target"
    fi
done

figure() {
    local found
    found=$(grep -oE "$2" "$logs/$1" | tail -1 | grep -oE '[0-9]+$' || true)
    printf '%s' "${found:--}"
}

printf '\n| target | executions | seconds | processor s | cov | features | corpus | peak MiB | crashed |\n'
printf '|---|---|---|---|---|---|---|---|---|\n'
for target in "${targets[@]}"; do
    crashed=no
    [[ " ${failed[*]-} " == *" $target "* ]] && crashed=yes
    printf '| %s | %s | %s | %s | %s | %s | %s | %s | %s |\n' "$target" \
        "$(figure "$target" 'stat::number_of_executed_units: +[0-9]+')" "$seconds" \
        "$(awk '{ printf "%.0f", $1 + $2 }' "$logs/$target.time")" \
        "$(figure "$target" 'cov: [0-9]+')" "$(figure "$target" 'ft: [0-9]+')" \
        "$(figure "$target" 'corp: [0-9]+')" \
        "$(figure "$target" 'stat::peak_rss_mb: +[0-9]+')" "$crashed"
done
if [ ${#failed[@]} -gt 0 ]; then
    for target in "${failed[@]}"; do
        for input in fuzz/artifacts/"$target"/*; do
            echo "again: $programs/$target $input"
        done
    done
    exit 1
fi

#!/usr/bin/env bash
# fuzz.sh SECONDS [TARGET...]: each target for so long, from its corpus on, under AddressSanitizer; then
# a table of what was done. What fails is kept in fuzz/artifacts, and printed with how to see it again.
# Needs cargo-fuzz, which it installs, and a nightly toolchain, or makes do with the pinned one.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=$1
shift
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(image ops journal v1 nbd control stream dataconn ssync)

command -v cargo-fuzz >/dev/null || cargo install cargo-fuzz --locked
if rustup toolchain list 2>/dev/null | grep -q '^nightly'; then
    export RUSTUP_TOOLCHAIN=nightly
else
    export RUSTC_BOOTSTRAP=1
fi
# A large quarantine of freed memory makes every input touch new pages.
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=0:quarantine_size_mb=16}
built=${CARGO_TARGET_DIR:-target}/fuzz
programs=$built/$(rustc -vV | sed -n "s/^host: //p")/release
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# Only what a target needs is compiled: the store alone is done in a fraction of the time.
features() {
    case $1 in
    image | ops | journal | v1) ;;
    nbd | control | stream) echo --features=server ;;
    *) echo --features=engine ;;
    esac
}

failed=()
for target in "${targets[@]}"; do
    mapfile -t feature < <(features "$target")
    cargo fuzz build --fuzz-dir fuzz --target-dir "$built" "${feature[@]}" "$target"
    work=$built/corpus/$target
    mkdir -p "$work" "fuzz/corpus/$target" "fuzz/regressions/$target" "fuzz/artifacts/$target"
    printf '\n== %s, %s s\n' "$target" "$seconds"
    # What it finds grows in the build's directory; the committed corpus is only read.
    if ! "$programs/$target" -max_total_time="$seconds" -timeout=10 \
        -rss_limit_mb=1024 -malloc_limit_mb=512 -max_len=4096 -print_final_stats=1 -use_value_profile=0 \
        -artifact_prefix="fuzz/artifacts/$target/" \
        "$work" "fuzz/corpus/$target" "fuzz/regressions/$target" </dev/null >"$logs/$target" 2>&1; then
        failed+=("$target")
        tail -n 40 "$logs/$target"
    fi
done

figure() {
    local found
    found=$(grep -oE "$2" "$logs/$1" | tail -1 | grep -oE '[0-9]+$' || true)
    printf '%s' "${found:--}"
}

printf '\n| target | executions | seconds | cov | features | corpus | peak MiB | crashed |\n'
printf '|---|---|---|---|---|---|---|---|\n'
for target in "${targets[@]}"; do
    crashed=no
    [[ " ${failed[*]-} " == *" $target "* ]] && crashed=yes
    printf '| %s | %s | %s | %s | %s | %s | %s | %s |\n' "$target" \
        "$(figure "$target" 'stat::number_of_executed_units: +[0-9]+')" "$seconds" \
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

#!/usr/bin/env bash
# lint.sh: what a change must pass besides its tests. Warnings are errors here and nowhere else.
set -euo pipefail
. "$(dirname "$0")/steps.sh"
export RUSTDOCFLAGS="${RUSTDOCFLAGS:-} -D warnings"

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
passed

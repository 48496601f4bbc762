#!/usr/bin/env bash
# deny.sh [install]: checks the dependencies against deny.toml, if cargo-deny is there; with
# `install` it is compiled first, which takes minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
# Flags for our own code are not for the tool's.
unset RUSTFLAGS

if ! command -v cargo-deny >/dev/null; then
    if [ "${1:-}" != install ]; then
        echo "SKIPPED: cargo-deny is not installed; \`make deny\` compiles it (minutes) and checks"
        exit 0
    fi
    cargo install cargo-deny --locked
fi
if timeout 300 cargo deny --all-features fetch db; then
    # Not `check --disable-fetch`, which 0.20 has no longer.
    exec cargo deny --all-features --offline check
fi
echo "SKIPPED: advisories, as their database cannot be fetched; checking the rest"
exec cargo deny --all-features check bans licenses sources

#!/usr/bin/env bash
# upstream.sh [SOURCE]: upstream's `longhorn`, for the tests and benchmarks that take it from LONGHORN_BIN, into
# target/upstream.
# upstream.sh --manager [SOURCE [PROBE]]: upstream's instance manager, which tests take from INSTANCE_MANAGER_BIN, and the
# program by which it sees that a process is up, into the same directory.
# SOURCE and PROBE are git repositories or clones of them; upstream's own unless given. The Go module proxy does not have
# them. Needs Go, and the header and library of libqcow.
set -euo pipefail
cd "$(dirname "$0")/.."
place=${CARGO_TARGET_DIR:-target}/upstream
mkdir -p "$place"
place=$(cd "$place" && pwd)

if ! command -v go >/dev/null; then
    echo "upstream.sh: go is missing: install golang (Debian) or what your system calls it" >&2
    exit 1
fi
if [ ! -e /usr/include/libqcow.h ]; then
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        echo "installing with apt-get: libqcow-dev"
        DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends libqcow-dev
    else
        echo "upstream.sh: libqcow.h is missing: install libqcow-dev (Debian) or what your system calls it" >&2
        exit 1
    fi
fi

# build NAME SOURCE [OPTION...]: a program of a repository.
build() {
    local name=$1 source=$2 commit version
    shift 2
    rm -rf "$place/source"
    git clone -q --depth 1 "$source" "$place/source"
    commit=$(git -C "$place/source" rev-parse HEAD)
    version=$(cat "$place/source/version" 2>/dev/null || echo unknown)
    (cd "$place/source" && CGO_ENABLED=1 go build -buildvcs=false -tags netgo,osusergo \
        -ldflags "-X main.Version=$version -X main.GitCommit=$commit" "$@" -o "$place/$name" .)
    rm -rf "$place/source"
    echo "built $place/$name of commit $commit"
}

# Dependencies come with Longhorn's programs, and not with the probe.
if [ "${1:-}" = --manager ]; then
    build longhorn-instance-manager "${2:-https://github.com/longhorn/longhorn-instance-manager}" -mod=vendor
    build grpc_health_probe "${3:-https://github.com/grpc-ecosystem/grpc-health-probe}"
    "$place/longhorn-instance-manager" --help >/dev/null
    echo "INSTANCE_MANAGER_BIN=$place/longhorn-instance-manager names it to tests"
else
    build longhorn "${1:-https://github.com/longhorn/longhorn-engine}" -mod=vendor
    "$place/longhorn" version --client-only >/dev/null
    echo "LONGHORN_BIN=$place/longhorn names it to tests and benchmarks"
fi

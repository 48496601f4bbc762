#!/usr/bin/env bash
# upstream.sh [SOURCE]: upstream's `longhorn`, for the tests and benchmarks that take it from LONGHORN_BIN, into
# target/upstream. SOURCE is a git repository or a clone of one; upstream's own unless given. The Go module proxy
# does not have it. Needs Go, and the header and library of libqcow.
set -euo pipefail
cd "$(dirname "$0")/.."
source=${1:-https://github.com/longhorn/longhorn-engine}
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

rm -rf "$place/source"
git clone -q --depth 1 "$source" "$place/source"
cd "$place/source"
commit=$(git rev-parse HEAD)
# Its dependencies come with it.
CGO_ENABLED=1 go build -mod=vendor -buildvcs=false -tags netgo,osusergo \
    -ldflags "-X main.Version=$(cat version 2>/dev/null || echo unknown) -X main.GitCommit=$commit" -o "$place/longhorn" .
rm -rf "$place/source"
"$place/longhorn" version --client-only >/dev/null
echo "built $place/longhorn of commit $commit; LONGHORN_BIN=$place/longhorn names it to tests and benchmarks"

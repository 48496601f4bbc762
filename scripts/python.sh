#!/usr/bin/env bash
# python.sh [wheel | bench ARGUMENTS]: tests the Python package, in an environment in target/python
# that is made once; or builds a wheel of it into target/wheels; or measures it.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${DBS_PYTHON_LIMITED:-}" ]; then
    # Nothing here takes long; what hangs is ended, with all that it started.
    DBS_PYTHON_LIMITED=1 exec timeout --kill-after=20 "${DBS_PYTHON_TIMEOUT:-1200}" "$0" "$@"
fi
cargo=${CARGO:-cargo}
python=${PYTHON:-python3}
target=${CARGO_TARGET_DIR:-target}
place=$(mkdir -p "$target/python" && cd "$target/python" && pwd)
venv=$place/venv
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PYTHONDONTWRITEBYTECODE=1

skip() {
    echo "SKIPPED the Python package: $1"
    exit 0
}

# The environment is made anew when what it is made of changes.
environment() {
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
        || skip "needs Python 3.11 or later (PYTHON=... names one)"
    local wanted
    wanted=$({ "$python" -VV; cat dbs-py/requirements.txt; } | sha256sum)
    if [ "$(cat "$venv/made-of" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    rm -rf "$venv"
    "$python" -m venv "$venv" >/dev/null 2>&1 \
        || skip "needs the module venv: apt-get install python3-venv"
    timeout 600 "$venv/bin/pip" install --quiet --timeout 60 --retries 2 --only-binary :all: \
        --no-binary crcmod,pyreadpartitions -r dbs-py/requirements.txt </dev/null \
        || skip "pip could not install dbs-py/requirements.txt"
    # As `maturin develop` does it: the package is used where its sources are.
    local packages
    packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "$PWD/dbs-py/python" >"$packages/dbs.pth"
    echo "$wanted" >"$venv/made-of"
}

# A file in use must not be written: what replaces it is another one.
install_module() {
    cp "$1" dbs-py/python/dbs/_dbs.abi3.so.new
    mv dbs-py/python/dbs/_dbs.abi3.so.new dbs-py/python/dbs/_dbs.abi3.so
}

tests() {
    # With the features that tests build with, nothing is compiled twice.
    # shellcheck disable=SC2086
    "$cargo" build --locked ${DBS_PYTHON_BUILD:--p dbs-py -p dbs-cli}
    install_module "$target/debug/lib_dbs.so"
    export DBS_BINARY=${DBS_BINARY:-$(cd "$target/debug" && pwd)/dbs}
    cd dbs-py
    timeout 300 "$venv/bin/python" -m pytest -q -o cache_dir="$place/pytest" </dev/null
    timeout 120 "$venv/bin/mypy" --cache-dir "$place/mypy" </dev/null
    MYPYPATH=python timeout 120 "$venv/bin/stubtest" --mypy-config-file pyproject.toml dbs </dev/null
    timeout 120 "$venv/bin/basedpyright" --pythonpath "$venv/bin/python" </dev/null
}

environment
case ${1:-test} in
    test) tests ;;
    wheel)
        "$venv/bin/maturin" build --release --locked --manifest-path dbs-py/Cargo.toml \
            --out "$target/wheels"
        ;;
    bench)
        shift
        "$cargo" build --release --locked -p dbs-py -p dbs-benches --bin reads --lib
        install_module "$target/release/lib_dbs.so"
        "$venv/bin/python" dbs-py/bench/reads.py --rust "$target/release/reads" "$@"
        ;;
    *) sed -n 2,3p "$0" && exit 2 ;;
esac

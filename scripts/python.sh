#!/usr/bin/env bash
# python.sh [wheel | bench ARGUMENTS]: tests the Python package, in an environment in target/python
# that is made once; or builds a wheel of it into target/wheels, and tries it where nothing else is
# installed; or measures it.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${DBS_PYTHON_LIMITED:-}" ]; then
    # Nothing here takes long; what hangs is ended, with all that it started.
    DBS_PYTHON_LIMITED=1 exec timeout --kill-after=20 "${DBS_PYTHON_TIMEOUT:-3500}" "$0" "$@"
fi
cargo=${CARGO:-cargo}
python=${PYTHON:-python3}
target=${CARGO_TARGET_DIR:-target}
mode=${1:-test}
place=$(mkdir -p "$target/python" && cd "$target/python" && pwd)
venv=$place/venv
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PYTHONDONTWRITEBYTECODE=1

skip() {
    if [ "$mode" != test ]; then
        echo "nothing was done for the Python package: $1" >&2
        exit 1
    fi
    echo "SKIPPED the Python package: $1"
    exit 0
}

interpreter() {
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
        || skip "needs Python 3.11 or later (PYTHON=... names one)"
    "$python" -c 'import sys, sysconfig
sys.exit(bool(sysconfig.get_config_var("Py_GIL_DISABLED")))' \
        || skip "is not for free-threaded interpreters (PYTHON=... names another)"
}

# The environment is made anew when what it is made of changes.
environment() {
    interpreter
    local wanted
    wanted=$({ "$python" -VV; pwd; cat dbs-py/requirements.txt; } | sha256sum)
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
    timeout 1800 "$venv/bin/python" -m pytest -q -o cache_dir="$place/pytest" </dev/null
    timeout 900 "$venv/bin/mypy" --cache-dir "$place/mypy" </dev/null
    # Its metaclass is that of a class without types.
    MYPYPATH=python timeout 900 "$venv/bin/stubtest" --mypy-config-file pyproject.toml \
        --allowlist <(echo dbs.fs.FileSystem) dbs </dev/null
    timeout 900 "$venv/bin/basedpyright" --pythonpath "$venv/bin/python" </dev/null
}

# Wheels that are in target/wheels were tried.
wheel() {
    interpreter
    local made=$place/made clean=$place/clean maturin=$place/maturin
    local version
    version=$(sed -n 's/^maturin==//p' dbs-py/requirements.txt)
    if [ "$("$maturin/bin/maturin" --version 2>/dev/null)" != "maturin $version" ]; then
        rm -rf "$maturin"
        "$python" -m venv "$maturin" >/dev/null 2>&1 \
            || skip "needs the module venv: apt-get install python3-venv"
        timeout 600 "$maturin/bin/pip" install --quiet --only-binary :all: "maturin==$version" \
            </dev/null || skip "pip could not install maturin"
    fi
    rm -rf "$made" "$clean"
    "$maturin/bin/maturin" build --release --locked --manifest-path dbs-py/Cargo.toml \
        --interpreter "$python" --out "$made"
    "$python" -m venv "$clean"
    "$clean/bin/pip" install --quiet --no-index "$made"/dbs-*.whl </dev/null
    (cd "$clean" && timeout 300 bin/python -I -W error - <<'TRY'
import importlib.metadata, importlib.resources
import dbs, dbs.aio

with dbs.Store.init("tried.dbs", "64MiB") as store:
    volume = store.create_volume("v", "1MiB")
    volume.pwrite(b"tried", 1000)
    assert volume.snapshot("s").pread(5, 1000) == b"tried" and store.check().ok
files = importlib.resources.files(dbs)
assert files.joinpath("py.typed").is_file() and files.joinpath("_dbs.pyi").is_file()
[found] = importlib.metadata.entry_points(group="fsspec.specs", name="dbs")
try:
    found.load()
except ModuleNotFoundError as error:
    assert "pip install fsspec" in str(error)
else:
    raise AssertionError("fsspec is here")
TRY
    )
    mkdir -p "$target/wheels"
    mv "$made"/dbs-*.whl "$target/wheels"
    rm -rf "$made" "$clean"
}

case $mode in
    test)
        environment
        tests
        ;;
    wheel) wheel ;;
    bench)
        shift
        environment
        "$cargo" build --release --locked -p dbs-py -p dbs-benches --bin reads --lib
        install_module "$target/release/lib_dbs.so"
        "$venv/bin/python" dbs-py/bench/reads.py --rust "$target/release/reads" "$@"
        ;;
    *) sed -n 2,4p "$0" && exit 2 ;;
esac

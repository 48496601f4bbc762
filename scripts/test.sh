#!/usr/bin/env bash
# test.sh: all tests. What a change must pass besides is in lint.sh.
set -euo pipefail
. "$(dirname "$0")/steps.sh"
built=${CARGO_TARGET_DIR:-target}/debug
export RUSTDOCFLAGS="${RUSTDOCFLAGS:-} -D warnings"

scripts/watched-test.sh
step "programs" 35 scripts/programs.sh
step "compiling" 60 "$cargo" test --locked --workspace --no-run -q
step "tests" 70 scripts/tests.sh
# With the `dbs` that has just been built; `make vm` takes static ones, and more time.
beside "virtual machine" 60 env DBS="$built/dbs" LONGHORN="$built/longhorn" scripts/vm/run.sh --quick
# With what the tests have just built, and the module beside it.
step "python" 60 env DBS_PYTHON_BUILD="--workspace --lib --tests" scripts/python.sh
joined
passed

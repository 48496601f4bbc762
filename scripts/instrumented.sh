#!/bin/sh
# The RUSTC_WORKSPACE_WRAPPER of coverage.sh: crates of this workspace count which of their lines run,
# dependencies do not and need not be compiled again.
exec "$@" -C instrument-coverage

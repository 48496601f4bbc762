#!/usr/bin/env bash
# replay.sh [MARKS] [SEEDS]: what a power loss leaves of ext4 and XFS on a volume, after so many syncs (200) of a
# recorded run, for each of so many seeds (1). Needs root, loop devices and FUSE. Some 15 minutes for a seed.
set -euo pipefail
cd "$(dirname "$0")/.."
marks=${1:-200}
for seed in $(seq "${2:-1}"); do
    DBS_REPLAY_MARKS=$marks DBS_REPLAY_STEPS=${STEPS:-1000} DBS_REPLAY_SEED=$seed \
        ${CARGO:-cargo} test --locked -p dbs-cli --test mount replay -- --nocapture --test-threads=1
done

#!/usr/bin/env bash
# run.sh DBS DATA PORT: serves the store in DATA, which is made if absent.
set -euo pipefail
dbs=$(realpath "$1") data=$2 port=$3

mkdir -p "$data"
store=$data/store.dbs socket=$data/nbd.sock
if [ ! -e "$store" ]; then
    # Made under another name, so that an interrupted first run leaves no half-made store.
    "$dbs" init "$store.new" --size 64GiB --force --yes
    "$dbs" --store "$store.new" volume create demo 10GiB
    mv "$store.new" "$store"
fi

hints() {
    cat <<END

The volume \`demo\` (10 GiB) is served. In another terminal, in this directory:

  export DBS_STORE=$store PATH="$(dirname "$dbs"):\$PATH"
  nbdinfo nbd://localhost:$port/demo
  nbdcopy disk.img 'nbd+unix:///demo?socket=$socket'      # a raw image of at most 10 GiB, in
  dbs snapshot create demo@first                         # a point in time, kept
  dbs volume export demo@first first.img                 # and out again, sparse
  dbs volume list; dbs snapshot list demo; dbs --help

Ctrl-C stops it; the next \`make run\` continues where it was.

END
}

# The server prints where it listens when it is ready, and takes the place of this script, so that
# signals find it.
exec "$dbs" --store "$store" serve --nbd "unix:$socket" --nbd "tcp:127.0.0.1:$port" > >(
    trap '' INT
    while read -r line; do
        echo "$line"
        case $line in "nbd tcp:"*) hints ;; esac
    done
)

#!/usr/bin/env bash
# vhost-user.sh: a guest whose disks are volumes of a store that `dbs serve --vhost-user` serves on the host, in the
# virtual machine of scripts/vm/run.sh: file systems, discards, a live resize, a snapshot, and `kill -9` of the server
# under verified I/O, again and again. Then a second boot finds what the first has left.
#
# DBS, VM_DIR, ROUNDS   as scripts/vm/run.sh takes them; here DBS serves, and is target/release/dbs by default
set -euo pipefail
here=$(realpath "$(dirname "$0")")
cd "$here/../.."
dbs=$(realpath "${DBS:-target/release/dbs}")
export DBS=$dbs VM_DIR=${VM_DIR:-target/vm}
mkdir -p "$VM_DIR"

work=$(mktemp -d "${TMPDIR:-/tmp}/vhost-user.XXXXXX")
export DBS_STORE=$work/store DBS_RUNTIME_DIR=$work/run
hand=
end() {
    local process
    for process in $(cat "$work/server" 2>/dev/null) $hand; do
        kill -9 "$process" 2>/dev/null || true
    done
    rm -rf "$work"
}
trap end EXIT
trap 'exit 130' INT TERM

serve() {
    "$dbs" --quiet serve --vhost-user "$work/vm" >/dev/null 2>"$work/server.log" </dev/null &
    echo $! >"$work/server"
    until grep -q event=ready "$work/server.log"; do
        kill -0 "$(cat "$work/server")" || {
            tail "$work/server.log"
            exit 1
        }
        sleep 0.05
    done
}

# gone: the server is.
gone() {
    while kill -0 "$(cat "$work/server")" 2>/dev/null; do
        sleep 0.05
    done
}

# hands: does what the guest asks the host for, a line each.
hands() {
    local what rest
    while read -r what rest; do
        # shellcheck disable=SC2086 # the arguments of a command
        case $what in
        kill)
            kill -9 "$(cat "$work/server")"
            gone
            serve
            echo done
            ;;
        sum) md5sum <"$work/content" ;;
        dbs) "$dbs" $rest >"$work/asked" 2>&1 && tr '\n' ' ' <"$work/asked" && echo || echo "failed: $(tail -1 "$work/asked")" ;;
        *) echo "failed: what is $what?" ;;
        esac
    done
}

"$dbs" --quiet init "$DBS_STORE" --size 2GiB
"$dbs" --quiet volume create fs 128MiB
"$dbs" --quiet volume create raw 64MiB
head -c 16M /dev/urandom >"$work/content"
"$dbs" --quiet volume import base "$work/content"
"$dbs" --quiet snapshot create base@s
serve

mkfifo "$work/hand.in" "$work/hand.out"
hands <"$work/hand.out" >"$work/hand.in" &
hand=$!

# disk SOCKET NAME: options for QEMU.
disk() {
    echo "-chardev socket,id=$2,path=$work/vm/$1.sock,reconnect=1 -device vhost-user-blk-pci,chardev=$2,num-queues=2"
}
VM_MEMORY=${VM_MEMORY:-1G}
export VM_MEMORY
VM_QEMU="-object memory-backend-memfd,id=mem,size=$VM_MEMORY,share=on -numa node,memdev=mem
    $(disk fs fs) $(disk raw raw) $(disk base@s snap)
    -chardev pipe,id=hand,path=$work/hand -device virtserialport,chardev=hand,name=hand"
export VM_QEMU

# Each in a machine of its own: the second is what the first finds after a reboot.
code=0
"$here/run.sh" vhost-user && "$here/run.sh" vhost-user-again || code=$?
kill "$(cat "$work/server")"
gone
"$dbs" check >"$work/check.log" || {
    cat "$work/check.log"
    code=1
}
if [ $code -ne 0 ]; then
    tail -20 "$work/server.log"
fi
exit $code

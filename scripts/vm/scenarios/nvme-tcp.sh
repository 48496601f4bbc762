# NVMe over TCP, the kernel's host: names, blocks, requests, ext4, discard, resize, a snapshot, keys, kill -9 under I/O
# timeout: 600
# rounds: 5
modprobe nvme-tcp
host=nqn.2014-08.org.nvmexpress:uuid:5f5cb9a0-6a4e-4e0a-9f5a-3b1d2c7e8f90
fresh_store
for volume in raw:64MiB fs:128MiB base:16MiB; do
    dbs --quiet volume create "${volume%:*}" "${volume#*:}"
done
start_server --nvme tcp:4420

# idle: nobody uses the store.
idle() {
    [ "$(json length clients --interval 0)" -eq 0 ]
}

# name SPEC: its subsystem.
name() {
    local kind=volume
    [ "${1#*@}" = "$1" ] || kind=snapshot
    echo "nqn.2014-08.org.nvmexpress:uuid:$(json .uuid "$kind" show "$1")"
}

# ask NQN OPTIONS: has the kernel connect.
ask() {
    echo "transport=tcp,traddr=127.0.0.1,trsvcid=4420,nqn=$1,hostnqn=$host,hostid=${host##*:},reconnect_delay=1,ctrl_loss_tmo=120$2" \
        >/dev/nvme-fabrics
}

# connect SPEC [OPTIONS]: sets `device`.
connect() {
    local nqn found
    nqn=$(name "$1")
    ask "$nqn" "${2:-}" || fail "cannot connect to $1"
    appears() {
        for found in /sys/block/nvme*n1; do
            if [ "$(cat "$found/device/subsysnqn")" = "$nqn" ]; then
                device=/dev/${found##*/}
                return 0
            fi
        done
        return 1
    }
    until_true 30 "the device of $1" appears
}

# disconnect DEVICE
disconnect() {
    echo 1 >"/sys/block/${1#/dev/}/device/delete_controller"
}

connect base
random_file "$work/base" 16
dd if="$work/base" of="$device" bs=1M oflag=direct 2>/dev/null
disconnect "$device"
until_true 30 "an idle server" idle
dbs --quiet snapshot create base@s
connect base@s
is "/sys/block/${device##*/}/ro" 1
dd if="$device" of="$work/read" bs=1M iflag=direct 2>/dev/null
cmp "$work/base" "$work/read"
must_fail dd if=/dev/zero of="$device" bs=4k count=1 oflag=direct
disconnect "$device"
ok "a snapshot is read, and not written"

connect raw ,hdr_digest,data_digest
raw=$device
connect fs
fs=$device
queue=/sys/block/${fs##*/}/queue
is "$queue/write_cache" "write back"
is "$queue/logical_block_size" 512
# The disk of the machine has sectors of 512 bytes: nothing longer is promised to be whole, and Linux takes that.
is "$queue/physical_block_size" 512
is "/sys/block/${fs##*/}/uuid" "$(json .uuid volume show fs)"
[ "$(cat "$queue/discard_max_bytes")" -gt 0 ] || fail "no discard"
[ "$(cat "$queue/write_zeroes_max_bytes")" -gt 0 ] || fail "no write-zeroes"
[ "$(json '[.[] | select(.kind == "nvme_tcp")] | length' clients --interval 0)" -eq 2 ] || fail "not 2 clients"
ok "names, write cache, blocks, discard, write-zeroes, clients"

works_as_a_disk

again() {
    end_server KILL
    start_server --nvme tcp:4420
}
survives_kills again

disconnect "$raw"
disconnect "$fs"
until_true 30 "an idle server" idle
end_server TERM

# A key of each kind, and one of the server.
keys="DHHC-1:01:hn4ssE9aBNy9WSUBpej+nOqvylAlVibKc2wTgEJTC6Sa20ov:
DHHC-1:02:5XljUfWcYmSsGGbaFwt53gTOy2MX3msFygjkKr8yx4VzsM59GNyKjFuV+tBzR1i4KXxQrA==:
DHHC-1:03:sPCAJGpiPSWI/WqEJ1dSh3A65KhFHgQ9mV8ejwr8O9eKFtYdpNlFvHARHiULmpDuPJMK7XWRkoToc4veTtrRxqacLHY=:"
proof=DHHC-1:00:AUKq0IdtE5/iQ9BxVjpjTVbS4+HRWo7fUfFrmNJkZ9LnLDYO:
wrong=DHHC-1:00:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAACtVQoZ:
touch "$work/keys"
chmod 600 "$work/keys"
base=
for key in $keys; do
    echo "$host $key $proof" >"$work/keys"
    start_server --nvme tcp:4420 --nvme-keys "$work/keys"
    base=$(name base)
    for options in "" ",dhchap_secret=$wrong" ",dhchap_secret=$key,dhchap_ctrl_secret=$wrong"; do
        must_fail ask "$base" "$options"
    done
    until_true 30 "an idle server" idle
    for options in "" ",dhchap_ctrl_secret=$proof" ",dhchap_ctrl_secret=$proof,hdr_digest,data_digest"; do
        connect base ",dhchap_secret=$key$options"
        dd if="$device" of="$work/read" bs=1M iflag=direct 2>/dev/null
        cmp "$work/base" "$work/read"
        disconnect "$device"
        until_true 30 "an idle server" idle
    done
    [ "$key" = "${keys##*$'\n'}" ] || end_server TERM
done
ok "keys of each kind, the server's key, and none without or with a wrong one"

connect raw ",dhchap_secret=$key,dhchap_ctrl_secret=$proof"
raw=$device
controller=$(echo /sys/class/nvme/nvme*)
is "$controller/dhchap_secret" "$key"
again() {
    end_server KILL
    start_server --nvme tcp:4420 --nvme-keys "$work/keys"
}
verified keyed --filename="$raw" --size=8m --rw=randwrite --bs=16k --direct=1 --ioengine=io_uring --iodepth=8 --loops=6 &
load=$!
sleep 2
kill -0 $load || fail "fio was done before the server was killed"
again
wait $load || fail "fio with keys"
# The kernel authenticates again when it is given a key, and goes on if that is refused.
echo "$key" >"$controller/dhchap_secret"
until_true 10 "another authentication" eval "dmesg | grep -q 're-authenticating controller'"
verified keyed --filename="$raw" --size=1m --rw=randwrite --bs=4k --direct=1
is "$controller/state" live
disconnect "$raw"
until_true 30 "an idle server" idle
end_server TERM
ok "kill -9 under fio with keys, and a key that is given again"

# The documents say that Linux does not insist on the server's key.
start_server --nvme tcp:4420
connect base ",dhchap_secret=$key,dhchap_ctrl_secret=$proof"
disconnect "$device"
until_true 30 "an idle server" idle
end_server TERM
check_store
ok "disconnected; dbs check"

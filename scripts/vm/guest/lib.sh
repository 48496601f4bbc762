# shellcheck shell=bash
# lib.sh: what scenarios share. They run in bash with -Eeuo pipefail; a command that fails ends them. The
# store is the disk /dev/vda, `work` a directory on tmpfs, `server` the process id of `dbs serve`.
# shellcheck disable=SC2034 # some are for the scenarios alone
export DBS_STORE=/dev/vda
socket=/run/nbd.sock
server=
servers=0
# run.sh says how many times the time of an idle host what is waited for may take.
patience=1

# ok TEXT: what was checked just now.
ok() {
    printf '  ok  %s (%s s)\n' "$*" "$SECONDS"
}

fail() {
    echo "  FAILED: $*"
    trap - ERR
    exit 1
}

# broken CODE COMMAND PLACE: a command failed that must not.
broken() {
    trap - ERR
    echo "  FAILED at $3: exit code $1 of: $2"
}

# until_true SECONDS TEXT COMMAND...: waits until the command succeeds; so many seconds are for an idle host.
until_true() {
    local end=$((SECONDS + $1 * patience)) text=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        if [ $SECONDS -gt $end ]; then
            fail "waited in vain for $text"
        fi
        sleep 0.1
    done
}

# must_fail COMMAND...
must_fail() {
    if "$@" >"$work/must_fail.log" 2>&1; then
        cat "$work/must_fail.log"
        fail "succeeded, and must not: $*"
    fi
}

# json FILTER COMMAND...: a value of what a dbs command prints.
json() {
    local filter=$1
    shift
    dbs --json "$@" | jq -er "$filter"
}

# fresh_store [OPTION...]: formats the store.
fresh_store() {
    dbs --quiet init "$DBS_STORE" --force --yes "$@" >"$work/init.log" 2>&1 || {
        cat "$work/init.log"
        fail "dbs init"
    }
}

# start_server [OPTION...]: `dbs serve`, returns when it is ready.
start_server() {
    servers=$((servers + 1))
    server_log=$work/server.$servers.log
    : >"$server_log"
    dbs --quiet serve --nbd "unix:$socket" "$@" 2>"$server_log" &
    server=$!
    local end=$((SECONDS + 30 * patience))
    until grep -q event=ready "$server_log"; do
        kill -0 "$server" 2>/dev/null || fail "dbs serve has ended"
        [ $SECONDS -le $end ] || fail "dbs serve is not ready"
        sleep 0.1
    done
}

# end_server SIGNAL: and waits for its end.
end_server() {
    kill "-$1" "$server"
    wait "$server" 2>/dev/null || true
    server=
}

# What `bench` found, by way and load ("RW BLOCK DEPTH JOBS"): a line for each time, requests a second and the median µs of one.
loads=()
declare -A found=()
seconds=4

# bench WAY DEVICE MEBIBYTES: puts each load there.
bench() {
    local rw block depth jobs load
    for load in "${loads[@]}"; do
        read -r rw block depth jobs <<<"$load"
        fio --name=m --filename="$2" --size="$3m" --rw="$rw" --bs="$block" --iodepth="$depth" --numjobs="$jobs" --group_reporting \
            --direct=1 --ioengine=io_uring --time_based --ramp_time=1 --runtime="$seconds" --lat_percentiles=1 --output-format=json \
            --output="$work/fio.json" >"$work/fio.err.log" 2>&1
        found[$1 $load]+=$(jq -r '[.jobs[0] | .read, .write] | max_by(.iops) |
            "\(.iops | round) \((.lat_ns.percentile["50.000000"] // 0) / 1000 | round)"' "$work/fio.json")$'\n'
    done
}

# bench_table TITLE COLUMN WAY...: the medians of a column by load and way, and the first way's by each other's, as Markdown.
bench_table() {
    local title=$1 column=$2 load way others=("${@:4}")
    shift 2
    printf '| %s |' "$title"
    printf ' %s |' "$@" "${others[@]/#/$1 / }"
    printf '\n|---|%s\n' "$(printf -- '---|%.0s' "$@" "${others[@]}")"
    for load in "${loads[@]}"; do
        for way in "$@"; do
            cut -d' ' -f"$column" <<<"${found[$way $load]%$'\n'}" | sort -n | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'
        done | awk -v load="$load" 'BEGIN { split(load, l, " "); printf "| %s %s, depth %s x %s |", l[1], l[2], l[4], l[3] }
            { v[NR] = $1; printf " %s |", $1 }
            END { for (i = 2; i <= NR; i++) printf v[i] ? " %.2f |" : " – |", v[i] ? v[1] / v[i] : 0; print "" }'
    done
    echo
}

# A Longhorn volume `vol` of so many bytes, its replicas in $work; process ids by replica, and its controller's.
volume_bytes=$((96 << 20))
declare -A replica=()
controller=
controllers=0

# start_replica NAME PORT: one that listens there, returns when it is ready.
start_replica() {
    local log=$work/replica-$1.log
    : >"$log"
    longhorn --volume-name vol replica "$work/replica-$1" --size "$volume_bytes" --disableRevCounter --listen "127.0.0.1:$2" \
        --sync-agent-port-count 2 >>"$log" 2>&1 </dev/null &
    replica[$1]=$!
    until_true 90 "replica $1" grep -q event=ready "$log"
}

# end_replica NAME SIGNAL: and waits for its end.
end_replica() {
    kill "-$2" "${replica[$1]}"
    wait "${replica[$1]}" 2>/dev/null || true
    unset "replica[$1]"
}

# start_controller FRONTEND [OPTION...]: of the volume vol, returns when it is ready; its log is $controller_log.
start_controller() {
    controllers=$((controllers + 1))
    controller_log=$work/controller.$controllers.log
    : >"$controller_log"
    longhorn controller vol --frontend "$1" --size "$volume_bytes" --current-size "$volume_bytes" --disableRevCounter \
        --listen 127.0.0.1:9501 "${@:2}" >>"$controller_log" 2>&1 </dev/null &
    controller=$!
    local end=$((SECONDS + 60 * patience))
    until grep -q event=ready "$controller_log"; do
        kill -0 "$controller" 2>/dev/null || fail "the controller has ended"
        [ $SECONDS -le $end ] || fail "the controller is not ready"
        sleep 0.1
    done
}

# end_controller SIGNAL: and waits for its end.
end_controller() {
    kill "-$1" "$controller"
    wait "$controller" 2>/dev/null || true
    controller=
}

# steer COMMAND...: of the volume vol.
steer() {
    longhorn --url http://127.0.0.1:9501 --volume-name vol "$@" 2>"$work/steer.log"
}

# freeze_as_killed MOUNT DEVICE: a file system is frozen as a controller leaves it that is killed amid a snapshot: with a
# note of the device's number. To kill one in that moment takes luck, and a test none.
freeze_as_killed() {
    fsfreeze --freeze "$1"
    echo -n $((0x$(stat -Lc %t "$2") << 8 | 0x$(stat -Lc %T "$2"))) >/var/run/longhorn/vol.frozen
}

# not_frozen MOUNT
not_frozen() {
    must_fail fsfreeze --unfreeze "$1"
    grep -q "Invalid argument" "$work/must_fail.log" || fail "$(cat "$work/must_fail.log")"
    [ ! -e /var/run/longhorn/vol.frozen ] || fail "what is frozen is noted still"
}

# attach VOLUME [OPTION...]: sets `device`.
attach() {
    modprobe ublk_drv
    device=$(json .device attach "$@")
    [ -b "$device" ] || fail "$device is no block device"
}

# detach VOLUME: and see its device gone.
detach() {
    local gone
    gone=$(json .device detach "$1")
    [ ! -e "$gone" ] || fail "$gone is still there"
}

# verified NAME OPTION...: fio writes, then reads back what it wrote.
verified() {
    local name=$1
    shift
    fio --name="$name" --eta=never "$@" --verify=crc32c --verify_fatal=1 --randrepeat=1 --output="$work/fio.log" >"$work/fio.err.log" 2>&1
}

# write_files: and syncs each; an error ends it.
write_files() {
    local n
    trap - ERR EXIT
    for n in $(seq 100000); do
        [ ! -e "$work/enough" ] || return 0
        head -c $((n * 977 % 40000 + 1)) /dev/urandom >"/mnt/fs/$((n % 200))" && sync "/mnt/fs/$((n % 200))" || return 1
        echo "$n" >"$work/written"
    done
}

# is FILE TEXT: what a file of the kernel says.
is() {
    local found
    found=$(cat "$1")
    [ "$found" = "$2" ] || fail "$1 is $found, not $2"
}

# works_as_a_disk: requests of all sizes on $raw, and an ext4 on $fs, at /mnt/fs, which is trimmed, and grows with its volume `fs`.
works_as_a_disk() {
    local empty sum
    verified raw --filename="$raw" --size=8m --rw=randwrite --bsrange=512-64k --blockalign=512 --ioengine=io_uring --iodepth=32 --direct=1
    verified raw --filename="$raw" --offset=16m --size=16m --rw=write --bs=1m --ioengine=libaio --iodepth=4 --direct=1 --fsync=2
    ok "writes of 512 bytes to 1 MiB, 32 at a time, and flushes"
    random_file "$work/a" 4
    dd if="$work/a" of="$raw" bs=1M seek=40 oflag=direct conv=fsync 2>/dev/null
    blkdiscard --zeroout --offset $((41 << 20)) --length $((1 << 20)) "$raw"
    blkdiscard --offset $((42 << 20)) --length $((1 << 20)) "$raw"
    head -c $((2 << 20)) /dev/zero | dd of="$work/a" bs=1M seek=1 conv=notrunc 2>/dev/null
    dd if="$raw" of="$work/b" bs=1M skip=40 count=4 iflag=direct 2>/dev/null
    cmp "$work/a" "$work/b"
    ok "discard and write-zeroes read as zeros, and nothing beside them is touched"

    mkfs.ext4 -q "$fs"
    mkdir -p /mnt/fs
    mount -o errors=panic "$fs" /mnt/fs
    sync
    fstrim /mnt/fs
    empty=$(allocated)
    random_file /mnt/fs/data 64
    sync
    [ "$(allocated)" -ge $((empty + (60 << 20))) ] || fail "64 MiB written, allocated from $empty to $(allocated)"
    rm /mnt/fs/data
    sync
    fstrim /mnt/fs
    freed() {
        [ "$(allocated)" -le $((empty + (16 << 20))) ]
    }
    until_true 30 "space after fstrim" freed
    ok "ext4 made, filled, trimmed: the store has its space back"

    dbs --quiet volume resize fs 192MiB
    grown() {
        [ "$(blockdev --getsize64 "$fs")" -eq $((192 << 20)) ]
    }
    until_true 10 "the disk's new size" grown
    resize2fs "$fs" >"$work/grow.log" 2>&1
    random_file /mnt/fs/behind 140
    sum=$(md5sum </mnt/fs/behind)
    sync
    echo 3 >/proc/sys/vm/drop_caches
    [ "$(md5sum </mnt/fs/behind)" = "$sum" ] || fail "what is behind the old end"
    rm /mnt/fs/behind
    ok "the mounted disk has grown, and ext4 with it"
}

# survives_kills COMMAND...: it kills the server and starts another, again and again, while fio writes to $raw and files
# are written to $fs, which is mounted on /mnt/fs: a pause, and no error.
survives_kills() {
    local round writing load before
    write_files 2>"$work/writer.log" &
    writing=$!
    for round in $(seq "$rounds"); do
        fio --name=round --eta=never --filename="$raw" --size=12m --rw=randwrite --bsrange=4k-64k --direct=1 \
            --ioengine=io_uring --iodepth=16 --verify=crc32c --verify_fatal=1 --randseed="$round" --output="$work/fio.log" &
        load=$!
        # Another moment of the run each time.
        sleep "$(awk -v n="$round" 'BEGIN { srand(n); print 0.8 + rand() }')"
        kill -0 $load 2>/dev/null || echo "  (fio was done before the server was killed)"
        "$@" >/dev/null
        wait $load || fail "fio, round $round"
        kill -0 $writing || fail "the writer saw an error in round $round"
    done
    ok "$rounds rounds of kill -9: fio read back all it wrote, the writer went on"

    touch "$work/enough"
    wait $writing
    before=$(cat "$work/written")
    [ "$before" -gt "$rounds" ] || fail "only $before files were written"
    if dmesg | grep -E 'I/O error|EXT4-fs error|Buffer I/O'; then
        fail "the kernel saw errors"
    fi
    md5sum /mnt/fs/[0-9]* >"$work/sums"
    umount /mnt/fs
    e2fsck -fn "$fs" >"$work/e2fsck.log" 2>&1
    mount "$fs" /mnt/fs
    md5sum -c "$work/sums" >/dev/null
    umount /mnt/fs
    ok "$before files written and synced meanwhile; the kernel saw no error, ext4 is clean"
}

# end_fio PROCESS: ends one that would go on; an error or wrong data before that is a failure.
end_fio() {
    kill -0 "$1" || fail "fio has ended by itself"
    kill -INT "$1"
    wait "$1" || [ $? -eq 128 ] || fail "fio"
    if grep -E 'err=[^ ]*[1-9]|verify:.*bad' "$work/fio.log"; then
        fail "fio"
    fi
}

# check_store: the store is idle and sound.
check_store() {
    dbs check >"$work/check.log" 2>&1 || {
        cat "$work/check.log"
        fail "dbs check"
    }
}

# allocated: bytes of the store that are in use.
allocated() {
    json .allocated info
}

# random_file FILE MIB
random_file() {
    dd if=/dev/urandom of="$1" bs=1M count="$2" 2>/dev/null
}

# Shows what logs say after a failure; then the machine ends, and nothing is worth a wait.
clean_up() {
    local code=$? log
    trap - ERR
    set +e
    if [ $code -ne 0 ]; then
        for log in "$work"/*.log; do
            if [ -s "$log" ]; then
                echo "  -- ${log##*/}:"
                tail -15 "$log"
            fi
        done
    fi
    rm -rf "$work"
    exit $code
}

# nothing_left: a scenario has ended what it started.
nothing_left() {
    local left
    left=$(awk '$2 ~ "^/mnt/" { print $2 }' /proc/mounts)
    if [ -n "$left" ]; then
        fail "still mounted: $left"
    fi
    if [ -n "$server" ]; then
        end_server TERM
    fi
    left=$(pidof dbs longhorn fio nbd-client || true)
    if [ -n "$left" ]; then
        ps | grep -v '\[.*\]'
        fail "still running: $left"
    fi
}

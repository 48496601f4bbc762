# xfstests' quick generic group on two volumes, failures again on plain disks (scripts/vm/xfstests.sh runs it)
# timeout: 1800
# rounds: 3600
# needs: dbs attach
# by name only
# Rounds are seconds here. /dev/vdb is for the log of writes of some tests, /dev/vdc the root file system,
# /dev/vdd carries files in and results out, /dev/vde and /dev/vdf are as large as the volumes.
[ -b /dev/vdf ] || fail "scripts/vm/xfstests.sh prepares what this needs, and runs it"
end=$((SECONDS + rounds - 120))
root=/xfstests
results=$root/results
mkdir -p "$root"
mount -t ext4 /dev/vdc "$root"
for place in proc sys dev dev/pts dev/shm; do
    mount --bind "/$place" "$root/$place"
done
mount -t tmpfs tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
mount --bind "$root/lib/modules" /lib/modules
mount -t debugfs debugfs /sys/kernel/debug 2>/dev/null || true
tar -x -C "$results" -f /dev/vdd
touch "$results/table"
# kind, the type of file system; limit, seconds for one test; tests, their numbers in order.
# shellcheck disable=SC1091 # written by xfstests.sh
. "$results/settings"

# There is no udev: dmsetup makes nodes itself, and here they become the links that udev would have made, by which
# tests find a device's name.
export DM_DISABLE_UDEV=1
cat >"$root/usr/local/sbin/dmsetup" <<'END'
#!/bin/bash
/sbin/dmsetup "$@" || exit
[ "$1" = create ] || exit 0
for node in /dev/mapper/*; do
    if [ -b "$node" ] && [ ! -L "$node" ]; then
        ln -sf "../dm-$((0x$(stat -c %T "$node")))" "$node"
    fi
done
END
chmod 755 "$root/usr/local/sbin/dmsetup"

# save: what there is goes out; should the machine die, this stays.
save() {
    dmesg >"$results/dmesg"
    cp "$work"/*.log "$results/"
    tar -c -C "$results" -f /dev/vdd .
    sync
}

# prepared WHERE TEST_DEVICE SCRATCH_DEVICE: a configuration for `check`, and the file system it expects.
prepared() {
    cat >"$results/$1.config" <<END
export FSTYP=$kind TEST_DEV=$2 TEST_DIR=/mnt/test SCRATCH_DEV=$3 SCRATCH_MNT=/mnt/scratch LOGWRITES_DEV=/dev/vdb
END
    case $kind in
    xfs) chroot "$root" mkfs.xfs -q -f "$2" ;;
    *) chroot "$root" "mkfs.$kind" -q -F "$2" ;;
    esac >"$work/mkfs.log" 2>&1
}

# family PID: the process and what descends from it.
family() {
    local child
    echo "$1"
    for child in $(chroot "$root" pgrep -P "$1" || true); do
        family "$child"
    done
}

# end_test TEST: asks, so that it clears away what it made; after 20 s it is no question any more.
end_test() {
    local process
    process=$(chroot "$root" pgrep -o -f "tests/generic/$1\$" || true)
    [ -n "$process" ] || return 0
    # shellcheck disable=SC2046 # a list
    kill $(family "$process") 2>/dev/null || true
    for _ in {1..40}; do
        kill -0 "$process" 2>/dev/null || return 0
        sleep 0.5
    done
    # shellcheck disable=SC2046 # a list
    kill -9 $(family "$process") 2>/dev/null || true
}

# checked WHERE TEST...: one `check`; sets of each test outcome[TEST] and why[TEST]. A test that hangs is ended, and so
# are those that run when the time is over.
declare -A outcome=() why=()
calls=0
checked() {
    local where=$1 process current=none test since=$SECONDS asked=''
    local out=$results/$where.$calls.out base=/results/$where.$calls
    shift
    calls=$((calls + 1))
    declare -A ended=()
    # What a test that was ended has left.
    umount "$root/mnt/scratch" "$root/mnt/test" 2>/dev/null || true
    chroot "$root" dmsetup remove_all --force >/dev/null 2>&1 || true
    chroot "$root" losetup -D >/dev/null 2>&1 || true
    chroot "$root" env "HOST_OPTIONS=/results/$where.config" "RESULT_BASE=$base" \
        PATH=/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin \
        bash -c 'cd /xfstests && exec ./check "$@"' check "${@/#/generic/}" >"$out" 2>&1 </dev/null &
    process=$!
    while kill -0 $process 2>/dev/null; do
        sleep 0.5
        test=$(sed -n 's,^generic/\([0-9]*\).*,\1,p' "$out" | tail -1)
        if [ "${test:-none}" != "$current" ]; then
            current=$test since=$SECONDS asked=''
        elif [ -z "$asked" ] && [ $SECONDS -gt $((since + limit)) ]; then
            ended[$current]="not done after $limit s" asked=1
            end_test "$current"
        elif [ $SECONDS -gt $((since + limit + 300)) ]; then
            save
            fail "generic/$current on $where: neither it nor check can be ended"
        fi
        if [ $SECONDS -gt $end ] && [ -z "${ended[over]-}" ]; then
            ended[over]=$current
            # Without its parent's loop there is no next one.
            kill -STOP $process
            end_test "$current"
            kill $process
            kill -CONT $process
        fi
    done
    wait $process || true
    if ! grep -q ^generic/ "$out" && [ $SECONDS -le $end ]; then
        cp "$out" "$work/check.log"
        fail "check runs nothing on $where"
    fi
    for test in "$@"; do
        why[$test]=
        if [ -n "${ended[$test]-}" ]; then
            outcome[$test]=failed why[$test]=${ended[$test]}
        elif [ "${ended[over]-}" = "$test" ] || ! grep -q "^generic/$test" "$out"; then
            outcome[$test]=unreached
        elif [ -e "$root$base/generic/$test.notrun" ]; then
            outcome[$test]=notrun why[$test]=$(tr '\n' ' ' <"$root$base/generic/$test.notrun")
        elif grep -qE "^generic/$test +[0-9]+s\$" "$out"; then
            outcome[$test]=passed why[$test]=$(sed -n "s,^generic/$test *\([0-9]*s\)\$,\1,p" "$out")
        else
            outcome[$test]=failed why[$test]=$(sed -n "s,^generic/$test *,,p" "$out" | sed 's,/results/,,' | head -1)
        fi
    done
}

# tell TEST OUTCOME WHY
tell() {
    printf '%s\t%s\t%s\n' "$@" | tee -a "$results/table"
}

# compared TEST...: these have failed on volumes. Do they on plain disks, and again on volumes?
compared() {
    local test first plain=() again=()
    declare -A first=()
    for test in "$@"; do
        first[$test]=${why[$test]}
    done
    checked plain "$@"
    for test in "$@"; do
        case ${outcome[$test]} in
        failed) tell "$test" "fails on a plain disk too" "${first[$test]}; there: ${why[$test]}" ;;
        unreached) tell "$test" "failed, time was over" "${first[$test]}" ;;
        *) again+=("$test") ;;
        esac
    done
    [ ${#again[@]} -gt 0 ] || return 0
    checked dbs "${again[@]}"
    for test in "${again[@]}"; do
        case ${outcome[$test]} in
        failed) tell "$test" "FAILS ON DBS ONLY" "${first[$test]}" ;;
        unreached) tell "$test" "failed, passed on a plain disk, time was over" "${first[$test]}" ;;
        *) tell "$test" "failed once on DBS, then passed" "${first[$test]}" ;;
        esac
    done
}

fresh_store
start_server
modprobe loop
for name in test scratch; do
    dbs --quiet volume create "$name" "$(blockdev --getsize64 "/dev/vd$([ $name = test ] && echo e || echo f)")"
done
attach test --queues 2
test_device=$device
attach scratch --queues 2
prepared dbs "$test_device" "$device"
prepared plain /dev/vde /dev/vdf
ok "volumes $test_device and $device"
# shellcheck disable=SC2154,SC2086 # of the settings
set -- $tests
while [ $# -gt 0 ] && [ $SECONDS -lt $end ]; do
    some=("${@:1:20}")
    shift ${#some[@]}
    checked dbs "${some[@]}"
    bad=() rest=()
    for number in "${some[@]}"; do
        case ${outcome[$number]} in
        failed) bad+=("$number") ;;
        unreached) rest+=("$number") ;;
        *) tell "$number" "${outcome[$number]}" "${why[$number]}" ;;
        esac
    done
    set -- "${rest[@]}" "$@"
    if [ ${#bad[@]} -gt 0 ]; then
        compared "${bad[@]}"
    fi
    save
done
ok "time for $(wc -l <"$results/table") tests, $# not reached"
for place in mnt/scratch mnt/test; do
    umount "$root/$place" 2>/dev/null || true
done
detach test
detach scratch
end_server TERM
check_store
ok "dbs check"
save
# What the kernel complained of was the tests' business, and is in their results.
dmesg -c >/dev/null

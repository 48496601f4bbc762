# a volume over three replicas as a disk of NVMe/TCP with two paths: under fio, its controller is killed, replaced, and loses paths
# timeout: 300
# needs: longhorn controller
modprobe nvme-tcp
host=nqn.2014-08.org.nvmexpress:uuid:5f5cb9a0-6a4e-4e0a-9f5a-3b1d2c7e8f90
first=127.0.0.2
second=127.0.0.3
declare -A port=([a]=10000 [b]=10010 [c]=10020)
backends=()
for name in a b c; do
    start_replica $name "${port[$name]}"
    backends+=(--replica "tcp://127.0.0.1:${port[$name]}")
done

# serve ADDRESS...: a controller that listens there.
serve() {
    local address listen=()
    for address in "$@"; do
        listen+=(--nvme-listen "tcp:$address:442")
    done
    start_controller nvme-tcp "${backends[@]}" --reactors 2 "${listen[@]}"
}

# again ADDRESS...: all are killed amid what they do, and the next controller listens there.
again() {
    local name
    end_controller KILL
    for name in a b c; do
        end_replica $name KILL
        start_replica $name "${port[$name]}"
    done
    serve "$@"
    grep -q event=taken_over "$controller_log" || fail "the disk is another one"
}

# ask ADDRESS: has the kernel connect to it.
ask() {
    echo "transport=tcp,traddr=$1,trsvcid=442,nqn=$nqn,hostnqn=$host,hostid=${host##*:},reconnect_delay=1,ctrl_loss_tmo=240" \
        >/dev/nvme-fabrics || fail "cannot connect to $1"
}

# path ADDRESS: the directory of the kernel's controller there.
path() {
    grep -l "traddr=$1," /sys/class/nvme/nvme*/address | head -1 | xargs dirname
}

# is_on ADDRESS STATE: whether the volume is optimized or inaccessible there.
is_on() {
    local found
    found=$(cat "$(path "$1")"/nvme*c*n1/ana_state)
    [ "$found" = "$2" ]
}

# begin: fio in the background, without an end.
begin() {
    fio --name=load --eta=never --filename="$device" --size=8m --rw=randwrite --bsrange=4k-64k --direct=1 --ioengine=io_uring \
        --iodepth=16 --verify=crc32c --verify_fatal=1 --time_based --runtime=3000 --output="$work/fio.log" >"$work/fio.err.log" 2>&1 &
    load=$!
    sleep 2
}

# goes_on TEXT: fio has a while more, and has seen no error and no wrong byte.
goes_on() {
    local before
    before=$(awk '{ print $7 }' "/sys/block/${device##*/}/stat")
    more() {
        [ "$(awk '{ print $7 }' "/sys/block/${device##*/}/stat")" -gt $((before + 4096)) ]
    }
    until_true 60 "more writes" more
    end_fio "$load"
    if dmesg | grep -E 'I/O error|Buffer I/O'; then
        fail "the kernel saw errors"
    fi
    ok "$1"
}

serve $first $second
nqn=$(steer info | jq -r '.endpoint | split("/") | last')
ask $first
appears() {
    device=/dev/$(basename /sys/class/nvme-subsystem/nvme-subsys*/nvme*n1)
    [ -b "$device" ]
}
until_true 30 "the disk" appears
ask $second
[ "$(echo /sys/class/nvme-subsystem/nvme-subsys*)" = /sys/class/nvme-subsystem/nvme-subsys0 ] || fail "not one disk"
until_true 30 "the first path" is_on $first optimized
until_true 30 "the second path" is_on $second inaccessible
ok "two paths to one disk, of which the first is used"

begin
again $second
until_true 60 "the second path" is_on $second optimized
goes_on "kill -9 of controller and replicas under fio: the next controller serves the second path"
begin
again $first $second
until_true 60 "both paths" eval "is_on $first optimized || is_on $second optimized"
goes_on "kill -9 again: the next controller serves both"

used=$first other=$second
is_on $first optimized || used=$second other=$first
until_true 60 "the path that is not used" is_on $other inaccessible
begin
echo 1 >"$(path $used)/delete_controller"
until_true 60 "the other path" is_on $other optimized
goes_on "a path that is disconnected under fio: the other one takes over"
ask $used
until_true 30 "the path again" is_on $used inaccessible

begin
old=$controller
declare -A older
for name in a b c; do
    older[$name]=${replica[$name]}
    start_replica $name $((${port[$name]} + 100))
done
longhorn controller vol --frontend nvme-tcp --size "$volume_bytes" --current-size "$volume_bytes" --disableRevCounter --upgrade \
    --listen 127.0.0.1:9501 --replica tcp://127.0.0.1:10100 --replica tcp://127.0.0.1:10110 --replica tcp://127.0.0.1:10120 \
    --nvme-listen "tcp:$used:442" >"$work/newer.log" 2>&1 </dev/null &
controller=$!
until_true 60 "the newer controller" grep -q event=ready "$work/newer.log"
grep -q event=taken_over "$work/newer.log" || fail "the disk is another one"
wait "$old" || fail "the older controller did not end well"
kill -TERM "${older[@]}"
wait "${older[@]}" || true
until_true 60 "its path" is_on $used optimized
goes_on "--upgrade under fio: the newer controller serves the other path"

for name in $first $second; do
    echo 1 >"$(path $name)/delete_controller"
done
end_controller TERM
for name in a b c; do
    end_replica $name TERM
done

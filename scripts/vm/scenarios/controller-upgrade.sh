# a controller that takes a mounted block device over from one that runs, with replica processes of its own
# timeout: 240
# needs: longhorn controller
modprobe ublk_drv
start_replica a 10000
start_replica b 10010
start_controller tgt-blockdev --replica tcp://127.0.0.1:10000 --replica tcp://127.0.0.1:10010
device=/dev/longhorn/vol
mkfs.ext4 -q "$device"
mkdir -p /mnt/v
mount -o errors=panic "$device" /mnt/v
random_file "$work/data" 3
cp "$work/data" /mnt/v/data
must_fail longhorn controller vol --frontend tgt-blockdev --size "$volume_bytes" --disableRevCounter --listen 127.0.0.1:9502 \
    --replica tcp://127.0.0.1:10000
kill -0 "$controller" || fail "the controller has ended"
ok "without --upgrade nothing is taken from a running controller"

verified load --directory=/mnt/v --size=3m --rw=randwrite --bs=4k --direct=1 --ioengine=io_uring --iodepth=16 --loops=2 &
load=$!
until_true 30 "fio's file" test -s /mnt/v/load.0.0
# As a manager does: newer processes on the same directories, then the newer controller, then the old ones go.
old=("${replica[a]}" "${replica[b]}")
old_controller=$controller
start_replica a 10100
start_replica b 10110
# It may have the port of the older one, which ends before.
longhorn controller vol --frontend tgt-blockdev --size "$volume_bytes" --current-size "$volume_bytes" --disableRevCounter --upgrade \
    --listen 127.0.0.1:9501 --replica tcp://127.0.0.1:10100 --replica tcp://127.0.0.1:10110 >"$work/newer.log" 2>&1 </dev/null &
controller=$!
until_true 60 "the newer controller" grep -q event=ready "$work/newer.log"
grep -q event=taken_over "$work/newer.log" || fail "the device is another one"
[ "$(steer info | jq -r .frontendState)" = up ] || fail "the newer one has another port"
wait "$old_controller" || fail "the older controller did not end well"
kill -TERM "${old[@]}"
wait "${old[@]}" || true
wait $load || fail "fio"
cmp "$work/data" /mnt/v/data
umount /mnt/v
e2fsck -fn "$device" >"$work/e2fsck.log" 2>&1
ok "the newer controller has the device: fio read back all it wrote, ext4 is clean"
end_controller TERM
end_replica a TERM
end_replica b TERM
[ ! -e "$device" ] || fail "$device is still there"

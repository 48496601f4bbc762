# what a command may not do to volumes whose block devices wait for a server, with a server and without one
# timeout: 120
# needs: dbs attach
# quick
fresh_store
start_server
dbs --quiet volume create v 16MiB
attach v
head=$device
random_file "$work/data" 4
dd if="$work/data" of="$head" bs=1M oflag=direct conv=fsync 2>/dev/null
dbs --quiet snapshot create v@s
attach v@s

# refused COMMAND...: because of a device.
refused() {
    must_fail "$@"
    grep -q '/dev/ublkb' "$work/must_fail.log" || fail "for another reason: $* $(cat "$work/must_fail.log")"
}
takes_content() {
    refused dbs --yes snapshot rollback "$1@s"
    refused dbs --yes volume resize "$1" 8MiB
    refused dbs --yes snapshot delete "$1@s"
    refused dbs --yes volume delete "$1"
}
end_server KILL
# Found by review: nobody served the store, so these went ahead.
takes_content v
refused dbs --yes init --force "$DBS_STORE"
refused dbs new-uuid
# It measures reading alone, or nothing; what the device shows is compared below.
dbs --yes bench v --write --time 20ms >"$work/bench.log" 2>&1 || true
dbs --quiet volume rename v w
ok "an idle store keeps what devices wait for"

is_live() {
    json '.[] | select(.volume == "w" and .snapshot == null) | .state' attached | grep -qx live
}
start_server
takes_content w
until_true 60 "the server to take the devices over" is_live
takes_content w
dd if="$head" of="$work/read" bs=1M count=4 iflag=direct 2>/dev/null
cmp "$work/read" "$work/data"
dbs --quiet volume rename w x
takes_content x
detach x@s
ok "so does a server, before and after it takes them over; a new name changes nothing"

end_server TERM
refused dbs --yes snapshot rollback x@s
dbs --quiet detach x --force
dbs --quiet --yes snapshot rollback x@s
dbs --quiet --yes volume delete x
ok "a device that was removed keeps nothing"
check_store

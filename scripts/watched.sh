#!/usr/bin/env bash
# watched.sh SECONDS COMMAND...: runs a command that may hang or leave processes behind, and does neither itself.
#
# Its output goes to a file that is shown as it grows: a process that keeps a pipe open keeps its reader waiting for
# ever. After SECONDS, what runs is shown and killed (exit code 124). Processes still there when the command has
# ended are named and killed, and it has failed (exit code 1). They are known by a variable in their environment.
# LOG: also written there. WATCHED_GRACE: how many seconds what is left has to end by itself, 60.
set -uo pipefail
limit=$1
shift
mark=DBS_WATCHED=$$.$(date +%s%N)
out=$(mktemp)
command=
follower=

# What the command started and is still there, by process id.
left() {
    local file
    for file in /proc/[0-9]*; do
        if tr '\0' '\n' 2>/dev/null <"$file/environ" | grep -qxF "$mark"; then
            # The dead keep their number until they are waited for, no environment.
            echo "${file#/proc/}"
        fi
    done
}

show() {
    local id
    for id in "$@"; do
        printf '%s %s %s in %s: %s\n' "$id" "$(awk '/^(State|PPid)/ { printf "%s ", $2 }' "/proc/$id/status")" \
            "$(ls "/proc/$id/task" | wc -l) threads" "$(cat "/proc/$id/wchan" 2>/dev/null)" \
            "$(tr '\0' ' ' <"/proc/$id/cmdline")"
    done 2>/dev/null
}

# Mounts of `dbs mount` and what they were loop-mounted to would block whoever looks at them.
unmount() {
    local point
    awk '$9 ~ /^fuse\.dbs/ || $10 ~ /^fuse\.dbs/ { print $5 }' /proc/self/mountinfo | while read -r point; do
        case $mounts in
        *" $point "*) ;;
        *) umount -l "$point" && echo "left mounted: $point" ;;
        esac
    done
}

finish() {
    local ids
    ids=$(left)
    if [ -n "$ids" ]; then
        # shellcheck disable=SC2086 # a list
        kill -9 $ids 2>/dev/null
    fi
    # It stops with the command, but one that cannot be killed would keep it.
    kill "$follower" 2>/dev/null
    if [ -n "${LOG:-}" ]; then
        cat "$out" >>"$LOG"
    fi
    rm -f "$out"
}
trap finish EXIT
trap 'exit 130' INT TERM

mounts=" $(awk '$9 ~ /^fuse\.dbs/ || $10 ~ /^fuse\.dbs/ { print $5 }' /proc/self/mountinfo | tr '\n' ' ') "
env "$mark" "$@" >"$out" 2>&1 </dev/null &
command=$!
tail -n +1 -s 0.2 -f --pid="$command" "$out" &
follower=$!
end=$((SECONDS + limit))
while kill -0 "$command" 2>/dev/null; do
    if [ "$SECONDS" -ge "$end" ]; then
        sleep 0.5
        echo "watched.sh: not done after $limit s: $*"
        # shellcheck disable=SC2046 # a list
        show $(left)
        unmount
        exit 124
    fi
    sleep 0.2
done
wait "$command"
code=$?
wait "$follower"
ids=$(left)
for _ in $(seq "${WATCHED_GRACE:-60}"); do
    # What is just ending is not left behind.
    [ -n "$ids" ] || break
    sleep 1
    ids=$(left)
done
if [ -n "$ids" ]; then
    echo "watched.sh: left behind by: $*"
    # shellcheck disable=SC2086 # a list
    show $ids
    code=$((code == 0 ? 1 : code))
fi
stale=$(unmount)
if [ -n "$stale" ]; then
    echo "$stale"
    code=$((code == 0 ? 1 : code))
fi
exit "$code"

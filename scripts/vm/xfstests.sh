#!/usr/bin/env bash
# xfstests.sh [SECONDS [TEST...]]: xfstests' quick generic tests in the virtual machine, by number, as far as
# SECONDS (3600) go; or those named (013 ...). Its two file systems are on volumes of one store, as ublk devices.
# What fails runs again on plain disks of the same size, and if it passes there, once more on the volumes.
# Prints what became of each, then a summary; details are in target/vm/xfstests/results. Exit code 1 if
# something fails on volumes alone. The first time it makes a root file system, as root, from Debian's archive
# (xfstests-root.sh; 10 minutes).
#
# FSTYP      xfs (default) or ext4
# LIMIT      seconds that one test may take, 420 by default
# FROM       the first test, to go on where another run has ended
# SKIP       tests to leave out
# XFSTESTS   a git directory of xfstests in place of its home
# VM_DIR     and whatever else scripts/vm/run.sh takes
set -euo pipefail
here=$(realpath "$(dirname "$0")")
cd "$here/../.."
seconds=${1:-3600}
shift || true
export VM_DIR=${VM_DIR:-target/vm}
dir=$VM_DIR/xfstests

why=$("$here/prepare.sh" "$VM_DIR") || {
    echo "the virtual machine needs ${why:-something}" >&2
    exit 1
}
"$here/xfstests-root.sh" "$VM_DIR"

work=$(mktemp -d "$dir/run.XXXXXX")
trap 'rm -rf "$work"' EXIT
tests=$*
if [ -z "$tests" ]; then
    tests=$(awk -v from="${FROM:-0}" '$1 + 0 >= from + 0' "$dir/quick")
fi
for test in ${SKIP:-}; do
    tests=$(tr ' ' '\n' <<<"$tests" | grep -vx "$test" || true)
done
mkdir "$work/in"
cat >"$work/in/settings" <<END
kind=${FSTYP:-xfs}
limit=${LIMIT:-420}
tests="$(echo $tests)"
END
tar -c -C "$work/in" -f "$work/mail.img" settings
truncate -s 1G "$work/mail.img"
truncate -s 3G "$work/test.img"
truncate -s 4G "$work/scratch.img"

code=0
echo "xfstests $(cat "$dir/version"), ${FSTYP:-xfs}, $(wc -w <<<"$tests") tests, $seconds s"
ROUNDS=$seconds VM_MEMORY=${VM_MEMORY:-3G} \
    VM_DISKS="$dir/root.img,snapshot=on $work/mail.img $work/test.img $work/scratch.img" \
    "$here/run.sh" xfstests || code=$?

rm -rf "$dir/results"
mkdir "$dir/results"
tar -x -C "$dir/results" -f "$work/mail.img"
if [ ! -s "$dir/results/table" ]; then
    echo "no test came to its end" >&2
    exit 1
fi
# Outcomes with their tests; those that did not run by reason, the others with what they said.
awk -F '\t' '
    { count[$2]++ }
    $2 == "passed" || $2 == "notrun" { key = $2 "\t" ($2 == "passed" ? "" : $3); list[key] = list[key] " " $1; next }
    { bad[$2] = bad[$2] "\n    " $1 ": " $3 }
    END {
        printf "passed %d:%s\n", count["passed"], list["passed\t"]
        printf "not run %d:\n", count["notrun"]
        for (key in list) if (key !~ /^passed/) { split(key, part, "\t"); print "    " part[2] ":" list[key] | "sort" }
        close("sort")
        for (key in bad) printf "%s %d:%s\n", key, count[key], bad[key]
    }' "$dir/results/table" | fold -s -w 120 | tee "$dir/results/summary"
if grep -q "FAILS ON DBS ONLY" "$dir/results/table"; then
    code=1
fi
exit $code

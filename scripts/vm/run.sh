#!/usr/bin/env bash
# run.sh [--quick] [--shell] [--list] [SCENARIO...]: boots Debian's 6.12 kernel in QEMU and runs scenarios
# (scripts/vm/scenarios) with our programs in it; without names all but those to be named.
#
#   --quick   only those marked for `make test`; where something is missing, say so and succeed
#   --shell   a shell in the machine instead
#   --list    what there is
#
# DBS, LONGHORN   the programs to test; by default what `make static` built (target/ARCH-unknown-linux-musl)
# VM_DIR          where the machine is kept, target/vm by default; removed, it is downloaded anew
# VM_KVM=1        with the host's acceleration, where that works
# ROUNDS          of scenarios that count them (`# rounds: N`); their time grows with it
# VM_DISKS        further disks, /dev/vdc and on: raw images, each with QEMU's options for it ("FILE,snapshot=on ...")
# VM_MEMORY       2G by default
# TGTD_BIN        a directory with Longhorn's tgtd and tgtadm, for the scenario controller-iscsi
# VM_QEMU         further options for QEMU, separated by blanks
# VM_PATIENCE     how many times the time of an idle host everything may take, 4 by default
set -euo pipefail
here=$(realpath "$(dirname "$0")")
cd "$here/../.."
arch=$(uname -m)
dir=${VM_DIR:-target/vm}
built=${CARGO_TARGET_DIR:-target}/$arch-unknown-linux-musl/release
dbs=${DBS:-$built/dbs}
longhorn=${LONGHORN:-$built/longhorn}
quick='' shell='' names=() ROUNDS=${ROUNDS:-0}
# Besides the time of its scenarios, what a machine may take: TCG is slow.
patience=${VM_PATIENCE:-4}
boot_seconds=$((60 * patience))

header() {
    sed -n "s/^# $2: //p" "$here/scenarios/$1.sh"
}

# limit SCENARIO: seconds it may take.
limit() {
    local seconds rounds
    seconds=$(($(header "$1" timeout) * patience))
    rounds=$(header "$1" rounds)
    if [ -n "$rounds" ]; then
        seconds=$((seconds * (ROUNDS > rounds ? ROUNDS : rounds) / rounds))
    fi
    echo "$seconds"
}

marked() {
    grep -qx "# $2" "$here/scenarios/$1.sh"
}

list() {
    local name note
    for name in "$here"/scenarios/*.sh; do
        name=$(basename "$name" .sh)
        note=$(sed -n '1s/^# //p' "$here/scenarios/$name.sh")
        if marked "$name" "by name only"; then
            note="$note (only by name)"
        fi
        printf '%-22s %s\n' "$name" "$note"
    done
}

# missing WHAT: cannot run here.
missing() {
    if [ -n "$quick" ]; then
        echo "SKIPPED the virtual machine: needs $1"
        exit 0
    fi
    echo "the virtual machine needs $1" >&2
    exit 1
}

while [ $# -gt 0 ]; do
    case $1 in
    --quick) quick=1 ;;
    --shell) shell=1 ;;
    --list)
        list
        exit
        ;;
    -*)
        sed -n '2,/^set/p' "$0" | sed -n 's/^# \{0,1\}//p' >&2
        exit 2
        ;;
    *) names+=("$1") ;;
    esac
    shift
done
if [ ${#names[@]} -eq 0 ]; then
    for name in "$here"/scenarios/*.sh; do
        name=$(basename "$name" .sh)
        if { [ -z "$quick" ] || marked "$name" quick; } && ! marked "$name" "by name only"; then
            names+=("$name")
        fi
    done
fi
for name in "${names[@]}"; do
    if [ ! -e "$here/scenarios/$name.sh" ]; then
        echo "no scenario $name; there are:" >&2
        list >&2
        exit 2
    fi
done

[ "$arch" = x86_64 ] || missing "an x86-64 machine; this is $arch"
if ! command -v qemu-system-x86_64 >/dev/null; then
    [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null ||
        missing "qemu-system-x86_64 (apt-get install qemu-system-x86)"
    echo "installing with apt-get: qemu-system-x86"
    { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends \
        qemu-system-x86; } >"${TMPDIR:-/tmp}/apt-qemu.$$.log" 2>&1 || {
        tail -5 "${TMPDIR:-/tmp}/apt-qemu.$$.log"
        missing "qemu-system-x86_64, and apt-get failed to install qemu-system-x86"
    }
    rm -f "${TMPDIR:-/tmp}/apt-qemu.$$.log"
fi
[ -e "$dbs" ] || missing "$dbs (make static)"
code=0 iscsi=()
why=$("$here/prepare.sh" "$dir") || code=$?
if [ $code -eq 0 ] && [ -n "${TGTD_BIN:-}" ] && [[ " ${names[*]} " = *" controller-iscsi "* ]]; then
    why=$("$here/iscsi.sh" "$dir") || code=$?
    iscsi=("$dir/iscsi.cpio")
fi
if [ $code -eq 77 ]; then
    missing "$why"
elif [ $code -ne 0 ]; then
    echo "$why" >&2
    exit $code
fi

machine=$(mktemp -d "$dir/machine.XXXXXX")
qemu=
end() {
    if [ -n "$qemu" ]; then
        # That is `timeout`, which ends QEMU, unless it is killed itself.
        kill "$qemu" 2>/dev/null || true
        wait "$qemu" 2>/dev/null || true
    fi
    rm -rf "$machine"
}
trap end EXIT
trap 'exit 130' INT TERM

# Our programs and scripts, in a second archive behind the first.
pack() {
    local root=$machine/root program name
    rm -rf "$root"
    mkdir -p "$root/vm/bin" "$root/vm/scenarios"
    for program in "$dbs:dbs" "$longhorn:longhorn"; do
        if [ -e "${program%:*}" ]; then
            strip -o "$root/vm/bin/${program##*:}" "${program%:*}" 2>/dev/null ||
                cp "${program%:*}" "$root/vm/bin/${program##*:}"
            chmod 755 "$root/vm/bin/${program##*:}"
        fi
    done
    cp "$here"/guest/{lib.sh,scenario} "$root/vm/"
    cp "$here/guest/init" "$root/init"
    cp "$here"/scenarios/*.sh "$root/vm/scenarios/"
    for name in "$@"; do
        sed -i "s/^# timeout: .*/# timeout: $(limit "$name")/" "$root/vm/scenarios/$name.sh"
        if [ "$ROUNDS" -gt 0 ]; then
            sed -i "s/^# rounds: .*/# rounds: $ROUNDS/" "$root/vm/scenarios/$name.sh"
        fi
    done
    sed -i "s/^patience=.*/patience=$patience/" "$root/vm/lib.sh"
    printf '%s\n' "$@" >"$root/vm/scenarios.list"
    if [ -n "$shell" ]; then
        touch "$root/vm/shell"
    fi
    name=$(realpath "$dir/busybox")
    { cat "$dir/base.cpio" "${iscsi[@]}" && (cd "$root" && find . | sort | "$name" cpio -o -H newc -R 0:0 2>/dev/null); } \
        >"$machine/initrd"
}

# boot SECONDS: runs a machine with what was packed, until it ends by itself.
boot() {
    local accelerator="tcg,thread=multi"
    if [ -n "${VM_KVM:-}" ]; then
        accelerator=kvm
    fi
    rm -f "$machine"/{status,kernel.log,a.img,b.img}
    truncate -s 8G "$machine/a.img"
    truncate -s 4G "$machine/b.img"
    # The images are thrown away: the host need not sync them. Discards make them sparse again.
    local drive="format=raw,if=none,cache=unsafe,discard=unmap" disk disks=()
    for disk in ${VM_DISKS:-}; do
        disks+=(-drive "file=$disk,id=more${#disks[@]},$drive" -device "virtio-blk-pci,drive=more${#disks[@]}")
    done
    # Without no_timer_check the kernel panics at boot if the host is too busy to give it a timer's interrupts in time.
    local command=(qemu-system-x86_64 -accel "$accelerator" -cpu max -smp 2 -m "${VM_MEMORY:-2G}" -nographic -no-reboot
        -nodefaults -kernel "$dir/vmlinuz" -initrd "$machine/initrd"
        -append "console=ttyS0 loglevel=5 panic=-1 rdinit=/init nokaslr tsc=reliable no_timer_check mitigations=off nosoftlockup"
        -serial "file:$machine/kernel.log"
        -device virtio-serial-pci
        -chardev "stdio,id=out,signal=off" -device virtconsole,chardev=out
        -chardev "file,id=status,path=$machine/status" -device virtserialport,chardev=status,name=status
        -drive "file=$machine/a.img,id=a,$drive" -device virtio-blk-pci,drive=a
        -drive "file=$machine/b.img,id=b,$drive" -device virtio-blk-pci,drive=b
        "${disks[@]}" ${VM_QEMU:-})
    if [ -n "$shell" ]; then
        "${command[@]}"
        return
    fi
    timeout -k 5 "$1" "${command[@]}" </dev/null &
    qemu=$!
    wait "$qemu" || true
    qemu=
}

if [ -n "$shell" ]; then
    pack
    boot
    exit
fi

printf 'Linux %s in QEMU (%s), %s\n' "$(cat "$dir/version")" "$([ -n "${VM_KVM:-}" ] && echo KVM || echo TCG)" "$dbs"
passed=() failed=() skipped=() again=() took=()
while [ ${#names[@]} -gt 0 ]; do
    seconds=$boot_seconds
    for name in "${names[@]}"; do
        seconds=$((seconds + $(limit "$name")))
    done
    pack "${names[@]}"
    boot "$seconds"
    rest=() current=
    for name in "${names[@]}"; do
        if grep -q "^$name passed" "$machine/status" 2>/dev/null; then
            passed+=("$name")
            took+=("$name $(sed -n "s/^$name passed //p" "$machine/status")")
        elif grep -q "^$name skipped" "$machine/status" 2>/dev/null; then
            skipped+=("$name")
        elif [ -z "$current" ]; then
            current=$name
        else
            rest+=("$name")
        fi
    done
    if ! grep -qx done "$machine/status" 2>/dev/null; then
        # Hung as a whole, panicked or did not even boot, unless the machine itself said what happened.
        if [ -z "$current" ]; then
            current="the end of the machine"
        fi
        if ! grep -q "^$current failed" "$machine/status" 2>/dev/null; then
            echo "  FAILED: the machine died or hung during $current; the kernel's last words:"
            tail -40 "$machine/kernel.log" 2>/dev/null || true
        fi
    fi
    booted=$(sed -n 's/^booted //p' "$machine/status" 2>/dev/null || true)
    if [ -n "$current" ] && [ -n "$quick" ] && [ "${booted:-0}" -gt 40 ]; then
        missing "a host that is faster or has less to do: the machine booted in $booted s, not 5"
    elif [ -n "$quick" ] && [ -e "$here/scenarios/$current.sh" ] && [[ " ${again[*]-} " != *" $current "* ]]; then
        # Among other programs, a stall of the host may be more than a time limit of the product allows.
        echo "  $current is tried once more"
        again+=("$current")
        rest=("$current" "${rest[@]}")
    elif [ -n "$current" ]; then
        failed+=("$current")
        # A machine in which nothing runs will not do better the next time.
        if ! grep -q started "$machine/status" 2>/dev/null; then
            failed+=("${rest[@]}")
            rest=()
        fi
    fi
    names=("${rest[@]}")
done

[ ${#took[@]} -eq 0 ] || printf '  %s s\n' "${took[@]}"
printf 'virtual machine: %s passed, %s skipped, %s failed, %s s\n' \
    "${#passed[@]}" "${#skipped[@]}" "${#failed[@]}" "$SECONDS"
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s; again: make vm SCENARIO=%s\n' "${failed[*]}" "${failed[0]}"
    exit 1
fi

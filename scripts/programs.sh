#!/usr/bin/env bash
# programs.sh: installs the programs that tests use, as root on Debian and its kin; else says what
# is missing. Tests that lack theirs are skipped, and say so.
set -euo pipefail

# program:package
programs="fio:fio nbdkit:nbdkit nbdinfo:libnbd-bin nbdcopy:libnbd-bin nbdsh:python3-libnbd
    qemu-img:qemu-utils qemu-nbd:qemu-utils mke2fs:e2fsprogs mkfs.xfs:xfsprogs losetup:mount
    mkfs.vfat:dosfstools mkfs.btrfs:btrfs-progs jq:jq dmsetup:dmsetup valgrind:valgrind
    xz:xz-utils fusermount3:fuse3 nbdfuse:libnbd-bin setpriv:util-linux"
# Not every kin of Debian has these: with a name that it does not know, apt-get installs nothing of what it was asked for.
rare="chromium-headless-shell:chromium-headless-shell"

missing=() packages=()
for pair in $programs $rare; do
    # Some live in /sbin, which users may not have in their path.
    if ! PATH=$PATH:/usr/sbin:/sbin command -v "${pair%%:*}" >/dev/null; then
        missing+=("${pair%%:*}")
        packages+=("${pair##*:}")
    fi
done
if [ ${#missing[@]} -eq 0 ]; then
    exit 0
fi
echo "missing programs: ${missing[*]}"
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "tests that need them will be skipped; to run them: apt-get install ${packages[*]}"
    exit 0
fi
echo "installing with apt-get: ${packages[*]}"
export DEBIAN_FRONTEND=noninteractive
# A network that swallows packets, or another apt, must end in tests that are skipped.
apt=(timeout -k 10 900 apt-get -o Acquire::http::Timeout=20 -o Acquire::Retries=1 -o DPkg::Lock::Timeout=120)
"${apt[@]}" update -q || true
install() {
    [ $# -eq 0 ] || "${apt[@]}" install -qy --no-install-recommends "$@" ||
        echo "apt-get failed: tests that need what is in $* will be skipped"
}
common=() single=()
for package in "${packages[@]}"; do
    case " $rare " in
        *":$package "*) single+=("$package") ;;
        *) common+=("$package") ;;
    esac
done
install "${common[@]}"
for package in "${single[@]}"; do
    install "$package"
done

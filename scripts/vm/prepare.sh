#!/usr/bin/env bash
# prepare.sh DIR: makes what no change of ours changes and keeps it in DIR: a Debian kernel with the modules
# we need (DIR/vmlinuz), and an initramfs with busybox and the host's file system tools (DIR/base.cpio).
# Packages are downloaded and unpacked, never installed. Exit code 77: something is missing, it says what.
set -euo pipefail
here=$(realpath "$(dirname "$0")")
mkdir -p "$1"
cd "$1"

# Those the scenarios load; what they depend on comes along.
modules="ublk_drv nbd nvme-tcp nvmet-tcp null_blk loop brd virtio_blk xfs veth dm-mod dm-flakey dm-delay"
# Copied with their libraries; all of them are installed by scripts/programs.sh.
programs="bash fio mkfs.ext4 e2fsck resize2fs dumpe2fs tune2fs mkfs.xfs xfs_repair xfs_growfs xfs_db blkdiscard fstrim jq dmsetup"
packages="busybox-static nbd-client libnl-3-200 libnl-genl-3-200"
PATH=$PATH:/usr/sbin:/sbin

missing() {
    echo "$1"
    exit 77
}

# The newest Debian kernel of the 6.12 series for clouds that apt knows of.
kernel_package() {
    apt-cache search --names-only '^linux-image-6\.12\.[0-9].*-cloud-amd64$' | awk '{ print $1 }' | sort -V | tail -1
}

# What is in the archive changes, and old versions go: what was downloaded once is used until DIR is removed.
download() {
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null ||
        missing "apt-get and dpkg-deb, to download Debian's kernel"
    local sandbox=() kernel
    kernel=$(kernel_package)
    if [ -z "$kernel" ] && [ "$(id -u)" -eq 0 ]; then
        apt-get update -q >/dev/null || true
        kernel=$(kernel_package)
    fi
    [ -n "$kernel" ] || missing "a package linux-image-6.12.*-cloud-amd64: apt knows none (apt-get update; on bookworm \
it is in bookworm-security or bookworm-backports)"
    if [ "$(id -u)" -eq 0 ]; then
        sandbox=(-o APT::Sandbox::User=root)
    fi
    rm -rf new debs
    mkdir new
    # shellcheck disable=SC2086 # a list
    (cd new && apt-get download -q "${sandbox[@]}" "$kernel" $packages >apt.log 2>&1) || {
        cat new/apt.log
        missing "packages that apt-get cannot download: $kernel $packages"
    }
    mv new debs
}

# with_libraries FILE ROOT: copies FILE and the libraries it names into ROOT, under the paths they have.
with_libraries() {
    local line
    install -D "$1" "$2/${3:-$1}"
    # A static program has none: ldd fails.
    { LD_LIBRARY_PATH=$PWD/unpacked/lib/x86_64-linux-gnu:$PWD/unpacked/usr/lib/x86_64-linux-gnu ldd "$1" 2>/dev/null || true; } |
        while read -r line; do
            case $line in
            *"not found"*)
                echo "$1: $line" >&2
                exit 1
                ;;
            */*)
                line=${line#*=> }
                line=${line%% (*}
                # What came from packages lies where it would have been installed.
                install -D -m755 "$line" "$2/${line#"$PWD/unpacked"}"
                ;;
            esac
        done
}

# add_module NAME: the module and those it depends on, without compression.
add_module() {
    local packed file dependency
    packed=$(find unpacked/lib/modules/*/kernel -name "${1//_/[-_]}.ko.xz" | head -1)
    # Built in, then.
    [ -n "$packed" ] || return 0
    file=base/${packed#unpacked/}
    file=${file%.xz}
    [ ! -e "$file" ] || return 0
    mkdir -p "$(dirname "$file")"
    xz -dc "$packed" >"$file"
    for dependency in $(tr '\0' '\n' <"$file" | sed -n 's/^depends=//p' | tr ',' ' '); do
        add_module "$dependency"
    done
}

build() {
    local deb program path kernel busybox=unpacked/bin/busybox
    rm -rf unpacked base
    mkdir -p unpacked base/{bin,sbin,etc,proc,sys,dev,run,tmp,mnt,root,usr/sbin,usr/bin}
    for deb in debs/*.deb; do
        dpkg-deb -x "$deb" unpacked
    done
    kernel=$(basename unpacked/lib/modules/*)

    install -m755 "$busybox" base/bin/busybox
    for program in $("$busybox" --list); do
        [ "$program" = busybox ] || ln -sf /bin/busybox "base/bin/$program"
    done
    # The real ones come first in the PATH of init.
    for program in $programs; do
        path=$(command -v "$program") || missing "$program (scripts/programs.sh installs it)"
        with_libraries "$(realpath "$path")" base "usr/sbin/$program"
    done
    with_libraries unpacked/sbin/nbd-client base usr/sbin/nbd-client
    # fio's NBD engine and others resolve users and hosts.
    echo 'root:x:0:0:root:/root:/bin/sh' >base/etc/passwd
    echo 'root:x:0:' >base/etc/group
    echo '127.0.0.1 localhost vm' >base/etc/hosts
    ln -sf /proc/mounts base/etc/mtab

    for program in $modules; do
        add_module "$program"
    done
    cp unpacked/lib/modules/*/modules.builtin unpacked/lib/modules/*/modules.order "base/lib/modules/$kernel/"
    "$busybox" depmod -b "$PWD/base" "$kernel"
    cp unpacked/boot/vmlinuz-* vmlinuz
    echo "$kernel" >version
    (cd base && find . | sort | ../"$busybox" cpio -o -H newc -R 0:0) >base.cpio.new 2>cpio.log
    cp "$busybox" busybox
    rm -rf base unpacked
    mv base.cpio.new base.cpio
}

[ -n "$(find debs -name 'linux-image-*.deb' 2>/dev/null)" ] || download
# Made again when this script, the packages or the host's programs are others.
# shellcheck disable=SC2046,SC2086 # lists
key=$({
    cat "$here/prepare.sh"
    ls debs
    for program in $programs; do
        stat -Lc '%n %s %Y' "$(command -v "$program" || echo /)"
    done
} | sha256sum)
if [ ! -e base.cpio ] || [ "$(cat key 2>/dev/null)" != "$key" ]; then
    build
    echo "$key" >key
fi

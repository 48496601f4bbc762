#!/usr/bin/env bash
# xfstests-root.sh DIR: makes DIR/xfstests/root.img, a Debian with xfstests built in it (/xfstests), its users, and
# the modules of the machine's kernel, which prepare.sh has downloaded into DIR. Kept until this script, the
# kernel or the version of xfstests is another.
#
# XFSTESTS   a git directory of xfstests in place of its home
set -euo pipefail
self=$(realpath "$0")
dir=$1/xfstests
version=v2026.01.27
source=${XFSTESTS:-https://git.kernel.org/pub/scm/fs/xfs/xfstests-dev.git}
suite=bookworm
mirror=http://deb.debian.org/debian
# What xfstests is built with, then what its tests call.
packages=autoconf,automake,file,gcc,gettext,libacl1-dev,libaio-dev,libattr1-dev,libc6-dev,libcap-dev,libgdbm-dev,
packages+=libssl-dev,libtool,libtool-bin,liburing-dev,make,pkg-config,uuid-dev,xfslibs-dev,
packages+=acl,attr,bc,bsdextrautils,dmsetup,e2fsprogs,fdisk,fio,gawk,kmod,libcap2-bin,perl,procps,psmisc,
packages+=python3-minimal,quota,thin-provisioning-tools,uuid-runtime,xfsdump,xfsprogs
PATH=$PATH:/usr/sbin:/sbin

kernel=$(find "$1/debs" -name 'linux-image-*.deb')
key=$({
    cat "$self"
    echo "$source $kernel"
} | sha256sum)
if [ -e "$dir/root.img" ] && [ "$(cat "$dir/key" 2>/dev/null)" = "$key" ]; then
    exit
fi
for program in git debootstrap mkfs.ext4; do
    command -v $program >/dev/null || {
        echo "xfstests needs $program, to make its root file system" >&2
        exit 1
    }
done
[ "$(id -u)" -eq 0 ] || {
    echo "xfstests needs root, to make its root file system" >&2
    exit 1
}
mkdir -p "$dir"
log=$dir/root.log
root=$dir/root
echo "making $dir/root.img (its log: $log)"
trap '[ $? -eq 0 ] || tail -15 "$log" >&2' EXIT
exec 3>"$log"

rm -rf "$root" "$dir/root.img.new"
debootstrap --variant=minbase "--include=$packages" "$suite" "$root" "$mirror" >&3 2>&1
git clone -q "$source" "$root/xfstests" >&3 2>&1
git -C "$root/xfstests" -c advice.detachedHead=false checkout -q "$version" >&3 2>&1
rm -rf "$root/xfstests/.git"
# Its makefiles find out for themselves what there is.
chroot "$root" sh -c 'cd /xfstests && make -j2' >&3 2>&1 </dev/null
sed -n 's/ *#.*//; s/^\([0-9]\{3,\}\) .*\<quick\>.*/\1/p' "$root/xfstests/tests/generic/group.list" >"$dir/quick"
for user in fsgqa fsgqa2 123456-fsgqa; do
    chroot "$root" useradd -m --badname "$user" >&3 2>&1
done
mkdir -p "$root/mnt/test" "$root/mnt/scratch" "$root/results"
# Without compression: the machine's modprobe is busybox's.
dpkg-deb --fsys-tarfile "$kernel" | tar -x -C "$root" --wildcards './lib/modules/*'
find "$root/lib/modules" -name '*.ko.xz' -exec xz -d {} +
for modules in "$root"/lib/modules/*; do
    chroot "$root" depmod "${modules##*/}"
done
rm -rf "$root"/var/cache/apt/*.bin "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* \
    "$root"/usr/share/{doc,man,locale}
mkfs.ext4 -q -d "$root" "$dir/root.img.new" $(($(du -sm "$root" | cut -f1) * 5 / 4 + 512))M >&3 2>&1
rm -rf "$root"
mv "$dir/root.img.new" "$dir/root.img"
echo "$version" >"$dir/version"
echo "$key" >"$dir/key"

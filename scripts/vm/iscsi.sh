#!/usr/bin/env bash
# iscsi.sh DIR: after prepare.sh, makes DIR/iscsi.cpio: what the scenario `controller-iscsi` needs besides, that is
# the kernel's initiator (/vm/iscsi/modules lists its modules in their order), open-iscsi, nsenter, and
# tgtd and tgtadm from the directory TGTD_BIN. Exit code 77: something is missing, it says what.
set -euo pipefail
cd "$1"
packages="open-iscsi libopeniscsiusr libisns0"
programs="sbin/iscsid sbin/iscsiadm"
PATH=$PATH:/usr/sbin:/sbin

missing() {
    echo "$1"
    exit 77
}

for program in tgtd tgtadm; do
    [ -x "$TGTD_BIN/$program" ] || missing "$TGTD_BIN/$program (docs/testing.md says how to build it)"
done
if [ ! -d iscsi-debs ]; then
    rm -rf new
    mkdir new
    # shellcheck disable=SC2086 # a list
    (cd new && apt-get download -q -o APT::Sandbox::User=root $packages >apt.log 2>&1) ||
        missing "packages that apt-get cannot download: $packages"
    mv new iscsi-debs
fi
rm -rf iscsi-unpacked iscsi-root
mkdir -p iscsi-unpacked iscsi-root/vm/iscsi iscsi-root/vm/bin iscsi-root/etc/iscsi
for deb in iscsi-debs/*.deb debs/linux-image-*.deb; do
    dpkg-deb -x "$deb" iscsi-unpacked
done

# with_libraries FILE NAME: copies FILE as NAME, and the libraries that it names.
with_libraries() {
    local line
    install -D "$1" "iscsi-root/$2"
    LD_LIBRARY_PATH=$PWD/iscsi-unpacked/lib/x86_64-linux-gnu:$PWD/iscsi-unpacked/usr/lib/x86_64-linux-gnu ldd "$1" |
        while read -r line; do
            case $line in
            *"not found"*) missing "a library of ${1##*/}: $line" ;;
            */*)
                line=${line#*=> }
                line=${line%% (*}
                install -D -m755 "$line" "iscsi-root/${line#"$PWD/iscsi-unpacked"}"
                ;;
            esac
        done
}

# add_module NAME: those that it depends on, then the module.
add_module() {
    local packed dependency
    [ ! -e "iscsi-root/vm/iscsi/$1.ko" ] || return 0
    packed=$(find iscsi-unpacked/lib/modules/*/kernel -name "${1//_/[-_]}.ko.xz" | head -1)
    # Built in, then.
    [ -n "$packed" ] || return 0
    xz -dc "$packed" >"iscsi-root/vm/iscsi/$1.ko"
    for dependency in $(tr '\0' '\n' <"iscsi-root/vm/iscsi/$1.ko" | sed -n 's/^depends=//p' | tr ',' ' '); do
        add_module "$dependency"
    done
    echo "$1" >>iscsi-root/vm/iscsi/modules
}

for program in $programs; do
    with_libraries "iscsi-unpacked/$program" "usr/sbin/${program##*/}"
done
with_libraries "$(realpath "$(command -v nsenter)")" usr/sbin/nsenter
for program in tgtd tgtadm; do
    with_libraries "$TGTD_BIN/$program" "vm/bin/$program"
done
for module in sd_mod iscsi_tcp; do
    add_module $module
done
cp iscsi-unpacked/etc/iscsi/iscsid.conf iscsi-root/etc/iscsi/
echo "InitiatorName=iqn.2000-01.vm:host" >iscsi-root/etc/iscsi/initiatorname.iscsi
(cd iscsi-root && find . | sort | ../busybox cpio -o -H newc -R 0:0) >iscsi.cpio 2>cpio.log
rm -rf iscsi-root iscsi-unpacked

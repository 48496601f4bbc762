#!/usr/bin/env bash
# boot.sh DEB DEBIAN VM WORK: boots the Debian in the directory DEBIAN, with its systemd, on the kernel that
# scripts/vm/prepare.sh keeps in VM, and runs guest.sh in it, which installs DEB as docs/install.md
# says. It boots again as long as that asks for it.
# WORK is for its disk.
set -euo pipefail
here=$(realpath "$(dirname "$0")")
deb=$1 debian=$2 vm=$3 work=$4
root=$work/boot
# How many times the time of an idle host everything may take.
patience=${VM_PATIENCE:-4}
command -v qemu-system-x86_64 >/dev/null || {
    echo "the virtual machine needs qemu-system-x86_64 (apt-get install qemu-system-x86)" >&2
    exit 1
}

mkdir -p "$root" "$work/boot.new"/{upper,work}
mount -t overlay overlay -o "lowerdir=$debian,upperdir=$work/boot.new/upper,workdir=$work/boot.new/work" "$root"
cp "$deb" "$root/root/"
# What docs/install.md says, as it says it, but for the sizes.
sed -n '/^## From nothing/,/^## Units/p' "$here/../../docs/install.md" | sed -n '/^```sh/,/^```$/{/^```/d;p}' |
    sed 's/64GiB/2GiB/; s/20GiB/256MiB/' >"$root/root/from-nothing.sh"
install -m755 "$here/guest.sh" "$root/root/"
echo '/dev/vda / ext4 defaults 0 0' >"$root/etc/fstab"
echo vm >"$root/etc/hostname"
cat >"$root/etc/systemd/system/guest.service" <<UNIT
[Unit]
Description=What packages-test.sh runs
After=multi-user.target

[Service]
Type=oneshot
TimeoutStartSec=infinity
Environment=PATIENCE=$patience
ExecStart=/root/guest.sh
StandardOutput=file:/dev/ttyS1
StandardError=inherit

[Install]
WantedBy=multi-user.target
UNIT
chroot "$root" systemctl -q enable guest.service
dpkg-deb --fsys-tarfile "$(find "$vm/debs" -name 'linux-image-*.deb')" | tar -x -C "$root" --wildcards './lib/modules/*'
chroot "$root" depmod "$(cat "$vm/version")"
truncate -s 3G "$work/boot.img"
mkfs.ext4 -q -d "$root" "$work/boot.img"
umount "$root"

mkdir "$work/initrd"
cat >"$work/initrd/init" <<'INIT'
#!/bin/sh
export PATH=/usr/sbin:/sbin:/bin
mount -t proc proc /proc
mount -t devtmpfs devtmpfs /dev
modprobe virtio_blk
modprobe virtio_pci
mkdir -p /new
until mount -t ext4 /dev/vda /new 2>/dev/null; do sleep 0.1; done
umount /proc
exec switch_root /new /usr/lib/systemd/systemd
INIT
chmod 755 "$work/initrd/init"
{ cat "$vm/base.cpio" && (cd "$work/initrd" && echo init | "$vm/busybox" cpio -o -H newc -R 0:0 2>/dev/null); } >"$work/initrd.cpio"

# Each boot says at its end whether there is another one.
for boot in 1 2; do
    : >"$work/said"
    # Without no_timer_check the kernel panics at boot if the host is too busy to give it a timer's interrupts in time.
    timeout -k 5 $((300 * patience)) qemu-system-x86_64 -accel "$([ -n "${VM_KVM:-}" ] && echo kvm || echo tcg,thread=multi)" \
        -cpu max -smp 2 -m 1G -nographic -no-reboot -nodefaults -kernel "$vm/vmlinuz" -initrd "$work/initrd.cpio" \
        -append "console=ttyS0 loglevel=4 panic=-1 rdinit=/init nokaslr tsc=reliable no_timer_check mitigations=off systemd.show_status=no" \
        -serial "file:$work/console" -serial "file:$work/said" \
        -drive "file=$work/boot.img,format=raw,if=virtio,cache=unsafe" </dev/null || true
    tr -d '\r' <"$work/said"
    if ! grep -q '^boot passed' "$work/said"; then
        echo "FAILED in boot $boot; the console's last words:"
        tail -20 "$work/console"
        exit 1
    fi
done

#!/usr/bin/env bash
# packages-test.sh [deb] [longhorn] [rpm] [tarball] [image] [wheel] [boot] [arm64]: installs what `make packages` has made,
# each where nothing else is, uses it, and removes it. All but `arm64` by default. Needs root. `boot` needs QEMU, and runs
# Debian's systemd in the virtual machine (scripts/packages/guest.sh): the commands of docs/install.md, units, devices at
# boot, an upgrade. `arm64` runs what ARCH=arm64 has made in QEMU's emulation of such a processor. The first time it makes a
# Debian with debootstrap. Most of its minutes are the machine's.
#
# MIRROR   where Debian comes from
set -Eeuo pipefail
trap 'echo "FAILED: exit code $? of: $BASH_COMMAND" >&2' ERR
cd "$(dirname "$0")/.."
built=$(mkdir -p "${CARGO_TARGET_DIR:-target}" && realpath "${CARGO_TARGET_DIR:-target}")
packages=$built/packages
place=$built/packages-test
base=$place/debian
suite=bookworm
# What is beside our packages in that Debian: systemd, which starts them, clients, and Python.
beside=systemd-sysv,udev,kmod,dbus,e2fsprogs,libnbd-bin,python3-venv
PATH=$PATH:/usr/sbin:/sbin
if [ $# -eq 0 ]; then
    set -- deb longhorn rpm tarball image wheel boot
fi

fail() {
    echo "FAILED: $*" >&2
    exit 1
}

# ok TEXT: what was checked just now.
ok() {
    printf '  ok  %s (%s s)\n' "$*" "$SECONDS"
}

# missing WHAT
missing() {
    echo "packages-test.sh needs $1" >&2
    exit 1
}

debian() {
    local wanted="$suite $beside"
    if [ "$(cat "$place/made-of" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    command -v debootstrap >/dev/null || missing "debootstrap (apt-get install debootstrap)"
    echo "making $base (its log: $place/debian.log)"
    rm -rf "$base" "$place/made-of"
    debootstrap --variant=minbase "--include=$beside" "$suite" "$base" "${MIRROR:-http://deb.debian.org/debian}" \
        >"$place/debian.log" 2>&1 || missing "a mirror of Debian; debootstrap said: $(tail -1 "$place/debian.log")"
    rm -rf "$base"/var/cache/apt/archives/*.deb "$base"/var/lib/apt/lists/*
    echo "$wanted" >"$place/made-of"
}

if [ -z "${DBS_PACKAGES_APART:-}" ]; then
    [ "$(id -u)" -eq 0 ] || missing "root"
    mkdir -p "$place"
    case " $* " in
    *" deb "* | *" longhorn "* | *" rpm "* | *" wheel "* | *" boot "*) debian ;;
    esac
    command -v openssl >/dev/null || missing "openssl (apt-get install openssl)"
    case " $* " in
    *" tarball "* | *" boot "* | *" arm64 "*) why=$(scripts/vm/prepare.sh "$built/vm") || missing "$why" ;;
    esac
    # What is mounted and started ends with it, whatever happens; it has no network but its own.
    DBS_PACKAGES_APART=1 exec unshare --mount --net --pid --fork --kill-child --mount-proc "$0" "$@"
fi
ip link set lo up 2>/dev/null || true
work=$(mktemp -d /tmp/dbs-packages.XXXXXX)
trap 'umount --lazy --recursive "$work"; rmdir "$work"' EXIT
mount -t tmpfs tmpfs "$work"

# one PATTERN: the package, of which there must be one.
one() {
    local found
    found=$(find "$packages" -maxdepth 1 -name "$1" 2>/dev/null) || true
    [ "$(wc -w <<<"$found")" -eq 1 ] || fail "target/packages has not one $1, but: ${found:-none} (make packages)"
    echo "$found"
}

# authority: makes one, a certificate by it for store.example in $work/tls, and has that server's S3 listen on `port`.
authority() {
    local end=$((SECONDS + 60)) tls=$work/tls
    mkdir "$tls"
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=authority \
        -keyout "$tls/ca-key.pem" -out "$tls/ca.pem" 2>"$work/openssl.log"
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=store -addext subjectAltName=DNS:store.example \
        -keyout "$tls/key.pem" -out "$tls/request.pem" 2>"$work/openssl.log"
    openssl x509 -req -in "$tls/request.pem" -copy_extensions copy -days 2 -CA "$tls/ca.pem" -CAkey "$tls/ca-key.pem" \
        -CAcreateserial -out "$tls/cert.pem" 2>"$work/openssl.log"
    scripts/packages/s3.py "$tls/cert.pem" "$tls/key.pem" >"$work/port" 2>"$work/s3.log" &
    until [ -s "$work/port" ]; do
        [ $SECONDS -le $end ] || fail "s3.py does not listen: $(cat "$work/s3.log")"
        sleep 0.1
    done
    port=$(cat "$work/port")
}

# enter ROOT: what programs expect of a system: also names of hosts, and whom to trust, in the place `trusted`, Debian's by
# default.
enter() {
    trusted=$1/${trust:-etc/ssl/certs/ca-certificates.crt}
    mkdir -p "$1"/{proc,run,dev,tmp,etc} "$(dirname "$trusted")"
    echo '127.0.0.1 localhost store.example' >"$1/etc/hosts"
    cp "$work/tls/ca.pem" "$trusted"
    mount -t proc proc "$1/proc"
    mount -t tmpfs -o mode=755 tmpfs "$1/run"
    mount -t tmpfs -o mode=755 tmpfs "$1/dev"
    mkdir -m1777 "$1/dev/shm"
    mount -t tmpfs tmpfs "$1/dev/shm"
    for node in null:3 zero:5 full:7 urandom:9 random:8; do
        mknod -m666 "$1/dev/${node%:*}" c 1 "${node#*:}"
    done
}

# leave ROOT
leave() {
    umount "$1"/{proc,run,dev/shm,dev}
}

# debian_root NAME: sets `root` to a Debian of its own.
debian_root() {
    root=$work/$1
    mkdir -p "$root" "$work/$1.new/upper" "$work/$1.new/work"
    mount -t overlay overlay -o "lowerdir=$base,upperdir=$work/$1.new/upper,workdir=$work/$1.new/work" "$root"
    enter "$root"
}

# inside COMMAND...: in `root`, with what systemd gives a service, and the variables `given`; with `run="exec"` in place of
# the shell.
given=()
inside() {
    ${run:-} env -i PATH=/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8 \
        "DBS_STORE=${store:-}" "${given[@]}" chroot "$root" "$@"
}

# refused TEXT COMMAND...: it fails, and says so.
refused() {
    if "${@:2}" >"$work/refused.log" 2>&1; then
        fail "succeeded, and must not: ${*:2}"
    fi
    grep -q "$1" "$work/refused.log" || fail "${*:2} says: $(cat "$work/refused.log")"
}

# files: what is in `root`, but what others keep about packages.
files() {
    (cd "$root" && find . -xdev \( -path ./var/lib/dpkg -o -path ./var/lib/rpm -o -path ./var/lib/apt -o -path ./var/cache -o -path ./var/log \
        -o -path ./root -o -path ./tmp -o -path ./usr/lib/sysimage \) -prune -o -print | sort)
}

# server COMMAND...: starts `dbs serve` in `root`; returns when clients of `socket` can connect.
server() {
    socket=$root/run/dbs/try.nbd.sock
    : >"$work/server.log"
    (run="exec" && inside "$@") >"$work/server.log" 2>&1 &
    server=$!
    local end=$((SECONDS + 60))
    until grep -q event=ready "$work/server.log"; do
        kill -0 "$server" 2>/dev/null || fail "$* has ended: $(cat "$work/server.log")"
        [ $SECONDS -le $end ] || fail "$* is not ready: $(cat "$work/server.log")"
        sleep 0.1
    done
}

# lies_open: somebody who reads the store finds what $work/plain is full of.
lies_open() {
    python3 -c 'import mmap, sys
with open(sys.argv[1], "rb") as file:
    sys.exit(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ).find(b"x" * 64) < 0)' "$root$store"
}

# secret DBS: a volume that a passphrase encrypts: nobody reads it without.
secret() {
    local given=()
    echo 'correct horse' >"$root/tmp/passphrase"
    echo 'battery staple' >"$root/tmp/wrong"
    head -c 16M /dev/zero | tr '\0' x >"$work/plain"
    cp "$work/plain" "$root/tmp/plain"
    given=(DBS_VOLUME_PASSPHRASE_FILE=/tmp/passphrase)
    inside "$1" --quiet volume import --encrypt secret /tmp/plain
    ! lies_open || fail "what is encrypted lies open in the store"
    inside "$1" --quiet volume export secret /tmp/opened
    cmp "$work/plain" "$root/tmp/opened"
    given=()
    refused 'is locked' inside "$1" volume export secret /tmp/none
    given=(DBS_VOLUME_PASSPHRASE_FILE=/tmp/wrong)
    refused 'is locked' inside "$1" volume export secret /tmp/none
    inside "$1" --quiet volume import open /tmp/plain
    lies_open || fail "what is not encrypted cannot be found: this test looks in the wrong place"
}

# backups DBS: of the snapshot v@s, whose content is in $work/written: to a directory, in Longhorn's layout, and to S3 with
# TLS, encrypted; the server is trusted because the system has its authority.
backups() {
    local given=() place=vfs:///tmp/backups
    mkdir "$root/tmp/backups"
    inside "$1" --quiet backup create --name first --to disk v@s "$place"
    inside "$1" --quiet backup restore "$place?backup=first&volume=disk" from-directory
    inside "$1" --quiet volume export from-directory /tmp/from-directory
    cmp "$work/written" "$root/tmp/from-directory"
    # Each root has a place of its own there.
    place=s3://bucket/$(basename "$root")/$(basename "$store")
    given=("AWS_ENDPOINTS=https://store.example:$port" AWS_ACCESS_KEY_ID=key AWS_SECRET_ACCESS_KEY=secret
        DBS_BACKUP_PASSPHRASE_FILE=/tmp/passphrase)
    mv "$trusted" "$work/nobody"
    refused 'ca-certificates.*AWS_CERT' inside "$1" backup init --encrypt "$place"
    mv "$work/nobody" "$trusted"
    inside "$1" --quiet backup init --encrypt "$place"
    inside "$1" --quiet backup create --name first --to disk v@s "$place"
    inside "$1" --quiet backup verify --data "$place?backup=first&volume=disk" >/dev/null
    inside "$1" --quiet backup restore "$place?backup=first&volume=disk" from-s3
    inside "$1" --quiet volume export from-s3 /tmp/from-s3
    cmp "$work/written" "$root/tmp/from-s3"
}

# tried DBS STORE SERVE...: a store, a volume, a snapshot; what NBD clients write and read, through a kill of the server; an
# encrypted volume, and backups.
tried() {
    local dbs=$1 uri
    store=$2
    shift 2
    inside "$dbs" --quiet init "$store" --size 1GiB
    inside "$dbs" --quiet volume create v 16MiB
    secret "$dbs"
    server "$@"
    uri="nbd+unix:///v?socket=$socket"
    head -c 16M /dev/urandom >"$work/written"
    nbdcopy "$work/written" "$uri"
    inside "$dbs" --quiet snapshot create v@s
    # Not flushed: an acknowledged write survives the kill.
    head -c 16M /dev/urandom >"$work/later"
    nbdcopy "$work/later" "$uri"
    kill -KILL "$server"
    wait "$server" 2>/dev/null || true
    server "$@"
    [ "$(nbdinfo --size "${uri/v?/v@s?}")" -eq $((16 << 20)) ] || fail "the snapshot's size"
    nbdcopy "${uri/v?/v@s?}" "$work/read"
    cmp "$work/written" "$work/read"
    nbdcopy "$uri" "$work/read"
    cmp "$work/later" "$work/read"
    refused . nbdcopy "${uri/v?/secret?}" "$work/read"
    given=(DBS_VOLUME_PASSPHRASE_FILE=/tmp/passphrase)
    inside "$dbs" --quiet volume unlock secret
    given=()
    nbdcopy "${uri/v?/secret?}" "$work/read"
    cmp "$work/plain" "$work/read"
    kill -TERM "$server"
    wait "$server" || fail "the server ends with $?: $(cat "$work/server.log")"
    backups "$dbs"
    inside "$dbs" --quiet check >/dev/null
    sum=$(sha256sum <"$root$store")
}

# kept: the store is as it was left.
kept() {
    [ "$(sha256sum <"$root$store")" = "$sum" ] || fail "the store is not as it was"
}

# unit FILE: the command of a unit of services, without its words from outside.
unit() {
    sed -n 's/^ExecStart=\(.*\) \$DBS_SERVE$/\1/p' "$root$1" | grep . || fail "$1 has no ExecStart"
}

# left BEFORE: nothing is left of a package but what is its user's.
left() {
    files >"$work/after"
    diff "$1" "$work/after" | grep '^[<>]' | grep -vE '^> \./(etc/dbs|var/lib/dbs|etc/(passwd|group|shadow|gshadow)-$)' \
        >"$work/left" || true
    [ ! -s "$work/left" ] || fail "left (>), or gone (<): $(cat "$work/left")"
}

# install_deb PATTERN: in `root`, where its dependencies are; with those of dpkg-shlibdeps.
install_deb() {
    local file
    file=$(one "$1")
    cp "$file" "$root/tmp/"
    inside apt-get install -qy --no-install-recommends "/tmp/$(basename "$file")" >"$work/apt.log" 2>&1 ||
        fail "$(cat "$work/apt.log")"
    dependencies "$file"
}

# dependencies FILE: a deb has those that dpkg-shlibdeps would give it, where what it needs is installed here.
dependencies() {
    local wanted
    if ! command -v dpkg-shlibdeps >/dev/null; then
        echo "SKIPPED the comparison with dpkg-shlibdeps (apt-get install dpkg-dev)"
        return
    fi
    rm -rf "$work/deps"
    mkdir -p "$work/deps/debian"
    : >"$work/deps/debian/control"
    dpkg-deb -x "$1" "$work/deps/files"
    wanted=$(cd "$work/deps" && dpkg-shlibdeps -O files/usr/bin/* 2>/dev/null | sed 's/^shlibs:Depends=//')
    [ "$(dpkg-deb -f "$1" Depends)" = "$wanted" ] || fail "$1 depends on $wanted"
}

deb() {
    local before=$work/before begun
    debian_root deb
    files >"$before"
    begun=$EPOCHREALTIME
    install_deb 'dbs_*_amd64.deb'
    ok "apt-get install ./dbs_*.deb, in $(awk "BEGIN { printf \"%.1f\", $EPOCHREALTIME - $begun }") s"
    grep -q '^dbs:' "$root/etc/passwd" || fail "no user dbs"
    for file in man/man1/{dbs,dbs-serve}.1.gz bash-completion/completions/dbs zsh/vendor-completions/_dbs \
        fish/vendor_completions.d/dbs.fish doc/dbs/{copyright,changelog.gz,changelog.Debian.gz,THIRD-PARTY.gz,README.md,docs/install.md}; do
        [ -s "$root/usr/share/$file" ] || fail "no $file"
    done
    [ "$(stat -c %a "$root/var/lib/dbs")" = 700 ] || fail "/var/lib/dbs is not private"
    inside sh -c 'cd /usr/lib/systemd/system && for unit in dbs*@.*; do
        cp $unit /run/$(echo $unit | sed s/@/@try/); done; touch /etc/dbs/try.conf
        systemd-analyze verify --man=no /run/dbs*@try.*' >"$work/verify.log" 2>&1 || fail "$(cat "$work/verify.log")"
    [ ! -s "$work/verify.log" ] || fail "systemd-analyze verify: $(cat "$work/verify.log")"
    inside systemd-analyze security --offline=true --threshold=40 /run/dbs@try.service >"$work/security.log" 2>&1 ||
        fail "$(cat "$work/security.log")"
    ok "units: systemd-analyze verify is silent; security: $(tail -1 "$work/security.log" | grep -o '[0-9]*\.[0-9].*')"
    read -ra command <<<"$(unit /usr/lib/systemd/system/dbs@.service)"
    tried dbs /var/lib/dbs/try.dbs "${command[@]}" --nbd unix:/run/dbs/try.nbd.sock
    echo "DBS_STORE=$store" >"$root/etc/dbs/try.conf"
    ok "a store, a volume, a snapshot, NBD, kill -9, encryption, backups to S3, check"
    inside sh -c 'dpkg -i /tmp/dbs_*.deb' >"$work/dpkg.log" 2>&1 || fail "$(cat "$work/dpkg.log")"
    inside dpkg --remove dbs >/dev/null
    kept
    inside dpkg --purge dbs >"$work/purge.log" 2>&1
    kept
    [ "$(cat "$root/etc/dbs/try.conf")" = "DBS_STORE=$store" ] || fail "/etc/dbs/try.conf is gone"
    left "$before"
    ok "installed anew, removed, purged: the store and its configuration stay, and nothing else"
    leave "$root"
}

longhorn() {
    local before=$work/before
    debian_root longhorn
    files >"$before"
    install_deb 'dbs-longhorn_*_amd64.deb'
    inside longhorn version --client-only | grep -q '"gitCommit": *"[0-9a-f]\{40\}"' || fail "longhorn version names no commit"
    inside dpkg --purge dbs-longhorn >/dev/null
    left "$before"
    ok "dbs-longhorn: installed, asked for its version, purged"
    leave "$root"
}

rpm() {
    local package before=$work/before tool
    package=$(one 'dbs-*.x86_64.rpm')
    tool=$(type -P rpm) || missing "rpm (apt-get install rpm)"
    # Where Fedora and its kin have them.
    trust=etc/pki/tls/certs/ca-bundle.crt debian_root rpm
    files >"$before"
    # This root has them under other names.
    "$tool" -qp --requires "$package" | sort -u >"$work/requires"
    if grep -vE '^(/bin/sh|rpmlib\(.*|rtld\(GNU_HASH\)|(ld-linux-x86-64|libc|libm)\.so\.[26]\((GLIBC_[0-9.]*)?\)\(64bit\)|libgcc_s\.so\.1\((GCC_[0-9.]*)?\)\(64bit\))' "$work/requires"; then
        fail "the rpm needs the above"
    fi
    manage() { "$tool" --root "$root" --dbpath /var/lib/rpm --force-debian --nodeps "$@"; }
    manage -i "$package" >"$work/rpm.log" 2>&1 || fail "$(cat "$work/rpm.log")"
    manage -V dbs || fail "not as it should be"
    grep -q '^dbs:' "$root/etc/passwd" || fail "no user dbs"
    read -ra command <<<"$(unit /usr/lib/systemd/system/dbs@.service)"
    tried dbs /var/lib/dbs/try.dbs "${command[@]}" --nbd unix:/run/dbs/try.nbd.sock
    manage -U --force "$package"
    manage -e dbs >"$work/rpm.log" 2>&1 || fail "$(cat "$work/rpm.log")"
    kept
    # Here, there is no package that has it.
    rmdir "$root/usr/share/licenses"
    left "$before"
    ok "rpm: needs glibc alone; installed, used, upgraded, removed"
    leave "$root"
}

# What needs nothing: beside it there is busybox.
tarball() {
    local before=$work/before
    root=$work/tarball
    mkdir -p "$root"/{bin,tmp,usr,var/lib/dbs}
    cp "$built/vm/busybox" "$root/bin/"
    for program in sh find sed cp mkdir chmod mv rm rmdir dirname cat tar; do
        ln -s busybox "$root/bin/$program"
    done
    enter "$root"
    files >"$before"
    tar -xzf "$(one 'dbs-*-x86_64-linux.tar.gz')" -C "$root/tmp"
    inside sh -c 'cd /tmp/dbs-*-x86_64-linux && ./install.sh' >/dev/null
    read -ra command <<<"$(unit /usr/local/lib/systemd/system/dbs@.service)"
    tried /usr/local/bin/dbs /var/lib/dbs/try.dbs "${command[@]}" --nbd unix:/run/dbs/try.nbd.sock
    inside sh -c 'cd /tmp/dbs-*-x86_64-linux && ./install.sh --remove && ./install.sh /opt/dbs' >/dev/null
    grep -q '^ExecStart=/opt/dbs/bin/dbs serve' "$root/opt/dbs/lib/systemd/system/dbs@.service" || fail "the unit in /opt"
    inside sh -c 'cd /tmp/dbs-*-x86_64-linux && ./install.sh --remove /opt/dbs' >/dev/null
    find "$root"/{usr,opt} -depth -type d -empty -delete
    kept
    [ ! -e "$root/usr" ] && [ ! -e "$root/opt" ] || fail "left: $(find "$root"/usr "$root"/opt)"
    ok "tarball: beside busybox alone; installed, used, removed"
    leave "$root"
}

image() {
    root=$work/image
    mkdir -p "$root" "$work/oci"
    tar -xf "$(one 'dbs-*-x86_64-image.tar')" -C "$work/oci"
    # Every name of a blob is its sum, and the image is made of the files that lie beside it.
    python3 - "$work/oci" "$(one 'dbs-*-x86_64-rootfs.tar.gz')" <<'TRY'
import hashlib, json, pathlib, sys

oci = pathlib.Path(sys.argv[1])
for blob in (oci / "blobs/sha256").iterdir():
    assert hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name
read = lambda entry: (oci / "blobs" / entry["digest"].replace(":", "/")).read_bytes()
manifest = json.loads(read(json.loads((oci / "index.json").read_bytes())["manifests"][0]))
assert read(manifest["layers"][0]) == open(sys.argv[2], "rb").read()
config = json.loads(read(manifest["config"]))["config"]
assert config["Entrypoint"] == ["/usr/bin/dbs"] and config["Cmd"][0] == "serve"
TRY
    tar -xzf "$(one 'dbs-*-x86_64-rootfs.tar.gz')" -C "$root"
    [ "$(find "$root" -type f | wc -l)" -eq 5 ] || fail "more in it than there should be: $(find "$root" -type f)"
    enter "$root"
    tried /usr/bin/dbs /data/store.dbs /usr/bin/dbs serve --nbd tcp:0.0.0.0:10809 --nbd unix:/run/dbs/try.nbd.sock
    ok "image: blobs, and the root file system used by itself"
    leave "$root"
}

wheel() {
    local file newest before=$work/before python=${PYTHON:-python3}
    file=$(one 'dbs-*_x86_64.whl')
    [[ $file =~ -cp311-abi3-manylinux_2_([0-9]+)_x86_64\.whl$ ]] || fail "$file is not for CPython 3.11 and later, on many Linuxes"
    # What its tag says is what it needs: no newer glibc, and no library but glibc's and GCC's.
    "$python" -m zipfile -e "$file" "$work/wheel.files"
    newest=$(objdump -T "$work/wheel.files/dbs/_dbs.abi3.so" | sed -n 's/.*(GLIBC_2\.\([0-9]*\).*/\1/p' | sort -n | tail -1)
    [ "$newest" -le "${BASH_REMATCH[1]}" ] || fail "$file needs glibc 2.$newest"
    if objdump -p "$work/wheel.files/dbs/_dbs.abi3.so" | awk '$1 == "NEEDED" { print $2 }' |
        grep -vE '^(libc\.so\.6|libm\.so\.6|libgcc_s\.so\.1|ld-linux-x86-64\.so\.2)$'; then
        fail "$file needs the above"
    fi
    debian_root wheel
    cp "$file" scripts/packages/wheel.py "$root/tmp/"
    inside python3 -m venv /tmp/venv
    files >"$before"
    inside sh -c 'cd /tmp && venv/bin/pip install --quiet --no-index dbs-*.whl && venv/bin/python -I -W error wheel.py /tmp/tried'
    inside /tmp/venv/bin/pip uninstall --quiet --yes dbs
    left "$before"
    ok "wheel: $(basename "$file"), in Debian, $(inside python3 --version)"
    leave "$root"
    "$python" -m venv "$work/venv"
    "$work/venv/bin/pip" install --quiet --no-index "$file"
    "$work/venv/bin/python" -I -W error scripts/packages/wheel.py "$work/tried"
    ok "wheel: in an empty environment of this machine, $("$python" --version)"
}

# Programs for ARM in QEMU's emulation of its processor: the static one, and that of the deb, with the libraries of Debian's
# cross compiler. QEMU has no io_uring.
arm64() {
    local name emulator names=(static) libraries=/usr/aarch64-linux-gnu
    emulator=$(type -P qemu-aarch64-static) || missing "qemu-aarch64-static (apt-get install qemu-user-static)"
    root=$work/arm64
    mkdir -p "$root"/{bin,static,deb,var/lib/dbs} "$root$libraries"
    cp "$built/vm/busybox" "$root/bin/sh"
    cp "$emulator" "$root/bin/emulator"
    tar -xzf "$(one 'dbs-*-aarch64-linux.tar.gz')" --strip-components=1 -C "$root/static"
    printf '#!/bin/sh\nexec /bin/emulator /static/bin/dbs "$@"\n' >"$root/bin/dbs-static"
    if [ -e $libraries/lib/ld-linux-aarch64.so.1 ] && [ -n "$(find "$packages" -name 'dbs_*_arm64.deb')" ]; then
        names+=(deb)
        cp -r $libraries/lib "$root$libraries/"
        dpkg-deb -x "$(one 'dbs_*_arm64.deb')" "$root/deb"
        printf '#!/bin/sh\nexec /bin/emulator -L %s /deb/usr/bin/dbs "$@"\n' $libraries >"$root/bin/dbs-deb"
    else
        echo "SKIPPED the deb: needs one for arm64, and its libraries (apt-get install libc6-arm64-cross)"
    fi
    chmod 755 "$root"/bin/*
    enter "$root"
    for name in "${names[@]}"; do
        rm -rf "${root:?}/tmp"/*
        tried "/bin/dbs-$name" "/var/lib/dbs/$name.dbs" "/bin/dbs-$name" serve --nbd unix:/run/dbs/try.nbd.sock
        ok "arm64, $name: $(inside "/bin/dbs-$name" info | grep -i driver | tr -s ' ')"
    done
    leave "$root"
}

boot() {
    scripts/packages/boot.sh "$(one 'dbs_*_amd64.deb')" "$base" "$built/vm" "$work"
    ok "boot"
}

authority
for kind; do
    case $kind in
    deb | longhorn | rpm | tarball | image | wheel | boot | arm64) ;;
    *)
        sed -n '2,/^set/p' "$0" | sed -n 's/^# \{0,1\}//p' >&2
        exit 2
        ;;
    esac
    echo "== $kind"
    "$kind"
done
(cd "$packages" && sha256sum --quiet --check SHA256SUMS)
echo "all packages passed, in $SECONDS s"

#!/usr/bin/env bash
# packages.sh [deb] [longhorn] [rpm] [tarball] [image] [wheel]: makes these packages, all by default, in target/packages, with their
# sums in SHA256SUMS. No root is needed. The same binary makes the same bytes, dated by the last commit.
#
#   deb       dbs_VERSION_ARCH.deb
#   longhorn  dbs-longhorn_VERSION_ARCH.deb: the replica and controller for Longhorn
#   rpm       dbs-VERSION-1.ARCH.rpm, with the binary of the deb; needs rpmbuild
#   tarball   dbs-VERSION-ARCH-linux.tar.gz: static, with an install.sh
#   image     dbs-VERSION-ARCH-image.tar, a container's (OCI), and ...-rootfs.tar.gz, the files in it
#   wheel     dbs-VERSION-cp311-abi3-manylinux_*.whl
#
# ARCH                  amd64 or arm64, this machine's by default. Another machine's need its Rust targets, and its
#                       compiler and binutils (rustup target add aarch64-unknown-linux-{gnu,musl}; apt-get install
#                       gcc-aarch64-linux-gnu). The wheel is made for this machine alone
# SOURCE_DATE_EPOCH     what everything is dated, in place of the last commit
# DEBFULLNAME, DEBEMAIL who is named as the maintainer
set -euo pipefail
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
built=${CARGO_TARGET_DIR:-target}
out=$built/packages
umask 022
export LC_ALL=C.UTF-8 TZ=UTC
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
# Before 2.0.0, for dpkg and rpm: a tilde sorts before the end.
sorted=${version/-/\~}
maintainer="${DEBFULLNAME:-DBS developers} <${DEBEMAIL:-dbs@localhost}>"

case $(uname -m) in
x86_64) here=amd64 ;;
aarch64) here=arm64 ;;
*) here=$(uname -m) ;;
esac
arch=${ARCH:-$here}
case $arch in
amd64) machine=x86_64 ;;
arm64) machine=aarch64 ;;
*)
    echo "packages.sh: no packages for $arch" >&2
    exit 2
    ;;
esac
target=$machine-unknown-linux-gnu
if [ "$arch" = "$here" ]; then
    release=$built/release
    cross=() tools=
else
    release=$built/$target/release
    cross=(--target "$target")
    tools=$machine-linux-gnu-
    linker=CARGO_TARGET_$(tr 'a-z-' 'A-Z_' <<<"$target")_LINKER
    export "$linker=${tools}gcc" "CC_${target//-/_}=${tools}gcc"
fi
export STRIP=${tools}strip

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"

# needs PROGRAM PACKAGE: or end.
needs() {
    command -v "$1" >/dev/null || {
        echo "packages.sh: $1 is missing (apt-get install $2)" >&2
        exit 1
    }
}

# compiled: `dbs` for the machine of the package.
compiled() {
    "$cargo" build --release --locked "${cross[@]}" -p dbs-cli
    tool "$release/dbs"
}

# tool BINARY: sets DBS_TOOL to it, or to one that runs here, and makes the manual pages.
tool() {
    DBS_TOOL=$1
    if [ -n "$tools" ]; then
        "$cargo" build --release --locked -p dbs-cli
        DBS_TOOL=$built/release/dbs
    fi
    DBS_TOOL=$(realpath "$DBS_TOOL")
    export DBS_TOOL
    if [ ! -e "$work/man" ]; then
        "$DBS_TOOL" man "$work/man.new" >/dev/null
        mv "$work/man.new" "$work/man"
    fi
}

# documents DIRECTORY: what to read, with links that work.
documents() {
    install -d "$1"/docs/{tutorials,reference}
    install -m644 README.md "$1/"
    install -m644 docs/*.md "$1/docs/"
    install -m644 docs/tutorials/*.md "$1/docs/tutorials/"
    install -m644 docs/reference/*.md "$1/docs/reference/"
    install -Dm644 dbs-py/examples/nightly.py "$1/dbs-py/examples/nightly.py"
}

# licences PACKAGE TARGET FILE
licences() {
    scripts/packages/licences.py "$1" "$2" >"$3"
}

# dated DIRECTORY: all of it, as reproducible packages need it.
dated() {
    find "$1" -exec touch -h -d "@$SOURCE_DATE_EPOCH" '{}' +
}

# libraries BINARY: the packages that have its shared libraries, in the versions whose symbols it uses: what
# dpkg-shlibdeps says, which knows only of libraries that are installed here.
libraries() {
    local glibc needed=() library
    glibc=$("${tools}objdump" -T "$1" | sed -n 's/.*(\?GLIBC_\([0-9.]*\))\?.*/\1/p' | sort -V | tail -1)
    for library in $("${tools}objdump" -p "$1" | awk '$1 == "NEEDED" { print $2 }'); do
        case $library in
        libc.so.6) needed+=("libc6 (>= $glibc)") ;;
        # Parts of the above.
        libm.so.6 | ld-linux-*) ;;
        libgcc_s.so.1) needed+=("libgcc-s1 (>= 4.2)") ;;
        *)
            echo "packages.sh: which package has $library, of $1?" >&2
            return 1
            ;;
        esac
    done
    printf '%s\n' "${needed[@]}" | sort | paste -sd, | sed 's/,/, /g'
}

# debian_documents PACKAGE DIRECTORY TARGET CRATE: what Debian's packages must say of themselves.
debian_documents() {
    local doc=$2/usr/share/doc/$1
    install -d "$doc"
    {
        printf 'Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n'
        printf 'Upstream-Name: dbs\n\nFiles: *\nCopyright: %s, the authors of DBS\nLicense: Apache-2.0\n' \
            "$(date -d "@$SOURCE_DATE_EPOCH" +%Y)"
        printf ' On Debian, the text of this licence is in /usr/share/common-licenses/Apache-2.0.\n'
        printf 'Comment:\n What others wrote of the program, and their licences: THIRD-PARTY.gz, beside this file.\n'
    } >"$doc/copyright"
    licences "$4" "$3" "$doc/THIRD-PARTY"
    printf '%s (%s-1) unstable; urgency=medium\n\n  * Version %s: changelog.gz, beside this file.\n\n -- %s  %s\n' \
        "$1" "$sorted" "$version" "$maintainer" "$(date -R -d "@$SOURCE_DATE_EPOCH")" >"$doc/changelog.Debian"
    cp CHANGELOG.md "$doc/changelog"
    gzip -9n "$doc"/{THIRD-PARTY,changelog.Debian,changelog}
}

# debian PACKAGE DIRECTORY: the package of what is in there, whose control file ends with the standard input.
debian() {
    local root=$2 size
    mkdir -p "$root/DEBIAN"
    size=$(find "$root" -path "$root/DEBIAN" -prune -o -type f -printf '%s\n' | awk '{ k += int(($1 + 1023) / 1024) } END { print k }')
    {
        printf 'Package: %s\nVersion: %s-1\nArchitecture: %s\nMaintainer: %s\n' "$1" "$sorted" "$arch" "$maintainer"
        printf 'Installed-Size: %s\nSection: admin\nPriority: optional\n' "$size"
        cat
    } >"$root/DEBIAN/control"
    (cd "$root" && find . -path ./DEBIAN -prune -o -type f -printf '%P\0' | sort -z | xargs -0 md5sum) >"$root/DEBIAN/md5sums"
    chmod 644 "$root/DEBIAN"/{control,md5sums}
    dated "$root"
    dpkg-deb --root-owner-group --threads-max=1 -Zxz --build "$root" "$out" >/dev/null
    echo "made $out/$1_$sorted-1_$arch.deb"
}

# system DIRECTORY: the files of dbs for /usr and /etc, but those that systems have in different places.
system() {
    scripts/install.sh "$release/dbs" "$work/man" "$1/usr" /usr >/dev/null
    gzip -9n "$1"/usr/share/man/man1/*
    install -d "$1/etc/dbs"
    install -d -m700 "$1/var/lib/dbs"
}

deb() {
    needs dpkg-deb dpkg
    needs "${tools}objdump" binutils
    compiled
    local root=$work/dbs
    system "$root"
    mkdir -p "$root/usr/share/zsh/vendor-completions" "$root/DEBIAN"
    mv "$root"/usr/share/zsh/{site-functions/_dbs,vendor-completions/}
    rmdir "$root/usr/share/zsh/site-functions"
    documents "$root/usr/share/doc/dbs"
    debian_documents dbs "$root" "$target" dbs-cli
    install -m755 scripts/packages/deb/* "$root/DEBIAN/"
    debian dbs "$root" <<CONTROL
Depends: $(libraries "$root/usr/bin/dbs")
Recommends: fuse3
Suggests: libnbd-bin, nbd-client, qemu-utils
Description: volumes, snapshots and clones in one file or block device
 DBS keeps many thin-provisioned virtual disks, each with thousands of
 snapshots and writable clones, in one file or on one block device. It
 serves them over NBD, as block devices (with the kernel's ublk driver) and
 as files, and backs them up to S3, Azure, NFS, SMB and directories.
CONTROL
}

longhorn() {
    needs dpkg-deb dpkg
    needs "${tools}objdump" binutils
    # What `longhorn version` shows.
    DBS_GIT_COMMIT=$(git rev-parse HEAD) DBS_BUILD_DATE=$(git show -s --format=%cs HEAD) \
        "$cargo" build --release --locked "${cross[@]}" -p longhorn
    local root=$work/longhorn
    install -Dsm755 --strip-program="$STRIP" "$release/longhorn" "$root/usr/bin/longhorn"
    debian_documents dbs-longhorn "$root" "$target" longhorn
    install -m644 docs/{replica,controller,kubernetes}.md "$root/usr/share/doc/dbs-longhorn/"
    debian dbs-longhorn "$root" <<CONTROL
Depends: $(libraries "$root/usr/bin/longhorn")
Suggests: dbs
Description: Longhorn's replica and controller on DBS
 The command longhorn: a replica, which keeps its volume in a DBS store, and
 a controller, which serves a volume over several replicas. Both speak the
 protocols of Longhorn's v1 data engine.
CONTROL
}

rpm() {
    needs rpmbuild rpm
    compiled
    local root=$work/rpm
    system "$root"
    documents "$root/usr/share/doc/dbs"
    install -m644 CHANGELOG.md "$root/usr/share/doc/dbs/"
    install -Dm644 LICENSE "$root/usr/share/licenses/dbs/LICENSE"
    licences dbs-cli "$target" "$root/usr/share/licenses/dbs/THIRD-PARTY"
    dated "$root"
    # Not what this user's or machine's configuration adds.
    rpmbuild -bb --quiet --nodebuginfo --target "$machine" \
        --define "_topdir $work/rpmbuild" --define "_rpmdir $work/rpms" --define "_tmppath $work" \
        --define "dbs_version $sorted" --define "dbs_root $root" --define "dbs_scripts $PWD/scripts/packages/deb" \
        --define "use_source_date_epoch_as_buildtime 1" --define "clamp_mtime_to_source_date_epoch 1" \
        --define "_buildhost localhost" scripts/packages/dbs.spec
    mv "$work/rpms/$machine/dbs-$sorted-1.$machine.rpm" "$out/"
    echo "made $out/dbs-$sorted-1.$machine.rpm"
}

# static: the command that needs no libraries. What `make static` says is not for here.
static() {
    MACHINE=$machine scripts/static.sh dbs >/dev/null
    static=$built/$machine-unknown-linux-musl/release/dbs
    tool "$static"
}

tarball() {
    static
    local name=dbs-$version-$machine-linux
    local root=$work/tarball/$name
    scripts/install.sh "$static" "$work/man" "$root" /usr/local >/dev/null
    documents "$root/share/doc/dbs"
    install -m644 CHANGELOG.md LICENSE "$root/share/doc/dbs/"
    licences dbs-cli "$machine-unknown-linux-musl" "$root/share/doc/dbs/THIRD-PARTY"
    install -m755 scripts/packages/install.sh "$root/"
    install -m644 scripts/packages/tarball.md "$root/README.md"
    dated "$root"
    tar -c -C "$work/tarball" --sort=name --format=gnu --owner=0 --group=0 --numeric-owner "$name" | gzip -9n >"$out/$name.tar.gz"
    echo "made $out/$name.tar.gz"
}

image() {
    static
    local root=$work/image name=dbs-$version-$machine-image.tar
    install -Dm755 "$static" "$root/usr/bin/dbs"
    install -d "$root"/{data,dev,etc,proc,sys,tmp,run/dbs}
    chmod 1777 "$root/tmp"
    chmod 700 "$root/run/dbs"
    printf 'root:x:0:0:root:/:/usr/bin/dbs\ndbs:x:999:999:DBS block store:/:/usr/bin/dbs\n' >"$root/etc/passwd"
    printf 'root:x:0:\ndbs:x:999:\n' >"$root/etc/group"
    install -Dm644 LICENSE "$root/usr/share/licenses/dbs/LICENSE"
    licences dbs-cli "$machine-unknown-linux-musl" "$root/usr/share/licenses/dbs/THIRD-PARTY"
    scripts/packages/image.py "$root" "$out/$name" "$version" "$arch" "$SOURCE_DATE_EPOCH"
    echo "made $out/$name and ${name/-image/-rootfs}.gz"
}

wheel() {
    if [ -n "$tools" ]; then
        echo "packages.sh: no wheel for another machine than this" >&2
        exit 1
    fi
    rm -f "$built"/wheels/dbs-*.whl
    scripts/python.sh wheel >/dev/null
    mv "$built"/wheels/dbs-*.whl "$out/"
    echo "made $(ls "$out"/dbs-*.whl)"
}

if [ $# -eq 0 ]; then
    set -- deb longhorn rpm tarball image
    [ -n "$tools" ] || set -- "$@" wheel
fi
for kind; do
    case $kind in
    deb | longhorn | rpm | tarball | image | wheel) "$kind" ;;
    *)
        sed -n '2,/^set/p' "$0" | sed -n 's/^# \{0,1\}//p' >&2
        exit 2
        ;;
    esac
done
(cd "$out" && find . -maxdepth 1 -type f ! -name SHA256SUMS -printf '%P\n' | sort | xargs sha256sum >SHA256SUMS)

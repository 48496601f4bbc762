#!/usr/bin/env bash
# static.sh [longhorn] [dbs]: builds these commands, statically linked, and puts the debug information of each into
# a file beside it. An engine image needs a static `longhorn`, because the file is copied out of the image and run in
# other images. Virtual machines need static commands, because they have no libraries.
#
# MACHINE   aarch64, for another machine than this; needs gcc-aarch64-linux-gnu
set -euo pipefail
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
machine=${MACHINE:-$(uname -m)}
target=$machine-unknown-linux-musl

options=()
for name in "${@:-longhorn}"; do
    case $name in
    longhorn) options+=(-p longhorn --bin longhorn) ;;
    dbs) options+=(-p dbs-cli --bin dbs) ;;
    *)
        echo "static.sh: no command $name" >&2
        exit 2
        ;;
    esac
done

tools=
if [ "$machine" != "$(uname -m)" ]; then
    # Rust has the linker and musl for it. What GCC's atomics outside of the code call, musl lacks.
    tools=$machine-linux-gnu-
    name=${target//-/_}
    export "CARGO_TARGET_${name^^}_LINKER=rust-lld" "CC_$name=${tools}gcc" "AR_$name=${tools}ar" \
        "CFLAGS_$name=-mno-outline-atomics"
    command -v "${tools}gcc" >/dev/null || {
        echo "static.sh: ${tools}gcc is missing (apt-get install gcc-${tools%-})" >&2
        exit 1
    }
elif ! command -v musl-gcc >/dev/null; then
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        echo "installing with apt-get: musl-tools"
        DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends musl-tools
    else
        echo "musl-gcc is missing: install musl-tools (Debian) or what your system calls it" >&2
        exit 1
    fi
fi
if command -v rustup >/dev/null && ! rustup target list --installed | grep -qx "$target"; then
    echo "installing with rustup: the target $target"
    rustup target add "$target"
fi

# What `longhorn version` prints. The date is the commit's: the same source makes the same binary.
if git rev-parse -q --verify HEAD >/dev/null 2>&1; then
    DBS_GIT_COMMIT=$(git rev-parse HEAD)
    DBS_BUILD_DATE=$(git show -s --format=%cs HEAD)
    export DBS_GIT_COMMIT DBS_BUILD_DATE
fi
"$cargo" build --release --locked --target "$target" "${options[@]}"

for name in "${@:-longhorn}"; do
    binary=${CARGO_TARGET_DIR:-target}/$target/release/$name
    if readelf -lW "$binary" | grep -q INTERP; then
        echo "$binary is not linked statically" >&2
        exit 1
    fi
    # What people download has no debug information; a debugger finds it beside.
    "${tools}objcopy" --only-keep-debug "$binary" "$binary.debug"
    "${tools}objcopy" --strip-all --add-gnu-debuglink="$binary.debug" "$binary" "$binary.stripped"
    mv "$binary.stripped" "$binary"
    [ -n "$tools" ] || "$binary" --version >/dev/null
    echo "built $binary, static, $(stat -c %s "$binary") bytes"
done

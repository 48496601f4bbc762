#!/bin/sh
# install.sh [--remove] [PREFIX]: puts what lies beside it into PREFIX (/usr/local), or takes it away again.
set -eu
cd "$(dirname "$0")"
remove=
if [ "${1:-}" = --remove ]; then
    remove=1
    shift
fi
prefix=${1:-/usr/local}
case $prefix in
/*) ;;
*) prefix=$PWD/$prefix ;;
esac

find bin lib share -type f | while read -r file; do
    to=$prefix/$file
    if [ -n "$remove" ]; then
        rm -f "$to"
        continue
    fi
    mkdir -p "$(dirname "$to")"
    # Under another name first: the command may be running.
    case $file in
    lib/systemd/*) sed "/^Exec/ s|/usr/local/bin/|$prefix/bin/|g" "$file" >"$to.new" ;;
    *) cp "$file" "$to.new" ;;
    esac
    case $file in
    bin/*) chmod 755 "$to.new" ;;
    *) chmod 644 "$to.new" ;;
    esac
    mv "$to.new" "$to"
done
if [ -n "$remove" ]; then
    rmdir "$prefix/share/doc/dbs/docs" "$prefix/share/doc/dbs" 2>/dev/null || true
    echo "removed dbs from $prefix"
else
    echo "installed dbs into $prefix"
fi

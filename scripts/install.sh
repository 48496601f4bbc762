#!/usr/bin/env bash
# install.sh DBS MAN PREFIX [FINAL]: the command, its manual pages and completions, and the units of systemd
# that run it from FINAL, where PREFIX is to be in the end.
#
# DBS_TOOL   a `dbs` that runs here, where DBS is for another machine
# STRIP      the program that strips it
set -euo pipefail
dbs=$1 man=$2 prefix=$3 final=${4:-$3}
cd "$(dirname "$0")/.."

# Without debug information: that of the same build stays in target/release.
install -Dsm755 --strip-program="${STRIP:-strip}" "$dbs" "$prefix/bin/dbs"
install -d "$prefix/share/man/man1"
install -m644 "$man"/*.1 "$prefix/share/man/man1/"
completion() {
    install -d "$(dirname "$prefix/share/$2")"
    "${DBS_TOOL:-$dbs}" completions "$1" >"$prefix/share/$2"
}
completion bash bash-completion/completions/dbs
completion zsh zsh/site-functions/_dbs
completion fish fish/vendor_completions.d/dbs.fish
install -d "$prefix/lib/systemd/system"
# longhorn@.service is for who installs `longhorn`.
for unit in contrib/dbs*.{service,socket,timer}; do
    sed "/^Exec/ s|/usr/local/bin/|$final/bin/|g" "$unit" >"$prefix/lib/systemd/system/${unit#contrib/}"
done
install -Dm644 contrib/dbs.sysusers "$prefix/lib/sysusers.d/dbs.conf"
install -Dm644 contrib/dbs.rules "$prefix/lib/udev/rules.d/70-dbs.rules"
echo "installed $prefix/bin/dbs, its manual pages, completions and units of systemd"

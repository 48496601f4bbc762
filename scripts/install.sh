#!/usr/bin/env bash
# install.sh DBS MAN PREFIX: the command, its manual pages and completions.
set -euo pipefail
dbs=$1 man=$2 prefix=$3

install -Dm755 "$dbs" "$prefix/bin/dbs"
install -d "$prefix/share/man/man1"
install -m644 "$man"/*.1 "$prefix/share/man/man1/"
completion() {
    install -d "$(dirname "$prefix/share/$2")"
    "$dbs" completions "$1" >"$prefix/share/$2"
}
completion bash bash-completion/completions/dbs
completion zsh zsh/site-functions/_dbs
completion fish fish/vendor_completions.d/dbs.fish
echo "installed $prefix/bin/dbs, its manual pages and completions"

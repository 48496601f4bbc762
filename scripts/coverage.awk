# The table of coverage.sh, from lines as lcov has them.
BEGIN {
    # Area, and the files it is: the first that fits counts.
    area("format", "dbs-core/src/format/")
    area("repair", "dbs-core/src/(meta/load/mend(/|\\.rs)|store/(repair|restore|aside|rewrite)\\.rs)")
    area("checksums of data", "dbs-core/src/((meta|store)/(sums(/|\\.rs)|scrub\\.rs)|store/pages\\.rs)")
    area("loading and proof", "dbs-core/src/meta/(load\\.rs|load/)")
    area("tail", "dbs-core/src/meta/tail\\.rs")
    area("recovery", "dbs-core/src/store/(recover|open)\\.rs")
    area("images of 1.0.0", "dbs-core/src/v1/")
    area("NBD, server", "dbs-server/nbd/src/(handshake|input|session|transmission)\\.rs")
    area("NBD, client", "dbs-server/nbd/src/client\\.rs")
    area("control socket", "dbs-server/control/src/(line|lib|server)\\.rs")
    area("streams", "dbs-server/transfer/src/stream/")
    area("backups", "dbs-backup/src/((codec|config|names|url)\\.rs|objects/(azure|http)\\.rs|objects/s3/)")
    area("data connection", "engine-adapter/(wire/src/frame/|data/src/request\\.rs|controller/src/path/link\\.rs)")
    area("ssync", "engine-adapter/sync/src/ssync/receive/")
}

function area(name, files) {
    names[++areas] = name
    patterns[areas] = "^" files
}

# Where the tests inside a file begin.
function end_of_code(path,    line, number, marked) {
    number = 0
    marked = 0
    while ((getline line < path) > 0) {
        number++
        if (marked && line ~ /^mod .*\{$/) {
            close(path)
            return number - 1
        }
        marked = line == "#[cfg(test)]"
    }
    close(path)
    return 1e9
}

/^SF:/ {
    path = substr($0, 4)
    file = index(path, root) == 1 ? substr(path, length(root) + 1) : path
    here = 0
    if (file !~ /tests?\.rs$|\/tests\//)
        for (i = areas; i > 0; i--)
            if (file ~ patterns[i])
                here = i
    if (here) {
        last = end_of_code(path)
        run_start = run_end = 0
        of[here] = of[here] " " file
    }
}

function flush_run() {
    if (run_start)
        holes[here] = holes[here] sprintf("  %s:%d%s\n", file, run_start,
            run_end > run_start ? "-" run_end : "")
    run_start = 0
}

here && /^DA:/ {
    split(substr($0, 4), fields, ",")
    if (fields[1] < last) {
        lines[here]++
        if (fields[2] > 0) {
            hit[here]++
            flush_run()
        } else {
            if (!run_start)
                run_start = fields[1]
            run_end = fields[1]
        }
    }
}

here && /^end_of_record/ {
    flush_run()
}

END {
    printf "\n| area | lines | run | share |\n|---|---|---|---|\n"
    for (i = 1; i <= areas; i++) {
        if (!lines[i])
            continue
        all += lines[i]
        run += hit[i]
        printf "| %s | %d | %d | %.1f %% |\n", names[i], lines[i], hit[i], 100 * hit[i] / lines[i]
    }
    if (all)
        printf "| all | %d | %d | %.1f %% |\n", all, run, 100 * run / all
    if (missing != "")
        for (i = 1; i <= areas; i++)
            if (holes[i])
                printf "\n%s, not run:\n%s", names[i], holes[i]
}

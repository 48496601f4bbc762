#!/usr/bin/env python3
"""Edits of dbs-core, each of which some test must notice.

The script applies each edit to a copy of the tree and runs the tests that should fail, the quickest first. It
prints a table: the edit, the test that failed, and how long that took. Exit code 1 if an edit survives.

usage: scripts/mutants.py [NAME ...]      those edits; all without a name
"""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent


def tests(package: str, program: str, *names: str) -> list[str]:
    """All tests of a program, or those whose names contain one of these."""
    which = [program] if program == "--lib" else ["--test", program]
    return ["cargo", "test", "-p", package, *which, "--", *names]


def unit(*names: str) -> list[str]:
    return tests("dbs-core", "--lib", *names)


def suite(*names: str) -> list[str]:
    return tests("dbs-core", "suite", *names)


def sim(*names: str) -> list[str]:
    return tests("dbs-sim", "suite", *names)


def histories(*names: str) -> list[str]:
    return tests("dbs-sim", "histories", *names)


def powercut(*names: str) -> list[str]:
    return tests("dbs-cli", "powercut", *names)


def replica(*names: str) -> list[str]:
    return tests("longhorn", "process", *names)


# Longer than any of them takes, but for a hang.
LIMIT = 600
# What is said of an edit that makes no program.
BROKEN = "does not compile: mend the table"

# Name; file below dbs-core/src; text that the file has once; the text that replaces it; tests in the order in which
# they are run: first the quickest test that is known to fail. Names that begin with m and a number are edits that a
# reviewer planted, with the reviewer's numbers.
EDITS = [
    ("m3-no-flush-at-open", "store/open.rs",
     """            storage.flush().map_err(|error| Error::io(error, "flush failed"))?;\n""", "",
     [sim("reopen::what_a_killed_process_did_not_flush")]),
    ("m6-superblock-keeps-its-sequence", "store/open.rs", "        new.sequence += 1;\n", "",
     [sim("reopen::a_copy_of_the_superblock_that_was_left_behind")]),
    ("m9-extent-is-reused-before-it-is-punched", "store/work.rs",
     """        let result = self.give_back(&extents, &geometry);
        // Free they are, whether or not the device took them.
        let mut meta = self.meta();
        meta.extents.punched(&extents);
        drop(meta);
""", """        let mut meta = self.meta();
        meta.extents.punched(&extents);
        drop(meta);
        let result = self.give_back(&extents, &geometry);
""", [sim("beside::what_is_being_given_back")]),
    ("m10-zeroes-beside-a-write-unlogged", "meta/zero.rs", """        self.log_entry(entry);
        self.fill(entry, part, state);""", "        self.fill(entry, part, state);",
     [sim("beside::zeroes_beside_a_write")]),
    ("m12-failed-write-frees-a-shared-extent", "meta/plan.rs",
     "if unused && self.unlogged.contains_key(&piece.entry) && self.locks.sole(space, &whole)",
     "if unused && self.unlogged.contains_key(&piece.entry)", [sim("beside::writes_that_fail_beside_others")]),
    ("m13-commit-is-also-for-who-came-later", "store/commit.rs", "        self.completed = covers;",
     "        self.completed = self.requested.max(covers);", [sim("beside::who_asks_for_a_commit"), unit("a_commit_is_for_those")]),
    ("m17-damaged-page-counts-as-open", "meta/sums/groups.rs",
     "StoredSums::Damaged(_), .. }) | None => (State::Closed, ALL),",
     "StoredSums::Damaged(_), .. }) | None => (State::Open, ALL),",
     [suite("checksums::a_page_that_was_read_wrong")]),
    ("m19-shrink-without-second-look", "store/space.rs", "if meta.extents_end() > new.data_extents() {",
     "if false && meta.extents_end() > new.data_extents() {", [sim("beside::a_write_amid_a_vacuum")]),
    ("m21-flush-without-sync", "io/file.rs", "self.file.sync_data()", "Ok(())",
     [powercut("each_promise_rests_on_a_sync")]),
    ("m21-flush-without-sync-of-a-replica", "io/file.rs", "self.file.sync_data()", "Ok(())",
     [replica("a_flush_of_a_volume_is_a_sync_of_its_replica")]),
    ("m23-merge-without-second-look-at-its-lock", "meta/merge.rs", "                && held()",
     "                && (held() || true)", [unit("nothing_is_merged_into_what_became_a_snapshot")]),
    ("m24-no-second-look-at-the-last-block", "store/commands.rs",
     "now() == before && (size <= before.0 || volume.last_block_cut(before.0)?.is_none())", "now() == before",
     [sim("beside::what_was_cut_off_while_a_volume_grows")]),
    ("m38-table-of-many-layers-is-stale", "meta/view.rs",
     "table[blocks.start as usize..blocks.end as usize].fill(index as u16);", "let _ = index;",
     [sim("beside::an_overwrite_above_ten_snapshots"), histories()]),
    ("m39-fill-off-by-one-at-64-blocks", "meta/entries.rs",
     "let (first, last) = ((blocks.start / 64) as usize, ((blocks.end - 1) / 64) as usize);",
     "let (first, last) = ((blocks.start / 64) as usize, (blocks.end / 64).min(words as u32 - 1) as usize);\n"
     "        let last = last - usize::from(blocks.end % 64 == 1 && last > first);",
     [unit("states_and_counts"), histories()]),
    ("m45-no-second-group-of-a-session", "store/open.rs",
     """        // The group above said that there is no tail; from here on groups say there is.
        self.commit_once(WriteBack::Session)
""", "        Ok(())\n", [sim("reopen::a_tail_that_is_gone")]),
    ("records-of-writes-on-their-way-not-counted", "meta/log.rs",
     "self.pending.len() + self.expected > self.pending_soft_max()", "self.pending.len() > self.pending_soft_max()",
     [suite("request::writes_on_their_way")]),
    ("two-writes-claim-a-block", "meta/sums.rs",
     "            Some(claims) if claims.has(blocks) => Err(Need::Wait),\n", "",
     [suite("checksums::writes_to_a_block_take_turns")]),
    ("view-of-a-cut-clone-stays", "meta/tree.rs", "self.tree_version += 1;", "{}", [suite("held::"), suite()]),
    ("merge-beside-old-reads", "meta/merge.rs", "let reads = self.fence.oldest() < self.sight.fence",
     "let reads = false && self.fence.oldest() < self.sight.fence", [suite("held::"), suite()]),
    ("view-outlives-an-entry", "meta/view.rs", "        self.forget(owner, &extents);\n", "", [suite(), sim(), histories()]),
    ("views-above-outlive-a-change", "meta/view.rs",
     "self.views.values_mut().for_each(|view| view.forget(extents));", "{}", [suite(), sim(), histories()]),
    ("freed-extent-without-fence", "meta/alloc.rs", "if first.group > durable_group || first.fence > oldest {",
     "if first.group > durable_group {", [unit("alloc::"), suite()]),
    ("freed-extent-before-it-is-durable", "meta/alloc.rs", "if first.group > durable_group || first.fence > oldest {",
     "if first.fence > oldest {", [unit("alloc::"), suite()]),
    ("dropped-write-frees-its-extent", "volume/request.rs",
     "Some(Running { kind: Kind::Write { planned: true, .. }, .. }) => self.lose(),", "", [suite("request::"), suite()]),
    ("writer-that-waited-writes-on", "store/mod.rs", """            self.check_sound()?;
            let stop = match""", "            let stop = match", [suite("request::"), suite()]),
    ("full-store-with-free-extents", "store/mod.rs", "if !held_by_readers && meta.extents.punching() == 0 {",
     "if !held_by_readers {", [suite("full::"), suite()]),
    ("flatten-keeps-its-extent", "meta/flatten.rs", "            self.unallocate(plan.layer, plan.logical);\n", "",
     [suite("full::"), suite()]),
    ("reclaim-what-a-merge-copies", "meta/merge.rs", "self.snapshot(id).children.is_empty() && !self.in_use.contains(&id)",
     "self.snapshot(id).children.is_empty()", [unit("what_a_merge_works_on")]),
    ("tail-that-is-gone", "meta/tail.rs", "if !self.memory.is_kept() && !sabotage::is(Bug::TrustLostTail) {",
     "if false {", [suite("durability::"), suite()]),
    ("tail-forgets-the-group-being-written", "meta/tail.rs", "        self.group += 1;\n        self.used = 0;",
     "        self.reset_half(self.group, 0);\n        self.group += 1;\n        self.used = 0;",
     [tests("dbs-sim", "interleave", "a_process_killed_amid_two_calls")]),
    ("tail-again-too-early", "meta/tail.rs", "        self.missing = Some(self.group);\n        self.lost = true;",
     "        self.lost = true;", [suite("durability::"), suite(), histories()]),
    ("discard-behind-the-old-end", "volume/zero.rs", "&& self.size() != end;", "&& false;", [unit("zero::"), unit()]),
    ("rollback-of-a-renamed-volume", "store/rollback.rs", "            still_named(meta, volume, id)?;\n", "",
     [suite("request::"), suite()]),
    ("merge-ignores-zero-marks", "meta/merge.rs", "let hidden = upper_data.or(&upper_zero);", "let hidden = upper_data;",
     [suite(), sim(), tests("dbs-sim", "thresholds")]),
    ("move-forgets-zero-marks", "meta/flatten.rs", "self.entries.set_bits(plan.to, &data, &zero);",
     "self.entries.set_bits(plan.to, &data, &Bits::default());", [suite(), sim(), histories()]),
    ("group-before-its-data", "store/commit.rs", """        if !skip {
            self.flush_storage()?;
        }""", "        let _ = skip;", [histories(), suite()]),
    ("commit-without-second-flush", "store/commit.rs", """        if !sabotage::is(Bug::SkipGroupFlush) {
            self.flush_storage()?;
        }""", "", [histories(), suite()]),
    ("page-closed-before-its-data", "store/sums/groups.rs",
     "        if !early {\n            self.flush_storage()?;\n        }\n", "",
     [sim("intent"), suite("checksums::"), histories()]),
    ("superblock-before-its-size", "store/space.rs", """            if !sabotage::is(Bug::GrowWithoutFlush) {
                self.inner.flush_storage()?;
            }""", "", [histories(), suite()]),
]


def main() -> int:
    chosen = [edit for edit in EDITS if (len(sys.argv) == 1 or edit[0] in sys.argv[1:])]
    unknown = set(sys.argv[1:]) - {edit[0] for edit in EDITS}
    if unknown:
        print(f"no such edit: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    # An end by SIGTERM, too, kills the test that runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # The same place each time, so that what is compiled stays.
    copy = ROOT / "target" / "mutants"
    survived = []
    print("| edit | killed by | seconds |\n|---|---|---|", flush=True)
    for name, file, before, after, tests in chosen:
        refresh(copy)
        path = copy / "dbs-core" / "src" / file
        text = path.read_text()
        if text.count(before) != 1:
            print(f"| {name} | the edit fits {text.count(before)} places in {file}: mend the table | |", flush=True)
            survived.append(name)
            continue
        path.write_text(text.replace(before, after))
        begun = time.monotonic()
        killer = next(filter(None, (kills(copy, test) for test in tests)), None)
        print(f"| {name} | {killer or '**nothing**'} | {time.monotonic() - begun:.0f} |", flush=True)
        if killer in (None, BROKEN):
            survived.append(name)
    if survived:
        print(f"survived: {', '.join(survived)}")
    return 1 if survived else 0


def refresh(copy: pathlib.Path) -> None:
    """Makes the files of the copy those of the tree. What was compiled in the copy's own `target` stays."""
    copy.mkdir(parents=True, exist_ok=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    files = {name for name in names if name and (ROOT / name).is_file()}
    for directory, below, there in os.walk(copy):
        if pathlib.Path(directory) == copy:
            below[:] = [name for name in below if name != "target"]
        for path in (pathlib.Path(directory, name) for name in there):
            if path.relative_to(copy).as_posix() not in files:
                path.unlink()
    for name in sorted(files):
        source, target = ROOT / name, copy / name
        data = source.read_bytes()
        if not target.exists() or target.read_bytes() != data:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            shutil.copymode(source, target)


def kills(copy: pathlib.Path, test: list[str]) -> str | None:
    """The first test that fails; None if all pass."""
    build = [*test[: test.index("--")], "--no-run"]
    with tempfile.TemporaryFile("w+") as output:
        # Takes as long as it takes: on a machine that others load, longer than a test may.
        if subprocess.run(build, cwd=copy, stdout=output, stderr=subprocess.STDOUT).returncode != 0:
            return BROKEN
        # A session of its own, so that all processes of a test that does not end can be killed together.
        process = subprocess.Popen(test, cwd=copy, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return f"`{described(test)}` does not end"
        finally:
            # Not ended: it took too long, or this script is being stopped.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        text = output.read()
    if code == 0:
        return None
    failed = re.findall(r"^test (\S+) \.\.\. FAILED", text, re.M)
    return f"`{failed[0]}`" if failed else f"`{described(test)}`"


def described(test: list[str]) -> str:
    return " ".join(part for part in test[3:] if part not in ("--test", "--"))


if __name__ == "__main__":
    sys.exit(main())

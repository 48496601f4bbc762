#!/usr/bin/env python3
"""Edits of dbs-core, each of which some test must notice.

Each edit is applied to a copy of the tree, and the tests that should fail are run, the quickest first. What
prints is a table: the edit, the test that failed, and how long that took. Exit code 1 if an edit survives.

usage: scripts/mutants.py [NAME ...]      those edits; all without a name
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SUITE = ["cargo", "test", "-p", "dbs-core", "--test", "suite"]
UNIT = ["cargo", "test", "-p", "dbs-core", "--lib"]
SIM = ["cargo", "test", "-p", "dbs-sim", "--test", "suite"]
HISTORIES = ["cargo", "test", "-p", "dbs-sim", "--test", "histories"]
THRESHOLDS = ["cargo", "test", "-p", "dbs-sim", "--test", "thresholds"]
INTERLEAVE = ["cargo", "test", "-p", "dbs-sim", "--test", "interleave"]
# Longer than any of them takes, but for a hang.
LIMIT = 600

# Name, file below dbs-core/src, text that is there once, what it becomes, tests in this order.
EDITS = [
    ("view-of-a-cut-clone-stays", "meta/tree.rs", "self.tree_version += 1;", "{}", [SUITE]),
    ("merge-beside-old-reads", "meta/merge.rs", "let reads = self.fence.oldest() < self.sight.fence",
     "let reads = false && self.fence.oldest() < self.sight.fence", [SUITE]),
    ("view-outlives-an-entry", "meta/view.rs", "        self.forget(owner, &extents);\n", "", [SUITE, SIM, HISTORIES]),
    ("views-above-outlive-a-change", "meta/view.rs",
     "self.views.values_mut().for_each(|view| view.forget(extents));", "{}", [SUITE, SIM, HISTORIES]),
    ("table-of-many-layers-is-stale", "meta/view.rs", "table[blocks.start as usize..blocks.end as usize].fill(index as u16);",
     "let _ = index;", [SIM]),
    ("zeroes-beside-a-write-unlogged", "meta/zero.rs", """        self.log_entry(entry);
        self.fill(entry, part, state);""", "        self.fill(entry, part, state);", [SIM]),
    ("shrink-without-second-look", "store/space.rs", "if meta.extents_end() > used.max(1) {",
     "if false && meta.extents_end() > used.max(1) {", [SIM]),
    ("fill-off-by-one-word", "meta/entries.rs", "((blocks.start / 64) as usize, ((blocks.end - 1) / 64) as usize);",
     "((blocks.start / 64) as usize, (blocks.end / 64).min(self.words as u32 - 1).min((blocks.end - 1) / 64) as usize"
     " - usize::from(blocks.end % 64 == 1 && blocks.end > 64));", [UNIT, HISTORIES]),
    ("flush-without-sync", "io/file.rs", "|| self.file.sync_data())", "|| Ok(()))",
     [["cargo", "test", "-p", "dbs-cli", "--test", "powercut"]]),
    ("freed-extent-without-fence", "meta/alloc.rs", "if first.group > durable_group || first.fence > oldest {",
     "if first.group > durable_group {", [UNIT, SUITE]),
    ("freed-extent-before-it-is-durable", "meta/alloc.rs", "if first.group > durable_group || first.fence > oldest {",
     "if first.fence > oldest {", [UNIT, SUITE]),
    ("failed-write-frees-a-shared-extent", "meta/plan.rs",
     "if unused && self.unlogged.contains_key(&piece.entry) && self.locks.sole(space, &whole)",
     "if unused && self.unlogged.contains_key(&piece.entry)", [SUITE, SIM, INTERLEAVE]),
    ("dropped-write-frees-its-extent", "volume/request.rs",
     "Some(Running { kind: Kind::Write { planned: true, .. }, .. }) => self.lose(),", "", [SUITE]),
    ("writer-that-waited-writes-on", "store/mod.rs", """            self.check_sound()?;
            let stop = match""", "            let stop = match", [SUITE]),
    ("full-store-with-free-extents", "store/mod.rs", "if !held_by_readers && meta.extents.punching() == 0 {",
     "if !held_by_readers {", [SUITE]),
    ("flatten-keeps-its-extent", "meta/flatten.rs", "            self.unallocate(plan.layer, plan.logical);\n", "", [SUITE]),
    ("reclaim-what-a-merge-copies", "meta/merge.rs", "self.snapshot(id).children.is_empty() && !self.in_use.contains(&id)",
     "self.snapshot(id).children.is_empty()", [SUITE, SIM, INTERLEAVE]),
    ("tail-that-is-gone", "meta/tail.rs", "if !self.memory.is_kept() && !sabotage::is(Bug::TrustLostTail) {",
     "if false {", [SUITE]),
    ("tail-again-too-early", "meta/tail.rs", "        self.missing = Some(self.group);\n        self.lost = true;",
     "        self.lost = true;", [SUITE, HISTORIES]),
    ("discard-behind-the-old-end", "volume/zero.rs", "&& self.size() != end;", "&& false;", [UNIT]),
    ("rollback-of-a-renamed-volume", "store/rollback.rs", "            still_named(meta, volume, id)?;\n", "", [SUITE]),
    ("merge-ignores-zero-marks", "meta/merge.rs", "let hidden = upper_data.or(&upper_zero);", "let hidden = upper_data;",
     [SUITE, SIM, THRESHOLDS]),
    ("move-forgets-zero-marks", "meta/flatten.rs", "self.entries.set_bits(plan.to, &data, &zero);",
     "self.entries.set_bits(plan.to, &data, &Bits::default());", [SUITE, SIM, HISTORIES]),
    ("group-before-its-data", "store/commit.rs", """        if !skip {
            self.flush_storage()?;
        }""", "        let _ = skip;", [SUITE, HISTORIES]),
    ("commit-without-second-flush", "store/commit.rs", """        if !sabotage::is(Bug::SkipGroupFlush) {
            self.flush_storage()?;
        }""", "", [SUITE, HISTORIES]),
    ("page-closed-before-its-data", "store/sums.rs",
     "if sabotage::is(Bug::ClosePagesEarly) { Ok(()) } else { self.flush_storage() }", "Ok(())", [SUITE, HISTORIES]),
    ("superblock-before-its-size", "store/space.rs", """            if !sabotage::is(Bug::GrowWithoutFlush) {
                self.inner.flush_storage()?;
            }""", "", [SUITE, HISTORIES]),
]


def main() -> int:
    chosen = [edit for edit in EDITS if (len(sys.argv) == 1 or edit[0] in sys.argv[1:])]
    unknown = set(sys.argv[1:]) - {edit[0] for edit in EDITS}
    if unknown:
        print(f"no such edit: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
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
        if killer is None:
            survived.append(name)
    if survived:
        print(f"survived: {', '.join(survived)}")
    return 1 if survived else 0


def refresh(copy: pathlib.Path) -> None:
    """Makes the copy what the tree is, but for what is built."""
    copy.mkdir(parents=True, exist_ok=True)
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    for name in filter(None, files):
        source, target = ROOT / name, copy / name
        if not source.is_file():
            continue
        data = source.read_bytes()
        if not target.exists() or target.read_bytes() != data:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            shutil.copymode(source, target)


def kills(copy: pathlib.Path, test: list[str]) -> str | None:
    """The first test that fails; None if all pass."""
    with tempfile.TemporaryFile("w+") as output:
        try:
            code = subprocess.run(test, cwd=copy, stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT).returncode
        except subprocess.TimeoutExpired:
            return f"`{' '.join(test[3:])}` does not end"
        output.seek(0)
        text = output.read()
    if code == 0:
        return None
    if re.search(r"^error(\[E\d+\])?:", text, re.M) and "test result" not in text:
        return "does not compile: mend the table"
    failed = re.findall(r"^test (\S+) \.\.\. FAILED", text, re.M)
    return f"`{failed[0]}`" if failed else f"`{' '.join(test[3:])}`"


if __name__ == "__main__":
    sys.exit(main())

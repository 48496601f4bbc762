//! What documents point to is there: files and headings of links, and the paths of the code they name. The book has
//! every page and every command.

use crate::support::{Place, listing, run};
use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

/// Folders that are not part of the sources.
const SKIPPED: [&str; 4] = ["target", ".git", "dbs-data", "node_modules"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

/// All files below a folder, relative to `root`.
fn files(root: &Path, folder: &Path, found: &mut BTreeSet<PathBuf>) {
    for entry in std::fs::read_dir(root.join(folder)).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name();
        let path = folder.join(&name);
        if entry.file_type().unwrap().is_dir() {
            if !SKIPPED.iter().any(|skipped| name == *skipped) {
                files(root, &path, found);
            }
        } else {
            found.insert(path);
        }
    }
}

/// The targets of all links of a page, code left out.
fn links(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut in_code = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        if in_code {
            continue;
        }
        for rest in line.split("](").skip(1) {
            if let Some((target, _)) = rest.split_once(')') {
                found.push(target.to_owned());
            }
        }
    }
    found
}

/// What a heading is called in links.
fn slug(heading: &str) -> String {
    let kept = heading.trim().to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || "-_ ".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

fn headings(text: &str) -> BTreeSet<String> {
    let mut in_code = false;
    let mut found = BTreeSet::new();
    for line in text.lines() {
        if line.starts_with("```") {
            in_code = !in_code;
        }
        if !in_code && line.starts_with('#') {
            found.insert(slug(line.trim_start_matches('#')));
        }
    }
    found
}

/// A path without `..` in it.
fn resolved(page: &Path, target: &str) -> PathBuf {
    let mut path = page.parent().unwrap().to_path_buf();
    for part in Path::new(target).components() {
        match part {
            Component::ParentDir => drop(path.pop()),
            Component::CurDir => {}
            other => path.push(other),
        }
    }
    path
}

#[test]
fn links_lead_somewhere() {
    let root = root();
    let mut all = BTreeSet::new();
    files(&root, Path::new(""), &mut all);
    let pages: Vec<_> =
        all.iter().filter(|path| path.extension().is_some_and(|e| e == "md")).collect();
    assert!(pages.len() > 20, "{pages:?}");
    let (mut wrong, mut looked_at) = (Vec::new(), 0);
    for page in pages {
        let text = std::fs::read_to_string(root.join(page)).unwrap();
        for link in links(&text).iter().filter(|link| !link.contains("://")) {
            looked_at += 1;
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { page.clone() } else { resolved(page, file) };
            let there = root.join(&target);
            let found = match heading {
                "" => there.exists(),
                heading => std::fs::read_to_string(&there)
                    .is_ok_and(|text| headings(&text).contains(heading)),
            };
            if !found {
                wrong.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(looked_at > 100, "only {looked_at} links found");
    assert!(wrong.is_empty(), "these links lead nowhere:\n{}", wrong.join("\n"));
}

/// `make book` lists the decisions.
#[test]
fn the_book_has_every_page_once() {
    let root = root();
    let mut pages = BTreeSet::new();
    files(&root, Path::new("docs"), &mut pages);
    let decision = |path: &Path| path.to_str().unwrap().starts_with("docs/decisions/0");
    pages.retain(|path| path.extension().is_some_and(|e| e == "md") && !decision(path));
    let contents = Path::new("docs/SUMMARY.md");
    assert!(pages.remove(contents));
    let text = std::fs::read_to_string(root.join(contents)).unwrap();
    let listed: Vec<_> = links(&text).iter().map(|link| resolved(contents, link)).collect();
    let once: BTreeSet<_> = listed.iter().cloned().collect();
    assert_eq!(listed.len(), once.len(), "a page is listed twice: {listed:?}");
    let missing: Vec<_> = pages.difference(&once).collect();
    assert!(missing.is_empty(), "docs/SUMMARY.md lacks {missing:?}");
}

/// What `make book` makes of the texts of `--help` has each command that has a manual page.
#[test]
fn the_book_has_every_command() {
    if Command::new("python3").arg("--version").output().is_err() {
        println!("SKIPPED the commands in the book: needs python3");
        return;
    }
    let place = Place::new();
    place.dbs("man pages").ok("man");
    let pages: BTreeSet<_> = listing(&place.path("pages"))
        .iter()
        .map(|name| name.trim_end_matches(".1").to_owned())
        .collect();
    let script = root().join("scripts/book.py");
    let made =
        run(Command::new("python3").arg(script).args(["commands", env!("CARGO_BIN_EXE_dbs")]))
            .ok("book.py");
    let text = made.text();
    let headings: BTreeSet<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("## `")?.strip_suffix('`'))
        .map(|command| command.replace(' ', "-"))
        .collect();
    assert!(pages.len() > 40, "{pages:?}");
    assert_eq!(headings, pages);
    assert!(text.contains("\nUsage: dbs volume create "), "{text}");
}

/// The code that `ARCHITECTURE.md` and `docs/internals` name, in text, tables and pictures.
#[test]
fn the_code_that_is_named_is_there() {
    let root = root();
    let mut all = BTreeSet::new();
    files(&root, Path::new(""), &mut all);
    let all: Vec<String> = all.iter().map(|path| format!("/{}", path.display())).collect();
    let (mut wrong, mut looked_at) = (Vec::new(), 0);
    let pages = all
        .iter()
        .filter(|path| *path == "/ARCHITECTURE.md" || path.starts_with("/docs/internals/"));
    for page in pages {
        let text = std::fs::read_to_string(root.join(&page[1..])).unwrap();
        let named = text
            .split(|c: char| !(c.is_ascii_alphanumeric() || "/_.-".contains(c)))
            .map(|word| word.trim_end_matches('.'))
            .filter(|word| word.ends_with(".rs") && word.len() > 3);
        for name in named {
            looked_at += 1;
            if !all.iter().any(|path| path.ends_with(&format!("/{name}"))) {
                wrong.push(format!("{page}: {name}"));
            }
        }
    }
    assert!(looked_at > 30, "only {looked_at} names found");
    assert!(wrong.is_empty(), "no file has these names:\n{}", wrong.join("\n"));
}

#[test]
fn headings_are_called_as_in_links() {
    assert_eq!(
        slug(" Commit: `store/commit.rs`, `meta/commit.rs`"),
        "commit-storecommitrs-metacommitrs"
    );
    assert_eq!(slug(" 22. Repair"), "22-repair");
    assert_eq!(links("a [b](c.md#d) e\n```\n[f](g)\n```\n"), ["c.md#d"]);
}

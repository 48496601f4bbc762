//! The examples of README.md, docs/tour.md and docs/tutorials: they run, and print what they are said to print.

use crate::support::can_mount;
use std::path::Path;
use std::process::{Command, Stdio};

/// Ends the output of each command; the exit code follows.
const MARK: &str = "==end of command==";

/// A command and what it prints, `...` standing for anything.
struct Example {
    command: String,
    output: String,
}

#[test]
fn the_examples_of_the_readme_run_and_print_what_they_should() {
    examples_run("README.md", 12, &["mke2fs", "nbdinfo", "nbdcopy"]);
}

#[test]
fn the_examples_of_the_tour_run_and_print_what_they_should() {
    examples_run("docs/tour.md", 30, &["mke2fs", "nbdinfo", "nbdcopy"]);
}

#[test]
fn a_host_of_virtual_machines_is_as_the_tutorial_says() {
    let programs = ["qemu-img", "qemu-system-x86_64"];
    examples_run("docs/tutorials/virtual-machines.md", 30, &programs);
}

#[test]
fn a_homelab_is_as_the_tutorial_says() {
    examples_run("docs/tutorials/homelab.md", 29, &["mke2fs", "nbdcopy"]);
}

#[test]
fn a_file_comes_out_of_a_snapshot_as_the_tutorial_says() {
    if can_mount() {
        let programs = ["mke2fs", "debugfs", "nbdcopy"];
        examples_run("docs/tutorials/file-from-snapshot.md", 19, &programs);
    }
}

/// Runs the examples of a page, of which there are at least so many, with these programs beside `dbs`.
fn examples_run(page: &str, least: usize, programs: &[&str]) {
    if let Some(missing) = programs.iter().find(|program| !is_there(program)) {
        println!("SKIPPED: the examples of {page} need {missing}");
        return;
    }
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(page);
    let examples = examples(&std::fs::read_to_string(text).unwrap());
    assert!(examples.len() >= least, "only {} examples found in {page}", examples.len());
    let printed = run(&examples);
    let mut parts = printed.split(MARK);
    let mut part = parts.next().unwrap();
    for (index, example) in examples.iter().enumerate() {
        let output = part;
        let Some((code, rest)) = parts.next().and_then(|next| next.split_once('\n')) else {
            panic!("`{}` did not end; all that was printed:\n{printed}", example.command);
        };
        part = rest;
        let asked = examples.get(index + 1).is_some_and(|next| next.command == "echo $?");
        assert!(code == "0" || asked, "`{}` exits with {code}:\n{output}", example.command);
        assert!(
            matches(&example.output, output),
            "`{}` prints\n{output}and not\n{}",
            example.command,
            example.output
        );
    }
}

fn is_there(program: &str) -> bool {
    Command::new("sh")
        .args(["-c", &format!("PATH=$PATH:/usr/sbin:/sbin command -v {program}")])
        .stdout(Stdio::null())
        .status()
        .unwrap()
        .success()
}

fn examples(text: &str) -> Vec<Example> {
    let mut examples: Vec<Example> = Vec::new();
    let mut inside = false;
    for line in text.lines() {
        match (inside, line.strip_prefix("$ ")) {
            (false, _) => inside = line == "```console",
            (true, _) if line == "```" => inside = false,
            (true, Some(command)) => {
                examples.push(Example { command: command.to_owned(), output: String::new() });
            }
            (true, None) => {
                let last = examples.last_mut().expect("a block begins with a command");
                match line.strip_prefix("> ").filter(|_| last.command.ends_with('\\')) {
                    Some(rest) => last.command += &format!("\n{rest}"),
                    None => last.output += &format!("{line}\n"),
                }
            }
        }
    }
    examples
}

/// Runs all of them in one shell in a directory of its own; everything printed.
fn run(examples: &[Example]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let bin = Path::new(env!("CARGO_BIN_EXE_dbs")).parent().unwrap();
    let path = format!("{}:{}:/usr/sbin:/sbin", bin.display(), std::env::var("PATH").unwrap());
    // Whatever happens, the server does not outlive the shell.
    let mut script = "trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT\nexec 2>&1\n".to_owned();
    for example in examples {
        // The status stays readable for `echo $?`.
        script +=
            &format!("{}\nstatus=$?; echo '{MARK}'$status; (exit $status)\n", example.command);
    }
    let output = Command::new("timeout")
        .args(["--kill-after=10", "900", "bash", "-c", &script])
        .env("PATH", path)
        .env("DBS_RUNTIME_DIR", dir.path().join("run"))
        .env("DBS_TEST_ALONE", "1")
        .env_remove("DBS_STORE")
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Whether the output is as expected, where `...` stands for any text, none and lines included.
fn matches(expected: &str, output: &str) -> bool {
    // Lines behind dots end where their text does.
    let expected = expected.replace("...\n", "...");
    let mut parts = expected.split("...");
    let Some(mut rest) = output.strip_prefix(parts.next().unwrap_or_default()) else {
        return false;
    };
    let parts: Vec<_> = parts.collect();
    let Some((last, middle)) = parts.split_last() else { return rest.is_empty() };
    for part in middle {
        let Some(found) = rest.find(part) else { return false };
        rest = &rest[found + part.len()..];
    }
    rest.ends_with(last)
}

#[test]
fn dots_stand_for_anything() {
    assert!(matches("a\n", "a\n"));
    assert!(!matches("a\n", "a\nb\n"));
    assert!(!matches("a\n", ""));
    assert!(matches("...\n", ""));
    assert!(matches("a ... c\nd\n", "a b c\nd\n"));
    assert!(!matches("a ... c\nd\n", "a b d\nd\n"));
    assert!(!matches("a ... c\n", "a c"));
    assert!(matches("x ...\ny ...\n", "x 1\ny 2\n"));
    assert!(!matches("x ...\nz ...\n", "x 1\ny 2\n"));
}

//! Serving in the background: the command starts a process, and ends when that is ready.

use crate::context::Context;
use dbs_core::{Error, ErrorKind, Result};
use serde_json::Value;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::process::{Command, Stdio};

/// A process that serves, as its messages leave it.
pub struct Server<'a> {
    /// The global options.
    pub context: &'a Context,
    /// It is in the background: who started it waits for one line of JSON.
    pub background: bool,
}

impl Server<'_> {
    /// Says that everything is ready. In the background, that is the last word: nobody may wait for
    /// the end of an output that this process keeps open.
    pub fn ready(&self, value: &Value, message: &str) -> Result<()> {
        if !self.background {
            return self.context.done(value, message);
        }
        let failed = |e: io::Error| Error::io(e, "going into the background");
        let null = File::options().read(true).write(true).open("/dev/null").map_err(failed)?;
        let mut out = io::stdout().lock();
        writeln!(out, "{value}").and_then(|()| out.flush()).map_err(failed)?;
        nix::unistd::dup2_stdout(&null).map_err(|e| failed(e.into()))?;
        nix::unistd::dup2_stderr(&null).map_err(|e| failed(e.into()))
    }

    /// Says something that is neither result nor failure.
    pub fn note(&self, text: &str) {
        self.context.note(text);
    }
}

/// Starts the process, and waits until it is ready or has failed. Its `command` mounts the first of the `places` at the
/// second.
pub fn start(
    context: &Context,
    command: &[&str],
    arguments: &[String],
    places: [&OsStr; 2],
) -> Result<()> {
    let starting = |e: io::Error| Error::io(e, "starting the process that serves the mount");
    let runtime_dir = std::path::absolute(context.runtime_dir()).map_err(starting)?;
    let mut child = Command::new(std::env::current_exe().map_err(starting)?)
        .args(context.io_arguments())
        .args(command)
        .arg("--background")
        .args(arguments)
        .arg("--")
        .args(places)
        .env("DBS_RUNTIME_DIR", runtime_dir)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(starting)?;
    // Both end when it is ready, or with the process. What it may say before fits into a pipe.
    let mut said = String::new();
    let mut failure = String::new();
    if let Some(mut out) = child.stdout.take() {
        out.read_to_string(&mut said).map_err(starting)?;
    }
    if let Some(mut err) = child.stderr.take() {
        err.read_to_string(&mut failure).map_err(starting)?;
    }
    if let Ok(value) = serde_json::from_str::<Value>(&said) {
        for line in failure.lines() {
            context.note(line.trim_start_matches("dbs: note: "));
        }
        let point = value["mountpoint"].as_str().unwrap_or_default().to_owned();
        return context.done(&value, &format!("mounted at {point}"));
    }
    let status = child.wait().map_err(starting)?;
    let why = failure.lines().rev().find_map(|line| line.strip_prefix("dbs: "));
    let why =
        why.map_or_else(|| format!("the process that serves it ended: {status}"), str::to_owned);
    let kind = status.code().map_or(ErrorKind::Io, crate::exit::kind);
    Err(Error::new(kind, why))
}

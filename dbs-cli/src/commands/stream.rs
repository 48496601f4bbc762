//! `dbs send` and `dbs receive`.

use super::export::refuse_terminal;
use crate::confirm::confirm;
use crate::context::Context;
use crate::output::print_json;
use crate::progress::Unit;
use crate::spec::{SnapshotSpec, Spec};
use clap::Args;
use dbs_core::{Error, Result, format_size};
use dbs_server::api::Request;
use dbs_server::transfer::{
    NewFile, Received, ResumeToken, SendOptions, pending, receive_over, send,
};
use serde_json::json;
use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::path::{Path, PathBuf};

/// Write a snapshot, or the difference between two, as a stream.
#[derive(Debug, Args)]
pub struct SendSnapshot {
    /// VOLUME@SNAPSHOT
    snapshot: SnapshotSpec,
    /// Send only the difference to this snapshot of the same volume
    #[arg(long, value_name = "SNAPSHOT")]
    from: Option<String>,
    /// Continue where `dbs receive` stopped, with the token it printed
    #[arg(long, value_name = "TOKEN")]
    resume: Option<ResumeToken>,
    /// A new file, `-` for the standard output
    #[arg(default_value = "-")]
    file: PathBuf,
}

impl SendSnapshot {
    pub fn run(self, context: &Context) -> Result<()> {
        let base = self.base()?;
        let to_stdout = is_standard(&self.file);
        refuse_terminal(to_stdout)?;
        context.stop.on_signals()?;
        let name = self.snapshot.to_string();
        let SnapshotSpec { volume, snapshot } = self.snapshot;
        let options = SendOptions { volume, snapshot, base, resume: self.resume };
        let copied = context.with(false, |target| {
            let store = target.access()?;
            let mut meter = context.meter("sending", Unit::Bytes);
            let mut progress = |done, total| meter.update(done, total);
            if to_stdout {
                return send(store, &options, io::stdout().lock(), &mut progress);
            }
            let new = NewFile::create(&self.file)?;
            let copied = send(store, &options, new.file(), &mut progress)?;
            new.keep().map(|()| copied)
        })?;
        if to_stdout {
            return Ok(());
        }
        context.done(&copied, &format!("sent {name}, {} of data", format_size(copied.data)))
    }

    /// The base, which may be written with its volume.
    fn base(&self) -> Result<Option<String>> {
        let Some(from) = &self.from else { return Ok(None) };
        match from.split_once('@') {
            None => Ok(Some(from.clone())),
            Some((volume, snapshot)) if volume == self.snapshot.volume => {
                Ok(Some(snapshot.to_owned()))
            }
            Some((volume, _)) => Err(Error::invalid(format!(
                "--from must be a snapshot of volume {}, not of {volume}",
                self.snapshot.volume
            ))),
        }
    }
}

/// Make a snapshot from a stream. A complete stream makes the volume, a difference goes on top of
/// the snapshot it was made against.
#[derive(Debug, Args)]
pub struct Receive {
    /// VOLUME to receive into, or VOLUME@SNAPSHOT to give the snapshot another name
    spec: Spec,
    /// A file, `-` for the standard input
    #[arg(default_value = "-")]
    file: PathBuf,
    /// Receive nothing; print the token with which `dbs send --resume` continues a stream that was
    /// received in part
    #[arg(long)]
    token: bool,
    /// Receive a difference whatever became of the volume since: roll it back to the snapshot that the
    /// stream is the difference to. What was written after that snapshot is lost
    #[arg(long, conflicts_with = "token")]
    force: bool,
}

impl Receive {
    pub fn run(self, context: &Context) -> Result<()> {
        if self.token {
            return self.print_token(context);
        }
        let (input, name) = self.open()?;
        if self.force {
            let volume = &self.spec.volume;
            let what = format!("Roll volume {volume} back to what the stream is based on?");
            confirm(context, &what)?;
        }
        context.stop.on_signals()?;
        let received = context.with(true, |target| {
            let mut meter = context.meter("receiving", Unit::Bytes);
            let mut progress = |done, total| meter.update(done, total);
            let volume = Some(self.spec.volume.as_str());
            let access = target.access()?;
            let mut received = receive_over(access, volume, self.force, input, &mut progress)
                .map_err(|e| e.context(name))?;
            drop(meter);
            if let Some(new) = self.spec.snapshot.clone().filter(|new| *new != received.snapshot) {
                let (volume, snapshot) = (received.volume.clone(), received.snapshot);
                let rename = Request::SnapshotRename { volume, snapshot, new: new.clone() };
                target.call(context, &rename)?;
                received.snapshot = new;
            }
            target.settle(context)?;
            Ok(received)
        })?;
        let Received { volume, snapshot, data, .. } = &received;
        let data = format_size(*data);
        context.done(&received, &format!("received {volume}@{snapshot}, {data} of data"))
    }

    fn open(&self) -> Result<(Box<dyn Read + Send>, String)> {
        if !is_standard(&self.file) {
            let name = self.file.display().to_string();
            let file = File::open(&self.file).map_err(|e| match e.kind() {
                io::ErrorKind::NotFound => Error::not_found(format!("{name}: no such file")),
                _ => Error::io(e, format!("opening {name}")),
            })?;
            return Ok((Box::new(file), name));
        }
        if io::stdin().is_terminal() {
            return Err(Error::invalid(
                "the standard input is a terminal: name a file or pipe it in",
            ));
        }
        Ok((Box::new(io::stdin()), "the standard input".to_owned()))
    }

    fn print_token(&self, context: &Context) -> Result<()> {
        let token = context.with(false, |target| pending(target.access()?, &self.spec.volume))?;
        let token = token.map(|token| token.to_string());
        if context.json {
            return print_json(&json!({ "token": token }));
        }
        match token {
            Some(token) => crate::output::print(&format!("{token}\n")),
            None => Err(Error::not_found(format!(
                "volume {} has received nothing in part",
                self.spec.volume
            ))),
        }
    }
}

fn is_standard(path: &Path) -> bool {
    path.as_os_str() == "-"
}

//! `dbs send` and `dbs receive`.

use super::export::{STDOUT, refuse_terminal};
use crate::confirm::confirm_in_store;
use crate::context::Context;
use crate::output::{self, print_json};
use crate::pipes::{Input, Output};
use crate::progress::Unit;
use crate::spec::{Spec, check_new_snapshot};
use clap::Args;
use dbs_control::api::Request;
use dbs_core::{Error, ErrorKind, Result, format_size};
use dbs_transfer::{
    Copied, NewFile, ReceiveOptions, Received, ResumeToken, SendOptions, StoreAccess, StreamHeader,
    pending, plan, receive_all, send,
};
use serde_json::json;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};

/// Write a snapshot, or the difference between two snapshots, as a stream.
///
/// With --recursive, writes all snapshots of a volume and of the clones that build on them, but for retired ones
/// and those of an export that runs.
#[derive(Debug, Args)]
pub struct SendSnapshot {
    /// VOLUME@SNAPSHOT, or with --recursive VOLUME
    spec: Spec,
    /// Send only the difference to this snapshot of the same volume. If it is VOLUME@SNAPSHOT of
    /// another volume, such as the origin of a clone, `dbs receive` makes a clone
    #[arg(long, value_name = "SNAPSHOT")]
    from: Option<String>,
    /// Continue where `dbs receive` stopped, with the token it printed
    #[arg(long, value_name = "TOKEN")]
    resume: Option<ResumeToken>,
    /// Send all snapshots of the volume, and of all clones that build on them, each as the difference
    /// to the snapshot before it. Data written after the last snapshot of a volume or clone is not sent
    #[arg(long, short = 'R', conflicts_with_all = ["from", "resume"])]
    recursive: bool,
    /// A new file, or `-` for the standard output
    #[arg(default_value = "-")]
    file: PathBuf,
}

impl SendSnapshot {
    pub fn run(self, context: &Context) -> Result<()> {
        let single = self.single()?;
        let to_stdout = is_standard(&self.file);
        refuse_terminal(to_stdout)?;
        context.stop.on_signals()?;
        let (copied, what) = context.with(false, |target| {
            let store = target.access()?;
            let streams = match &single {
                Some(options) => vec![options.clone()],
                None => plan(store, &self.spec.volume)?,
            };
            let what = if single.is_some() { self.spec.to_string() } else { describe(&streams) };
            if to_stdout {
                let failed = |e| Error::io(e, STDOUT);
                let output = Output::new(&context.stop).map_err(failed)?;
                let copied = send_all(context, store, &streams, &output);
                let copied =
                    copied.and_then(|copied| output.sync().map(|()| copied).map_err(failed));
                return Ok((copied.map_err(|error| context.stop.explain(error))?, what));
            }
            let new = NewFile::create(&self.file)?;
            let copied = send_all(context, store, &streams, new.file())?;
            new.keep().map(|()| (copied, what))
        })?;
        if to_stdout {
            return Ok(());
        }
        context.done(&copied, &format!("sent {what}, {} of data", format_size(copied.data)))
    }

    /// What to send if it is one snapshot.
    fn single(&self) -> Result<Option<SendOptions>> {
        let Spec { volume, snapshot } = self.spec.clone();
        match (snapshot, self.recursive) {
            (Some(snapshot), false) => Ok(Some(SendOptions {
                volume,
                snapshot,
                base: self.from.clone(),
                resume: self.resume.clone(),
                more: false,
            })),
            (None, true) => Ok(None),
            (None, false) => Err(Error::invalid(format!(
                "name a snapshot, as {volume}@SNAPSHOT, or send all of them with --recursive"
            ))),
            (Some(_), true) => Err(Error::invalid(format!(
                "--recursive sends all snapshots: name volume {volume} alone"
            ))),
        }
    }
}

fn send_all(
    context: &Context,
    store: &dyn StoreAccess,
    streams: &[SendOptions],
    mut output: impl Write,
) -> Result<Copied> {
    let mut all = Copied::default();
    for options in streams {
        let mut meter = context.meter(&format!("sending {}", spec_of(options)), Unit::Bytes);
        let mut progress = |done, total| meter.update(done, total);
        let copied = send(store, options, &mut output, &mut progress)?;
        all = Copied { length: all.length + copied.length, data: all.data + copied.data };
    }
    Ok(all)
}

fn spec_of(options: &SendOptions) -> String {
    format!("{}@{}", options.volume, options.snapshot)
}

/// What a sequence of streams carries.
fn describe(streams: &[SendOptions]) -> String {
    let volumes: BTreeSet<_> = streams.iter().map(|stream| &stream.volume).collect();
    let root = streams.first().map_or("", |stream| &stream.volume);
    let clones = match volumes.len() {
        0 | 1 => String::new(),
        2 => " and a clone".to_owned(),
        n => format!(" and {} clones", n - 1),
    };
    let snapshots = if streams.len() == 1 { "snapshot" } else { "snapshots" };
    format!("volume {root}{clones}, {} {snapshots}", streams.len())
}

/// Make snapshots from a stream.
///
/// A complete stream makes the volume. A difference is added to the volume that has the snapshot which
/// the difference was made against, or makes a clone of this snapshot. A stream of `dbs send
/// --recursive` makes the volume and its clones; snapshots that exist already are skipped.
#[derive(Debug, Args)]
pub struct Receive {
    /// VOLUME to receive into, or VOLUME@SNAPSHOT to give the snapshot another name
    spec: Spec,
    /// A file, or `-` for the standard input
    #[arg(default_value = "-")]
    file: PathBuf,
    /// Receive nothing; print the token with which `dbs send --resume` continues a stream that was
    /// received in part
    #[arg(long)]
    token: bool,
    /// Roll the volume back to the snapshot that the difference was made against, then receive. Data
    /// written to the volume after that snapshot is lost
    #[arg(long, conflicts_with = "token")]
    force: bool,
    /// Put PREFIX before the names of the clones in a stream of `dbs send --recursive`
    #[arg(long, value_name = "PREFIX", default_value = "", hide_default_value = true)]
    prefix: String,
}

impl Receive {
    pub fn run(self, context: &Context) -> Result<()> {
        if self.token {
            return self.print_token(context);
        }
        let (input, name) = self.open(context)?;
        if self.force {
            let volume = &self.spec.volume;
            let what = format!(
                "Roll volume {volume} back to the snapshot that the stream was made against?"
            );
            confirm_in_store(context, &what)?;
        }
        context.stop.on_signals()?;
        let received = context.with(true, |target| {
            self.check_free(target.access()?)?;
            let received = self.receive(context, target.access()?, input);
            let mut received = received.map_err(|e| context.stop.explain(e.context(name)))?;
            if let (Some(new), [one]) = (&self.spec.snapshot, &mut received[..])
                && *new != one.snapshot
            {
                let (volume, snapshot) = (one.volume.clone(), one.snapshot.clone());
                let rename = Request::SnapshotRename { volume, snapshot, new: new.clone() };
                target.call(context, &rename)?;
                one.snapshot.clone_from(new);
            }
            target.settle(context)?;
            Ok(received)
        })?;
        show(context, &received)
    }

    /// Refuses a name that the snapshot cannot get, before anything is received.
    fn check_free(&self, store: &dyn StoreAccess) -> Result<()> {
        let Spec { volume, snapshot: Some(new) } = &self.spec else { return Ok(()) };
        check_new_snapshot(new)?;
        match store.snapshot_info(volume, new) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
            Ok(_) => Err(Error::exists(format!("volume {volume} already has snapshot {new}"))),
        }
    }

    fn receive(
        &self,
        context: &Context,
        store: &dyn StoreAccess,
        input: impl Read + Send,
    ) -> Result<Vec<Received>> {
        let options = ReceiveOptions {
            volume: Some(&self.spec.volume),
            prefix: &self.prefix,
            force: self.force,
            single: self.spec.snapshot.is_some(),
        };
        let meter = RefCell::new(None);
        let mut began = |header: &StreamHeader| {
            // Each has its own line.
            drop(meter.take());
            let label = format!("receiving {}@{}", header.volume, header.snapshot);
            meter.replace(Some(context.meter(&label, Unit::Bytes)));
        };
        let mut progress =
            |done, total| meter.borrow_mut().as_mut().is_none_or(|meter| meter.update(done, total));
        receive_all(store, &options, input, &mut began, &mut progress)
    }

    fn open(&self, context: &Context) -> Result<(Box<dyn Read + Send>, String)> {
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
        let name = "the standard input".to_owned();
        let input = Input::new(&context.stop).map_err(|e| Error::io(e, &name))?;
        Ok((Box::new(input), name))
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
                "volume {} has no interrupted receive to continue",
                self.spec.volume
            ))),
        }
    }
}

/// One stream as it is, a sequence with all that it brought.
fn show(context: &Context, received: &[Received]) -> Result<()> {
    let data: u64 = received.iter().map(|one| one.data).sum();
    let bytes = format_size(data);
    let others = received.iter().filter(|one| one.other_secret);
    for volume in others.map(|one| &one.volume).collect::<BTreeSet<_>>() {
        output::warn(&format!(
            "the secret of volume {volume} was changed here or at the source: what unlocks the copy is what unlocked it \
             here before, or, of a new clone, what unlocks its origin here"
        ));
    }
    match received {
        [one] => {
            let Received { volume, snapshot, .. } = one;
            context.done(one, &format!("received {volume}@{snapshot}, {bytes} of data"))
        }
        all => {
            let names: Vec<_> =
                all.iter().map(|one| format!("{}@{}", one.volume, one.snapshot)).collect();
            let text = format!("received {}, {bytes} of data", names.join(", "));
            context.done(&json!({ "received": all, "data": data }), &text)
        }
    }
}

fn is_standard(path: &Path) -> bool {
    path.as_os_str() == "-"
}

//! `dbs volume import`.

use crate::context::{Context, typed};
use crate::pipes::Input;
use crate::progress::Unit;
use crate::secret;
use crate::spec;
use crate::target::Target;
use clap::{Args, ValueEnum};
use dbs_control::api::{Given, Request};
use dbs_core::info::VolumeInfo;
use dbs_core::io::probe::{IMAGE_BYTES, image_format};
use dbs_core::units::SECTOR_BYTES;
use dbs_core::{Error, ErrorKind, Result, format_size};
use dbs_transfer::{BlockAccess, Copied, import_file, import_stream};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::PathBuf;

/// Size of a volume while it is filled from a pipe whose length nobody knows.
const UNKNOWN_SIZE_BYTES: u64 = 16 << 40;

/// Create a volume from a raw image.
#[derive(Debug, Args)]
pub struct Import {
    /// Name of the new volume
    name: String,
    /// A file or block device, or `-` for the standard input. A pipe that ends early looks like a short image:
    /// use `set -o pipefail`, and look at the command before the pipe
    file: PathBuf,
    /// Size of the volume, at least the size of the image; by default the size of the image
    #[arg(long, value_parser = spec::size)]
    size: Option<u64>,
    /// Format of the image. Without this option, an image that looks like another format than raw is
    /// refused
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// Begin again: replace the incomplete volume of this name that a stopped import has left
    #[arg(long)]
    restart: bool,
    /// Encrypt the volume, as `dbs volume create --encrypt` does. The image stays as it is
    #[arg(long)]
    encrypt: bool,
    /// File of 32 random bytes, the secret that unlocks the volume
    #[arg(long, value_name = "FILE", requires = "encrypt")]
    key_file: Option<PathBuf>,
}

/// Formats of images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// The bytes of a disk and nothing else, whatever they look like
    Raw,
}

/// The image.
enum Source {
    File(File),
    /// What was read of the standard input to look at it; and the rest.
    Pipe(Vec<u8>, Input),
}

impl Import {
    pub fn run(self, context: &Context) -> Result<()> {
        // Before anything is made in the store.
        let (source, length) = self.open(context)?;
        if matches!(source, Source::File(_)) {
            context.refuse_store(&self.file)?;
        }
        context.stop.on_signals()?;
        let size = self.size.or(length).unwrap_or(UNKNOWN_SIZE_BYTES);
        let request = self.create_request(size)?;
        let (value, copied) = context.with(true, |target| {
            let uuid = self.create(context, target, &request)?;
            let filled = self.fill(context, target, &uuid, &source, length);
            match filled {
                Ok((copied, volume)) => Ok((self.finish(context, target, &uuid, volume)?, copied)),
                Err(error) => {
                    let (volume, uuid) = (self.name.clone(), Some(uuid));
                    let delete = Request::VolumeDelete { volume, uuid, rebuilding: true };
                    match target.clean_up(context, &delete) {
                        Ok(()) => Err(error),
                        Err(kept) => Err(error.context(format!(
                            "the incomplete volume {} could not be deleted ({kept})",
                            self.name
                        ))),
                    }
                }
            }
        })?;
        let volume: VolumeInfo = typed(value.clone())?;
        let (size, data) = (format_size(volume.size), format_size(copied.data));
        context.done(&value, &format!("imported volume {}, {size}, {data} of data", self.name))
    }

    fn open(&self, context: &Context) -> Result<(Source, Option<u64>)> {
        if self.file.as_os_str() == "-" {
            let failed = |e| Error::io(e, "reading the standard input");
            let (mut head, input) = (Vec::new(), Input::new(&context.stop).map_err(failed)?);
            (&input).take(IMAGE_BYTES as u64).read_to_end(&mut head).map_err(failed)?;
            self.check_format(&head, "the standard input")?;
            return Ok((Source::Pipe(head, input), None));
        }
        let name = self.file.display();
        let failed = |e: io::Error| match e.kind() {
            io::ErrorKind::NotFound => Error::not_found(format!("{name}: no such file")),
            _ => Error::io(e, format!("opening {name}")),
        };
        let mut file = File::open(&self.file).map_err(failed)?;
        if file.metadata().map_err(failed)?.is_dir() {
            return Err(Error::invalid(format!("{name} is a directory")));
        }
        // A named pipe cannot be sought: it is read to its end like the standard input.
        let Ok(length) = file.seek(SeekFrom::End(0)) else {
            return Err(Error::invalid(format!(
                "{name} is no file or block device; use `- < {name}`"
            )));
        };
        if length == 0 {
            return Err(Error::invalid(format!("{name} is empty")));
        }
        file.rewind().map_err(failed)?;
        let mut head = Vec::new();
        (&file).take(IMAGE_BYTES as u64).read_to_end(&mut head).map_err(failed)?;
        self.check_format(&head, &name.to_string())?;
        file.rewind().map_err(failed)?;
        Ok((Source::File(file), Some(length.next_multiple_of(SECTOR_BYTES))))
    }

    /// Refuses an image that is not raw: a volume of its bytes is of no use to anybody.
    fn check_format(&self, head: &[u8], name: &str) -> Result<()> {
        let Some(what) = image_format(head).filter(|_| self.format != Some(Format::Raw)) else {
            return Ok(());
        };
        let remedy = match what {
            "a DBS store" => {
                "copy a volume of it with `dbs -s STORE send VOLUME@SNAPSHOT | dbs receive`"
            }
            "a DBS store of version 1" => "convert the store with `dbs upgrade IMAGE NEW`",
            what if what.starts_with("a DBS store") => {
                "copy a volume of it with the newer `dbs` that made it"
            }
            _ => "convert it with `qemu-img convert -O raw IMAGE IMAGE.raw` and import that",
        };
        Err(Error::invalid(format!(
            "{name} is {what}, not a raw image: {remedy}, or import its bytes as they are with \
             --format raw"
        )))
    }

    /// What makes the volume.
    fn create_request(&self, size: u64) -> Result<Request> {
        let (volume, rebuilding) = (self.name.clone(), true);
        if !self.encrypt {
            return Ok(Request::VolumeCreate { volume, size, rebuilding });
        }
        let secret = Given(secret::of_new_volume(self.key_file.as_deref(), &volume)?);
        Ok(Request::VolumeCreateEncrypted { volume, size, secret, rebuilding })
    }

    /// Makes the volume, which is incomplete until [`Import::finish`]; its identity.
    fn create(&self, context: &Context, target: &Target, request: &Request) -> Result<String> {
        let create = || {
            let made = target.call(context, request)?;
            typed::<VolumeInfo>(made).map(|volume| volume.uuid)
        };
        let taken = match create() {
            Err(error) if error.kind() == ErrorKind::Exists => error,
            made => return made,
        };
        let there = target.access()?.volume_info(&self.name)?;
        if !there.rebuilding || there.snapshots > 0 {
            return Err(taken);
        }
        if !self.restart {
            return Err(taken.context(format!(
                "an import of volume {} is not complete: if no import runs, begin again with \
                 `--restart`, or delete the volume",
                self.name
            )));
        }
        // One that is still being filled is open, and stays; so does one that is complete by now, or another one.
        let (volume, uuid) = (self.name.clone(), Some(there.uuid));
        target.call(context, &Request::VolumeDelete { volume, uuid, rebuilding: true })?;
        create()
    }

    /// Fills the volume, which is open still, and gives one from a pipe the size of what came.
    fn fill<'a>(
        &self,
        context: &Context,
        target: &'a Target,
        uuid: &str,
        source: &Source,
        length: Option<u64>,
    ) -> Result<(Copied, Box<dyn BlockAccess + 'a>)> {
        let filled = target.access()?.open_to_fill(&self.name, false)?;
        let known = length.is_some();
        let mut meter = context.meter("importing", Unit::Bytes);
        let mut progress =
            |done, total| meter.update(done, if known || self.size.is_some() { total } else { 0 });
        let copied = match source {
            Source::File(file) => import_file(file, &*filled, &mut progress),
            Source::Pipe(head, input) => import_stream(head.chain(input), &*filled, &mut progress),
        };
        let copied = copied.map_err(|error| context.stop.explain(error))?;
        if copied.length == 0 {
            return Err(Error::invalid(
                "the standard input ended before its first byte: look at the command before the pipe",
            ));
        }
        if length.is_some_and(|length| length != copied.length) {
            return Err(Error::busy(format!(
                "{} has another length than a moment ago: somebody writes to it. Import it again when that has ended",
                self.file.display()
            )));
        }
        if self.size.is_some() || known {
            return Ok((copied, filled));
        }
        // Also by a server: a volume that is open is not made smaller.
        filled.close(&mut || !context.stop.asked())?;
        let (size, uuid) = (copied.length.max(SECTOR_BYTES), Some(uuid.to_owned()));
        let volume = self.name.clone();
        target.call(context, &Request::VolumeResize { volume, size, shrink: true, uuid })?;
        Ok((copied, target.access()?.open_to_fill(&self.name, false)?))
    }

    /// Says that the volume is complete. Until then it is open, and nobody else begins to fill it.
    fn finish(
        &self,
        context: &Context,
        target: &Target,
        uuid: &str,
        filled: Box<dyn BlockAccess + '_>,
    ) -> Result<serde_json::Value> {
        let (volume, uuid) = (self.name.clone(), Some(uuid.to_owned()));
        target.call(context, &Request::VolumeComplete { volume: volume.clone(), uuid })?;
        drop(filled);
        target.call(context, &Request::VolumeShow { volume, usage: true })
    }
}

//! `dbs volume export`.

use crate::confirm::confirm;
use crate::context::Context;
use crate::progress::Unit;
use crate::spec::Spec;
use clap::Args;
use dbs_core::io::open::claim;
use dbs_core::store::is_same_place;
use dbs_core::{Error, ErrorKind, Result, format_size};
use dbs_transfer::{export_path, export_stream};
use std::io::{self, IsTerminal};
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;

/// Write a volume or snapshot as a raw image.
#[derive(Debug, Args)]
pub struct Export {
    /// VOLUME, or VOLUME@SNAPSHOT
    spec: Spec,
    /// A new file, or `-` for the standard output. Blocks without data become holes. Until all of it is
    /// written, the file is called FILE.RANDOM.partial
    file: PathBuf,
    /// Overwrite an existing file or block device. Mounted devices and open stores are never
    /// overwritten, other stores only after a question
    #[arg(long)]
    force: bool,
}

impl Export {
    pub fn run(self, context: &Context) -> Result<()> {
        let to_stdout = self.file.as_os_str() == "-";
        refuse_terminal(to_stdout)?;
        if self.force && !to_stdout {
            self.check_overwritten(context)?;
        }
        context.stop.on_signals()?;
        let copied = context.with(false, |target| {
            let volume = target.open_spec(&self.spec.to_string())?;
            let mut meter = context.meter("exporting", Unit::Bytes);
            let mut progress = |done, total| meter.update(done, total);
            let copied = if to_stdout {
                export_stream(&*volume, io::stdout().lock(), &mut progress)?
            } else {
                export_path(&*volume, &self.file, self.force, &mut progress)?
            };
            // A rebuild may have begun meanwhile, and changed what was read.
            match target.open_spec(&self.spec.to_string()) {
                Err(error) if error.kind() == ErrorKind::Busy => {
                    let file = self.file.display();
                    Err(error.context(format!("{file} may be incomplete, export it again")))
                }
                _ => Ok(copied),
            }
        })?;
        if to_stdout {
            return Ok(());
        }
        let (size, data) = (format_size(copied.length), format_size(copied.data));
        context.done(&copied, &format!("exported {}, {size}, {data} of data", self.spec))
    }
}

impl Export {
    /// Refuses to overwrite the store itself, and what its volumes rest on; asks before another one is.
    fn check_overwritten(&self, context: &Context) -> Result<()> {
        let (file, Ok(kind)) = (self.file.display(), std::fs::metadata(&self.file)) else {
            return Ok(());
        };
        if !kind.is_file() && !kind.file_type().is_block_device() {
            return Ok(());
        }
        context.refuse_store(&self.file)?;
        for image in context.backing_files() {
            // One that is not there stops nothing: see `Context::open_options`.
            if is_same_place(&self.file, image).unwrap_or(false) {
                return Err(Error::invalid(format!(
                    "{file} is the image that volumes of the store rest on: name another file"
                )));
            }
        }
        match claim(&self.file)?.content()? {
            Some(what) if what.starts_with(STORE) => {
                confirm(context, &format!("{file} contains {what}. Destroy it?"))
            }
            _ => Ok(()),
        }
    }
}

/// How what is known of a file begins if that is a store, of any version.
const STORE: &str = "a DBS store";

/// Binary data on a terminal is never what was meant.
pub fn refuse_terminal(to_stdout: bool) -> Result<()> {
    if to_stdout && io::stdout().is_terminal() {
        return Err(Error::invalid("the standard output is a terminal: name a file or pipe it on"));
    }
    Ok(())
}

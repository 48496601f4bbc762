//! What every command needs: the global options, and what is printed.

use crate::backups::open;
use crate::globals::{Driver, Globals};
use crate::output::{self, printable};
use crate::progress::{Meter, Stop, Unit};
use crate::secret;
use dbs_backup::url::Url;
use dbs_client::remote::fill_usage;
use dbs_core::store::is_same_place;
use dbs_core::{Backing, Error, IoDriver, OpenOptions, Result, Secret, Store};
use dbs_volume_backup::lazy::{BackupFile, late};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// The global options, read.
pub struct Context {
    store: Option<PathBuf>,
    driver: IoDriver,
    backing_files: Vec<PathBuf>,
    backing_backups: Vec<Url>,
    /// Backups that were attached to a store of this command.
    attached: Mutex<Vec<Arc<dyn Backing>>>,
    /// Print JSON.
    pub json: bool,
    /// Everything is confirmed.
    pub yes: bool,
    /// Print no messages.
    pub quiet: bool,
    progress: bool,
    /// Set by signals once a command watches for them.
    pub stop: Stop,
}

impl Context {
    /// From the command line.
    pub fn new(globals: Globals) -> Self {
        let driver = match globals.driver {
            Driver::Auto => IoDriver::Auto,
            Driver::Uring => IoDriver::Uring,
            Driver::Pread => IoDriver::Pread,
        };
        Self {
            store: globals.store,
            driver,
            backing_files: globals.backing_file,
            backing_backups: globals.backing_backup,
            attached: Mutex::default(),
            json: globals.json,
            yes: globals.yes,
            quiet: globals.quiet,
            progress: globals.progress,
            stop: Stop::default(),
        }
    }

    /// The path of the store.
    ///
    /// # Errors
    /// `Invalid` if none was named.
    pub fn store(&self) -> Result<&Path> {
        self.store.as_deref().ok_or_else(|| {
            Error::invalid("which store? Name it with --store PATH or the variable DBS_STORE")
        })
    }

    /// Refuses a file or device that is the store itself, under whatever name.
    ///
    /// # Errors
    /// `Invalid`; those of looking at it.
    pub fn refuse_store(&self, file: &Path) -> Result<()> {
        if is_same_place(file, self.store()?)? {
            let file = file.display();
            return Err(Error::invalid(format!("{file} is the store itself: name another file")));
        }
        Ok(())
    }

    /// How to do I/O on an idle store.
    pub fn driver(&self) -> IoDriver {
        self.driver
    }

    /// Files that volumes of the store rest on, as they were given.
    pub fn backing_files(&self) -> &[PathBuf] {
        &self.backing_files
    }

    /// Backups that volumes of the store rest on, as they were given.
    pub fn backing_backups(&self) -> &[Url] {
        &self.backing_backups
    }

    /// Gives an idle store the backups that volumes of it rest on, for as long as the command runs. A backup store is asked when
    /// something is read of it.
    pub fn attach_backups(&self, store: &Store) {
        let among = self.backing_backups.len();
        for url in &self.backing_backups {
            let place = url.clone();
            let open = move || BackupFile::open(&place, open(&place)?, among);
            if let Some(file) = late(store, url, open) {
                let attached = store.attach_backing(file);
                self.attached.lock().unwrap_or_else(PoisonError::into_inner).push(attached);
            }
        }
    }

    /// How to open a store for one command. A backing file that cannot be opened is told, and left out: most
    /// commands read nothing of it, and what does fails.
    pub fn open_options(&self, read_only: bool) -> OpenOptions {
        let open = |path: &PathBuf| match dbs_backing::open(path) {
            Ok(file) => Some(file),
            Err(error) => {
                output::warn(&error.to_string());
                None
            }
        };
        let backing = self.backing_files.iter().filter_map(open).collect();
        let secret = secret::given().unwrap_or_else(|error| {
            output::warn(&error.to_string());
            None
        });
        self.options_with(read_only, backing, secret)
    }

    /// How to open a store whose volumes are served.
    ///
    /// # Errors
    /// Those of opening the backing files, and of a secret that is none: its volumes would be refused to all.
    pub fn serving_options(&self, read_only: bool) -> Result<OpenOptions> {
        let open = |path: &PathBuf| dbs_backing::open(path);
        let backing = self.backing_files.iter().map(open).collect::<Result<_>>()?;
        Ok(self.options_with(read_only, backing, secret::given()?))
    }

    fn options_with(
        &self,
        read_only: bool,
        backing: Vec<Arc<dyn Backing>>,
        secret: Option<Secret>,
    ) -> OpenOptions {
        OpenOptions { read_only, driver: self.driver, backing, secret, ..OpenOptions::default() }
    }

    /// The arguments that make another `dbs` do its I/O in the same way, with the same backing files and backups.
    pub fn io_arguments(&self) -> Vec<OsString> {
        let driver = match self.driver {
            IoDriver::Auto => "auto",
            IoDriver::Uring => "uring",
            IoDriver::Pread => "pread",
        };
        let mut arguments = vec!["--driver".into(), driver.into()];
        for file in &self.backing_files {
            arguments.extend(["--backing-file".into(), file.into()]);
        }
        for url in &self.backing_backups {
            arguments.extend(["--backing-backup".into(), url.to_string().into()]);
        }
        arguments
    }

    /// Where control sockets are.
    pub fn runtime_dir(&self) -> PathBuf {
        let path = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        dbs_control::runtime_dir(path("DBS_RUNTIME_DIR"), path("XDG_RUNTIME_DIR"))
    }

    /// A progress line, and with it the way to stop a long command. With `--json` it is drawn only
    /// if asked for.
    pub fn meter(&self, label: &str, unit: Unit) -> Meter {
        let wanted = match (self.progress, self.quiet || self.json) {
            (true, _) => Some(true),
            (false, true) => Some(false),
            (false, false) => None,
        };
        Meter::new(label, unit, wanted, &self.stop)
    }

    /// Prints a result: as JSON, or as `human` makes it of its type.
    ///
    /// # Errors
    /// Those of the output; `Io` if the result has another type, which a newer server may send.
    pub fn show<T: DeserializeOwned>(
        &self,
        value: Value,
        human: impl FnOnce(T) -> String,
    ) -> Result<()> {
        if self.json {
            return output::print_json(&value);
        }
        output::print(&human(typed(value)?))
    }

    /// Says something on the standard error output that is neither result nor failure: not with
    /// `--quiet`, nor with `--json`, whose result says it.
    pub fn note(&self, text: &str) {
        if !self.quiet && !self.json {
            // Nowhere to report a failure to.
            let _ = writeln!(std::io::stderr(), "dbs: note: {}", printable(text));
        }
    }

    /// As [`Context::show`] for what only confirms that something was done: not with `--quiet`, and where the output is closed
    /// nobody wants to hear it.
    ///
    /// # Errors
    /// As [`Context::show`].
    pub fn done<T: Serialize>(&self, value: &T, message: &str) -> Result<()> {
        match (self.json, self.quiet) {
            _ if output::check_open().is_err() => Ok(()),
            (true, _) => output::print_json(value),
            (false, true) => Ok(()),
            (false, false) => output::print(&format!("{message}\n")),
        }
    }
}

/// A result as its type.
///
/// # Errors
/// `Io` if it is another one.
pub fn typed<T: DeserializeOwned>(mut value: Value) -> Result<T> {
    fill_usage(&mut value);
    serde_json::from_value(value)
        .map_err(|e| Error::io(std::io::Error::other(e), "understanding the result"))
}

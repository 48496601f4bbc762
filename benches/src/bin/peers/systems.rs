//! What is compared, and how each is started.

use dbs_benches::Outcome;
use dbs_benches::process::output;
use dbs_benches::server::{Dbs, Served};
use serde::Serialize;
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A way to store blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum System {
    /// A file, without a server.
    Bare,
    Dbs,
    /// Without checksums of data: measured beside the one with them, and nowhere else.
    Unchecked,
    Prototype,
    QemuRaw,
    Qcow2,
    Nbdkit,
}

/// All that are held against each other, in the order of the tables.
pub const SYSTEMS: [System; 6] =
    [System::Bare, System::Dbs, System::Prototype, System::QemuRaw, System::Qcow2, System::Nbdkit];

impl System {
    pub fn title(self) -> &'static str {
        match self {
            Self::Bare => "bare file",
            Self::Dbs => "dbs",
            Self::Unchecked => "dbs, no checksums",
            Self::Prototype => "Go prototype",
            Self::QemuRaw => "qemu-nbd raw",
            Self::Qcow2 => "qemu-nbd qcow2",
            Self::Nbdkit => "nbdkit file",
        }
    }

    /// Whether its figures are what DBS is held against.
    pub fn is_peer(self) -> bool {
        !matches!(self, Self::Bare | Self::Dbs | Self::Unchecked)
    }
}

/// The programs, and a directory for sockets: their paths must be short.
pub struct Tools {
    pub dbs: Dbs,
    prototype: Option<String>,
    sockets: TempDir,
    started: Cell<u32>,
    found: Vec<(System, Result<String, String>)>,
}

impl Tools {
    /// Looks for all programs.
    ///
    /// # Errors
    /// If fio or `dbs` is missing, without which nothing can be measured.
    pub fn find(dbs: Option<&Path>, prototype: Option<String>) -> Outcome<Self> {
        let dbs = Dbs::find(dbs)?;
        let fio = first_line(Command::new("fio").arg("--version"))
            .map_err(|e| format!("fio is needed: {e}"))?;
        let qemu = first_line(Command::new("qemu-nbd").arg("--version"));
        let nbdkit = first_line(Command::new("nbdkit").arg("--version"));
        let given = prototype.as_ref().map(|command| format!("`{command}`"));
        let given = given.ok_or("give its command with --prototype or DBS_PROTOTYPE".to_owned());
        let found = vec![
            (System::Bare, Ok(format!("{fio}, io_uring and O_DIRECT"))),
            (System::Dbs, Ok(dbs.version()?)),
            (System::Prototype, given),
            (System::QemuRaw, qemu.clone().map(|v| format!("{v}, --cache=none --aio=io_uring"))),
            (System::Qcow2, qemu.map(|v| format!("{v}, --cache=none --aio=io_uring"))),
            (System::Nbdkit, nbdkit.map(|v| format!("{v}, plugin file, through the page cache"))),
        ];
        Ok(Self { dbs, prototype, sockets: tempfile::tempdir()?, started: Cell::new(0), found })
    }

    /// Version and options of each, or why it is missing.
    pub fn versions(&self) -> &[(System, Result<String, String>)] {
        &self.found
    }

    pub fn has(&self, system: System) -> bool {
        self.found.iter().any(|(found, version)| *found == system && version.is_ok())
    }

    /// Makes an empty image of so many bytes; `store_size` is that of a store, where it needs one.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn create(&self, system: System, image: &Path, size: u64, store_size: u64) -> Outcome<()> {
        match system {
            System::Dbs | System::Unchecked => {
                let path = image.to_str().ok_or("the directory's name is not UTF-8")?;
                let size = store_size.to_string();
                let further: &[_] =
                    if system == System::Unchecked { &["--no-checksums"] } else { &[] };
                self.dbs.run(image, &[&["init", path, "--size", &size], further].concat())?;
                self.dbs.run(image, &["volume", "create", "v", &size.to_string()])?;
            }
            System::Qcow2 => {
                let mut command = Command::new("qemu-img");
                command.args(["create", "-q", "-f", "qcow2"]).arg(image).arg(size.to_string());
                output(&mut command)?;
            }
            _ => std::fs::File::create(image)?.set_len(size)?,
        }
        Ok(())
    }

    /// Starts what serves an image; `volume` names what a store exports.
    ///
    /// # Errors
    /// If it does not start.
    pub fn serve(&self, system: System, image: &Path, volume: &str) -> Outcome<Served> {
        let socket = self.socket();
        let mut command = match system {
            System::Bare => return Ok(Served::file(image)),
            System::Dbs | System::Unchecked => return self.dbs.serve(image, volume, &socket),
            System::Prototype => self.prototype(image, &socket)?,
            System::QemuRaw => qemu_nbd("raw", &socket),
            System::Qcow2 => qemu_nbd("qcow2", &socket),
            System::Nbdkit => {
                let mut command = Command::new("nbdkit");
                command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(&socket);
                command.arg("file");
                command
            }
        };
        if system != System::Prototype {
            command.arg(image);
        }
        Served::start(system.title(), command, &socket, "")
    }

    /// Serves an image of a chain of qcow2 files, for reading.
    ///
    /// # Errors
    /// If it does not start.
    pub fn serve_chain(&self, image: &Path) -> Outcome<Served> {
        let socket = self.socket();
        let mut command = qemu_nbd("qcow2", &socket);
        command.arg("--read-only").arg(image);
        Served::start("qemu-nbd", command, &socket, "")
    }

    /// The command given, with file, size and socket filled in.
    fn prototype(&self, image: &Path, socket: &Path) -> Outcome<Command> {
        let template = self.prototype.as_deref().unwrap_or_default();
        let size = std::fs::metadata(image)?.len().to_string();
        let mut words = template.split_whitespace().map(|word| {
            word.replace("{file}", &image.to_string_lossy())
                .replace("{socket}", &socket.to_string_lossy())
                .replace("{size}", &size)
        });
        let mut command = Command::new(words.next().ok_or("the prototype's command is empty")?);
        command.args(words);
        Ok(command)
    }

    fn socket(&self) -> PathBuf {
        let number = self.started.get();
        self.started.set(number + 1);
        self.sockets.path().join(format!("{number}.sock"))
    }
}

fn qemu_nbd(format: &str, socket: &Path) -> Command {
    let mut command = Command::new("qemu-nbd");
    command.args(["--persistent", "--shared=0", "--cache=none", "--aio=io_uring", "--format"]);
    command.arg(format).arg("--socket").arg(socket);
    command
}

fn first_line(command: &mut Command) -> Result<String, String> {
    let text = output(command).map_err(|error| error.to_string())?;
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

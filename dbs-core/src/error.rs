//! The error type of the store: a small kind to match on, a text that names the thing, and the
//! operating system's error where there is one.

use std::fmt;
use std::io;

/// What went wrong, coarse enough to match on and to map to an exit code or an errno.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// No such store, volume or snapshot.
    NotFound,
    /// The name is taken.
    Exists,
    /// Somebody else holds it: another process, an open handle, a protected snapshot.
    Busy,
    /// No free extent, table slot or label space is left.
    NoSpace,
    /// Stored metadata is damaged.
    Corrupt,
    /// Stored data is not what was written: its checksum does not match.
    Damaged,
    /// The caller's argument is wrong, or names something that is no store.
    Invalid,
    /// The store, volume or snapshot may not be written.
    ReadOnly,
    /// The storage below failed.
    Io,
    /// An earlier write or sync failed; nothing is written until the store is opened again.
    Poisoned,
    /// This version or build cannot do it.
    Unsupported,
    /// The user or a signal stopped it.
    Interrupted,
    /// Another machine writes the store, too. Trying again does not help while it does, and destroys what it wrote once
    /// it pauses.
    Elsewhere,
    /// The volume is encrypted, and nobody has unlocked it.
    Locked,
}

impl ErrorKind {
    /// The stable name used in JSON and on the control socket.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::Exists => "exists",
            Self::Busy => "busy",
            Self::NoSpace => "no_space",
            Self::Corrupt => "corrupt",
            Self::Damaged => "damaged",
            Self::Invalid => "invalid",
            Self::ReadOnly => "read_only",
            Self::Io => "io",
            Self::Poisoned => "poisoned",
            Self::Unsupported => "unsupported",
            Self::Interrupted => "interrupted",
            Self::Elsewhere => "elsewhere",
            Self::Locked => "locked",
        }
    }

    /// The kind with this stable name; unknown names (a newer peer) become [`ErrorKind::Io`].
    #[must_use]
    pub fn from_name(name: &str) -> Self {
        [
            Self::NotFound,
            Self::Exists,
            Self::Busy,
            Self::NoSpace,
            Self::Corrupt,
            Self::Damaged,
            Self::Invalid,
            Self::ReadOnly,
            Self::Poisoned,
            Self::Unsupported,
            Self::Interrupted,
            Self::Elsewhere,
            Self::Locked,
        ]
        .into_iter()
        .find(|kind| kind.name() == name)
        .unwrap_or(Self::Io)
    }
}

/// Where data is not what was written, or cannot be read, as who read it or wrote into it sees the place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Damage {
    /// First byte of the damaged block in the volume or snapshot, a multiple of 4096.
    pub offset: u64,
    /// A snapshot holds the block: others may read it, and it stays where it is.
    pub in_snapshot: bool,
}

/// An error of the store.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    damage: Option<Damage>,
    source: Option<io::Error>,
}

/// Result with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error with a text that names the thing and, where there is one, the way out.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), damage: None, source: None }
    }

    /// An operating system error with what was being done. `ENOSPC` becomes
    /// [`ErrorKind::NoSpace`]; all else is [`ErrorKind::Io`].
    pub fn io(source: io::Error, message: impl Into<String>) -> Self {
        let kind = match source.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => ErrorKind::NoSpace,
            _ => ErrorKind::Io,
        };
        Self { kind, message: message.into(), damage: None, source: Some(source) }
    }

    /// The same error with the place of the damage it is about.
    #[must_use]
    pub(crate) fn at(mut self, damage: Damage) -> Self {
        self.damage = Some(damage);
        self
    }

    /// The same error of what has stopped all writing to the store. `NoSpace` would say that nothing has
    /// happened, and that writing goes on once there is space.
    #[must_use]
    pub(crate) fn stopping(mut self) -> Self {
        if self.kind == ErrorKind::NoSpace {
            self.kind = ErrorKind::Io;
        }
        self
    }

    /// Which block is damaged, for reads and writes of volumes that fail with
    /// [`ErrorKind::Damaged`], or as the device cannot read that block ([`ErrorKind::Io`]).
    #[must_use]
    pub fn damage(&self) -> Option<Damage> {
        self.damage
    }

    /// The same error with more context in front.
    #[must_use]
    pub fn context(mut self, context: impl fmt::Display) -> Self {
        self.message = format!("{context}: {}", self.message);
        self
    }

    /// The kind to match on.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            Some(source) => write!(f, "{}: {source}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|e| e as _)
    }
}

macro_rules! constructors {
    ($($(#[$doc:meta])* $name:ident => $kind:ident),* $(,)?) => {
        impl Error {
            $($(#[$doc])* pub fn $name(message: impl Into<String>) -> Self {
                Self::new(ErrorKind::$kind, message)
            })*
        }
    };
}

constructors! {
    /// [`ErrorKind::NotFound`].
    not_found => NotFound,
    /// [`ErrorKind::Exists`].
    exists => Exists,
    /// [`ErrorKind::Busy`].
    busy => Busy,
    /// [`ErrorKind::NoSpace`].
    no_space => NoSpace,
    /// [`ErrorKind::Corrupt`].
    corrupt => Corrupt,
    /// [`ErrorKind::Damaged`].
    damaged => Damaged,
    /// [`ErrorKind::Invalid`].
    invalid => Invalid,
    /// [`ErrorKind::ReadOnly`].
    read_only => ReadOnly,
    /// [`ErrorKind::Unsupported`].
    unsupported => Unsupported,
}

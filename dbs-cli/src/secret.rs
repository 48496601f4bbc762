//! Secrets of encrypted volumes: from options, from the environment, or asked for on the terminal.

use dbs_core::{Error, ErrorKind, Result, Secret};
use nix::sys::signal::{Signal, raise};
use nix::sys::termios::{
    LocalFlags, SetArg, SpecialCharacterIndices, Termios, tcgetattr, tcsetattr,
};
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::sync::OnceLock;
use zeroize::Zeroizing;

/// Variables that have the secret of volumes begin so; those of a new one so.
const PREFIX: &str = "DBS_VOLUME";
const NEW_PREFIX: &str = "DBS_VOLUME_NEW";

/// The secret in the environment, if there is one. A file with it is read once: it may be a pipe.
///
/// # Errors
/// `Invalid` if there are two, or if one is none.
pub fn given() -> Result<Option<Secret>> {
    static GIVEN: OnceLock<Secret> = OnceLock::new();
    if let Some(secret) = GIVEN.get() {
        return Ok(Some(secret.clone()));
    }
    let secret = in_variables(PREFIX)?;
    Ok(secret.map(|secret| GIVEN.get_or_init(|| secret).clone()))
}

fn in_variables(prefix: &str) -> Result<Option<Secret>> {
    Secret::from_variables(prefix, &|name| std::env::var_os(name))
}

/// The secret of a volume: of the key file, of the environment, or from who sits at the terminal.
///
/// # Errors
/// `Invalid` if there is none.
pub fn present(key_file: Option<&Path>, volume: &str) -> Result<Secret> {
    find(key_file, PREFIX, &|| ask(&format!("Passphrase of volume {volume}: ")))
}

/// The secret that a new volume is to have; who types it types it twice.
///
/// # Errors
/// As [`present`].
pub fn of_new_volume(key_file: Option<&Path>, volume: &str) -> Result<Secret> {
    find(key_file, PREFIX, &|| ask_twice(volume))
}

/// The secret that a volume is to have from now on; who types it types it twice.
///
/// # Errors
/// As [`present`].
pub fn new(key_file: Option<&Path>, volume: &str) -> Result<Secret> {
    find(key_file, NEW_PREFIX, &|| ask_twice(volume))
}

fn find(
    key_file: Option<&Path>,
    prefix: &str,
    ask: &dyn Fn() -> Result<Zeroizing<String>>,
) -> Result<Secret> {
    if let Some(file) = key_file {
        return Secret::read_key_file(file);
    }
    let found = if prefix == PREFIX { given() } else { in_variables(prefix) };
    if let Some(secret) = found? {
        return Ok(secret);
    }
    if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        return Err(Error::invalid(format!(
            "a passphrase or key is needed, and there is no terminal to ask on: set {prefix}_PASSPHRASE, \
             {prefix}_PASSPHRASE_FILE or {prefix}_KEY_FILE"
        )));
    }
    Secret::passphrase(&ask()?)
}

fn ask_twice(volume: &str) -> Result<Zeroizing<String>> {
    let first = ask(&format!("New passphrase of volume {volume}: "))?;
    if *ask("The same again: ")? != *first {
        return Err(Error::invalid("the two passphrases differ; nothing was changed"));
    }
    Ok(first)
}

/// The terminal as it was, which shows again what is typed.
struct Shown(Termios);

impl Drop for Shown {
    fn drop(&mut self) {
        // There is nobody to tell.
        let _ = tcsetattr(io::stdin(), SetArg::TCSAFLUSH, &self.0);
        let _ = writeln!(io::stderr());
    }
}

/// Bytes of a line that a terminal gives at once.
const LINE_MAX: usize = 4096;
/// What Ctrl-C sends.
const INTERRUPT: u8 = 3;

fn ask(prompt: &str) -> Result<Zeroizing<String>> {
    let failed = |error: io::Error| Error::io(error, "asking for a passphrase");
    let before = tcgetattr(io::stdin()).map_err(|e| failed(e.into()))?;
    let mut hidden = before.clone();
    // A signal would end the process, and leave the terminal like this: so Ctrl-C ends the line.
    hidden.local_flags.remove(LocalFlags::ECHO | LocalFlags::ISIG);
    hidden.control_chars[SpecialCharacterIndices::VEOL as usize] = INTERRUPT;
    let shown = Shown(before);
    tcsetattr(io::stdin(), SetArg::TCSAFLUSH, &hidden).map_err(|e| failed(e.into()))?;
    write!(io::stderr(), "{prompt}").and_then(|()| io::stderr().flush()).map_err(failed)?;
    // Not through a buffer that is not overwritten.
    let mut line = Zeroizing::new([0; LINE_MAX]);
    let count = nix::unistd::read(io::stdin(), &mut line[..]).map_err(|e| failed(e.into()))?;
    drop(shown);
    match &line[..count] {
        [.., INTERRUPT] => {
            // As if the terminal had sent it.
            raise(Signal::SIGINT).map_err(|e| failed(e.into()))?;
            Err(Error::new(ErrorKind::Interrupted, "stopped"))
        }
        // Ctrl-Z and the like, which do nothing here.
        [text @ .., b'\n'] if text.trim_ascii_end().iter().any(u8::is_ascii_control) => {
            Err(Error::invalid("a control character was typed; nothing was changed"))
        }
        [text @ .., b'\n'] => std::str::from_utf8(text)
            .map(|text| Zeroizing::new(text.trim_end_matches('\r').to_owned()))
            .map_err(|_| Error::invalid("the passphrase is no UTF-8")),
        _ => Err(Error::invalid("no passphrase was typed")),
    }
}

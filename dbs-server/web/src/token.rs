//! The token: who has it may see the page.

use dbs_core::{Error, Result};
use dbs_service::privileges::read_secret;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use subtle::ConstantTimeEq;

/// Random bytes of a token that is made.
const RANDOM_BYTES: usize = 32;
/// Fewest and most characters of one: fewer could be guessed.
const LENGTHS: std::ops::RangeInclusive<usize> = 16..=256;

/// A secret text.
#[derive(Clone)]
pub struct Token(String);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

impl Token {
    /// One that nobody knows yet.
    ///
    /// # Errors
    /// `Io` if the system has no random bytes.
    pub fn random() -> Result<Self> {
        let mut bytes = [0; RANDOM_BYTES];
        getrandom::fill(&mut bytes)
            .map_err(|e| Error::io(io::Error::other(e), "making a token for the web page"))?;
        Ok(Self(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// The one in a file. If there is no file, it is made, with a new token, for its owner alone.
    ///
    /// # Errors
    /// `Invalid` if others than its owner may read the file, if it belongs to somebody else than the server's user
    /// and root, or if it holds no token; `Io`.
    pub fn from_file(path: &Path) -> Result<Self> {
        let failed = |e| Error::io(e, format!("the token file {}", path.display()));
        // What is no file must not keep the server waiting for somebody who writes it.
        let flags = nix::libc::O_NONBLOCK;
        let open = || OpenOptions::new().read(true).custom_flags(flags).open(path);
        match open() {
            Ok(file) => read(&file, path),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let token = Self::random()?;
                match token.write(path) {
                    Ok(()) => Ok(token),
                    // Another server has made it meanwhile.
                    Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                        read(&open().map_err(failed)?, path)
                    }
                    Err(e) => Err(failed(e)),
                }
            }
            Err(e) => Err(failed(e)),
        }
    }

    /// Makes the file, which appears with all that is in it.
    fn write(&self, path: &Path) -> io::Result<()> {
        let mut beside = path.as_os_str().to_owned();
        beside.push(format!(".{}", std::process::id()));
        // Of a process of that number that was killed meanwhile.
        let _is_none = fs::remove_file(&beside);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside)?;
        let written = writeln!(file, "{}", self.0).and_then(|()| file.sync_all());
        let made = written.and_then(|()| fs::hard_link(&beside, path));
        fs::remove_file(&beside)?;
        made
    }

    /// The text, to be shown to who may have it.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.0
    }

    /// Whether this is the token. How long that takes says nothing of what it is.
    #[must_use]
    pub fn is(&self, text: &str) -> bool {
        self.0.as_bytes().ct_eq(text.as_bytes()).into()
    }
}

fn read(file: &File, path: &Path) -> Result<Token> {
    let name = path.display();
    let text = read_secret(file, path, "token file", *LENGTHS.end() as u64 + 2)?;
    let text = text.trim_end();
    if !LENGTHS.contains(&text.len()) || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(Error::invalid(format!(
            "the token file {name} must hold one line of {} to {} characters without blanks",
            LENGTHS.start(),
            LENGTHS.end()
        )));
    }
    Ok(Token(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    #[test]
    fn a_token_is_made_once_and_for_its_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let made = Token::from_file(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(made.text().len(), 64);
        assert!(Token::from_file(&path).unwrap().is(made.text()));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "something is left beside it");
        assert!(!made.is("") && !made.is(&made.text()[1..]) && !made.is(&"0".repeat(64)));
        assert!(!Token::random().unwrap().is(made.text()));
        assert!(!format!("{made:?}").contains(made.text()));
    }

    #[test]
    fn files_that_others_can_read_or_that_hold_no_token_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        for (mode, text) in [
            (0o640, "0123456789abcdef\n"),
            (0o604, "0123456789abcdef\n"),
            (0o602, "0123456789abcdef\n"),
            (0o600, "short\n"),
            (0o600, "0123456789 abcdef\n"),
            (0o600, ""),
        ] {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let error = Token::from_file(&path).unwrap_err();
            assert_eq!(error.kind(), dbs_core::ErrorKind::Invalid, "{mode:o} {text:?}");
            assert!(!error.to_string().contains("0123456789"), "{error}");
        }
        fs::write(&path, "0123456789abcdef\n").unwrap();
        assert!(Token::from_file(&path).unwrap().is("0123456789abcdef"));
        // Nobody writes this one, and nobody waits for that.
        let pipe = dir.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
        assert_eq!(Token::from_file(&pipe).unwrap_err().kind(), dbs_core::ErrorKind::Invalid);
    }
}

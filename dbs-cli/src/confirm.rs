//! Asking before something is destroyed.

use crate::context::Context;
use dbs_core::{Error, ErrorKind, Result};
use std::io::{self, IsTerminal, Write};

/// Asks whether to go on with `what` ("Delete volume demo?").
///
/// # Errors
/// `Invalid` if there is nobody to ask and `--yes` was not given, `Interrupted` for a no.
pub fn confirm(context: &Context, what: &str) -> Result<()> {
    if context.yes {
        return Ok(());
    }
    if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        return Err(Error::invalid(format!("{what} There is no terminal to ask on: add --yes")));
    }
    let mut answer = String::new();
    let asked = write!(io::stderr(), "{what} [y/N] ").and_then(|()| io::stderr().flush());
    asked
        .and_then(|()| io::stdin().read_line(&mut answer))
        .map_err(|e| Error::io(e, "asking for confirmation"))?;
    match answer.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" => Ok(()),
        _ => Err(Error::new(ErrorKind::Interrupted, "not confirmed; nothing was changed")),
    }
}

/// As [`confirm`], of something in the store, which may be that of another shell's `DBS_STORE`.
///
/// # Errors
/// As [`confirm`]; `Invalid` if no store was named.
pub fn confirm_in_store(context: &Context, what: &str) -> Result<()> {
    confirm(context, &format!("Store {}: {what}", context.store()?.display()))
}

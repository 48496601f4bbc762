//! The terminal that a command was started from.

use dbs_core::{Error, Result};

/// Lets go of the terminal it was started from, and of the directory: a file system there could not
/// be unmounted.
pub fn leave_terminal() -> Result<()> {
    // Fails only for who leads a group of processes, as nothing does that was just started.
    let _ = nix::unistd::setsid();
    std::env::set_current_dir("/").map_err(|e| Error::io(e, "leaving the current directory"))
}

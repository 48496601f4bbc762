//! Giving up the rights of root once everything is open.

use dbs_core::{Error, Result};
use nix::sys::prctl;
use nix::unistd::{Gid, Group, Uid, User, setgroups, setresgid, setresuid};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::str::FromStr;

/// Whom a process becomes: `NAME` or `NAME:GROUP`, or numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unprivileged {
    user: Uid,
    group: Gid,
}

impl FromStr for Unprivileged {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (name, group) = match text.split_once(':') {
            Some((name, group)) => (name, Some(group)),
            None => (text, None),
        };
        let known = User::from_name(name).map_err(|e| format!("looking for user `{name}`: {e}"))?;
        let (user, own) = match (known, name.parse()) {
            (Some(user), _) => (user.uid, Some(user.gid)),
            (None, Ok(number)) => (Uid::from_raw(number), None),
            (None, Err(_)) => return Err(format!("there is no user `{name}`")),
        };
        let group = match (group, own) {
            (Some(group), _) => group_of(group)?,
            (None, Some(own)) => own,
            (None, None) => return Err(format!("user {name} has no name: write {name}:GROUP")),
        };
        if user.is_root() {
            return Err("this user is root, who gives up nothing".to_owned());
        }
        Ok(Self { user, group })
    }
}

/// A group by name or number.
///
/// # Errors
/// That there is none.
pub fn group_of(name: &str) -> std::result::Result<Gid, String> {
    let known = Group::from_name(name).map_err(|e| format!("looking for group `{name}`: {e}"))?;
    match (known, name.parse()) {
        (Some(group), _) => Ok(group.gid),
        (None, Ok(number)) => Ok(Gid::from_raw(number)),
        (None, Err(_)) => Err(format!("there is no group `{name}`")),
    }
}

/// From now on no program that this thread, or one it starts, executes has more rights than it has
/// itself. To be called before there are other threads.
///
/// # Errors
/// `Io` where the kernel does not know this.
pub fn gain_none() -> Result<()> {
    prctl::set_no_new_privs().map_err(|e| Error::io(e.into(), "giving up new privileges"))
}

/// From now on the kernel writes no core dump of this process, and lets nobody but root look into its memory: for who has keys
/// in it.
///
/// # Errors
/// `Io`, if the kernel refuses.
pub fn hide_memory() -> Result<()> {
    prctl::set_dumpable(false).map_err(|e| Error::io(e.into(), "keeping keys out of core dumps"))
}

/// The text of an open file with secrets; of what is longer than `most` bytes only the beginning. `what` says what it is.
///
/// # Errors
/// `Invalid` if others than its owner may read or write it, or if it belongs to somebody else than the process's user and
/// root; `Io`.
pub fn read_secret(file: &File, path: &Path, what: &str, most: u64) -> Result<String> {
    let name = path.display();
    let failed = |e| Error::io(e, format!("the {what} {name}"));
    let meta = file.metadata().map_err(failed)?;
    let ours = [0, Uid::effective().as_raw()].contains(&meta.uid());
    if !meta.is_file() || !ours || meta.mode() & 0o077 != 0 {
        return Err(Error::invalid(format!(
            "the {what} {name} must be a file of the server's user or root that nobody else can read or \
             write: chmod 0600 {name}"
        )));
    }
    let mut text = String::new();
    file.take(most).read_to_string(&mut text).map_err(failed)?;
    Ok(text)
}

/// Makes a change with which the kernel forgets [`hide_memory`]: for a new user `fs.suid_dumpable` says what is dumped.
fn staying_hidden(change: impl FnOnce() -> Result<()>) -> Result<()> {
    let hidden = matches!(prctl::get_dumpable(), Ok(false));
    change()?;
    if hidden { hide_memory() } else { Ok(()) }
}

impl Unprivileged {
    /// The user.
    #[must_use]
    pub fn user(&self) -> Uid {
        self.user
    }

    /// Makes all threads of this process this user's, without further groups, for good: with the last
    /// of root's three user ids go all capabilities.
    ///
    /// # Errors
    /// `Io` for who is not root, or if root could be had back.
    pub fn become_it(&self) -> Result<()> {
        let failed = |e: nix::Error| {
            Error::io(e.into(), format!("becoming user {}, group {}", self.user, self.group))
        };
        staying_hidden(|| {
            setgroups(&[self.group]).map_err(failed)?;
            setresgid(self.group, self.group, self.group).map_err(failed)?;
            setresuid(self.user, self.user, self.user).map_err(failed)
        })?;
        if setresuid(Uid::from_raw(0), Uid::from_raw(0), Uid::from_raw(0)).is_ok() {
            return Err(Error::io(
                std::io::Error::other("the system gives root back to who asks"),
                "giving up root",
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a process of its own, which stays as it is then.
    #[test]
    fn memory_that_is_hidden_stays_hidden_from_another_user() {
        const CHILD: &str = "DBS_TEST_HIDES_MEMORY";
        if std::env::var_os(CHILD).is_none() {
            let mut again = std::process::Command::new(std::env::current_exe().unwrap());
            let name = "memory_that_is_hidden_stays_hidden_from_another_user";
            let child = again.args([name, "--nocapture"]).env(CHILD, "1").output().unwrap();
            let shown = String::from_utf8_lossy(&child.stdout);
            assert!(child.status.success() && shown.contains("was another user"), "{child:?}");
            return;
        }
        // What the kernel may do with the user.
        let forget = || prctl::set_dumpable(true).map_err(|e| Error::io(e.into(), "test"));
        staying_hidden(forget).unwrap();
        assert!(prctl::get_dumpable().unwrap());
        hide_memory().unwrap();
        staying_hidden(forget).unwrap();
        assert!(!prctl::get_dumpable().unwrap());
        if Uid::effective().is_root() {
            let nobody = Unprivileged { user: Uid::from_raw(65534), group: Gid::from_raw(65534) };
            nobody.become_it().unwrap();
            assert!(!prctl::get_dumpable().unwrap());
        }
        println!("was another user");
    }

    #[test]
    fn users_and_groups_are_names_or_numbers() {
        let parse = |text: &str| text.parse::<Unprivileged>();
        let numbers = Unprivileged { user: Uid::from_raw(4321), group: Gid::from_raw(1234) };
        assert_eq!(parse("4321:1234"), Ok(numbers));
        for (text, error) in [
            ("", "no user ``"),
            ("no-such-user", "no user `no-such-user`"),
            ("4321", "write 4321:GROUP"),
            ("4321:no-such-group", "no group `no-such-group`"),
            ("0:0", "root"),
        ] {
            let message = parse(text).unwrap_err();
            assert!(message.contains(error), "{text}: {message}");
        }
    }
}

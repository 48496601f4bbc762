//! What a page is about: the seam between the server of the page, and who answers its questions.

use dbs_core::{Error, ErrorKind, Result};
use serde::Serialize;
use serde_json::Value;

/// What is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum View {
    /// A store.
    Store,
    /// The volume of a Longhorn controller.
    Volume,
}

/// Answers what a page asks. All but [`Subject::view`] may wait, and is called on threads of the page's own.
pub trait Subject: Send + Sync + 'static {
    /// Which page shows it.
    fn view(&self) -> View;

    /// As JSON: what is new to a page that was told this `cursor`, or everything; `admin` says whether the page may
    /// change something.
    ///
    /// # Errors
    /// It cannot be told.
    fn live(&self, cursor: Option<&str>, admin: bool) -> Result<Vec<u8>>;

    /// Called once a second, also while nobody looks: what the graphs show is kept from here.
    fn tick(&self);

    /// The page is not served, for want of the address that another process has kept.
    fn not_served(&self, why: &Error);

    /// As JSON: what was found by commands that look for damage.
    ///
    /// # Errors
    /// `NotFound` if there are no such commands.
    fn findings(&self) -> Result<Vec<u8>> {
        Err(Error::not_found("nothing looks for damage here"))
    }

    /// What a page asks to be done; not begun yet.
    ///
    /// # Errors
    /// Why that is no command.
    fn order(&self, wire: Value) -> std::result::Result<Order, String>;
}

/// A command of a page.
pub struct Order {
    /// Whether it may be carried out.
    pub leave: Leave,
    /// Carries it out. One that takes long asks now and then whether to go on.
    pub run: Run,
}

/// See [`Order::run`].
pub type Run = Box<dyn FnOnce(&mut dyn FnMut() -> bool) -> Result<Value> + Send>;

/// Whether a page may send a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leave {
    /// Any page: it changes nothing.
    Look,
    /// Any page, one at a time: it looks at every layer or extent.
    LookAtAll,
    /// A page with rights to change something.
    Change,
    /// Only such a page, and not without the identity of what its user has confirmed, which has this name.
    Lacks(&'static str),
    /// No page.
    Never,
}

/// A document, as JSON.
///
/// # Errors
/// `Io` if it cannot be written so.
pub fn encode(value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(value)
        .map_err(|e| Error::new(ErrorKind::Io, format!("encoding an answer: {e}")))
}

/// The name of this machine, which pages show.
#[must_use]
pub fn host() -> String {
    let names = nix::sys::utsname::uname();
    names.map_or_else(|_| String::new(), |names| names.nodename().to_string_lossy().into_owned())
}

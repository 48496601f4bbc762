//! The web page of `dbs serve` and `longhorn controller`: what a store, or a volume over replicas, holds and does, in a
//! browser.
//!
//! This crate owns the HTTP server of the page ([`WebServer`]), who is let in ([`Token`], hosts and origins), and the
//! page itself, whose files are part of the program. What the page is about is a [`Subject`]: a store ([`StorePage`]),
//! or the volume of a controller, which brings its own. The server carries out no command by itself
//! ([decision 30](../../../docs/decisions/0030-web-page.md)).
//!
//! Main types: [`WebServer`]; [`WebOptions`], how; [`WebAddress`], where; [`Subject`], about what.
//!
//! Enter at [`WebServer::start`].

mod address;
mod answer;
mod assets;
mod history;
mod server;
mod store;
mod subject;
mod token;

pub use address::WebAddress;
pub use history::{History, Sample, rate};
pub use server::{WebOptions, WebServer, WebSocket};
pub use store::{StorePage, Update};
pub use subject::{Leave, Order, Run, Subject, View, encode, host};
pub use token::Token;

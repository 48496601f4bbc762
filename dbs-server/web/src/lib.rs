//! The web page of `dbs serve`: what the store holds and does, in a browser.
//!
//! This crate owns the HTTP server of the page ([`WebServer`]), who is let in ([`Token`], hosts and origins), what
//! the page asks, and the page itself, whose files are part of the program. It carries out no command by itself:
//! all goes to the server of the store, as from the control socket
//! ([decision 30](../../../docs/decisions/0030-web-page.md)).
//!
//! Main types: [`WebServer`]; [`WebOptions`], how; [`WebAddress`], where.
//!
//! Enter at [`WebServer::start`].

mod address;
mod answer;
mod asks;
mod assets;
mod live;
mod server;
mod token;

pub use address::WebAddress;
pub use live::Update;
pub use server::{WebOptions, WebServer};
pub use token::Token;

//! The page of a served store.

mod asks;
mod live;

pub use live::Update;

use crate::subject::{Order, Subject, View, encode, host};
use dbs_control::api::Request;
use dbs_core::{Error, Result};
use dbs_server::asked::Asked;
use live::Live;
use serde::Serialize;
use serde_json::Value;
use std::sync::Arc;

/// A store, as its page shows it.
pub struct StorePage {
    asked: Arc<dyn Asked>,
    live: Live,
    host: String,
    path: String,
}

/// What a page is told, and where it is.
#[derive(Serialize)]
struct Told<'a> {
    #[serde(flatten)]
    update: Update,
    host: &'a str,
    path: &'a str,
}

impl StorePage {
    /// That of the store at `path`, whose server answers.
    #[must_use]
    pub fn new(asked: Arc<dyn Asked>, path: String) -> Self {
        Self { asked, live: Live::default(), host: host(), path }
    }
}

impl Subject for StorePage {
    fn view(&self) -> View {
        View::Store
    }

    fn live(&self, cursor: Option<&str>, admin: bool) -> Result<Vec<u8>> {
        let update = self.live.update(&*self.asked, cursor, admin);
        encode(&update.map(|update| Told { update, host: &self.host, path: &self.path }))
    }

    fn not_served(&self, why: &Error) {
        self.asked.notice(format!("the web page is not served: {why}"));
    }

    fn tick(&self) {
        self.live.tick(&*self.asked);
    }

    fn findings(&self) -> Result<Vec<u8>> {
        encode(&self.asked.findings())
    }

    fn order(&self, wire: Value) -> std::result::Result<Order, String> {
        let request = Request::from_wire(wire).map_err(|error| error.to_string())?;
        let asked = Arc::clone(&self.asked);
        let leave = asks::leave(&request);
        Ok(Order { leave, run: Box::new(move |go_on| asked.command(&request, go_on)) })
    }
}

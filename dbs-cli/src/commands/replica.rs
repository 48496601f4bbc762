//! `dbs replica`.

use crate::context::Context;
use clap::Args;
use dbs_core::Result;
use engine_adapter::cli::{self, ReplicaArgs, TlsArgs};

/// Serve a replica of a Longhorn volume, until SIGINT or SIGTERM.
///
/// It is kept in a store of its own, in DIRECTORY; or, with --store (or DBS_STORE), in that store,
/// which a running `dbs serve` must own. The command `longhorn replica` does the same and takes its
/// arguments just as Longhorn's instance manager gives them.
#[derive(Debug, Args)]
pub struct Replica {
    /// Name of the volume, which callers that name another are refused by
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    volume_name: String,
    #[command(flatten)]
    tls: TlsArgs,
    #[command(flatten)]
    replica: ReplicaArgs,
}

impl Replica {
    pub fn run(self, context: &Context) -> Result<()> {
        self.tls.choose(true)?;
        cli::serve(&self.replica, context.store().ok(), &self.volume_name)
    }
}

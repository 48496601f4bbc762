//! The `dbs` command.
fn main() {}

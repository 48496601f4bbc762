//! What a backup store holds, and what a server of objects says.

/// Any bytes as the facts of a volume or backup, a block, a URL, or an answer of a server.
///
/// The input: what the rest is (one byte), and the rest.
pub fn backup(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else { return };
    dbs_backup::hostile::read(*kind, rest);
}

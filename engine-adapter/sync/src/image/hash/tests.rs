#![allow(clippy::unwrap_used)]

use super::*;
use crate::image::{Bytes, Sink, SparseFile};
use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicUsize;

const QUIET: HashOptions<'static> =
    HashOptions { threads: 2, cancelled: &|| false, progress: &|_| {} };

/// A sparse file of a bit more than two parts with data here and there, and its whole content.
fn sparse(dir: &Path) -> (SparseFile, Vec<u8>) {
    let path = dir.join("volume-snap-a.img");
    let file = std::fs::File::create(&path).unwrap();
    let mut content = vec![0; (2 * PART_BYTES + 5 * 4096) as usize];
    file.set_len(content.len() as u64).unwrap();
    let mut rng = fastrand::Rng::with_seed(7);
    let mut put = |offset: u64, length: usize| {
        let data: Vec<u8> = std::iter::repeat_with(|| rng.u8(..)).take(length).collect();
        file.write_all_at(&data, offset).unwrap();
        content[offset as usize..][..length].copy_from_slice(&data);
    };
    put(8192, 4096);
    put(20_480, 12_288);
    put(PART_BYTES - 4096, 3 << 20);
    put(2 * PART_BYTES - (1 << 20), 1 << 20);
    put(2 * PART_BYTES + 4 * 4096, 4096);
    (SparseFile::source(path).unwrap(), content)
}

#[test]
fn an_image_hashes_as_its_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let (file, content) = sparse(dir.path());
    let whole = format!("{:016x}", Crc64::of(&content).value());
    for threads in [1, 3] {
        let (done, calls) = (AtomicU64::new(0), AtomicUsize::new(0));
        let progress = |bytes| {
            done.fetch_add(bytes, Ordering::Relaxed);
            calls.fetch_add(1, Ordering::Relaxed);
        };
        let options = HashOptions { threads, progress: &progress, ..QUIET };
        assert_eq!(hash(&file, &options).unwrap(), whole);
        assert_eq!(done.into_inner(), content.len() as u64);
        assert_eq!(calls.into_inner(), 3);
    }
    assert_eq!(hash(&Bytes::new("123456789"), &QUIET).unwrap(), "b90956c775a41001");
    assert_eq!(hash(&Bytes::new(""), &QUIET).unwrap(), "0000000000000000");
}

#[test]
fn hashing_can_be_cancelled() {
    let dir = tempfile::tempdir().unwrap();
    let (file, _) = sparse(dir.path());
    let options = HashOptions { cancelled: &|| true, ..QUIET };
    assert_eq!(hash(&file, &options).unwrap_err().kind(), ErrorKind::Interrupted);
}

/// The stamp of a file of these tests: they change content behind its back.
fn fixed() -> Result<String> {
    Ok("one".to_owned())
}

#[test]
fn a_record_spares_hashing_until_the_image_changes() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("volume-snap-a.img");
    let first = hash_recorded(&Bytes::new("a"), &image, &fixed, false, &QUIET).unwrap();
    let record = Record::load(&image).unwrap().unwrap();
    assert_eq!(record.checksum, first.checksum);
    assert!(record.is_current("one") && record.last_hashed_at.ends_with('Z'));
    // Other content, same stamp: believed without another look.
    let again = hash_recorded(&Bytes::new("b"), &image, &fixed, false, &QUIET).unwrap();
    assert_eq!(again, first);
    let two = || Ok("two".to_owned());
    let changed = hash_recorded(&Bytes::new("b"), &image, &two, false, &QUIET).unwrap();
    assert_ne!(changed.checksum, first.checksum);
    assert!(!changed.silently_corrupted);
}

#[test]
fn a_change_nobody_made_is_reported_from_then_on() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("volume-snap-a.img");
    let good = hash_recorded(&Bytes::new("a"), &image, &fixed, false, &QUIET).unwrap();
    let found = hash_recorded(&Bytes::new("b"), &image, &fixed, true, &QUIET).unwrap();
    assert_eq!(found, Hashed { checksum: good.checksum.clone(), silently_corrupted: true });
    assert_eq!(Record::load(&image).unwrap().unwrap().checksum, good.checksum);
    let later = hash_recorded(&Bytes::new("a"), &image, &fixed, false, &QUIET).unwrap();
    assert_eq!(later, Hashed { checksum: String::new(), silently_corrupted: true });
}

#[test]
fn a_change_meanwhile_is_an_error_and_leaves_no_record() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("volume-snap-a.img");
    let calls = AtomicUsize::new(0);
    let stamp = || Ok(calls.fetch_add(1, Ordering::Relaxed).to_string());
    let error = hash_recorded(&Bytes::new("a"), &image, &stamp, false, &QUIET).unwrap_err();
    assert!(error.to_string().contains("changed while it was hashed"), "{error}");
    assert_eq!(Record::load(&image).unwrap(), None);
}

#[test]
fn a_damaged_record_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("volume-snap-a.img");
    std::fs::write(Record::path(&image), "{not json").unwrap();
    assert_eq!(Record::load(&image).unwrap_err().kind(), ErrorKind::Corrupt);
    let hashed = hash_recorded(&Bytes::new("a"), &image, &fixed, false, &QUIET).unwrap();
    assert_eq!(Record::load(&image).unwrap().unwrap().checksum, hashed.checksum);
}

#[test]
fn a_file_keeps_a_received_checksum_until_it_changes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("volume-snap-a.img");
    let file = SparseFile::sink(&path);
    file.open(8192).unwrap();
    file.finish(Some(&crate::image::Checksum { method: METHOD.into(), value: "00".into() }))
        .unwrap();
    let again = SparseFile::sink(&path);
    assert_eq!(again.recorded().unwrap().unwrap().checksum, "00");
    again.open(4096).unwrap();
    assert_eq!(again.recorded().unwrap(), None);
}

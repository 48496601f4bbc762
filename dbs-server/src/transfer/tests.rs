//! Import and export, over volumes in memory and real files and pipes.

use super::memory::Memory;
use super::*;
use dbs_core::ErrorKind;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt};

const MIB: u64 = 1 << 20;

fn always(_: u64, _: u64) -> bool {
    true
}

/// A sparse file of `size` bytes with some data, a hole, blocks of zeros and data at its end.
fn sparse_file(size: u64) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(size).unwrap();
    file.write_all_at(&[1; 5000], 0).unwrap();
    file.write_all_at(&[0; 65536], 3 * MIB).unwrap();
    file.write_all_at(&[2; 4096], 5 * MIB - 4096).unwrap();
    file.write_all_at(&[3; 100], size - 100).unwrap();
    file
}

fn content(mut file: &File) -> Vec<u8> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_end(&mut bytes).unwrap();
    bytes
}

#[test]
fn import_of_a_sparse_file_stays_sparse() {
    for size in [64 * MIB, 64 * MIB + 700] {
        let file = sparse_file(size);
        let volume = Memory::new(padded(size));
        let mut calls = Vec::new();
        let copied = import_file(&file, &volume, &mut |done, total| {
            calls.push((done, total));
            true
        })
        .unwrap();
        assert_eq!(copied.length, padded(size));
        // Two blocks at the start, one before 5 MiB, one or two at the end.
        assert!((4..=5).contains(&(volume.allocated() / 4096)), "{}", volume.allocated());
        let mut expected = content(&file);
        expected.resize(padded(size) as usize, 0);
        assert!(volume.content().bytes == expected);
        assert_eq!(calls.last(), Some(&(padded(size), padded(size))));
        assert!(calls.is_sorted());
    }
}

#[test]
fn import_over_old_content_replaces_it() {
    let file = sparse_file(8 * MIB);
    let volume = Memory::new(9 * MIB);
    volume.write_at(0, &vec![0xaa; 9 << 20]).unwrap();
    import_file(&file, &volume, &mut always).unwrap();
    assert!(volume.content().bytes[..8 << 20] == content(&file));
    assert!(volume.content().bytes[8 << 20..].iter().all(|b| *b == 0xaa));
    assert!(volume.allocated() <= MIB + 5 * 4096);
}

#[test]
fn import_from_a_pipe_finds_zeros() {
    for size in [8 * MIB, 7 * MIB + 4097] {
        let bytes = content(&sparse_file(size));
        let (reader, mut writer) = std::io::pipe().unwrap();
        let volume = Memory::new(8 * MIB);
        let copied = std::thread::scope(|scope| {
            scope.spawn(|| {
                writer.write_all(&bytes).unwrap();
                drop(writer);
            });
            import_stream(reader, &volume, &mut always).unwrap()
        });
        assert_eq!(copied.length, padded(size));
        assert!(volume.content().bytes[..bytes.len()] == bytes);
        assert!(volume.allocated() <= 5 * 4096);
    }
}

#[test]
fn import_of_too_much_is_refused() {
    let volume = Memory::new(MIB);
    let error = import_file(&sparse_file(8 * MIB), &volume, &mut always).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let input = vec![1; MIB as usize + 1];
    let error = import_stream(&input[..], &volume, &mut always).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    import_stream(&input[1..], &volume, &mut always).unwrap();
}

#[test]
fn transfers_can_be_stopped() {
    let file = sparse_file(8 * MIB);
    let volume = Memory::new(8 * MIB);
    let error = import_file(&file, &volume, &mut |_, _| false).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Interrupted);
    let error = export_stream(&volume, Vec::new(), &mut |_, _| false).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Interrupted);
}

/// A volume with data, zeros and a hole.
fn volume() -> Memory {
    let volume = Memory::new(32 * MIB + 512);
    volume.write_at(4096, &[7; 8192]).unwrap();
    volume.write_at(20 * MIB - 512, &[8; 1024]).unwrap();
    volume.write_at(2 * MIB, &[0; 1 << 20]).unwrap();
    volume.write_at(32 * MIB, &[9; 512]).unwrap();
    volume
}

#[test]
fn export_makes_sparse_files_and_asks_before_overwriting() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    let volume = volume();
    let file = open_export(&path, false).unwrap();
    let copied = export_file(&volume, &file, &mut always).unwrap();
    assert_eq!(copied.length, 32 * MIB + 512);
    assert!(std::fs::read(&path).unwrap() == volume.content().bytes);
    assert!(file.metadata().unwrap().blocks() * 512 <= MIB);

    assert_eq!(open_export(&path, false).unwrap_err().kind(), ErrorKind::Exists);
    std::fs::write(&path, vec![0xee; 40 << 20]).unwrap();
    let file = open_export(&path, true).unwrap();
    export_file(&volume, &file, &mut always).unwrap();
    assert!(std::fs::read(&path).unwrap() == volume.content().bytes);
    assert!(open_export(&directory.path().join("none/image"), false).is_err());
}

#[test]
fn export_into_a_pipe_writes_every_byte() {
    let volume = volume();
    let (mut reader, writer) = std::io::pipe().unwrap();
    let mut bytes = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| reader.read_to_end(&mut bytes).unwrap());
        let writer = File::from(std::os::fd::OwnedFd::from(writer));
        export_file(&volume, &writer, &mut always).unwrap();
    });
    assert!(bytes == volume.content().bytes);
}

/// Access whose map is wrong.
struct Liar(Memory, Vec<MapRange>);

impl BlockAccess for Liar {
    fn size(&self) -> u64 {
        self.0.size()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.0.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        self.0.write_at(offset, buf)
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> Result<()> {
        self.0.write_zeroes(offset, length)
    }

    fn discard(&self, offset: u64, length: u64) -> Result<()> {
        self.0.discard(offset, length)
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn map(&self, _offset: u64, _length: u64, _limit: usize) -> Result<Vec<MapRange>> {
        Ok(self.1.clone())
    }
}

#[test]
fn broken_maps_are_refused() {
    let range = |offset, length| MapRange { offset, length, state: RangeState::Data };
    for map in [
        vec![],
        vec![range(0, 0)],
        vec![range(512, MIB - 512)],
        vec![range(0, MIB + 512)],
        vec![range(0, u64::MAX)],
        vec![range(0, 4096), range(8192, 4096)],
    ] {
        let liar = Liar(Memory::new(MIB), map);
        let error = export_stream(&liar, Vec::new(), &mut always).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
    }
}

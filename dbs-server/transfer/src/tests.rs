//! Import and export, over volumes in memory and real files and pipes.

mod peers;
mod store;
#[path = "../../nbd/tests/nbd/support.rs"]
mod support;

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

/// Found by review: where a sparse file was cut off meanwhile, it looked like a hole, and the import like a whole one.
#[test]
fn a_file_that_is_written_meanwhile_is_not_imported() {
    // The last one is how a conversion of images begins again.
    for lengths in [[40 * MIB; 2], [64 * MIB + 4096; 2], [0, 64 * MIB]] {
        let file = sparse_file(64 * MIB);
        let past = std::time::SystemTime::now() - std::time::Duration::from_secs(9);
        file.set_modified(past).unwrap();
        let mut change = |_, _| {
            lengths.iter().for_each(|length| file.set_len(*length).unwrap());
            true
        };
        let refused = import_file(&file, &Memory::new(64 * MIB), &mut change).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Busy, "{refused}");
    }
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
    // Found by trying: the signal that stops an import also ends who writes to the pipe, and a part was the whole.
    let error = import_stream(&input[..0], &volume, &mut |_, _| false).unwrap_err();
    assert_eq!(error.kind(), dbs_core::ErrorKind::Interrupted);
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
    let copied = export_path(&volume, &path, false, &mut always).unwrap();
    assert_eq!(copied.length, 32 * MIB + 512);
    assert!(std::fs::read(&path).unwrap() == volume.content().bytes);
    assert!(std::fs::metadata(&path).unwrap().blocks() * 512 <= MIB);

    let error = export_path(&volume, &path, false, &mut always).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exists);
    std::fs::write(&path, vec![0xee; 40 << 20]).unwrap();
    export_path(&volume, &path, true, &mut always).unwrap();
    assert!(std::fs::read(&path).unwrap() == volume.content().bytes);
    assert!(export_path(&volume, &directory.path().join("no/image"), true, &mut always).is_err());
}

#[test]
fn export_that_fails_leaves_no_image() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    export_path(&volume(), &path, false, &mut |_, _| false).unwrap_err();
    assert!(!path.exists());
    std::fs::write(&path, "old").unwrap();
    export_path(&volume(), &path, true, &mut |_, _| false).unwrap_err();
    assert_eq!(std::fs::read(&path).unwrap(), b"");
}

/// A loop device on a file of its own.
struct LoopDevice(std::path::PathBuf, #[allow(dead_code)] tempfile::NamedTempFile);

impl LoopDevice {
    fn new(size: u64) -> Option<Self> {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().write_all_at(&vec![0xdd; size as usize], 0).unwrap();
        let made = std::process::Command::new("losetup")
            .args(["--find", "--show"])
            .arg(file.path())
            .output();
        match made {
            Ok(output) if output.status.success() => {
                let path = String::from_utf8(output.stdout).unwrap();
                Some(Self(path.trim().into(), file))
            }
            _ => {
                println!("skipped: needs losetup and the right to use it");
                None
            }
        }
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = std::process::Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

#[test]
fn block_devices_are_exported_to_and_imported_from() {
    let Some(device) = LoopDevice::new(4 * MIB) else { return };
    let volume = Memory::new(3 * MIB);
    volume.write_at(MIB, &[7; 8192]).unwrap();
    let error = export_path(&volume, &device.0, false, &mut always).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exists);
    export_path(&volume, &device.0, true, &mut always).unwrap();
    let back = Memory::new(4 * MIB);
    import_file(&File::open(&device.0).unwrap(), &back, &mut always).unwrap();
    assert!(back.content().bytes[..3 << 20] == volume.content().bytes);
    assert!(back.content().bytes[3 << 20..].iter().all(|byte| *byte == 0xdd));
    assert_eq!(back.allocated(), MIB + 8192);

    let error = export_path(&Memory::new(5 * MIB), &device.0, true, &mut always).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[test]
fn volumes_of_v1_images_are_exported() {
    let image = tempfile::NamedTempFile::new().unwrap();
    let put = |offset: u64, bytes: &[u8]| image.as_file().write_all_at(bytes, offset).unwrap();
    image.as_file().set_len(100 * MIB).unwrap();
    put(0, b"DBS@393!\0\0\x01\0\x01\0\0\0");
    put(16, &(100 * MIB).to_le_bytes());
    put(4096, b"\x01\0\0\0\x30\0\0\0\0\0old");
    put(72192, b"\0\0\x01\0\0\0\0\0\0\0");
    put(729_088, b"\x01\0\x02\0\0\0\x01");
    put(MIB, &[5; 4096]);
    let image = v1::Image::open(image.path(), None).unwrap();
    let view = image.open_spec("old").unwrap();
    let mut bytes = Vec::new();
    let copied = export_stream(&view, &mut bytes, &mut always).unwrap();
    assert_eq!(copied, Copied { length: 3 * MIB, data: 4096 });
    assert_eq!(bytes.len() as u64, 3 * MIB);
    assert!(bytes.iter().enumerate().all(|(i, b)| *b == if i >> 12 == 512 { 5 } else { 0 }));
    assert_eq!(view.write_at(0, &[0; 512]).unwrap_err().kind(), ErrorKind::ReadOnly);
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

//! Writing a volume or snapshot out as a raw image.

use super::pipeline::pipeline;
use super::{BlockAccess, Copied, PIECE_BYTES, Piece, Progress, VolumeSource, report};
use dbs_core::{Error, Result};
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;

static ZEROS: [u8; PIECE_BYTES as usize] = [0; PIECE_BYTES as usize];

/// Exports to a new file, or with `force` over an existing file or block device. A named pipe or
/// character device needs no force. What an export that fails has written to a file is removed,
/// so that nobody takes it for an image.
///
/// # Errors
/// `Exists` without `force`; those of [`export_file`].
pub fn export_path(
    access: &dyn BlockAccess,
    path: &Path,
    force: bool,
    progress: Progress<'_>,
) -> Result<Copied> {
    let context = |error: Error| error.context(path.display());
    let (file, created) = open(path, force).map_err(context)?;
    export_file(access, &file, progress).map_err(|error| {
        if created {
            let _ = std::fs::remove_file(path);
        } else if file.metadata().is_ok_and(|metadata| metadata.is_file()) {
            let _ = file.set_len(0);
        }
        context(error)
    })
}

/// The file and whether it is new.
fn open(path: &Path, force: bool) -> Result<(File, bool)> {
    match OpenOptions::new().write(true).create_new(true).open(path) {
        Ok(file) => return Ok((file, true)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(Error::io(error, "creating the file")),
    }
    let kind = std::fs::metadata(path).map_err(write_error)?.file_type();
    if (kind.is_file() || kind.is_block_device()) && !force {
        return Err(Error::exists("it exists; use --force to overwrite it"));
    }
    let file = OpenOptions::new().write(true).open(path).map_err(write_error)?;
    Ok((file, false))
}

/// Writes a volume or snapshot to a file of which nothing is kept, with holes where it holds no
/// data; to a block device in full. On success everything is durable. What is neither is treated
/// as [`export_stream`] does.
///
/// # Errors
/// `Invalid` if it is a block device and too small; `Interrupted`; those of either side.
pub fn export_file(
    access: &dyn BlockAccess,
    file: &File,
    progress: Progress<'_>,
) -> Result<Copied> {
    let kind = file.metadata().map_err(write_error)?.file_type();
    let size = access.size();
    let copied = if kind.is_file() {
        file.set_len(0).and_then(|()| file.set_len(size)).map_err(write_error)?;
        copy(access, progress, |piece| write_sparse(file, piece))?
    } else if kind.is_block_device() {
        let mut device = file;
        let room = device.seek(SeekFrom::End(0)).map_err(write_error)?;
        if room < size {
            return Err(Error::invalid(format!(
                "the device has {room} bytes and the volume {size}; choose a larger one"
            )));
        }
        device.rewind().map_err(write_error)?;
        copy(access, progress, |piece| write_all(&mut device, piece))?
    } else {
        return export_stream(access, file, progress);
    };
    file.sync_all().map_err(write_error)?;
    Ok(copied)
}

/// Writes all bytes of a volume or snapshot, zeros included, to a pipe or anything else.
///
/// # Errors
/// `Interrupted`; those of either side.
pub fn export_stream(
    access: &dyn BlockAccess,
    mut output: impl Write,
    progress: Progress<'_>,
) -> Result<Copied> {
    let copied = copy(access, progress, |piece| write_all(&mut output, piece))?;
    output.flush().map_err(write_error)?;
    Ok(copied)
}

fn copy(
    access: &dyn BlockAccess,
    progress: Progress<'_>,
    mut write: impl FnMut(&Piece) -> io::Result<u64>,
) -> Result<Copied> {
    let mut source = VolumeSource::new(access, 0);
    let mut copied = Copied::default();
    pipeline(
        |piece| source.next(piece),
        |piece: &Piece| {
            copied.data += write(piece).map_err(write_error)?;
            copied.length = piece.end();
            report(progress, copied.length, access.size())
        },
    )?;
    Ok(copied)
}

/// Writes the blocks of a piece that are not zero.
fn write_sparse(file: &File, piece: &Piece) -> io::Result<u64> {
    let mut written = 0;
    for run in piece.runs() {
        if let Some(data) = run.data {
            file.write_all_at(data, run.offset)?;
            written += run.length;
        }
    }
    Ok(written)
}

fn write_all(output: &mut impl Write, piece: &Piece) -> io::Result<u64> {
    if piece.is_data {
        output.write_all(&piece.buf)?;
        return Ok(piece.length);
    }
    let mut rest = piece.length;
    while rest > 0 {
        let length = rest.min(PIECE_BYTES);
        output.write_all(&ZEROS[..length as usize])?;
        rest -= length;
    }
    Ok(0)
}

fn write_error(error: io::Error) -> Error {
    Error::io(error, "writing the output")
}

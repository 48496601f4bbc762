//! Writing a volume or snapshot out as a raw image.

use super::pipeline::pipeline;
use super::{BlockAccess, Copied, PIECE_BYTES, Piece, Progress, VolumeSource, report};
use dbs_core::{Error, Result};
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;

static ZEROS: [u8; PIECE_BYTES as usize] = [0; PIECE_BYTES as usize];

/// Opens what an export goes to: a new file, or with `force` an existing file or block device,
/// whose content is given up. A named pipe or character device needs no force.
///
/// # Errors
/// `Exists` without `force`; `Io`.
pub fn open_export(path: &Path, force: bool) -> Result<File> {
    let context = |error: io::Error| Error::io(error, format!("opening {}", path.display()));
    let fresh = OpenOptions::new().write(true).create_new(true).open(path);
    match fresh {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        other => return other.map_err(context),
    }
    let kind = std::fs::metadata(path).map_err(context)?.file_type();
    if (kind.is_file() || kind.is_block_device()) && !force {
        return Err(Error::exists(format!(
            "{} exists; use --force to overwrite it",
            path.display()
        )));
    }
    OpenOptions::new().write(true).open(path).map_err(context)
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

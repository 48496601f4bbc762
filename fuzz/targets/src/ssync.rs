//! Upstream's file transfer: a sender's HTTP, on a connection that is written down.

use crate::input::Input;
use hyper::rt::{Read, ReadBufCursor, Write};
use longhorn_sync::image::{Bytes, Source};
use longhorn_sync::ssync::serve_one;
use std::cell::RefCell;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::runtime::{Builder, Runtime};

/// Most answered bytes: a flood of replies is none that anybody asked for.
const SENT_MAX_BYTES: usize = 64 << 20;

thread_local! {
    static RUNTIME: RefCell<Option<Runtime>> = const { RefCell::new(None) };
}

/// Requests and bodies of one connection, whatever they are.
///
/// The input: the size of pieces in which they come (one byte), and what is received.
pub fn ssync(data: &[u8]) {
    let mut input = Input::new(data);
    let piece = 16 * (1 + usize::from(input.u8()));
    let stream = Wire { input: input.rest().to_vec(), at: 0, piece, sent: 0 };
    let sink = Arc::new(Bytes::new(Vec::new()));
    RUNTIME.with_borrow_mut(|runtime| {
        let runtime = runtime.get_or_insert_with(|| {
            Builder::new_current_thread().enable_time().max_blocking_threads(1).build().unwrap()
        });
        runtime.block_on(serve_one(Arc::clone(&sink) as _, stream));
    });
    assert!(sink.size() <= 1 << 20, "a description beyond its limit");
}

/// A connection whose input is known and whose output is counted.
struct Wire {
    input: Vec<u8>,
    at: usize,
    piece: usize,
    sent: usize,
}

impl Read for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
        mut buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let (at, piece) = (self.at, self.piece);
        let rest = &self.input[at..];
        let count = rest.len().min(piece).min(buf.remaining());
        buf.put_slice(&rest[..count]);
        self.at += count;
        Poll::Ready(Ok(()))
    }
}

impl Write for Wire {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.sent += buf.len();
        assert!(self.sent <= SENT_MAX_BYTES, "replies without end");
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

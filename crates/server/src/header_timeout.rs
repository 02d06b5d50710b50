//! Notes when the headers of an HTTP/1 request begin to arrive.
//!
//! A client that sends its headers one byte at a time is disconnected after `header_timeout_ms`, and a connection without a
//! request after `idle_timeout_ms`. To tell the two apart, this wrapper reports arriving bytes to the connection's activity.
//! HTTP/2 connections send frames that belong to no request (`PING`), so their bytes are not reported; a stream without
//! complete headers counts as idle there.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::response_body::ConnectionActivity;

/// Start of an HTTP/2 connection. No method of HTTP/1 starts with it.
const HTTP2_PREFACE: &[u8] = b"PRI";

/// A connection whose arriving bytes are noted.
pub struct HeaderTimeout<S> {
    stream: S,
    activity: ConnectionActivity,
    /// Known after the first bytes.
    is_http1: Option<bool>,
}

impl<S> HeaderTimeout<S> {
    /// Reports to this activity.
    pub fn new(stream: S, activity: ConnectionActivity) -> HeaderTimeout<S> {
        HeaderTimeout { stream, activity, is_http1: None }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for HeaderTimeout<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        task: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        let polled = Pin::new(&mut this.stream).poll_read(task, buffer);
        let arrived = buffer.filled().get(before..).unwrap_or_default();
        if !arrived.is_empty() {
            let is_http1 = *this.is_http1.get_or_insert_with(|| {
                let length = arrived.len().min(HTTP2_PREFACE.len());
                arrived.get(..length) != HTTP2_PREFACE.get(..length)
            });
            if is_http1 {
                this.activity.received();
            }
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for HeaderTimeout<S> {
    fn poll_write(self: Pin<&mut Self>, task: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(task, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(task)
    }

    fn poll_shutdown(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(task)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        task: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(task, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

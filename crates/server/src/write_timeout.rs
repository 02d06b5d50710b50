//! A socket whose writes fail when the peer accepts nothing within a time limit.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use statehouse_store::Clock;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// A socket with a write timeout.
pub struct WriteTimeout {
    stream: TcpStream,
    clock: Arc<dyn Clock>,
    limit: Duration,
    /// Runs while a write is blocked.
    timer: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl WriteTimeout {
    /// Limits the time that a write may be blocked.
    pub fn new(stream: TcpStream, clock: Arc<dyn Clock>, limit: Duration) -> WriteTimeout {
        WriteTimeout { stream, clock, limit, timer: None }
    }

    fn check_timeout<T>(
        &mut self,
        task: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.timer = None;
            return written;
        }
        let (clock, limit) = (&self.clock, self.limit);
        let timer = self.timer.get_or_insert_with(|| {
            let clock = clock.clone();
            Box::pin(async move { clock.sleep(limit).await })
        });
        ready!(timer.as_mut().poll(task));
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the client did not read the response in time",
        )))
    }
}

impl AsyncRead for WriteTimeout {
    fn poll_read(
        self: Pin<&mut Self>,
        task: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(task, buffer)
    }
}

impl AsyncWrite for WriteTimeout {
    fn poll_write(self: Pin<&mut Self>, task: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(task, bytes);
        this.check_timeout(task, written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        task: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(task, slices);
        this.check_timeout(task, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let flushed = Pin::new(&mut this.stream).poll_flush(task);
        this.check_timeout(task, flushed)
    }

    fn poll_shutdown(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let shut = Pin::new(&mut this.stream).poll_shutdown(task);
        this.check_timeout(task, shut)
    }
}

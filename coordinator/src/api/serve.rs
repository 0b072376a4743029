//! Serving the API on a socket, with a bound on connections.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::serve::Listener;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Serves until `stop` is done, then lets requests under way end.
///
/// # Errors
/// When the socket fails.
pub async fn serve(
    listener: TcpListener,
    connections_max: usize,
    router: Router,
    stop: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let bounded = Bounded {
        listener,
        places: Arc::new(Semaphore::new(connections_max)),
    };
    axum::serve(bounded, router)
        .with_graceful_shutdown(stop)
        .await
}

/// A listener that takes no more connections than there are places; others wait in the kernel's queue.
struct Bounded {
    listener: TcpListener,
    places: Arc<Semaphore>,
}

impl Listener for Bounded {
    type Io = Placed;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Placed, SocketAddr) {
        let place = self
            .places
            .clone()
            .acquire_owned()
            .await
            .expect("the semaphore is never closed");
        let (stream, address) = Listener::accept(&mut self.listener).await;
        let placed = Placed {
            stream,
            _place: place,
        };
        (placed, address)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection and its place.
struct Placed {
    stream: TcpStream,
    _place: OwnedSemaphorePermit,
}

mod io_impl {
    use std::io;
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

    use super::Placed;

    impl AsyncRead for Placed {
        fn poll_read(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Pin::new(&mut self.stream).poll_read(context, buffer)
        }
    }

    impl AsyncWrite for Placed {
        fn poll_write(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            Pin::new(&mut self.stream).poll_write(context, bytes)
        }

        fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.stream).poll_flush(context)
        }

        fn poll_shutdown(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
        ) -> Poll<io::Result<()>> {
            Pin::new(&mut self.stream).poll_shutdown(context)
        }
    }
}

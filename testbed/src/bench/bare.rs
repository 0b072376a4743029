//! Bare quinn, to compare with: one unidirectional stream per message, echoed; the settings are those of our transport.
//!
//! It shares no code with `compass-transport` but the values of its settings: no hello, no framing, no deadlines, no counters.

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use bytes::Bytes;
use compass_transport::TransportSettings;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{IdleTimeout, TransportConfig};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use socket2::{Domain, Socket, Type};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

use super::node_runtime;

const NAME: &str = "localhost";
const LARGEST: usize = 1 << 20;

/// What one exchange took.
#[derive(Debug, Clone, Copy)]
pub(super) struct Exchange {
    /// From before the stream was opened until the other side had read it to its end.
    pub(super) there: Duration,
    /// The same and back.
    pub(super) round_trip: Duration,
}

/// A client and an echo server, each on a runtime of its own.
pub(super) struct BareEcho {
    connection: quinn::Connection,
    arrivals: mpsc::UnboundedReceiver<Instant>,
    client: Runtime,
    _endpoint: quinn::Endpoint,
    _server: Runtime,
}

impl BareEcho {
    pub(super) fn start() -> anyhow::Result<Self> {
        let settings = TransportSettings::default();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let own = rcgen::generate_simple_self_signed([NAME.to_owned()])?;
        let certificate = CertificateDer::from(own.cert);
        let key = PrivateKeyDer::Pkcs8(own.signing_key.serialize_der().into());

        let tls = rustls::ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_no_client_auth()
            .with_single_cert(vec![certificate.clone()], key)?;
        let mut server =
            quinn::ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(tls)?));
        server.transport_config(transport(&settings)?);

        let mut roots = rustls::RootCertStore::empty();
        roots.add(certificate)?;
        let tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let mut client = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls)?));
        client.transport_config(transport(&settings)?);

        let (server_runtime, client_runtime) =
            (node_runtime("bare-server")?, node_runtime("bare-client")?);
        let (arrived, arrivals) = mpsc::unbounded_channel();
        let address = {
            let _within = server_runtime.enter();
            let endpoint = endpoint(&settings, Some(server))?;
            let address = endpoint.local_addr()?;
            server_runtime.spawn(serve(endpoint, arrived));
            address
        };
        let (connection, endpoint) = client_runtime.block_on(async {
            let endpoint = endpoint(&settings, None)?;
            let connecting = endpoint.connect_with(client, address, NAME)?;
            anyhow::Ok((connecting.await?, endpoint))
        })?;
        Ok(Self {
            connection,
            arrivals,
            client: client_runtime,
            _endpoint: endpoint,
            _server: server_runtime,
        })
    }

    /// One message there and back, after a pause.
    pub(super) fn exchange(&mut self, message: Bytes, pause: Duration) -> anyhow::Result<Exchange> {
        let connection = self.connection.clone();
        // On the runtime's own thread, as the data plane's tasks are, not on this one.
        let exchange = self.client.spawn(async move {
            if !pause.is_zero() {
                tokio::time::sleep(pause).await;
            }
            let began = Instant::now();
            let mut stream = connection.open_uni().await?;
            stream.write_chunk(message).await?;
            stream.finish()?;
            let mut back = connection.accept_uni().await?;
            back.read_to_end(LARGEST).await?;
            anyhow::Ok((began, began.elapsed()))
        });
        let (began, round_trip) = self.client.block_on(exchange)??;
        let arrived = self.arrivals.try_recv().context("an echo has arrived")?;
        Ok(Exchange {
            there: arrived.saturating_duration_since(began),
            round_trip,
        })
    }
}

async fn serve(endpoint: quinn::Endpoint, arrived: mpsc::UnboundedSender<Instant>) {
    let echo = async {
        let incoming = endpoint.accept().await.context("the endpoint is closed")?;
        let connection = incoming.await?;
        loop {
            let mut stream = connection.accept_uni().await?;
            let message = stream.read_to_end(LARGEST).await?;
            arrived.send(Instant::now())?;
            let mut back = connection.open_uni().await?;
            back.write_chunk(message.into()).await?;
            back.finish()?;
        }
    };
    let ended: anyhow::Result<()> = echo.await;
    if let Err(error) = ended {
        tracing::debug!(%error, "the echo has ended");
    }
}

fn endpoint(
    settings: &TransportSettings,
    server: Option<quinn::ServerConfig>,
) -> anyhow::Result<quinn::Endpoint> {
    let address = SocketAddr::from(([127, 0, 0, 1], 0));
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)?;
    socket.set_recv_buffer_size(settings.socket_buffer)?;
    socket.set_send_buffer_size(settings.socket_buffer)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(quinn::Endpoint::new(
        quinn::EndpointConfig::default(),
        server,
        UdpSocket::from(socket),
        Arc::new(quinn::TokioRuntime),
    )?)
}

fn transport(settings: &TransportSettings) -> anyhow::Result<Arc<TransportConfig>> {
    let mut config = TransportConfig::default();
    config
        .max_idle_timeout(Some(IdleTimeout::try_from(settings.idle_timeout)?))
        .keep_alive_interval(Some(settings.keep_alive_interval()))
        .stream_receive_window(settings.stream_receive_window.into())
        .receive_window(settings.receive_window.into())
        .send_window(settings.send_window)
        .max_concurrent_uni_streams(settings.uni_streams_max.into())
        .enable_segmentation_offload(settings.segmentation_offload)
        .initial_mtu(settings.mtu_initial);
    Ok(Arc::new(config))
}

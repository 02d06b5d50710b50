//! The transport for HTTP/1.1, with TLS by rustls.
//!
//! - C1. The transport resolves the name, checks every address ([`super::address`]) and connects to a checked address. If one of
//!   the name's addresses is forbidden, all are: a name with both kinds of addresses is not trusted.
//! - C2. The transport follows no redirect and uses no proxy of the environment: the address of either would be unchecked.
//! - C3. A failure before the request is handed to the connection means that nothing was sent. A later failure without a status
//!   line means that the outcome is unknown. Once the status line was received, it is the answer, also if the rest of the body is
//!   missing.
//! - C4. The transport reads at most as much of a response as it keeps.
//!
//! Each request has its own connection. The target may have closed a kept connection, which the client notices only after it
//! has sent the request: that would turn a known outcome into an unknown one.

use std::fmt;
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use ::http::header::{CONNECTION, CONTENT_LENGTH, HOST, HeaderValue, RETRY_AFTER, USER_AGENT};
use ::http::{Request, Response};
use async_trait::async_trait;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper_util::rt::TokioIo;
use rustls::pki_types::{CertificateDer, ServerName};
use statehouse_store::Clock;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::address::is_allowed;
use super::{OutboundRequest, SendOutcome, TargetResponse, Transport};

/// How this program names itself.
const AGENT: &str = concat!("statehouse/", env!("CARGO_PKG_VERSION"));
/// The longest time that a target can ask for with `Retry-After`.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(24 * 3_600);

/// Finds the addresses of a name.
#[async_trait]
pub trait Resolver: Send + Sync + fmt::Debug {
    /// The addresses, or why there are none.
    async fn resolve(&self, host: &str) -> Result<Vec<IpAddr>, String>;
}

/// The resolver of the operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemResolver;

#[async_trait]
impl Resolver for SystemResolver {
    async fn resolve(&self, host: &str) -> Result<Vec<IpAddr>, String> {
        let found = tokio::net::lookup_host((host, 0)).await.map_err(|error| error.to_string())?;
        Ok(found.map(|address| address.ip()).collect())
    }
}

/// Sends requests over HTTP/1.1.
#[derive(Clone, Debug)]
pub struct HttpTransport {
    resolver: Arc<dyn Resolver>,
    roots: TrustRoots,
}

/// Whom the courier trusts.
#[derive(Clone)]
enum TrustRoots {
    /// Whom the operating system trusts, or `SSL_CERT_FILE` names.
    System,
    /// These authorities only.
    Given(Arc<rustls::ClientConfig>),
}

impl fmt::Debug for TrustRoots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if matches!(self, TrustRoots::System) { "the system's" } else { "given" })
    }
}

impl Default for HttpTransport {
    fn default() -> HttpTransport {
        HttpTransport { resolver: Arc::new(SystemResolver), roots: TrustRoots::System }
    }
}

/// The system's roots are read once, when something is sent over TLS for the first time.
static SYSTEM: LazyLock<Result<Arc<rustls::ClientConfig>, String>> = LazyLock::new(|| {
    let found = rustls_native_certs::load_native_certs();
    let config = trusting(found.certs)?;
    Ok(Arc::new(config))
});

/// A client that trusts these authorities. Those that cannot be read are passed over.
fn trusting(certificates: Vec<CertificateDer<'static>>) -> Result<rustls::ClientConfig, String> {
    let mut roots = rustls::RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(certificates);
    if added == 0 {
        return Err("there are no root certificates".into());
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    let mut config = config.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

impl HttpTransport {
    /// The same transport with another resolver.
    #[must_use]
    pub fn resolving_by(mut self, resolver: Arc<dyn Resolver>) -> HttpTransport {
        self.resolver = resolver;
        self
    }

    /// The same courier, which trusts only these authorities.
    pub fn trusting(mut self, roots: Vec<CertificateDer<'static>>) -> Result<HttpTransport, String> {
        self.roots = TrustRoots::Given(Arc::new(trusting(roots)?));
        Ok(self)
    }

    fn tls(&self) -> Result<Arc<rustls::ClientConfig>, String> {
        match &self.roots {
            TrustRoots::System => SYSTEM.clone(),
            TrustRoots::Given(config) => Ok(config.clone()),
        }
    }

    /// A connection to an address that was judged (C1).
    async fn connect(&self, outbound: &OutboundRequest) -> Result<Box<dyn ByteStream>, SendOutcome> {
        let not_sent = |why: String| SendOutcome::NotSent { why };
        let host = outbound.url.host().unwrap_or_default();
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let secure = outbound.url.scheme_str() == Some("https");
        let port = outbound.url.port_u16().unwrap_or(if secure { 443 } else { 80 });
        let found = match bare.parse::<IpAddr>() {
            Ok(address) => vec![address],
            Err(_) => self.resolver.resolve(bare).await.map_err(|why| not_sent(format!("{bare}: {why}")))?,
        };
        if found.iter().any(|address| !is_allowed(*address, outbound.allow_private)) {
            return Err(SendOutcome::Forbidden { why: format!("{bare} has an address that is not public") });
        }
        let mut why = format!("{bare} has no address");
        for address in found {
            match TcpStream::connect(SocketAddr::new(address, port)).await {
                Err(error) => why = format!("{bare} cannot be reached: {error}"),
                Ok(stream) => {
                    // Requests are written at once; waiting for more would only make them late.
                    let _ = stream.set_nodelay(true);
                    if !secure {
                        return Ok(Box::new(stream));
                    }
                    let name = ServerName::try_from(bare.to_owned())
                        .map_err(|_| not_sent(format!("{bare} cannot be the name of a certificate")))?;
                    let connector = TlsConnector::from(self.tls().map_err(not_sent)?);
                    let secured = connector.connect(name, stream).await;
                    let secured = secured.map_err(|error| not_sent(format!("TLS with {bare}: {error}")))?;
                    return Ok(Box::new(secured));
                }
            }
        }
        Err(not_sent(why))
    }
}

trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for S {}

/// The request as HTTP/1.1 wants it.
fn request(outbound: &OutboundRequest) -> Result<Request<Full<Bytes>>, String> {
    let path = outbound.url.path_and_query().map_or("/", ::http::uri::PathAndQuery::as_str);
    let mut request = Request::builder()
        .method(outbound.method.clone())
        .uri(path)
        .body(Full::new(Bytes::from(outbound.body.clone())))
        .map_err(|error| error.to_string())?;
    let authority = outbound.url.authority().map_or("", ::http::uri::Authority::as_str);
    let headers = request.headers_mut();
    *headers = outbound.headers.clone();
    headers.insert(HOST, HeaderValue::from_str(authority).map_err(|error| error.to_string())?);
    headers.insert(CONTENT_LENGTH, HeaderValue::from(outbound.body.len()));
    headers.insert(CONNECTION, HeaderValue::from_static("close"));
    headers.entry(USER_AGENT).or_insert(HeaderValue::from_static(AGENT));
    Ok(request)
}

/// The answer, with as much of its body as is to be kept (C4). What is missing of it does not change the answer (C3).
async fn reply(
    response: Response<Incoming>,
    outbound: &OutboundRequest,
    until: RequestDeadline<'_>,
) -> TargetResponse {
    let status = response.status().as_u16();
    let after =
        response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
    let retry_after = after.map(|seconds| Duration::from_secs(seconds).min(RETRY_AFTER_MAX));
    let mut kept = Vec::new();
    let mut incoming = response.into_body();
    let all = async {
        while let Some(frame) = incoming.frame().await {
            let Ok(frame) = frame else { return false };
            let Ok(data) = frame.into_data() else { continue };
            let room = outbound.response_max.saturating_sub(kept.len());
            kept.extend_from_slice(data.get(..room).unwrap_or(&data));
            if data.len() > room {
                return false;
            }
        }
        true
    };
    let complete = tokio::select! {
        complete = all => complete,
        () = until => false,
    };
    TargetResponse { status, retry_after, body: kept, complete }
}

type RequestDeadline<'c> = Pin<Box<dyn Future<Output = ()> + Send + 'c>>;

#[async_trait]
impl Transport for HttpTransport {
    async fn send(&self, outbound: &OutboundRequest, clock: &dyn Clock) -> SendOutcome {
        let request = match request(outbound) {
            Ok(request) => request,
            Err(why) => return SendOutcome::NotSent { why },
        };
        let opened = async {
            let stream = self.connect(outbound).await?;
            hyper::client::conn::http1::handshake(TokioIo::new(stream))
                .await
                .map_err(|error| SendOutcome::NotSent { why: error.to_string() })
        };
        let (mut sender, connection) = tokio::select! {
            opened = opened => match opened {
                Ok(opened) => opened,
                Err(sent) => return sent,
            },
            () = clock.sleep(outbound.connect_timeout) => {
                return SendOutcome::NotSent { why: "it could not be reached in time".into() };
            }
        };
        // The connection is driven beside the request, and ends with it.
        let _driven = AbortOnDrop(tokio::spawn(connection));
        let mut until: RequestDeadline<'_> = clock.sleep(outbound.timeout);
        // From here on the request may leave (C3).
        let response = tokio::select! {
            response = sender.send_request(request) => response.map_err(|error| error.to_string()),
            () = &mut until => Err("no answer came in time".into()),
        };
        match response {
            Ok(response) => SendOutcome::Answered(reply(response, outbound, until).await),
            Err(why) => SendOutcome::Unknown { why },
        }
    }
}

/// A task that ends when this is dropped.
struct AbortOnDrop<T>(tokio::task::JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

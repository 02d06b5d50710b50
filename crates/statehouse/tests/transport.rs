//! The courier that speaks HTTP: what it says of requests, and whom it trusts.

#![cfg(feature = "http")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking, as tests do")]

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use http::{HeaderMap, Method};
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use statehouse::egress::http::{HttpTransport, Resolver};
use statehouse::egress::{OutboundRequest, SendOutcome, Transport};
use statehouse_store::SystemClock;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

fn outbound(url: &str) -> OutboundRequest {
    OutboundRequest {
        method: Method::POST,
        url: url.parse().unwrap(),
        headers: HeaderMap::new(),
        body: b"{}".to_vec(),
        connect_timeout: Duration::from_secs(20),
        timeout: Duration::from_secs(20),
        response_max: 1_000,
        allow_private: true,
    }
}

/// A server with a certificate for this name. It answers with the name that the client asked for.
async fn secured(name: &str) -> (SocketAddr, CertificateDer<'static>) {
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(vec![name.to_owned()]).unwrap().self_signed(&key).unwrap();
    let der = certificate.der().clone();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![der.clone()], PrivatePkcs8KeyDer::from(key.serialize_der()).into())
        .unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let Ok(mut stream) = acceptor.accept(stream).await else { continue };
            let name = stream.get_ref().1.server_name().unwrap_or_default().to_owned();
            let mut bytes = Vec::new();
            while !bytes.ends_with(b"{}") {
                if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
                    break;
                }
            }
            let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{name}", name.len());
            let _ = stream.write_all(answer.as_bytes()).await;
            let _ = stream.shutdown().await;
        }
    });
    (address, der)
}

/// A resolver that says this, and counts how often it was asked.
#[derive(Debug)]
struct Says(Vec<IpAddr>, AtomicUsize);

#[async_trait]
impl Resolver for Says {
    async fn resolve(&self, _: &str) -> Result<Vec<IpAddr>, String> {
        self.1.fetch_add(1, Ordering::SeqCst);
        Ok(self.0.clone())
    }
}

fn says(addresses: &[&str]) -> Arc<Says> {
    Arc::new(Says(addresses.iter().map(|text| text.parse().unwrap()).collect(), AtomicUsize::new(0)))
}

#[tokio::test]
async fn tls_is_checked_against_the_name_and_the_authority() {
    let (address, authority) = secured("target.example").await;
    let (_, stranger) = secured("target.example").await;
    let resolver = says(&["127.0.0.1"]);
    let transport = HttpTransport::default().resolving_by(resolver.clone());
    let send = async |transport: &HttpTransport, host: &str| {
        transport.send(&outbound(&format!("https://{host}:{}/", address.port())), &SystemClock).await
    };
    let trusting = transport.clone().trusting(vec![authority]).unwrap();
    match send(&trusting, "target.example").await {
        SendOutcome::Answered(reply) => {
            assert_eq!((reply.status, reply.body), (200, b"target.example".to_vec()));
        }
        other => panic!("{other:?}"),
    }
    // The name was resolved once: the connection goes to the checked address.
    assert_eq!(resolver.1.load(Ordering::SeqCst), 1);
    // Another name, or an unknown authority: nothing was sent.
    for (transport, host) in [
        (&trusting, "other.example"),
        (&transport.clone().trusting(vec![stranger]).unwrap(), "target.example"),
        (&transport, "target.example"),
    ] {
        let sent = send(transport, host).await;
        assert!(matches!(sent, SendOutcome::NotSent { .. }), "{host}: {sent:?}");
    }
}

#[tokio::test]
async fn every_address_of_a_name_is_judged() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://name.example:{}/", listener.local_addr().unwrap().port());
    for (addresses, allow_private) in [
        (&["127.0.0.1"][..], false),
        (&["8.8.8.8", "127.0.0.1"], false),
        (&["127.0.0.1", "169.254.169.254"], true),
        (&["::ffff:127.0.0.1"], false),
        (&["::"], true),
    ] {
        let transport = HttpTransport::default().resolving_by(says(addresses));
        let sent = transport.send(&OutboundRequest { allow_private, ..outbound(&url) }, &SystemClock).await;
        let SendOutcome::Forbidden { why } = sent else { panic!("{addresses:?}: {sent:?}") };
        // Who made the effect reads why, and must not learn the addresses of an inner network from it.
        assert!(addresses.iter().all(|address| !why.contains(address)), "{addresses:?}: {why}");
    }
    // Nor where an inner address is allowed, and nothing listens there.
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let transport = HttpTransport::default().resolving_by(says(&["127.0.0.1"]));
    let inner =
        OutboundRequest { allow_private: true, ..outbound(&format!("http://name.example:{closed}/")) };
    let sent = transport.send(&inner, &SystemClock).await;
    let SendOutcome::NotSent { why } = sent else { panic!("{sent:?}") };
    assert!(!why.contains("127.0.0.1"), "{why}");
    // No client has connected.
    let accepted = tokio::select! {
        accepted = listener.accept() => Some(accepted),
        () = tokio::task::yield_now() => None,
    };
    assert!(accepted.is_none());
}

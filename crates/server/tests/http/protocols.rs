//! HTTP/2: without TLS by prior knowledge, and over TLS where the client asks for it.

use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::ServerName;
use statehouse_server::Config;
use statehouse_server::config::Tls;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use crate::support::{Running, Site, cases};

cases![http2_by_prior_knowledge, http2_over_tls, floods_of_headers_are_refused_there_too];

type Sender = http2::SendRequest<Full<Bytes>>;

async fn shaken(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Sender {
    let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    sender
}

async fn connect(server: &Running) -> Sender {
    shaken(TcpStream::connect(("127.0.0.1", server.port)).await.unwrap()).await
}

fn request(method: &str, path: &str, body: impl Into<Bytes>) -> http::Request<Full<Bytes>> {
    http::Request::builder()
        .method(method)
        .uri(format!("http://localhost{path}"))
        .header("content-type", "application/json")
        .body(Full::new(body.into()))
        .unwrap()
}

async fn reply(sender: &Sender, request: http::Request<Full<Bytes>>) -> (u16, http::HeaderMap, Bytes) {
    let mut sender = sender.clone();
    sender.ready().await.unwrap();
    let (parts, body) = sender.send_request(request).await.unwrap().into_parts();
    assert_eq!(parts.version, http::Version::HTTP_2);
    (parts.status.as_u16(), parts.headers, body.collect().await.unwrap().to_bytes())
}

/// Many requests at once on one connection, writes and reads and what has no body.
async fn exercise(sender: &Sender) {
    let creates = (0..50).map(|user| {
        let body = format!("{{\"user_id\": {user}, \"display_name\": \"Ann\"}}");
        async move { reply(sender, request("POST", "/v1/profile", body)).await }
    });
    for (status, headers, _) in futures_util::future::join_all(creates).await {
        assert_eq!((status, headers["etag"].as_bytes()), (201, &b"\"1\""[..]));
    }
    let (status, headers, body) = reply(sender, request("HEAD", "/v1/profile/7", "")).await;
    assert_eq!((status, body.len()), (200, 0));
    assert!(headers["content-length"].to_str().unwrap().parse::<usize>().unwrap() > 0);
    let (status, _, body) = reply(sender, request("GET", "/v1/profile/99", "")).await;
    assert_eq!(status, 404);
    assert!(String::from_utf8_lossy(&body).contains("\"not_found\""));
    let (status, _, _) = reply(sender, request("POST", "/v1/profile", vec![b' '; 5 << 20])).await;
    assert_eq!(status, 413);
}

async fn http2_by_prior_knowledge(site: Site) {
    let server = site.server().await;
    let sender = connect(&server).await;
    exercise(&sender).await;
    // A page of another place is turned away here too, by the authority it names.
    let mut foreign = request("GET", "/v1/profile/1", "");
    *foreign.uri_mut() = "http://evil.example/v1/profile/1".parse().unwrap();
    assert_eq!(reply(&sender, foreign).await.0, 403);
    // A stream goes on while others come and go on the same connection.
    let mut events = sender.clone();
    events.ready().await.unwrap();
    let mut events =
        events.send_request(request("GET", "/v1/events?after=oldest", "")).await.unwrap().into_body();
    let mut told = String::new();
    while !told.contains("profile/49") {
        let frame = events.frame().await.unwrap().unwrap();
        told.push_str(&String::from_utf8_lossy(frame.data_ref().unwrap()));
    }
    assert_eq!(reply(&sender, request("GET", "/livez", "")).await.0, 200);
    drop((events, sender));
    server.stop().await;
}

async fn http2_over_tls(site: Site) {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".into()]).unwrap();
    let (certificates, key) = (site.folder().join("cert.pem"), site.folder().join("key.pem"));
    std::fs::write(&certificates, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let server = site
        .server_with(Config {
            tls: Some(Tls { certificates, key, client_authorities: None }),
            ..Config::default()
        })
        .await;
    let mut roots = rustls::RootCertStore::empty();
    roots.add(made.cert.der().clone()).unwrap();
    for (offered, agreed) in [(vec!["h2", "http/1.1"], "h2"), (vec!["http/1.1"], "http/1.1")] {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let client = rustls::ClientConfig::builder_with_provider(provider);
        let client = client.with_safe_default_protocol_versions().unwrap();
        let mut client = client.with_root_certificates(roots.clone()).with_no_client_auth();
        client.alpn_protocols = offered.iter().map(|name| name.as_bytes().to_vec()).collect();
        let tcp = TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
        let connector = tokio_rustls::TlsConnector::from(Arc::new(client));
        let stream = connector.connect(ServerName::try_from("localhost").unwrap(), tcp).await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(agreed.as_bytes()));
        if agreed == "h2" {
            exercise(&shaken(stream).await).await;
        }
    }
}

async fn floods_of_headers_are_refused_there_too(site: Site) {
    let server = site.server().await;
    let sender = connect(&server).await;
    let mut many = request("GET", "/livez", "");
    for number in 0..100 {
        let name: http::HeaderName = format!("x-flood-{number}").parse().unwrap();
        many.headers_mut().insert(name, http::HeaderValue::from_static("1"));
    }
    let (status, _, body) = reply(&sender, many).await;
    assert_eq!(status, 431);
    assert!(String::from_utf8_lossy(&body).contains("headers_too_large"));
    assert_eq!(reply(&sender, request("GET", "/livez", "")).await.0, 200);
}

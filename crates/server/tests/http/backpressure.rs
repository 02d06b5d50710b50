//! Clients that do not accept their responses: HTTP/2 clients without a flow-control window above all.

use std::future::Future;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::json;
use statehouse_server::Config;
use statehouse_store::{Clock as _, SystemClock};
use tokio::net::TcpStream;

use crate::support::{Running, Site, cases};

cases![
    zero_windows_do_not_hold_connections,
    a_stalled_stream_is_reset_and_its_connection_goes_on,
    event_streams_need_a_reader,
    unsent_bytes_of_a_connection_are_bounded,
    unsent_bytes_of_a_tenant_are_bounded,
];

type Sender = http2::SendRequest<Full<Bytes>>;
type Reply = http::Response<hyper::body::Incoming>;

/// Far more than any of these cases needs: reached only if the server holds on to a client for ever.
const FOR_EVER: Duration = Duration::from_secs(60);

async fn in_time<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::select! {
        done = work => done,
        () = SystemClock.sleep(FOR_EVER) => panic!("{what}: still waiting"),
    }
}

/// A connection whose streams may receive this many bytes until the client reads.
async fn connect(server: &Running, window: u32) -> Sender {
    let stream = TcpStream::connect(("127.0.0.1", server.port)).await.unwrap();
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder.initial_stream_window_size(window).initial_connection_window_size((1 << 30) - 1);
    let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    sender
}

async fn get(sender: &Sender, path: &str) -> Result<Reply, hyper::Error> {
    let mut sender = sender.clone();
    sender.ready().await?;
    let request = http::Request::get(format!("http://localhost{path}")).body(Full::default()).unwrap();
    sender.send_request(request).await
}

/// Waits until the server has ended a response that it could not send.
async fn until_reset(reply: Reply) {
    let mut body = reply.into_body();
    while let Some(frame) = body.frame().await {
        if frame.is_err() {
            return;
        }
    }
    panic!("the response was complete");
}

/// A server whose list of profiles is about 1.2 MB.
async fn with_large_list(site: &Site, config: Config) -> Running {
    let server = site.server_with(config).await;
    for user in 0..4 {
        let body = json!({"user_id": user, "display_name": "x".repeat(300_000)});
        server.put("POST", "/v1/profile", &[("connection", "close")], body).await.ok(201);
    }
    server
}

async fn zero_windows_do_not_hold_connections(site: Site) {
    let mut config = Config::default();
    config.limits.write_timeout_ms = 500;
    config.limits.connections = 3;
    let server = site.server_with(config).await;
    let mut clients = Vec::new();
    for _ in 0..3 {
        let sender = connect(&server, 0).await;
        let reply = get(&sender, "/livez").await.unwrap();
        assert_eq!(reply.status(), 200);
        clients.push((sender, reply));
    }
    for (sender, reply) in clients {
        in_time("a response without a window", until_reset(reply)).await;
        // The connection is closed too: this client accepts nothing at all.
        let closed = async {
            while !sender.is_closed() {
                tokio::task::yield_now().await;
            }
        };
        in_time("a connection without a window", closed).await;
    }
    in_time("the next client", server.get("/livez")).await.ok(200);
}

async fn a_stalled_stream_is_reset_and_its_connection_goes_on(site: Site) {
    let mut config = Config::default();
    config.limits.write_timeout_ms = 1_000;
    let server = with_large_list(&site, config).await;
    let sender = connect(&server, 100_000).await;
    // This body is not read until the server has given it up.
    let stalled = get(&sender, "/v1/profile?limit=4").await.unwrap();
    let given_up = async {
        loop {
            let metrics = get(&sender, "/metrics").await.unwrap().into_body().collect().await.unwrap();
            let metrics = String::from_utf8_lossy(&metrics.to_bytes()).into_owned();
            if metrics.contains("statehouse_http_stalled_responses_total 1\n") {
                break;
            }
            tokio::task::yield_now().await;
        }
    };
    in_time("a response that is not read", given_up).await;
    until_reset(stalled).await;
    assert_eq!(get(&sender, "/livez").await.unwrap().status(), 200);
}

async fn event_streams_need_a_reader(site: Site) {
    let mut config = Config::default();
    config.limits.write_timeout_ms = 500;
    let server = site.server_with(config).await;
    let sender = connect(&server, 0).await;
    let events = get(&sender, "/v1/events").await.unwrap();
    in_time("an event stream without a window", until_reset(events)).await;
}

/// Asks for the large list until an answer says that too much is unsent. Keeps the responses before it unread.
async fn flood(sender: &Sender, replies: &mut Vec<Reply>) -> Option<Reply> {
    for _ in 0..20 {
        let reply = get(sender, "/v1/profile?limit=4").await.unwrap();
        if reply.status() == 429 {
            return Some(reply);
        }
        assert_eq!(reply.status(), 200);
        replies.push(reply);
    }
    None
}

async fn unsent_bytes_of_a_connection_are_bounded(site: Site) {
    let mut config = Config::default();
    config.limits.connection_unsent_bytes = 3 << 20;
    let server = with_large_list(&site, config).await;
    let sender = connect(&server, 1_000).await;
    let mut unread = Vec::new();
    let refused = in_time("a flood", flood(&sender, &mut unread)).await.expect("no request was refused");
    assert_eq!(unread.len(), 2, "two responses of 1.2 MB fit into 3 MiB");
    assert_eq!(refused.headers()["retry-after"], "1");
    let body = refused.into_body().collect().await.unwrap().to_bytes();
    assert!(String::from_utf8_lossy(&body).contains("\"too_many_requests\""));
    // What is read makes room, and other connections are not affected.
    let other = connect(&server, 1_000).await;
    assert_eq!(get(&other, "/v1/profile?limit=4").await.unwrap().status(), 200);
    for reply in unread {
        reply.into_body().collect().await.unwrap();
    }
    let again = async { while get(&sender, "/v1/profile?limit=4").await.unwrap().status() != 200 {} };
    in_time("a request after the others were read", again).await;
}

async fn unsent_bytes_of_a_tenant_are_bounded(site: Site) {
    let mut config = Config::default();
    config.limits.tenant_unsent_bytes = 3 << 20;
    let server = with_large_list(&site, config).await;
    let (first, second) = (connect(&server, 1_000).await, connect(&server, 1_000).await);
    let mut unread = vec![get(&first, "/v1/profile?limit=4").await.unwrap()];
    in_time("a flood", flood(&second, &mut unread)).await.expect("no request was refused");
    assert_eq!(unread.len(), 2, "two responses of 1.2 MB fit into 3 MiB");
    server.get_with("/v1/profile?limit=4", &[("statehouse-tenant", "other")]).await.ok(200);
}

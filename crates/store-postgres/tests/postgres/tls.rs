//! TLS to the server: encrypted when asked for, and with `verify-full` only to a server that can be trusted.

use std::path::PathBuf;

use statehouse_store::StoreError;
use statehouse_store_postgres::{Encryption, PostgresStore};

use crate::support::{Namespace, raw};

/// The server's own certificate, which vouches for itself.
async fn certificate() -> PathBuf {
    let text =
        "select current_setting('data_directory'), current_setting('ssl'), current_setting('ssl_cert_file')";
    let row = raw().await.query_one(text, &[]).await.unwrap();
    assert_eq!(
        row.get::<_, &str>(1),
        "on",
        "the server has to offer TLS, as the one of scripts/postgres does"
    );
    PathBuf::from(row.get::<_, String>(0)).join(row.get::<_, String>(2))
}

/// How many of the store's connections are encrypted, and how many are not.
async fn connections(application: &str) -> (i64, i64) {
    let text = "select count(*) filter (where s.ssl), count(*) filter (where not s.ssl) from pg_stat_ssl s \
                join pg_stat_activity a using (pid) where a.application_name = $1";
    let row = raw().await.query_one(text, &[&application]).await.unwrap();
    (row.get(0), row.get(1))
}

async fn open(
    encryption: Encryption,
    trusted: Option<PathBuf>,
    application: &str,
) -> Result<PostgresStore, StoreError> {
    let url = crate::support::url();
    let mark = if url.contains('?') { '&' } else { '?' };
    let namespace = Namespace::new();
    let mut options = statehouse_store_postgres::PostgresOptions::from_url(&format!(
        "{url}{mark}application_name={application}"
    ))?;
    options.schema = namespace.schema().to_owned();
    options.encrypt(encryption);
    options.root_certificates = trusted;
    let store = PostgresStore::open(options).await?;
    // A connection that stays until the store is dropped.
    let scan = statehouse_store::Scan::all(&crate::support::counters("nowhere"));
    drop(statehouse_store::Store::scan(&store, &scan).await);
    Ok(store)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_are_as_secure_as_asked_for() {
    let certificate = certificate().await;
    let plain = open(Encryption::Disable, None, "tls_disable").await.unwrap();
    assert!(matches!(connections("tls_disable").await, (0, 1..)));
    let encrypted = open(Encryption::Require, None, "tls_require").await.unwrap();
    assert!(matches!(connections("tls_require").await, (1.., 0)));
    let verified = open(Encryption::VerifyFull, Some(certificate), "tls_verify").await.unwrap();
    assert!(matches!(connections("tls_verify").await, (1.., 0)));
    // No other authority vouches for this server.
    let error = open(Encryption::VerifyFull, None, "tls_stranger").await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error}");
    drop((plain, encrypted, verified));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_without_certificates_is_refused_by_name() {
    let error = open(Encryption::VerifyFull, Some("/nowhere/root.crt".into()), "tls_file").await.unwrap_err();
    assert!(error.to_string().contains("/nowhere/root.crt"), "{error}");
}

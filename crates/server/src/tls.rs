//! TLS from certificate and key files. The crypto provider is named here, so that it does not depend on which provider
//! another part of the process installed.
//!
//! Certificates are renewed while the server runs, so the files are loaded again when they have changed. Files that cannot be
//! used do not replace those in use. With `client_authorities` a client must present a certificate that one of them signed.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use statehouse_store::{Clock, Time};
use tokio_rustls::TlsAcceptor;

use crate::SetupError;
use crate::config::Tls;

/// The files and what they contained when they were last loaded.
pub struct TlsFiles {
    files: Tls,
    /// Minimum time between two looks at the files.
    interval: Duration,
    loaded: Mutex<LoadedTls>,
}

struct LoadedTls {
    contents: TlsContents,
    acceptor: TlsAcceptor,
    checked_at: Option<Time>,
}

/// The bytes of the files.
#[derive(PartialEq, Eq)]
struct TlsContents {
    certificates: Vec<u8>,
    key: Vec<u8>,
    authorities: Option<Vec<u8>>,
}

impl TlsFiles {
    /// Loads the files.
    pub fn load(files: Tls, interval: Duration) -> Result<TlsFiles, SetupError> {
        let contents = TlsContents::read(&files)?;
        let acceptor = contents.acceptor(&files)?;
        let loaded = Mutex::new(LoadedTls { contents, acceptor, checked_at: None });
        Ok(TlsFiles { files, interval, loaded })
    }

    /// The acceptor for a new connection. Looks at the files if the last look is too long ago.
    pub async fn acceptor(self: &Arc<Self>, clock: &dyn Clock) -> TlsAcceptor {
        if self.begin_check(clock.now()) {
            let this = self.clone();
            let checked = tokio::task::spawn_blocking(move || this.reload()).await;
            if let Ok(Err(error)) = checked {
                tracing::warn!(target: "statehouse::http", %error, "the TLS files cannot be used; those in use stay");
            }
        }
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner).acceptor.clone()
    }

    /// Whether the files must be looked at now.
    fn begin_check(&self, now: Time) -> bool {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = loaded.checked_at.is_none_or(|at| now.since(at) >= self.interval);
        if is_due {
            loaded.checked_at = Some(now);
        }
        is_due
    }

    fn reload(&self) -> Result<(), SetupError> {
        let contents = TlsContents::read(&self.files)?;
        if self.loaded.lock().unwrap_or_else(PoisonError::into_inner).contents == contents {
            return Ok(());
        }
        let acceptor = contents.acceptor(&self.files)?;
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        (loaded.contents, loaded.acceptor) = (contents, acceptor);
        tracing::info!(target: "statehouse::http", "the TLS files were loaded again");
        Ok(())
    }
}

impl TlsContents {
    fn read(files: &Tls) -> Result<TlsContents, SetupError> {
        let read = |path: &Path| fs::read(path).map_err(|error| bad(path, error));
        Ok(TlsContents {
            certificates: read(&files.certificates)?,
            key: read(&files.key)?,
            authorities: files.client_authorities.as_deref().map(read).transpose()?,
        })
    }

    fn acceptor(&self, files: &Tls) -> Result<TlsAcceptor, SetupError> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let certificates = certificates(&files.certificates, &self.certificates)?;
        let key = PrivateKeyDer::from_pem_slice(&self.key).map_err(|error| bad(&files.key, error))?;
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|error| bad(&files.certificates, error))?;
        let builder = match files.client_authorities.as_deref().zip(self.authorities.as_deref()) {
            None => builder.with_no_client_auth(),
            Some((path, authorities)) => {
                let mut roots = RootCertStore::empty();
                for authority in self::certificates(path, authorities)? {
                    roots.add(authority).map_err(|error| bad(path, error))?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
                builder.with_client_cert_verifier(verifier.map_err(|error| bad(path, error))?)
            }
        };
        let mut config =
            builder.with_single_cert(certificates, key).map_err(|error| bad(&files.certificates, error))?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(TlsAcceptor::from(Arc::new(config)))
    }
}

fn bad(path: &Path, why: impl std::fmt::Display) -> SetupError {
    SetupError::Tls(format!("{}: {why}", path.display()))
}

fn certificates(path: &Path, text: &[u8]) -> Result<Vec<CertificateDer<'static>>, SetupError> {
    let certificates = CertificateDer::pem_slice_iter(text).collect::<Result<Vec<_>, _>>();
    let certificates = certificates.map_err(|error| bad(path, error))?;
    if certificates.is_empty() {
        return Err(bad(path, "it has no certificate in PEM form"));
    }
    Ok(certificates)
}

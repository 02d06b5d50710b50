//! TLS from certificate and key files. The crypto provider is named here, so that it does not depend on which provider
//! another part of the process installed.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

use crate::SetupError;
use crate::config::Tls;

/// Loads the files and returns the acceptor.
pub fn acceptor(files: &Tls) -> Result<TlsAcceptor, SetupError> {
    let bad = |path: &Path, why: String| SetupError::Tls(format!("{}: {why}", path.display()));
    let read = |path: &Path| {
        let mut text = Vec::new();
        let read = File::open(path).and_then(|mut file| file.read_to_end(&mut text));
        read.map(|_| text).map_err(|error| bad(path, error.to_string()))
    };
    let certificates = CertificateDer::pem_slice_iter(&read(&files.certificates)?)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| bad(&files.certificates, error.to_string()))?;
    if certificates.is_empty() {
        return Err(bad(&files.certificates, "it has no certificate in PEM form".into()));
    }
    let key = PrivateKeyDer::from_pem_slice(&read(&files.key)?)
        .map_err(|error| bad(&files.key, error.to_string()))?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(certificates, key))
        .map_err(|error| bad(&files.certificates, error.to_string()))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

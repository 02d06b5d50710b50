//! TLS to the server, with a provider that is passed in: which one a process has as its default is not our affair.
//!
//! `require` means what it means to every PostgreSQL client: encrypted, without a check of the server's identity. Only `verify-full`
//! protects against a man in the middle, and it trusts the system's certificates or a file.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use statehouse_store::StoreError;
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::options::{Encryption, PostgresOptions};

fn bad(why: impl std::fmt::Display) -> StoreError {
    StoreError::unavailable(format!("TLS to the PostgreSQL server cannot be set up: {why}"))
}

/// What makes connections secure, as the options ask.
pub(crate) fn connector(options: &PostgresOptions) -> Result<MakeRustlsConnect, StoreError> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(bad)?;
    let config = if options.encryption == Encryption::VerifyFull {
        builder.with_root_certificates(roots(options)?).with_no_client_auth()
    } else {
        builder
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyServer(provider)))
            .with_no_client_auth()
    };
    Ok(MakeRustlsConnect::new(config))
}

fn roots(options: &PostgresOptions) -> Result<RootCertStore, StoreError> {
    let mut roots = RootCertStore::empty();
    match &options.root_certificates {
        Some(path) => {
            let unreadable = |error| bad(format!("{}: {error}", path.display()));
            for certificate in CertificateDer::pem_file_iter(path).map_err(unreadable)? {
                roots.add(certificate.map_err(unreadable)?).map_err(bad)?;
            }
        }
        None => {
            let found = rustls_native_certs::load_native_certs();
            roots.add_parsable_certificates(found.certs);
        }
    }
    if roots.is_empty() {
        return Err(bad("there are no certificates to trust; name a file with sslrootcert"));
    }
    Ok(roots)
}

/// Accepts every server's certificate, but only from a server that holds its key.
#[derive(Debug)]
struct AnyServer(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

//! TLS settings: the trusted root certificates and the client certificate.

use std::{fmt, io, pin::Pin, sync::Arc};

use tokio::net::TcpStream;
use tokio_rustls::{
    TlsConnector,
    rustls::{
        AlertDescription, CertificateError, ClientConfig, Error, RootCertStore,
        crypto::CryptoProvider,
        pki_types::{
            CertificateDer, InvalidDnsNameError, PrivateKeyDer, ServerName, pem::PemObject,
        },
    },
};

use super::{
    error::TransportError,
    traffic::{Stream, boxed},
};

pub(crate) type Connector = TlsConnector;

/// The trusted servers, and the client certificate. By default, the root certificates of the system
/// are trusted, and with the feature `tls-rustls-webpki-roots` those of the crate `webpki-roots`.
#[derive(Clone, Default)]
pub struct TlsSettings {
    roots: Option<RootCertStore>,
    client: Option<Arc<Identity>>,
}

/// A certificate with its chain and its private key.
struct Identity {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl TlsSettings {
    /// Trusts only these root certificates, one or more in PEM format.
    pub fn ca_certificates(self, pem: &[u8]) -> Result<Self, TransportError> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(pem, "the CA certificates")? {
            roots.add(certificate).map_err(|error| unusable("the CA certificates", error))?;
        }
        Ok(Self { roots: Some(roots), ..self })
    }

    /// Identifies the client by a certificate, optionally with its chain, and its private key. Both
    /// are in PEM format.
    pub fn client_certificate(
        self,
        chain_pem: &[u8],
        key_pem: &[u8],
    ) -> Result<Self, TransportError> {
        let chain = certificates(chain_pem, "the client certificate")?;
        let key = PrivateKeyDer::from_pem_slice(key_pem)
            .map_err(|error| unusable("the client's private key", error))?;
        Ok(Self { client: Some(Arc::new(Identity { chain, key })), ..self })
    }

    fn connector(&self) -> Result<Connector, TransportError> {
        let roots = match &self.roots {
            Some(roots) => roots.clone(),
            None => default_roots()?,
        };
        let config = ClientConfig::builder_with_provider(crypto_provider()?)
            .with_safe_default_protocol_versions()
            .map_err(|error| {
                TransportError::config(format!(
                    "cannot use TLS: {error}; install a crypto provider with TLS 1.2 or 1.3"
                ))
            })?
            .with_root_certificates(roots);
        let config = match self.client.as_deref() {
            Some(Identity { chain, key }) => config
                .with_client_auth_cert(chain.clone(), key.clone_key())
                .map_err(|error| unusable("the client certificate", error))?,
            None => config.with_no_client_auth(),
        };
        Ok(Arc::new(config).into())
    }
}

/// Makes what begins TLS by these settings, and by others where these have none.
pub(crate) fn connector(
    own: Option<&TlsSettings>,
    other: Option<&TlsSettings>,
) -> Result<Connector, TransportError> {
    let [own, other] = [own, other].map(|tls| tls.cloned().unwrap_or_default());
    let (roots, client) = (own.roots.or(other.roots), own.client.or(other.client));
    TlsSettings { roots, client }.connector()
}

pub(super) async fn begin(
    connector: &Connector,
    host: &str,
    tcp: TcpStream,
) -> io::Result<Pin<Box<dyn Stream>>> {
    let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
    Ok(boxed(connector.connect(name, tcp).await?))
}

pub(super) const CHECK_CLIENT: &str = "; check the certificate of \
     `RedisConfig::client_certificate`, and that the server trusts the CA that signed it";
const NO_TLS: &str = "; if the port does not expect TLS, write redis:// and set no certificates";

const OTHER_CERTIFICATE: &str = "; `openssl s_client -connect HOST:PORT` shows the certificate: \
     give the server one that clients accept";

/// Returns what to do about a handshake that failed.
pub(super) fn remedy(error: &io::Error) -> &'static str {
    use AlertDescription as Alert;
    use CertificateError as Bad;

    let cause = error.get_ref();
    if cause.is_some_and(|cause| cause.is::<InvalidDnsNameError>()) {
        return "; give the server a host name or an address that a certificate can contain";
    }
    match cause.and_then(|cause| cause.downcast_ref()) {
        Some(Error::InvalidCertificate(error)) => match error {
            Bad::Expired | Bad::ExpiredContext { .. } => {
                "; renew the certificate of the server, or set the clock of this host"
            }
            Bad::NotValidYet | Bad::NotValidYetContext { .. } => {
                "; set the clock of this host, or that of the host that made the certificate"
            }
            Bad::NotValidForName | Bad::NotValidForNameContext { .. } => {
                "; connect by a name that is in the certificate: a subject alternative name, as \
                 its common name does not count"
            }
            Bad::UnknownIssuer => {
                "; give the CA that signed the certificate to `RedisConfig::ca_certificates`"
            }
            Bad::BadSignature => {
                "; a CA with this name is known, but with another key: give the CA that signed the \
                 certificate to `RedisConfig::ca_certificates`"
            }
            Bad::InvalidPurpose | Bad::InvalidPurposeContext { .. } => {
                "; give the server a certificate for servers (extended key usage `serverAuth`)"
            }
            Bad::Revoked => "; give the server a new certificate",
            Bad::Other(error) => of_webpki(&format!("{error:?}")),
            _ => OTHER_CERTIFICATE,
        },
        Some(Error::AlertReceived(
            Alert::BadCertificate
            | Alert::CertificateExpired
            | Alert::CertificateRequired
            | Alert::CertificateRevoked
            | Alert::CertificateUnknown
            | Alert::UnknownCA
            | Alert::UnsupportedCertificate,
        )) => CHECK_CLIENT,
        Some(Error::AlertReceived(Alert::UnrecognisedName)) => {
            "; connect by a name that the server knows"
        }
        Some(
            Error::AlertReceived(
                Alert::HandshakeFailure | Alert::InsufficientSecurity | Alert::ProtocolVersion,
            )
            | Error::PeerIncompatible(_),
        ) => "; let the server accept TLS 1.2 or 1.3, with the ciphers of current clients",
        _ => NO_TLS,
    }
}

/// Returns what to do about an error of the crate `webpki`, which is none of the dependencies.
fn of_webpki(error: &str) -> &'static str {
    if error.contains("CaUsedAsEndEntity") {
        return "; the server presents the certificate of a CA: give it one without `CA:TRUE`, \
                signed by that CA or by itself, and give the signer to \
                `RedisConfig::ca_certificates`";
    }
    if error.contains("UnsupportedCertVersion") {
        return "; give the server a certificate of version 3, with a subject alternative name";
    }
    OTHER_CERTIFICATE
}

fn certificates(pem: &[u8], what: &str) -> Result<Vec<CertificateDer<'static>>, TransportError> {
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let certificates = certificates.map_err(|error| unusable(what, error))?;
    match certificates.is_empty() {
        true => Err(unusable(what, "there is no certificate in it")),
        false => Ok(certificates),
    }
}

fn unusable(what: &str, why: impl fmt::Display) -> TransportError {
    TransportError::config(format!("cannot use {what}: {why}; check the PEM file"))
}

/// Returns the provider that the application has installed, or else `ring`.
fn crypto_provider() -> Result<Arc<CryptoProvider>, TransportError> {
    let installed = CryptoProvider::get_default().cloned();
    #[cfg(feature = "tls-rustls")]
    let installed = installed
        .or_else(|| Some(Arc::new(tokio_rustls::rustls::crypto::ring::default_provider())));
    installed.ok_or_else(|| {
        TransportError::config(
            "cannot use TLS: rustls has no crypto provider; enable the feature `tls-rustls`, or \
             call `rustls::crypto::CryptoProvider::install_default` when the process starts",
        )
    })
}

/// Returns the root certificates of the system and, with that feature, those of `webpki-roots`. A
/// feature takes nothing away: another crate of the program can have enabled it.
fn default_roots() -> Result<RootCertStore, TransportError> {
    let mut roots = RootCertStore::empty();
    #[cfg(feature = "tls-rustls-webpki-roots")]
    roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    let found = rustls_native_certs::load_native_certs();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        let why = found.errors.first().map(|error| format!(": {error}")).unwrap_or_default();
        return Err(TransportError::config(format!(
            "cannot find the system's root certificates{why}; install them, or give those of the \
             server to `RedisConfig::ca_certificates`"
        )));
    }
    Ok(roots)
}

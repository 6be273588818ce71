//! The public TLS settings.

use super::transport::TlsSettings;
use crate::error::StoreError;

/// TLS settings of a [`RedisConfig`](crate::store::RedisConfig): the trusted servers, and the
/// client certificate.
///
/// By default, the root certificates of the system are trusted, and with the feature
/// `tls-rustls-webpki-roots` also those of the crate `webpki-roots`.
///
/// The crypto provider is the one that the application has installed, by
/// `rustls::crypto::CryptoProvider::install_default`. Without one it is `ring`, if the feature
/// `tls-rustls` is enabled; with `tls-rustls-no-provider` alone, the store is not made.
///
/// # Examples
///
/// ```no_run
/// use std::fs;
/// use tower_ratelimit::{
///     RedisStore,
///     store::{RedisConfig, Tls},
/// };
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let tls = Tls::new()
///     .ca_certificates(fs::read("ca.pem")?)?
///     .client_certificate(fs::read("client.pem")?, fs::read("client.key")?)?;
/// let store = RedisStore::new(RedisConfig::server("rediss://redis.internal")?.tls(tls))?;
/// # let _ = store;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Tls(pub(super) TlsSettings);

impl Tls {
    /// Makes settings that trust the default root certificates, without a client certificate.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Trusts only these root certificates, one or more in PEM format.
    ///
    /// # Errors
    ///
    /// If the text contains no certificate, or an invalid one.
    pub fn ca_certificates(self, pem: impl AsRef<[u8]>) -> Result<Self, StoreError> {
        Ok(Self(self.0.ca_certificates(pem.as_ref())?))
    }

    /// Identifies the client by a certificate, optionally with its chain, and its private key. Both
    /// are in PEM format.
    ///
    /// # Errors
    ///
    /// If one of them is invalid.
    pub fn client_certificate(
        self,
        chain_pem: impl AsRef<[u8]>,
        key_pem: impl AsRef<[u8]>,
    ) -> Result<Self, StoreError> {
        Ok(Self(self.0.client_certificate(chain_pem.as_ref(), key_pem.as_ref())?))
    }
}

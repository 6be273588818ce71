//! In place of `tls.rs`, if TLS is not compiled in: no connector can be made.

use std::{io, pin::Pin};

use tokio::net::TcpStream;

use super::{error::TransportError, traffic::Stream};

#[derive(Clone)]
pub enum TlsSettings {}

pub(crate) type Connector = TlsSettings;

pub(super) const CHECK_CLIENT: &str = "";

pub(crate) fn connector(
    _: Option<&TlsSettings>,
    _: Option<&TlsSettings>,
) -> Result<Connector, TransportError> {
    Err(TransportError::config(
        "cannot use a rediss:// URL: TLS is not compiled in; enable the feature `tls-rustls`",
    ))
}

pub(super) async fn begin(
    connector: &Connector,
    _: &str,
    _: TcpStream,
) -> io::Result<Pin<Box<dyn Stream>>> {
    match *connector {}
}

pub(super) fn remedy(_: &io::Error) -> &'static str {
    ""
}

//! Requests over a connection each. HTTP/1.0: a response ends with its connection.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpSocket,
};

/// A request to a server of this machine.
pub struct Request<'a> {
    pub to: SocketAddr,
    /// An address of this machine.
    pub from: Ipv4Addr,
    /// Such as `GET /`.
    pub start: &'a str,
    /// A header line, or nothing.
    pub header: &'a str,
}

impl Request<'_> {
    /// Sends the request. Returns the status and the body.
    pub async fn send(&self) -> io::Result<(u16, String)> {
        let socket = TcpSocket::new_v4()?;
        socket.bind(SocketAddr::new(IpAddr::V4(self.from), 0))?;
        let mut stream = socket.connect(self.to).await?;
        let end = if self.header.is_empty() { "" } else { "\r\n" };
        let head = format!("{} HTTP/1.0\r\nhost: {}\r\n{}{end}", self.start, self.to, self.header);
        stream.write_all(format!("{head}\r\n").as_bytes()).await?;
        let mut response = String::new();
        stream.read_to_string(&mut response).await?;
        let (head, body) = response.split_once("\r\n\r\n").unwrap_or((&response, ""));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        Ok((status.ok_or(io::ErrorKind::InvalidData)?, body.to_owned()))
    }
}

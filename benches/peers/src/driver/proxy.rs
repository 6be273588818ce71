//! A proxy that delays all bytes, so that Redis seems to be far away.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

/// Delays what goes to `server` and what comes back, each by `delay`. Returns the address of the
/// proxy, which runs until this process ends.
pub fn start(server: SocketAddr, delay: Duration) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            // A client whose connection fails here sees that its connection is closed.
            let _ = connect(client, server, delay);
        }
    });
    Ok(address)
}

fn connect(client: TcpStream, server: SocketAddr, delay: Duration) -> io::Result<()> {
    let server = TcpStream::connect(server)?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    forward(client.try_clone()?, server.try_clone()?, delay);
    forward(server, client, delay);
    Ok(())
}

fn forward(mut from: TcpStream, mut to: TcpStream, delay: Duration) {
    let (sender, receiver) = mpsc::channel::<(Instant, Vec<u8>)>();
    thread::spawn(move || {
        let mut buffer = [0; 1 << 16];
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            if sender.send((Instant::now() + delay, buffer[..length].to_vec())).is_err() {
                break;
            }
        }
    });
    thread::spawn(move || {
        for (due, bytes) in receiver {
            thread::sleep(due.saturating_duration_since(Instant::now()));
            if to.write_all(&bytes).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    });
}

//! A network between the store and its server, which can fail in several ways.

use std::{
    future::pending,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst},
        mpsc,
    },
    thread,
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, UnixStream},
    runtime::Builder,
    sync::{mpsc::unbounded_channel, oneshot},
    time::{Instant, sleep, sleep_until},
};

use super::server::RedisServer;

/// A proxy, which ends when this is dropped.
pub struct Proxy {
    port: u16,
    faults: Arc<Faults>,
    _end: oneshot::Sender<()>,
}

#[derive(Default)]
struct Faults {
    /// Drops all data in both directions, without closing connections.
    drops_all: AtomicBool,
    /// The connections up to this number are lost.
    lost: AtomicUsize,
    connections: AtomicUsize,
    /// The number of connections that have ended.
    ended: AtomicUsize,
    /// Replaces the next reply with one that does not end.
    floods: AtomicBool,
    /// The number of its bytes so far.
    flooded: AtomicU64,
    /// Ends the next reply in the middle, and closes the connection.
    cuts: AtomicBool,
    /// Replaces replies with garbage.
    garbles: AtomicBool,
    /// Passes requests on, and holds replies.
    holds_replies: AtomicBool,
    /// The delay of each reply in milliseconds.
    delay: AtomicU64,
}

impl Proxy {
    pub fn start(server: &RedisServer) -> Self {
        let faults = Arc::<Faults>::default();
        let (port_sender, port) = mpsc::channel();
        let (end, ended) = oneshot::channel();
        let (socket, shared) = (server.socket(), faults.clone());
        thread::spawn(move || {
            let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
                let address = listener.local_addr().expect("it is bound");
                port_sender.send(address.port()).expect("the test waits for the port");
                tokio::select! {
                    () = serve(listener, socket, shared) => {}
                    _ = ended => {}
                }
            });
        });
        Self { port: port.recv().expect("the proxy starts"), faults, _end: end }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub fn drop_all(&self, on: bool) {
        self.faults.drops_all.store(on, SeqCst);
    }

    pub fn lose_connections(&self) {
        self.faults.lost.store(self.faults.connections.load(SeqCst), SeqCst);
    }

    pub fn cut_a_reply(&self) {
        self.faults.cuts.store(true, SeqCst);
    }

    /// Replaces the next reply with one of 2 GB.
    pub fn flood(&self) {
        self.faults.floods.store(true, SeqCst);
    }

    /// The number of bytes of that reply which the store has taken.
    pub fn flooded(&self) -> u64 {
        self.faults.flooded.load(SeqCst)
    }

    /// The number of open connections.
    pub fn open(&self) -> usize {
        self.faults.connections.load(SeqCst) - self.faults.ended.load(SeqCst)
    }

    pub fn garble(&self, on: bool) {
        self.faults.garbles.store(on, SeqCst);
    }

    /// Holds the replies, or lets all of them arrive.
    pub fn hold_replies(&self, on: bool) {
        self.faults.holds_replies.store(on, SeqCst);
    }

    /// Delays each reply.
    pub fn delay_replies(&self, delay: Duration) {
        self.faults.delay.store(delay.as_millis() as u64, SeqCst);
    }
}

impl Faults {
    fn has_lost(&self, connection: usize) -> bool {
        connection <= self.lost.load(SeqCst)
    }

    async fn arrive(&self) {
        while self.drops_all.load(SeqCst) {
            sleep(Duration::from_millis(5)).await;
        }
    }
}

async fn serve(listener: TcpListener, socket: PathBuf, faults: Arc<Faults>) {
    while let Ok((client, _)) = listener.accept().await {
        let id = faults.connections.fetch_add(1, SeqCst) + 1;
        let (socket, faults) = (socket.clone(), faults.clone());
        tokio::spawn(async move {
            let Ok(server) = UnixStream::connect(socket).await else { return };
            let (from_client, to_client) = client.into_split();
            let (from_server, to_server) = server.into_split();
            tokio::select! {
                () = requests(from_client, to_server, &faults, id) => {}
                () = replies(from_server, to_client, &faults, id) => {}
            }
            faults.ended.fetch_add(1, SeqCst);
        });
    }
}

async fn requests(
    mut from: impl AsyncReadExt + Unpin,
    mut to: impl AsyncWriteExt + Unpin,
    faults: &Faults,
    connection: usize,
) {
    let mut buffer = vec![0; 65_536];
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        faults.arrive().await;
        if faults.has_lost(connection) {
            continue; // until the client closes it
        }
        if to.write_all(&buffer[..length]).await.is_err() {
            break;
        }
    }
}

async fn replies(
    mut from: impl AsyncReadExt + Unpin,
    mut to: impl AsyncWriteExt + Unpin,
    faults: &Faults,
    connection: usize,
) {
    let (sender, mut under_way) = unbounded_channel();
    let read = async move {
        let mut buffer = vec![0; 65_536];
        while let Ok(length @ 1..) = from.read(&mut buffer).await {
            let delay = Duration::from_millis(faults.delay.load(SeqCst));
            let _ = sender.send((Instant::now() + delay, buffer[..length].to_vec()));
        }
    };
    let write = async {
        while let Some((arrives, mut reply)) = under_way.recv().await {
            sleep_until(arrives).await;
            faults.arrive().await;
            while faults.holds_replies.load(SeqCst) {
                sleep(Duration::from_millis(5)).await;
            }
            if faults.has_lost(connection) {
                return pending().await;
            }
            if faults.cuts.swap(false, SeqCst) {
                let _ = to.write_all(&reply[..reply.len() / 2]).await;
                break;
            }
            if faults.floods.swap(false, SeqCst) {
                reply = b"$2000000000\r\n".to_vec();
                while to.write_all(&reply).await.is_ok() {
                    faults.flooded.fetch_add(reply.len() as u64, SeqCst);
                    reply.resize(65_536, 0);
                }
                break;
            }
            if faults.garbles.load(SeqCst) {
                reply.fill(b'?');
            }
            if to.write_all(&reply).await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        () = write => {}
        () = async { read.await; pending().await } => {} // the data that was read is still sent
    }
}

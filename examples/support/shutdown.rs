//! `redis-connecting.md`: a service that shuts down.

use std::{io, net::SocketAddr, time::Duration};

use axum::Router;
use tokio::{
    net::TcpListener,
    signal::{
        ctrl_c,
        unix::{SignalKind, signal},
    },
    sync::watch,
    time::{sleep, timeout},
};
use tower_ratelimit::store::AnyStore;

/// Less than the time after which the process is killed: 30 s in Kubernetes.
const GRACE: Duration = Duration::from_secs(20);

/// Becomes true with Ctrl-C, or with the SIGTERM of Kubernetes, Docker and systemd.
pub fn stopping() -> io::Result<watch::Receiver<bool>> {
    let mut terminated = signal(SignalKind::terminate())?;
    let (stop, stopping) = watch::channel(false);
    tokio::spawn(async move {
        tokio::select! {
            _ = ctrl_c() => {}
            _ = terminated.recv() => {}
        }
        stop.send_replace(true);
    });
    Ok(stopping)
}

pub async fn stopped(mut stopping: watch::Receiver<bool>) {
    let _ = stopping.wait_for(|is_stopping| *is_stopping).await;
}

/// Serves until the service stops, and the requests in flight have ended, but for at most `GRACE`.
pub async fn serve(
    listener: TcpListener,
    app: Router,
    store: AnyStore,
    stopping: watch::Receiver<bool>,
) -> io::Result<()> {
    // `PeerIp` needs the addresses of the clients.
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    let served = axum::serve(listener, app).with_graceful_shutdown(stopped(stopping.clone()));
    let too_long = async {
        stopped(stopping.clone()).await;
        sleep(GRACE).await;
    };
    tokio::select! {
        result = served => result?,
        () = too_long => {}
    }
    let _ = timeout(Duration::from_secs(2), store.flush()).await;
    Ok(())
}

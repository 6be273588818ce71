//! `concurrency.md`: a client that is connected and does not read.

use std::{io, time::Duration};

use axum::{
    Extension,
    body::{Body, Bytes},
    extract::Request,
    middleware::Next,
    response::Response,
};
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tower_ratelimit::layer::Settle;

/// The longest time for which a client may read nothing.
const STALLED: Duration = Duration::from_secs(30);

/// Inside of a limit on concurrency with `settle_handle(true)`.
async fn end_stalled(
    Extension(settle): Extension<Settle>,
    request: Request,
    next: Next,
) -> Response {
    settle.keep(); // until the task below drops it
    let (sender, receiver) = mpsc::channel::<io::Result<Bytes>>(2);
    let response = next.run(request).await;
    response.map(|body| {
        tokio::spawn(async move {
            let mut chunks = body.into_data_stream();
            let Ok(cut_off) = sender.clone().reserve_owned().await else { return };
            loop {
                let chunk = tokio::select! {
                    chunk = chunks.next() => chunk,
                    () = sender.closed() => return, // the client has left
                };
                let Some(chunk) = chunk else { return };
                let sent = sender.send(chunk.map_err(io::Error::other));
                if timeout(STALLED, sent).await.is_err() {
                    break;
                }
            }
            drop(settle); // the place is free
            cut_off.send(Err(io::ErrorKind::TimedOut.into()));
        });
        Body::from_stream(ReceiverStream::new(receiver))
    })
}

mod tests {
    use std::convert::Infallible;

    use axum::{Router, middleware::from_fn, routing::get};
    use http_body_util::BodyExt;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::{TcpListener, TcpStream},
        time::sleep,
    };
    use tower::ServiceExt;
    use tower_ratelimit::{Algorithm, Limiter, MemoryStore, Quota, RateLimitLayer, key};

    use super::*;

    fn limiter() -> Limiter {
        let quota = Quota::concurrent(1);
        Limiter::new("streams", MemoryStore::new(), Algorithm::concurrency(), quota)
    }

    fn app(limiter: &Limiter, chunks: usize) -> Router {
        let zeros = move || {
            let chunk = Ok::<_, Infallible>(Bytes::from(vec![0; 64 * 1_024]));
            Body::from_stream(tokio_stream::iter(vec![chunk; chunks]))
        };
        let limit = RateLimitLayer::new(limiter, key::Global).settle_handle(true);
        Router::new()
            .route("/", get(async move || zeros()))
            .layer(from_fn(end_stalled))
            .layer(limit)
    }

    async fn held(limiter: &Limiter) -> u64 {
        limiter.peek(key::Global.key()).await.unwrap().held()
    }

    /// The clock is paused: it advances when the server and the client wait for each other.
    #[tokio::test(start_paused = true)]
    async fn a_client_that_does_not_read_is_cut_off() {
        let limiter = limiter();
        let app = app(&limiter, 1_000); // more than the kernel buffers
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(axum::serve(listener, app).into_future());

        let mut http1 = TcpStream::connect(address).await.unwrap();
        http1.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
        http1.readable().await.unwrap();
        assert_eq!(held(&limiter).await, 1);
        while held(&limiter).await == 1 {
            sleep(Duration::from_secs(1)).await;
        }
        let mut text = vec![];
        let _ = http1.read_to_end(&mut text).await;
        assert!(!text.ends_with(b"0\r\n\r\n"), "the client can see that the body is cut off");

        let tcp = TcpStream::connect(address).await.unwrap();
        let (mut http2, connection) = h2::client::handshake(tcp).await.unwrap();
        let connection = tokio::spawn(connection);
        let request = Request::get(format!("http://{address}/")).body(()).unwrap();
        let response = http2.send_request(request, true).unwrap().0.await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(held(&limiter).await, 1);
        while held(&limiter).await == 1 {
            sleep(Duration::from_secs(1)).await;
        }
        connection.abort();
        server.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_reads_slowly_gets_all_and_one_that_leaves_frees_its_place() {
        let limiter = limiter();
        let app = app(&limiter, 10);
        let send = async || app.clone().oneshot(Request::new(Body::empty())).await.unwrap();
        let mut body = send().await.into_body();
        let mut length = 0;
        while let Some(frame) = body.frame().await {
            length += frame.unwrap().into_data().unwrap().len();
            sleep(STALLED - Duration::from_secs(1)).await;
        }
        assert_eq!(length, 640 * 1_024);

        drop(send().await);
        sleep(Duration::from_secs(1)).await;
        assert_eq!(held(&limiter).await, 0);
    }
}

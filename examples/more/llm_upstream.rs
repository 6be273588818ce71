//! A fake API that is compatible with OpenAI's, on a local port. It knows no limits. It answers
//! with the number of words that a question names, and counts four bytes of a question as a token.
//!
//! The model `silent` reports no usage, and the model `failing` answers 503.

use std::{convert::Infallible, io, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::post,
};
use futures_util::stream;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{net::TcpListener, time::sleep};

/// The time between two tokens of a stream.
const PAUSE: Duration = Duration::from_millis(5);

/// What the upstream and the gateway read of a request.
#[derive(Deserialize)]
pub struct Completion {
    pub model: String,
    pub messages: Vec<Message>,
    pub max_tokens: u64,
    #[serde(default)]
    pub stream: bool,
    #[serde(default)]
    stream_options: StreamOptions,
}

#[derive(Deserialize)]
pub struct Message {
    pub content: String,
}

#[derive(Default, Deserialize)]
struct StreamOptions {
    include_usage: bool,
}

impl Completion {
    /// Returns the length of all messages in bytes.
    pub fn input_bytes(&self) -> u64 {
        self.messages.iter().map(|message| message.content.len() as u64).sum()
    }

    /// Returns the number of tokens of the answer.
    fn output(&self) -> u64 {
        let words = self.messages.iter().flat_map(|message| message.content.split_whitespace());
        let number = words.filter_map(|word| word.parse().ok()).next();
        number.unwrap_or(10).min(self.max_tokens)
    }

    fn usage(&self) -> Value {
        json!({"prompt_tokens": self.input_bytes().div_ceil(4), "completion_tokens": self.output()})
    }
}

/// Starts the upstream. Returns the URL of its completions.
pub async fn start() -> io::Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/v1/chat/completions", listener.local_addr()?);
    let app = Router::new().route("/v1/chat/completions", post(complete));
    tokio::spawn(axum::serve(listener, app).into_future());
    Ok(url)
}

async fn complete(body: Bytes) -> Response {
    let request: Completion = match serde_json::from_slice(&body) {
        Ok(request) => request,
        Err(error) => return (StatusCode::BAD_REQUEST, error.to_string()).into_response(),
    };
    if request.model == "failing" {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    if request.stream {
        return streamed(&request);
    }
    let text = "word ".repeat(request.output() as usize);
    let mut answer = json!({"choices": [{"message": {"role": "assistant", "content": text}}]});
    if request.model != "silent" {
        answer["usage"] = request.usage();
    }
    ([(CONTENT_TYPE, "application/json")], answer.to_string()).into_response()
}

/// Returns a stream of a token in each event. The last event before `[DONE]` has the usage.
fn streamed(request: &Completion) -> Response {
    let token = json!({"choices": [{"delta": {"content": "word "}}]});
    let mut events: Vec<_> = (0..request.output()).map(|_| token.to_string()).collect();
    if request.stream_options.include_usage && request.model != "silent" {
        events.push(json!({"choices": [], "usage": request.usage()}).to_string());
    }
    events.push("[DONE]".to_owned());
    let body = stream::unfold(events.into_iter(), async |mut events| {
        let event = events.next()?;
        sleep(PAUSE).await;
        Some((Ok::<_, Infallible>(format!("data: {event}\n\n")), events))
    });
    ([(CONTENT_TYPE, "text/event-stream")], Body::from_stream(body)).into_response()
}

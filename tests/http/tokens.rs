//! The meter for answers of language models: what it finds in answers and streams, whatever their
//! frames, and what it must not take for the usage.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
};

use axum::body::{Body, Bytes};
use http::{Request, Response, header::CONTENT_TYPE, request::Parts, response};
use http_body_util::BodyExt;
use proptest::prelude::*;
use serde_json::json;
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{
    Charge, Limiter, Quota, RateLimitLayer,
    http::{Meter, TokenMeter, Tokens, Usage},
};

use crate::support::in_memory;

const JSON: &str = "application/json";
const STREAM: &str = "text/event-stream; charset=utf-8";

/// The input, the cached input and the output.
type Numbers = (u64, u64, u64);

fn head(content_type: &str) -> response::Parts {
    Response::builder().header(CONTENT_TYPE, content_type).body(()).unwrap().into_parts().0
}

/// Shows the pieces to a meter. Returns the tokens that it reports.
fn read<'a>(content_type: &str, pieces: impl IntoIterator<Item = &'a [u8]>) -> Option<Numbers> {
    let reported = Arc::new(Mutex::new(None));
    let report = {
        let reported = reported.clone();
        move |Tokens { input, cached_input, output, .. }| {
            *reported.lock().unwrap() = Some((input, cached_input, output));
            Usage::default()
        }
    };
    let mut meter = TokenMeter::new(&head(content_type), report);
    pieces.into_iter().for_each(|piece| meter.data(piece));
    assert_eq!(meter.usage(true).is_some(), reported.lock().unwrap().is_some());
    reported.lock().unwrap().take()
}

/// Reads an answer in one piece, byte by byte, and split at every byte.
fn tokens(content_type: &str, text: &str) -> Option<Numbers> {
    let whole = read(content_type, [text.as_bytes()]);
    assert_eq!(read(content_type, text.as_bytes().chunks(1)), whole, "{text}");
    for i in 0..text.len() {
        let (one, other) = text.as_bytes().split_at(i);
        assert_eq!(read(content_type, [one, other]), whole, "{text} at {i}");
    }
    whole
}

/// A stream of events without names, as that of chat completions.
fn stream(events: &[serde_json::Value], line_end: &str) -> String {
    let line = |data: String| format!("data: {data}{line_end}{line_end}");
    let events: String = events.iter().map(|event| line(event.to_string())).collect();
    events + &line("[DONE]".into())
}

#[test]
fn the_usage_of_answers_is_found() {
    let chat = json!({
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1_741_569_952,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}}],
        "usage": {
            "prompt_tokens": 19, "completion_tokens": 10, "total_tokens": 29,
            "prompt_tokens_details": {"cached_tokens": 7, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 3, "accepted_prediction_tokens": 0}
        },
        "service_tier": "default"
    });
    let response = json!({
        "id": "resp_1", "object": "response", "output": [{"type": "message", "content": []}],
        "usage": {
            "input_tokens": 36, "input_tokens_details": {"cached_tokens": 30},
            "output_tokens": 87, "output_tokens_details": {"reasoning_tokens": 80},
            "total_tokens": 123
        },
        "user": null
    });
    let embeddings = json!({"data": [], "usage": {"prompt_tokens": 8, "total_tokens": 8}});
    for (answer, expected) in
        [(chat, (19, 7, 10)), (response, (36, 30, 87)), (embeddings, (8, 0, 0))]
    {
        assert_eq!(tokens(JSON, &answer.to_string()), Some(expected));
        assert_eq!(tokens(JSON, &format!("{answer:#}")), Some(expected));
    }
}

#[test]
fn the_usage_of_streams_is_found() {
    let delta = |text| json!({"choices": [{"delta": {"content": text}}], "usage": null});
    let usage = |output| json!({"prompt_tokens": 5, "completion_tokens": output});
    let at_end = [delta("a"), delta("b"), json!({"choices": [], "usage": usage(2)})];
    let with_each = [1, 2, 3].map(|n| json!({"choices": [{"delta": {}}], "usage": usage(n)}));
    for line_end in ["\n", "\r\n", "\r"] {
        assert_eq!(tokens(STREAM, &stream(&at_end, line_end)), Some((5, 0, 2)));
        assert_eq!(tokens(STREAM, &stream(&with_each, line_end)), Some((5, 0, 3)));
    }
    let responses = "event: response.created\n\
        data: {\"type\":\"response.created\",\"response\":{\"id\":\"r\",\"usage\":null}}\n\n\
        : a comment {\"usage\":{\"input_tokens\":1}}\n\
        event: response.output_text.delta\n\
        data: {\"delta\":\"{\\\"usage\\\":{\\\"input_tokens\\\":2}}\"}\n\n\
        event: response.completed\n\
        data:{\"type\":\"response.completed\",\"response\":{\"usage\":{\"input_tokens\":37,\n\
        data: \"output_tokens\":11,\"input_tokens_details\":{\"cached_tokens\":4}}}}\n\n";
    assert_eq!(tokens(STREAM, responses), Some((37, 4, 11)));
}

#[test]
fn nothing_else_is_taken_for_the_usage() {
    for answer in [
        json!({"usage": null}),
        json!({"usage": {"total_tokens": 7}}),
        json!({"usage": [{"prompt_tokens": 7}]}),
        json!([{"usage": {"prompt_tokens": 7}}]),
        json!({"tools": [{"parameters": {"properties": {"usage": {"prompt_tokens": 7}}}}]}),
        json!({"metadata": {"usage": {"prompt_tokens": 7}}}),
        json!({"response": {"response": {"usage": {"prompt_tokens": 7}}}}),
        json!({"usage": {"completion_tokens_details": {"prompt_tokens": 7}}}),
        json!({"usage": {"prompt_tokens_details": {"prompt_tokens": 7}}}),
        json!({"choices": ["usage", {"prompt_tokens": 7}], "a\"usage": {"prompt_tokens": 7}}),
        json!({"choices": [{"message": {"content": "\"usage\": {\"prompt_tokens\": 7}"}}]}),
        json!({"usage": {"prompt_tokens": -7, "completion_tokens": 7.5}}),
    ] {
        assert_eq!(tokens(JSON, &answer.to_string()), None, "{answer}");
        assert_eq!(tokens(STREAM, &stream(&[answer], "\n")), None);
    }
    for text in ["", "}}]", "\"", "{\"usage\":{\"prompt_tokens\":7", "data: {\"usage\":"] {
        assert_eq!(tokens(JSON, text), None, "{text}");
        assert_eq!(tokens(STREAM, text), None, "{text}");
    }
    // A stream that no head announces, and the other way round.
    let usage = json!({"usage": {"prompt_tokens": 7}});
    assert_eq!(tokens(STREAM, &usage.to_string()), None);
    let most = format!("{{\"usage\":{{\"prompt_tokens\":{}0}}}}", u64::MAX);
    assert_eq!(tokens(JSON, &most), Some((u64::MAX, 0, 0)));
}

/// Texts of what the meter looks for, and of what it may stumble over.
fn pieces() -> impl Strategy<Value = Vec<String>> {
    let marks = "[\\PC\"{}\\[\\]:,\\\\ \r\n0-9]{0,6}";
    let names = prop_oneof!["\"usage\":\\{", "\"prompt_tokens\":", "data: ", "\n\n\\{"];
    prop::collection::vec(prop_oneof![marks, names], 0..40)
}

proptest! {
    #[test]
    fn the_frames_of_any_text_change_nothing(
        pieces in pieces(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let text = pieces.concat();
        let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
        cuts.extend([0, text.len()]);
        cuts.sort_unstable();
        let frames = || cuts.windows(2).map(|cut| &text.as_bytes()[cut[0]..cut[1]]);
        for kind in [JSON, STREAM] {
            prop_assert_eq!(read(kind, frames()), read(kind, [text.as_bytes()]));
        }
    }

    #[test]
    fn what_is_written_does_not_change_the_usage(content in "\\PC{0,200}", name in "\\PC{0,30}") {
        let usage = json!({"prompt_tokens": 5, "completion_tokens": 2});
        let forged = json!({&name: {"prompt_tokens": 9}, "usage": {"prompt_tokens": 9}});
        let answer = json!({"choices": [&content, forged], "usage": usage, &name: content});
        prop_assume!(name != "usage");
        let text = answer.to_string();
        prop_assert_eq!(read(JSON, [text.as_bytes()]), Some((5, 0, 2)), "{}", text);
        let text = stream(&[answer.clone(), json!({"choices": [answer]})], "\n");
        prop_assert_eq!(read(STREAM, [text.as_bytes()]), Some((5, 0, 2)), "{}", text);
    }
}

/// Sends a request that holds 100 tokens. Returns how many of them count after `frames` of the
/// stream were received, and the rest was dropped.
async fn counted(stream: &'static str, frames: usize, limiter: &Limiter) -> u64 {
    let before = limiter.peek("alice").await.unwrap().remaining();
    let of_rule = limiter.clone();
    let layer =
        RateLimitLayer::by_rule(move |_: &Parts| Ok(Charge::new(&of_rule, "alice").estimate(100)))
            .settle_by(|head| {
                TokenMeter::new(head, |used| Usage::of("default", used.input + used.output))
                    .when_cut_off(|events| Usage::of("default", 40 + events))
            });
    let model = service_fn(async move |_: Request<Body>| {
        let frames =
            stream.split_inclusive('\n').map(|line| Ok::<_, Infallible>(Bytes::from(line)));
        let body = Body::from_stream(tokio_stream::iter(frames));
        Ok::<_, Infallible>(Response::builder().header(CONTENT_TYPE, STREAM).body(body).unwrap())
    });
    let mut response = layer.layer(model).oneshot(Request::default()).await.unwrap();
    for _ in 0..frames {
        if response.frame().await.is_none() {
            break;
        }
    }
    drop(response);
    before - limiter.peek("alice").await.unwrap().remaining()
}

#[tokio::test]
async fn a_layer_settles_by_the_tokens_of_a_stream() {
    let limiter = in_memory(Quota::per_day(1_000));
    let with_usage = "data: {\"choices\":[{}]}\n\ndata: {\"choices\":[{}]}\n\n\
        data: {\"usage\":{\"prompt_tokens\":30,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n";
    let without = "data: {\"choices\":[{}]}\n\ndata: [DONE]\n\n";
    assert_eq!(counted(with_usage, 100, &limiter).await, 32);
    assert_eq!(counted(with_usage, 5, &limiter).await, 32, "cut off after the usage");
    assert_eq!(counted(with_usage, 4, &limiter).await, 42, "cut off after two events");
    assert_eq!(counted(without, 100, &limiter).await, 100, "the estimate");
}

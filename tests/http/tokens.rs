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
    layer::{Meter, TokenMeter, Tokens, Usage},
};

use crate::support::in_memory;

const JSON: &str = "application/json";
const STREAM: &str = "text/event-stream; charset=utf-8";

/// The input, the cached input and the output.
type Numbers = (u64, u64, u64);

const NDJSON: &str = "application/x-ndjson";

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
fn anthropic_reports_the_caches_beside_the_input() {
    let message = json!({
        "id": "msg_1", "type": "message", "role": "assistant",
        "content": [{"type": "text", "text": "Hi"}], "stop_reason": "end_turn",
        "usage": {
            "input_tokens": 50,
            "cache_creation_input_tokens": 248, "cache_read_input_tokens": 100_000,
            "cache_creation": {"ephemeral_5m_input_tokens": 148, "ephemeral_1h_input_tokens": 100},
            "output_tokens": 503, "server_tool_use": {"web_search_requests": 1},
            "service_tier": "standard"
        }
    });
    assert_eq!(tokens(JSON, &message.to_string()), Some((100_298, 100_000, 503)));
    let plain = json!({"type": "message", "usage": {"input_tokens": 12, "output_tokens": 3}});
    assert_eq!(tokens(JSON, &plain.to_string()), Some((12, 0, 3)));
    // A gateway that speaks as OpenAI does, and keeps the fields of Anthropic.
    let gateway = json!({"usage": {
        "prompt_tokens": 100_298, "completion_tokens": 503, "total_tokens": 100_801,
        "prompt_tokens_details": {"cached_tokens": 100_000},
        "cache_creation_input_tokens": 248, "cache_read_input_tokens": 100_000
    }});
    assert_eq!(tokens(JSON, &gateway.to_string()), Some((100_298, 100_000, 503)));
}

/// The events of a message, up to the usage at its end.
fn message(start: &serde_json::Value, end: Option<&serde_json::Value>) -> String {
    let start = json!({"type": "message_start", "message": {
        "id": "msg_1", "content": [], "stop_reason": null, "usage": start
    }});
    let text = json!({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}});
    let mut events = vec![
        ("message_start", start),
        ("ping", json!({"type": "ping"})),
        ("content_block_delta", text),
    ];
    if let Some(usage) = end {
        let delta = json!({"stop_reason": "end_turn", "stop_sequence": null});
        let delta = json!({"type": "message_delta", "delta": delta, "usage": usage});
        events
            .extend([("message_delta", delta), ("message_stop", json!({"type": "message_stop"}))]);
    }
    events.iter().map(|(name, data)| format!("event: {name}\ndata: {data}\n\n")).collect()
}

#[test]
fn a_stream_of_anthropic_has_its_usage_in_two_events() {
    let start = json!({
        "input_tokens": 25, "cache_creation_input_tokens": 7, "cache_read_input_tokens": 440,
        "output_tokens": 1
    });
    let end = json!({"output_tokens": 89});
    assert_eq!(tokens(STREAM, &message(&start, Some(&end))), Some((472, 440, 89)));
    // The numbers at the end are of the whole message, too.
    let end = json!({
        "input_tokens": 10_682, "cache_creation_input_tokens": 7, "cache_read_input_tokens": 440,
        "output_tokens": 89, "server_tool_use": {"web_search_requests": 1}
    });
    assert_eq!(tokens(STREAM, &message(&start, Some(&end))), Some((11_129, 440, 89)));
    let zeros = json!({"input_tokens": 0, "output_tokens": 89});
    assert_eq!(tokens(STREAM, &message(&start, Some(&zeros))), Some((472, 440, 89)));
    // Without the end, the output is unknown; without the begin, the input.
    assert_eq!(tokens(STREAM, &message(&start, None)), None);
    let null = json!(null);
    assert_eq!(tokens(STREAM, &message(&null, Some(&json!({"output_tokens": 89})))), None);
}

#[test]
fn other_apis_report_their_usage_by_other_names() {
    let bedrock = json!({"output": {"message": {"content": []}}, "usage": {
        "inputTokens": 30, "outputTokens": 628, "totalTokens": 658,
        "cacheReadInputTokens": 0, "cacheWriteInputTokens": 0
    }});
    let cached = json!({"usage": {
        "inputTokens": 3, "cacheReadInputTokens": 20, "cacheWriteInputTokens": 7, "outputTokens": 6,
        "totalTokens": 36
    }});
    let gemini = json!({"candidates": [{"content": {}}], "usageMetadata": {
        "promptTokenCount": 80, "cachedContentTokenCount": 60, "toolUsePromptTokenCount": 5,
        "candidatesTokenCount": 20, "thoughtsTokenCount": 100, "totalTokenCount": 205,
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 80}]
    }});
    let units = json!({"input_tokens": 17, "output_tokens": 12});
    let counted = json!({"input_tokens": 215, "output_tokens": 14});
    let cohere = json!({"usage": {"billed_units": units, "tokens": counted, "cached_tokens": 16}});
    let old_cohere = json!({"text": "Hi", "meta": {"billed_units": units, "tokens": counted}});
    let ollama = json!({
        "model": "llama3", "message": {"role": "assistant", "content": "Hi"}, "done": true,
        "total_duration": 4_883_583_458_u64, "prompt_eval_count": 26, "eval_count": 298
    });
    let deepseek = json!({"usage": {
        "prompt_tokens": 40, "prompt_cache_hit_tokens": 32, "prompt_cache_miss_tokens": 8,
        "completion_tokens": 9, "total_tokens": 49
    }});
    // xAI counts the reasoning in the total alone.
    let grok = json!({"usage": {
        "prompt_tokens": 10, "completion_tokens": 9, "total_tokens": 119,
        "completion_tokens_details": {"reasoning_tokens": 100}
    }});
    for (answer, expected) in [
        (&bedrock, (30, 0, 628)),
        (&cached, (30, 20, 6)),
        (&gemini, (85, 60, 120)),
        (&cohere, (215, 16, 14)),
        (&old_cohere, (215, 0, 14)),
        (&ollama, (26, 0, 298)),
        (&deepseek, (40, 32, 9)),
        (&grok, (10, 0, 109)),
    ] {
        assert_eq!(tokens(JSON, &answer.to_string()), Some(expected), "{answer}");
    }

    let chunk = |output| {
        json!({"candidates": [{"content": {}}], "usageMetadata": {
            "promptTokenCount": 80, "candidatesTokenCount": output, "totalTokenCount": 80 + output
        }})
    };
    assert_eq!(tokens(STREAM, &stream(&[chunk(3), chunk(9)], "\n")), Some((80, 0, 9)));
    assert_eq!(tokens(JSON, &json!([chunk(3), chunk(9)]).to_string()), Some((80, 0, 9)));
    let end = json!({"type": "message-end", "delta": {"finish_reason": "COMPLETE", "usage": {
        "billed_units": units, "tokens": counted
    }}});
    let delta = json!({"type": "content-delta", "delta": {"message": {"content": {"text": "a"}}}});
    assert_eq!(tokens(STREAM, &stream(&[delta, end], "\n")), Some((215, 0, 14)));
    let groq = json!({"choices": [], "x_groq": {"id": "r", "usage": {
        "prompt_tokens": 18, "completion_tokens": 6, "total_tokens": 24
    }}});
    assert_eq!(tokens(STREAM, &stream(&[groq], "\n")), Some((18, 0, 6)));
    let part = json!({"message": {"content": "H"}, "done": false});
    assert_eq!(tokens(NDJSON, &format!("{part}\n{part}\n{ollama}\n")), Some((26, 0, 298)));
}

/// Too little would be counted as if it were all.
#[test]
fn a_usage_that_is_not_understood_is_unknown() {
    for usage in [
        json!({"output_tokens": 7}),
        json!({"completion_tokens": 7, "total_tokens": 9}),
        json!({"prompt_tokens": 7, "completion_tokens": 7.5}),
        json!({"prompt_tokens": 7, "completion_tokens": -1}),
        json!({"input_tokens": 1e30, "output_tokens": 7}),
        json!({"billed_units": {"input_tokens": 7, "output_tokens": 7}}),
        json!({"promptTokens": 7, "completionTokens": 7}),
    ] {
        let answer = json!({"usage": usage}).to_string();
        assert_eq!(tokens(JSON, &answer), None, "{answer}");
    }
    let usage = json!({"usage": {"prompt_tokens": 7, "completion_tokens": 7}}).to_string();
    let read = |name: &'static str, value| {
        let response = Response::builder().header(name, value).body(()).unwrap();
        let mut meter = TokenMeter::new(&response.into_parts().0, |_| Usage::default());
        meter.data(usage.as_bytes());
        meter.usage(true).is_some()
    };
    assert!(read("content-encoding", "identity"));
    assert!(!read("content-encoding", "gzip"));
    assert!(!read("content-type", "application/vnd.amazon.eventstream"));
    assert!(read("content-type", "text/plain"));
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
        json!({"message": {"message": {"usage": {"prompt_tokens": 7}}}}),
        json!({"message": {"prompt_eval_count": 7}}),
        json!({"meta": {"prompt_tokens": 7}}),
        json!({"tokens": {"prompt_tokens": 7}}),
        json!([[{"usageMetadata": {"promptTokenCount": 7}}]]),
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
}

/// The closures of users subtract the caches from the input, and multiply.
#[test]
fn no_answer_of_a_vendor_makes_the_arithmetic_of_a_closure_overflow() {
    let most = 1_u64 << 40;
    let read = |usage: &str| {
        let twentieths = |used: Tokens| {
            let sum = 20 * used.input - 18 * used.cached_input + 5 * used.written_input;
            let uncached = used.input - used.cached_input - used.written_input;
            Usage::of("money", sum).and("tokens", uncached + used.output)
        };
        let mut meter = TokenMeter::new(&head(JSON), twentieths);
        meter.data(format!("{{\"usage\":{usage}}}").as_bytes());
        meter.usage(true).is_some()
    };
    const NAMES: [&str; 7] = [
        "prompt_tokens",
        "input_tokens",
        "cached_tokens",
        "cache_read_input_tokens",
        "cache_creation_input_tokens",
        "toolUsePromptTokenCount",
        "completion_tokens",
    ];
    // All mixtures of small, largest and missing counts.
    for mixture in 0..3_usize.pow(NAMES.len() as u32) {
        let counts = NAMES.iter().enumerate().filter_map(|(i, name)| {
            let count = [None, Some(3), Some(most)][mixture / 3_usize.pow(i as u32) % 3]?;
            Some((*name, json!(count)))
        });
        let usage = json!(counts.collect::<std::collections::BTreeMap<_, _>>());
        let has_input = NAMES[..2].iter().any(|name| usage.get(*name).is_some());
        assert_eq!(read(&usage.to_string()), has_input, "{usage}");
    }
    for name in NAMES.into_iter().chain(["total_tokens"]) {
        for count in [(most + 1).to_string(), u64::MAX.to_string(), format!("{}0", u64::MAX)] {
            let usage = format!("{{\"prompt_tokens\":7,\"{name}\":{count}}}");
            assert!(!read(&usage), "{usage}");
        }
    }
    let caches = json!({"usage": {
        "prompt_tokens": 9, "cached_tokens": 12, "cache_creation_input_tokens": 5
    }});
    assert_eq!(tokens(JSON, &caches.to_string()), Some((9, 9, 0)));
    let largest = json!({"usage": {"prompt_tokens": most, "total_tokens": most}});
    assert_eq!(tokens(JSON, &largest.to_string()), Some((most, 0, 0)));
}

/// Texts of what the meter looks for, and of what it may stumble over.
fn pieces() -> impl Strategy<Value = Vec<String>> {
    let marks = "[\\PC\"{}\\[\\]:,\\\\ \r\n0-9]{0,6}";
    let names = prop_oneof![
        "\"usage\":\\{",
        "\"message\":\\{",
        "\"output_tokens\":",
        "\"prompt_tokens\":",
        "data: ",
        "\n\n\\{"
    ];
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
    let anthropic = "data: {\"message\":{\"usage\":{\"input_tokens\":30,\"output_tokens\":1}}}\n\n\
        data: {\"delta\":{\"text\":\"a\"}}\n\ndata: {\"usage\":{\"output_tokens\":5}}\n\n";
    assert_eq!(counted(anthropic, 100, &limiter).await, 35);
    assert_eq!(counted(anthropic, 4, &limiter).await, 42, "cut off before the output is known");
}

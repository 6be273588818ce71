//! `TokenMeter`: the meter for answers of language models. It finds the usage in JSON and in
//! streams of events, whatever the frames, and keeps no text of them. What it reports is settled by
//! `body.rs`.

use std::{fmt, sync::Mutex};

use http::{
    HeaderMap, HeaderName,
    header::{CONTENT_ENCODING, CONTENT_TYPE},
    response,
};

use super::meter::{Meter, Usage};
use crate::sync::get_mut;

/// The tokens of a request to a language model, as its answer reports them.
///
/// # Examples
///
/// ```
/// use tower_ratelimit::layer::Tokens;
///
/// fn cost(tokens: &Tokens) -> u64 {
///     let cached = tokens.cached_input / 10; // a tenth of the price
///     tokens.input - tokens.cached_input + cached + 4 * tokens.output
/// }
/// # let _ = cost;
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Tokens {
    /// All tokens of the prompt, with those that the model has read from its cache or has written
    /// to it.
    pub input: u64,
    /// The part of `input` that the model has read from its cache, which often costs less, and
    /// which some vendors do not count in their limits.
    pub cached_input: u64,
    /// The part of `input` that the model has written to its cache, if the answer says so. It can
    /// cost more.
    pub written_input: u64,
    /// The tokens of the answer, with its reasoning.
    pub output: u64,
}

/// The meter for answers of language models, for
/// [`RateLimitLayer::settle_by`](crate::RateLimitLayer::settle_by).
///
/// It reads JSON bodies, lines of JSON, and streams (`text/event-stream`). If a stream reports the
/// usage several times, the largest numbers count. It keeps some bytes, however long the answer is.
/// Names inside of what the model or the client has written are not taken for the usage.
///
/// | API | input | cached, written | output |
/// |---|---|---|---|
/// | chat completions and embeddings of OpenAI, Azure, Mistral, Groq, DeepSeek, vLLM and others | `prompt_tokens` | `cached_tokens` or `prompt_cache_hit_tokens`, a part of the input | `completion_tokens` |
/// | responses of OpenAI | `input_tokens` | `cached_tokens`, a part of the input | `output_tokens` |
/// | messages of Anthropic; in streams, of `message_start` and `message_delta` | `input_tokens` and both caches | `cache_read_input_tokens`, `cache_creation_input_tokens` | `output_tokens` |
/// | Converse of Bedrock, without streams | `inputTokens` and both caches | `cacheReadInputTokens`, `cacheWriteInputTokens` | `outputTokens` |
/// | Gemini | `promptTokenCount`, `toolUsePromptTokenCount` | `cachedContentTokenCount`, a part of the input | `candidatesTokenCount`, `thoughtsTokenCount` |
/// | Cohere, `tokens` of `usage` or `meta` | `input_tokens` | | `output_tokens` |
/// | Ollama | `prompt_eval_count` | | `eval_count` |
///
/// If the answer has a total that is larger than the sum, the difference is output: some vendors
/// report reasoning in the total alone. The cached and the written input together are at most the
/// input. An answer whose usage is not understood, has no input, or has a number above 2^40, counts
/// as one without usage.
///
/// | answer | counts |
/// |---|---|
/// | with usage | what the closure returns |
/// | without, complete or an error | the estimate; to charge no errors, use [`charge_when`](crate::RateLimitLayer::charge_when) |
/// | a stream that is cut off before its usage | the estimate, or what [`when_cut_off`](TokenMeter::when_cut_off) returns |
///
/// A stream of chat completions reports its usage only if the request has
/// `"stream_options": {"include_usage": true}`. A body that is compressed, or a binary stream of
/// AWS, has no usage for the meter: a gateway sends no `Accept-Encoding` to the model.
///
/// # Examples
///
/// Tokens, and money in nano-dollars:
///
/// ```
/// use http::{Request, Response, request::Parts};
/// use tower::{Layer, ServiceExt, service_fn};
/// use tower_ratelimit::{
///     Algorithm, Charge, Limiter, MemoryStore, Quota, RateLimitLayer,
///     layer::{TokenMeter, Usage},
/// };
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = MemoryStore::new();
/// let limiter = |name, quota| Limiter::new(name, store.clone(), Algorithm::sliding_log(), quota);
/// let tokens = limiter("tokens", Quota::per_minute(100_000));
/// let money = limiter("money", Quota::per_day(50_000_000_000)); // 50 dollars
///
/// let limiters = (tokens.clone(), money.clone());
/// let layer = RateLimitLayer::by_rule(move |_: &Parts| {
///     Ok(Charge::new(&limiters.0, "alice").estimate(2_000).also(&limiters.1).estimate(4_000_000))
/// })
/// .settle_by(|head| {
///     TokenMeter::new(head, |used| {
///         let nano_dollars = used.input * 250 + used.output * 2_000;
///         Usage::of("tokens", used.input + used.output).and("money", nano_dollars)
///     })
/// });
///
/// let answer = r#"{"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": 20}}"#;
/// let model = service_fn(async |_: Request<String>| {
///     Ok::<_, http::Error>(Response::new(answer.to_owned()))
/// });
/// let response = layer.layer(model).oneshot(Request::default()).await?;
/// http_body_util::BodyExt::collect(response).await?;
/// assert_eq!(tokens.peek("alice").await?.remaining(), 99_880);
/// assert_eq!(money.peek("alice").await?.remaining(), 49_999_935_000);
/// # Ok(())
/// # }
/// ```
pub struct TokenMeter {
    source: Source,
    reader: UsageReader,
    report: ToUsage<Tokens>,
    when_cut_off: Option<ToUsage<u64>>,
}

/// Returns the usage. The mutex, which is never locked, makes the meter `Sync`: the closure need
/// not be.
type ToUsage<T> = Mutex<Box<dyn FnMut(T) -> Usage + Send>>;

impl TokenMeter {
    /// Creates the meter of an answer with this head. `report` determines the usage of each limiter
    /// from the tokens.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::layer::{TokenMeter, Usage};
    ///
    /// fn meter(head: &http::response::Parts) -> TokenMeter {
    ///     TokenMeter::new(head, |tokens| Usage::of("tokens", tokens.input + tokens.output))
    /// }
    /// # let _ = meter;
    /// ```
    pub fn new(
        head: &response::Parts,
        report: impl FnMut(Tokens) -> Usage + Send + 'static,
    ) -> Self {
        let (source, reader) = (Source::of(&head.headers), UsageReader::default());
        Self { source, reader, report: Mutex::new(Box::new(report)), when_cut_off: None }
    }

    /// Sets what a stream counts that the client or the model cuts off before its usage.
    ///
    /// The closure receives the number of events that have arrived. Models send about an event per
    /// token of the answer, and a few more. The estimates of limiters that it does not name count.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_ratelimit::layer::{TokenMeter, Usage};
    ///
    /// fn meter(head: &http::response::Parts) -> TokenMeter {
    ///     TokenMeter::new(head, |tokens| Usage::of("tokens", tokens.output))
    ///         .when_cut_off(|events| Usage::of("tokens", events)) // about a token each
    /// }
    /// # let _ = meter;
    /// ```
    #[must_use]
    pub fn when_cut_off(mut self, usage: impl FnMut(u64) -> Usage + Send + 'static) -> Self {
        self.when_cut_off = Some(Mutex::new(Box::new(usage)));
        self
    }
}

impl Meter for TokenMeter {
    fn data(&mut self, data: &[u8]) {
        match &mut self.source {
            Source::Json => data.iter().for_each(|byte| self.reader.read(*byte)),
            Source::Stream(line) => data.iter().for_each(|byte| line.read(*byte, &mut self.reader)),
            Source::Binary => {}
        }
    }

    fn usage(&mut self, is_complete: bool) -> Option<Usage> {
        if let Some(tokens) = self.reader.counts.tokens() {
            return Some(get_mut(&mut self.report)(tokens));
        }
        if is_complete {
            return None;
        }
        self.when_cut_off.as_mut().map(|usage| get_mut(usage)(self.reader.documents))
    }
}

impl fmt::Debug for TokenMeter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenMeter")
            .field("tokens", &self.reader.counts.tokens())
            .finish_non_exhaustive()
    }
}

enum Source {
    Json,
    /// Events, of which this is the current line.
    Stream(Line),
    /// What is compressed, or framed otherwise: a part of it could look like a usage.
    Binary,
}

impl Source {
    fn of(headers: &HeaderMap) -> Self {
        let begins = |name: HeaderName, start: &str| {
            let value = headers.get(name).map_or(&b""[..], |value| value.as_bytes());
            value.get(..start.len()).is_some_and(|it| it.eq_ignore_ascii_case(start.as_bytes()))
        };
        let is_encoded =
            headers.contains_key(CONTENT_ENCODING) && !begins(CONTENT_ENCODING, "identity");
        if is_encoded || begins(CONTENT_TYPE, "application/vnd.amazon.eventstream") {
            Self::Binary
        } else if begins(CONTENT_TYPE, "text/event-stream") {
            Self::Stream(Line::START)
        } else {
            Self::Json
        }
    }
}

/// A line of a stream of events.
struct Line {
    kind: LineKind,
    /// Whether the last byte was a carriage return: a line feed then ends no other line.
    was_return: bool,
}

enum LineKind {
    /// The line is the beginning of the name of a field, up to this length.
    Name(usize),
    Data,
    /// Another field, or a comment.
    Other,
}

impl Line {
    const NAME: &[u8] = b"data:";
    const START: Self = Self { kind: LineKind::Name(0), was_return: false };

    /// Reads a byte. The data of an event is a JSON document, perhaps in several lines.
    fn read(&mut self, byte: u8, reader: &mut UsageReader) {
        let was_return = std::mem::replace(&mut self.was_return, byte == b'\r');
        match (byte, &self.kind) {
            (b'\n', _) if was_return => {}
            (b'\n' | b'\r', kind) => {
                match kind {
                    LineKind::Name(0) => reader.begin(), // an empty line ends an event
                    LineKind::Data => reader.read(b'\n'),
                    _ => {}
                }
                self.kind = LineKind::Name(0);
            }
            (_, LineKind::Data) => reader.read(byte),
            (_, LineKind::Name(length)) if byte == Self::NAME[*length] => {
                let length = length + 1;
                let is_whole = length == Self::NAME.len();
                self.kind = if is_whole { LineKind::Data } else { LineKind::Name(length) };
            }
            _ => self.kind = LineKind::Other,
        }
    }
}

/// Reads JSON documents byte by byte, and keeps the numbers of their usage alone.
#[derive(Default)]
struct UsageReader {
    counts: Counts,
    /// The number of objects that have begun, as documents.
    documents: u64,
    /// The number of open objects and arrays.
    depth: usize,
    /// The first of them, as long as they lead to the usage. So a tool of a client may have a
    /// parameter of the same name.
    path: [Option<Part>; 4],
    /// The last name or other string, if it matters.
    name: Option<Name>,
    token: Token,
}

/// The largest count of a usage. A closure can multiply it by a price without an overflow.
const MAX_COUNT: u64 = 1 << 40;

/// The largest number of each field.
#[derive(Clone, Copy, Default)]
struct Counts {
    fields: [Option<u64>; CountField::ALL],
    /// Whether a usage was found beyond the first event of a stream.
    is_final: bool,
    /// Whether a number of the usage is no count, or above `MAX_COUNT`.
    is_malformed: bool,
}

impl Counts {
    fn tokens(&self) -> Option<Tokens> {
        if !self.is_final || self.is_malformed {
            return None;
        }
        let known = |field: CountField| self.fields[field as usize];
        let count = |field| known(field).unwrap_or(0);
        let [read, written] = [count(CountField::CacheRead), count(CountField::CacheWritten)];
        // Gateways write the fields of Anthropic beside those of OpenAI, which contain them.
        let includes_cache = known(CountField::Prompt).or(known(CountField::Cached)).is_some();
        let caches = if includes_cache { 0 } else { read + written };
        let prompt = known(CountField::Prompt).max(known(CountField::Input))?;
        let input = prompt + count(CountField::ToolPrompt) + caches;
        let output = count(CountField::Output) + count(CountField::Thoughts);
        let cached_input = count(CountField::Cached).max(read).min(input);
        Some(Tokens {
            input,
            cached_input,
            written_input: written.min(input - cached_input),
            output: output.max(count(CountField::Total).saturating_sub(input)),
        })
    }
}

/// An object that leads to the usage, or is one.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Document,
    /// The array that Gemini streams, and a document in it.
    List,
    Chunk,
    /// An object around the usage, such as the response in an event of the responses API.
    Wrapper,
    /// The message with which a stream of Anthropic begins, and its usage.
    Start,
    StartUsage,
    Usage,
    /// The `meta` of Cohere.
    Meta,
    Details,
}

/// What the last bytes are part of.
#[derive(Default)]
enum Token {
    #[default]
    Other,
    String(Text),
    /// After a backslash in a string.
    Escape,
    /// The digits of a number, unless it is no count.
    Number(Option<u64>),
}

/// The beginning of a string: the names that matter are short.
#[derive(Clone, Copy, Default)]
struct Text {
    bytes: [u8; 28],
    length: usize,
}

#[derive(Clone, Copy, PartialEq)]
enum Name {
    Wrapper,
    Message,
    Usage,
    UsageMetadata,
    Meta,
    Tokens,
    Details,
    /// A field of a usage.
    Count(CountField),
    /// A field of a document of Ollama.
    Own(CountField),
}

/// A number of a usage.
#[derive(Clone, Copy, PartialEq)]
enum CountField {
    /// The input, with what is cached.
    Prompt,
    /// The input, without both caches if they have fields of their own.
    Input,
    ToolPrompt,
    /// A part of the input.
    Cached,
    CacheRead,
    CacheWritten,
    Output,
    Thoughts,
    Total,
}

impl CountField {
    const ALL: usize = Self::Total as usize + 1;
}

const NAMES: &[(&str, Name)] = &[
    ("response", Name::Wrapper),
    ("delta", Name::Wrapper),  // Cohere
    ("x_groq", Name::Wrapper), // Groq
    ("message", Name::Message),
    ("usage", Name::Usage),
    ("usageMetadata", Name::UsageMetadata),
    ("meta", Name::Meta),
    ("tokens", Name::Tokens),
    ("prompt_tokens_details", Name::Details),
    ("input_tokens_details", Name::Details),
    ("prompt_tokens", Name::Count(CountField::Prompt)),
    ("completion_tokens", Name::Count(CountField::Output)),
    ("input_tokens", Name::Count(CountField::Input)),
    ("output_tokens", Name::Count(CountField::Output)),
    ("total_tokens", Name::Count(CountField::Total)),
    ("cached_tokens", Name::Count(CountField::Cached)),
    ("prompt_cache_hit_tokens", Name::Count(CountField::Cached)), // DeepSeek
    ("cache_read_input_tokens", Name::Count(CountField::CacheRead)), // Anthropic
    ("cache_creation_input_tokens", Name::Count(CountField::CacheWritten)),
    ("inputTokens", Name::Count(CountField::Input)), // Bedrock
    ("outputTokens", Name::Count(CountField::Output)),
    ("totalTokens", Name::Count(CountField::Total)),
    ("cacheReadInputTokens", Name::Count(CountField::CacheRead)),
    ("cacheWriteInputTokens", Name::Count(CountField::CacheWritten)),
    ("promptTokenCount", Name::Count(CountField::Prompt)), // Gemini
    ("toolUsePromptTokenCount", Name::Count(CountField::ToolPrompt)),
    ("cachedContentTokenCount", Name::Count(CountField::Cached)),
    ("candidatesTokenCount", Name::Count(CountField::Output)),
    ("thoughtsTokenCount", Name::Count(CountField::Thoughts)),
    ("totalTokenCount", Name::Count(CountField::Total)),
    ("prompt_eval_count", Name::Own(CountField::Prompt)), // Ollama
    ("eval_count", Name::Own(CountField::Output)),
];

impl Text {
    /// A string that is no name that matters.
    const OTHER: Self = Self { bytes: [0; 28], length: usize::MAX };

    fn push(&mut self, byte: u8) {
        if let Some(place) = self.bytes.get_mut(self.length) {
            *place = byte;
        }
        self.length = self.length.saturating_add(1);
    }

    fn name(&self) -> Option<Name> {
        let text = self.bytes.get(..self.length)?;
        NAMES.iter().find(|(name, _)| name.as_bytes() == text).map(|(_, name)| *name)
    }
}

impl UsageReader {
    /// Begins another document, also if the last one is not complete.
    fn begin(&mut self) {
        let Self { counts, documents, .. } = *self;
        *self = Self { counts, documents, ..Self::default() };
    }

    fn read(&mut self, byte: u8) {
        match (&mut self.token, byte) {
            (Token::String(text), b'"') => {
                // Names matter in the parts of the path alone, and few strings are in one.
                let text = *text;
                self.token = Token::Other;
                self.name = self.innermost().and_then(|_| text.name());
            }
            (Token::String(_), b'\\') => self.token = Token::Escape,
            (Token::String(text), _) => text.push(byte),
            (Token::Escape, _) => self.token = Token::String(Text::OTHER),
            (Token::Number(count), b'0'..=b'9') => {
                let digit = u64::from(byte - b'0');
                *count = count.map(|count| count.saturating_mul(10).saturating_add(digit));
            }
            (Token::Number(count), b'.' | b'e' | b'E' | b'+' | b'-') => *count = None,
            (Token::Number(count), _) => {
                let count = *count;
                self.token = Token::Other;
                self.found(count);
                self.begin_token(byte);
            }
            (Token::Other, _) => self.begin_token(byte),
        }
    }

    /// Reads a byte outside of strings and numbers.
    fn begin_token(&mut self, byte: u8) {
        match byte {
            b'"' => self.token = Token::String(Text::default()),
            b'0'..=b'9' => self.token = Token::Number(Some(u64::from(byte - b'0'))),
            b'-' => self.token = Token::Number(None),
            b'{' => self.open(self.part()),
            b'[' => self.open((self.depth == 0).then_some(Part::List)),
            b'}' | b']' => self.close(),
            b',' => self.name = None,
            _ => {} // a space, a colon, or a letter of `true`
        }
    }

    /// Returns the part of the path that an object is which begins now.
    fn part(&self) -> Option<Part> {
        Some(match (self.innermost(), self.name) {
            _ if self.depth == 0 => Part::Document,
            (Some(Part::List), None) => Part::Chunk,
            (Some(Part::Document), Some(Name::Wrapper)) => Part::Wrapper,
            (Some(Part::Document), Some(Name::Message)) => Part::Start,
            (Some(Part::Start), Some(Name::Usage)) => Part::StartUsage,
            (Some(Part::Document | Part::Wrapper), Some(Name::Usage)) => Part::Usage,
            (Some(Part::Document | Part::Chunk), Some(Name::UsageMetadata)) => Part::Usage,
            (Some(Part::Document | Part::Wrapper), Some(Name::Meta)) => Part::Meta,
            (Some(Part::Usage | Part::Meta), Some(Name::Tokens)) => Part::Usage,
            (Some(Part::Usage), Some(Name::Details)) => Part::Details,
            _ => return None,
        })
    }

    /// Returns the innermost object or array, if it is part of the path.
    fn innermost(&self) -> Option<Part> {
        *self.path.get(self.depth.checked_sub(1)?)?
    }

    fn open(&mut self, part: Option<Part>) {
        if let Some(place) = self.path.get_mut(self.depth) {
            *place = part;
        }
        let is_document = matches!(part, Some(Part::Document | Part::Chunk));
        self.documents = self.documents.saturating_add(u64::from(is_document));
        (self.depth, self.name) = (self.depth.saturating_add(1), None);
    }

    fn close(&mut self) {
        (self.depth, self.name) = (self.depth.saturating_sub(1), None);
    }

    /// Adds a number of a usage, or that there is one that is no count.
    fn found(&mut self, count: Option<u64>) {
        let (field, is_final) = match (self.innermost(), self.name) {
            (Some(Part::Usage), Some(Name::Count(field))) => (field, true),
            (Some(Part::StartUsage), Some(Name::Count(field))) => (field, false),
            (Some(Part::Details), Some(Name::Count(CountField::Cached))) => {
                (CountField::Cached, true)
            }
            (Some(Part::Document), Some(Name::Own(field))) => (field, true),
            _ => return,
        };
        let count = count.filter(|count| *count <= MAX_COUNT);
        let counts = &mut self.counts;
        counts.is_malformed |= count.is_none();
        counts.is_final |= is_final;
        let known = &mut counts.fields[field as usize];
        *known = (*known).max(count);
    }
}

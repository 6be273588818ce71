//! `TokenMeter`: the meter for answers of language models whose API is compatible with OpenAI's. It
//! finds the usage in JSON and in streams of events, whatever the frames, and keeps no text of
//! them. What it reports is settled by `guard.rs`.

use std::fmt;

use http::{HeaderMap, header::CONTENT_TYPE, response};

use super::meter::{Meter, Usage};

/// The tokens of a request to a language model, as its answer reports them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tokens {
    /// Those of the prompt: `prompt_tokens` or `input_tokens`.
    pub input: u64,
    /// Those of the prompt that the model has read from its cache, which often cost less. They are
    /// part of `input`.
    pub cached_input: u64,
    /// Those of the answer, with its reasoning: `completion_tokens` or `output_tokens`.
    pub output: u64,
}

/// The meter for answers of an API that is compatible with OpenAI's, for
/// [`RateLimitLayer::settle_by`](crate::RateLimitLayer::settle_by).
///
/// It reads the `usage` of completions, chat completions, embeddings and of the responses API, of
/// JSON bodies and of streams (`text/event-stream`). If a stream reports it several times, the last
/// numbers count. It keeps some bytes, however long the answer is. Names inside of what the model
/// or the client has written are not taken for the usage.
///
/// | answer | counts |
/// |---|---|
/// | with usage | what the closure returns |
/// | without, complete or an error | the estimate; to charge no errors, use [`charge_when`](crate::RateLimitLayer::charge_when) |
/// | a stream that is cut off before its usage | the estimate, or what [`when_cut_off`](TokenMeter::when_cut_off) returns |
///
/// A stream of chat completions reports its usage only if the request has
/// `"stream_options": {"include_usage": true}`. The body must not be compressed: a gateway sends no
/// `Accept-Encoding` to the model.
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
///     http::{TokenMeter, Usage},
/// };
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = MemoryStore::new();
/// let limiter = |name, quota| Limiter::new(name, store.clone(), Algorithm::SlidingLog, quota);
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
    report: Box<dyn FnMut(Tokens) -> Usage + Send>,
    when_cut_off: Option<Box<dyn FnMut(u64) -> Usage + Send>>,
}

impl TokenMeter {
    /// Creates the meter of an answer with this head. `report` determines the usage of each limiter
    /// from the tokens.
    pub fn new(
        head: &response::Parts,
        report: impl FnMut(Tokens) -> Usage + Send + 'static,
    ) -> Self {
        let source =
            if is_stream(&head.headers) { Source::Stream(Line::START) } else { Source::Json };
        let reader = UsageReader::default();
        Self { source, reader, report: Box::new(report), when_cut_off: None }
    }

    /// Sets what a stream counts that the client or the model cuts off before its usage.
    ///
    /// The closure receives the number of events that have arrived. Models send about an event per
    /// token of the answer, and a few more. The estimates of limiters that it does not name count.
    #[must_use]
    pub fn when_cut_off(mut self, usage: impl FnMut(u64) -> Usage + Send + 'static) -> Self {
        self.when_cut_off = Some(Box::new(usage));
        self
    }
}

fn is_stream(headers: &HeaderMap) -> bool {
    const STREAM: &[u8] = b"text/event-stream";
    let kind = headers.get(CONTENT_TYPE).map_or(&b""[..], |kind| kind.as_bytes());
    kind.get(..STREAM.len()).is_some_and(|kind| kind.eq_ignore_ascii_case(STREAM))
}

impl Meter for TokenMeter {
    fn data(&mut self, data: &[u8]) {
        match &mut self.source {
            Source::Json => data.iter().for_each(|byte| self.reader.read(*byte)),
            Source::Stream(line) => data.iter().for_each(|byte| line.read(*byte, &mut self.reader)),
        }
    }

    fn usage(&mut self, is_complete: bool) -> Option<Usage> {
        if let Some(tokens) = self.reader.tokens {
            return Some((self.report)(tokens));
        }
        if is_complete {
            return None;
        }
        self.when_cut_off.as_mut().map(|usage| usage(self.reader.documents))
    }
}

impl fmt::Debug for TokenMeter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenMeter").field("tokens", &self.reader.tokens).finish_non_exhaustive()
    }
}

enum Source {
    Json,
    /// Events, of which this is the current line.
    Stream(Line),
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
    /// The last numbers, if there were any.
    tokens: Option<Tokens>,
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

/// An object that leads to the usage, or is one.
#[derive(Clone, Copy)]
enum Part {
    Document,
    /// That of the responses API, in an event of a stream.
    Response,
    Usage,
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
    bytes: [u8; 24],
    length: usize,
}

#[derive(Clone, Copy)]
enum Name {
    Response,
    Usage,
    Input,
    Output,
    Details,
    Cached,
}

impl Text {
    /// A string that is no name that matters.
    const OTHER: Self = Self { bytes: [0; 24], length: usize::MAX };

    fn push(&mut self, byte: u8) {
        if let Some(place) = self.bytes.get_mut(self.length) {
            *place = byte;
        }
        self.length = self.length.saturating_add(1);
    }

    fn name(&self) -> Option<Name> {
        Some(match self.bytes.get(..self.length)? {
            b"response" => Name::Response,
            b"usage" => Name::Usage,
            b"prompt_tokens" | b"input_tokens" => Name::Input,
            b"completion_tokens" | b"output_tokens" => Name::Output,
            b"prompt_tokens_details" | b"input_tokens_details" => Name::Details,
            b"cached_tokens" => Name::Cached,
            _ => return None,
        })
    }
}

impl UsageReader {
    /// Begins another document, also if the last one is not complete.
    fn begin(&mut self) {
        let Self { tokens, documents, .. } = *self;
        *self = Self { tokens, documents, ..Self::default() };
    }

    fn read(&mut self, byte: u8) {
        match (&mut self.token, byte) {
            (Token::String(text), b'"') => {
                self.name = text.name();
                self.token = Token::Other;
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
                count.into_iter().for_each(|count| self.found(count));
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
            b'[' => self.open(None),
            b'}' | b']' => self.close(),
            b',' => self.name = None,
            _ => {} // a space, a colon, or a letter of `true`
        }
    }

    /// Returns the part of the path that an object is which begins now.
    fn part(&self) -> Option<Part> {
        match (self.depth, self.innermost()?, self.name) {
            (0, ..) => Some(Part::Document),
            (_, Part::Document, Some(Name::Response)) => Some(Part::Response),
            (_, Part::Document | Part::Response, Some(Name::Usage)) => Some(Part::Usage),
            (_, Part::Usage, Some(Name::Details)) => Some(Part::Details),
            _ => None,
        }
    }

    /// Returns the innermost object, if it is part of the path.
    fn innermost(&self) -> Option<Part> {
        match self.depth.checked_sub(1) {
            Some(depth) => *self.path.get(depth)?,
            None => Some(Part::Document),
        }
    }

    fn open(&mut self, part: Option<Part>) {
        if let Some(place) = self.path.get_mut(self.depth) {
            *place = part;
        }
        self.documents = self.documents.saturating_add(u64::from(self.depth == 0));
        (self.depth, self.name) = (self.depth.saturating_add(1), None);
    }

    fn close(&mut self) {
        (self.depth, self.name) = (self.depth.saturating_sub(1), None);
    }

    fn found(&mut self, count: u64) {
        let (Some(part), Some(name)) = (self.innermost(), self.name) else { return };
        let mut tokens = self.tokens.unwrap_or_default();
        match (part, name) {
            (Part::Usage, Name::Input) => tokens.input = count,
            (Part::Usage, Name::Output) => tokens.output = count,
            (Part::Details, Name::Cached) => tokens.cached_input = count,
            _ => return,
        }
        self.tokens = Some(tokens);
    }
}

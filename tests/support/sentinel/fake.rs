//! A server with replies that a test chooses, in the protocol of Redis.

use std::{
    io::{self, BufRead, BufReader, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    thread,
};

/// Returns the reply to the words of a command, or no text to close the connection. The first
/// argument is the number of the connection.
type Answer = dyn Fn(usize, &[&str]) -> String + Send + Sync;

/// A server, which ends when this is dropped.
pub struct Fake {
    port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    answer: Box<Answer>,
    is_over: AtomicBool,
    connections: AtomicUsize,
    streams: Mutex<Vec<TcpStream>>,
}

impl Fake {
    pub fn start(answer: impl Fn(usize, &[&str]) -> String + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("it is bound").port();
        let shared = Arc::new(Shared {
            answer: Box::new(answer),
            is_over: AtomicBool::default(),
            connections: AtomicUsize::default(),
            streams: Mutex::default(),
        });
        let server = shared.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { continue };
                if server.is_over.load(SeqCst) {
                    break;
                }
                let copy = stream.try_clone().expect("a copy of the stream");
                server.streams.lock().unwrap().push(copy);
                let (server, number) =
                    (server.clone(), server.connections.fetch_add(1, SeqCst) + 1);
                thread::spawn(move || server.serve(stream, number));
            }
        });
        Self { port, shared }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// The number of connections so far.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(SeqCst)
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.shared.is_over.store(true, SeqCst);
        let _ = TcpStream::connect(("127.0.0.1", self.port)); // wakes the listener
        for stream in self.shared.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Shared {
    fn serve(&self, stream: TcpStream, number: usize) -> Option<()> {
        let mut writer = stream.try_clone().ok()?;
        let mut reader = BufReader::new(stream);
        loop {
            let words = read(&mut reader).ok()?;
            let words: Vec<_> = words.iter().map(String::as_str).collect();
            let reply = match words[0] {
                "HELLO" => map(&[("server", "redis"), ("proto", "3")]),
                _ => (self.answer)(number, &words),
            };
            if reply.is_empty() {
                return writer.shutdown(Shutdown::Both).ok();
            }
            writer.write_all(reply.as_bytes()).ok()?;
        }
    }
}

/// Reads a command: an array of strings. Bytes that are not UTF-8 are replaced.
fn read(reader: &mut impl BufRead) -> io::Result<Vec<String>> {
    let number = read_size(reader)?;
    let word = |_| {
        let mut bytes = vec![0; read_size(reader)? + 2];
        reader.read_exact(&mut bytes)?;
        bytes.truncate(bytes.len() - 2); // the end of the line
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    (0..number).map(word).collect()
}

/// Reads a line of a type and a size.
fn read_size(reader: &mut impl BufRead) -> io::Result<usize> {
    let mut line = String::new();
    match reader.read_line(&mut line)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(line[1..].trim_end().parse().expect("a size")),
    }
}

pub fn array(words: &[&str]) -> String {
    let strings: String =
        words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len())).collect();
    format!("*{}\r\n{strings}", words.len())
}

pub fn map(entries: &[(&str, &str)]) -> String {
    let words: Vec<_> = entries.iter().flat_map(|(name, value)| [*name, *value]).collect();
    array(&words).replacen(&format!("*{}", words.len()), &format!("%{}", entries.len()), 1)
}

pub fn push(words: &[&str]) -> String {
    array(words).replacen('*', ">", 1)
}

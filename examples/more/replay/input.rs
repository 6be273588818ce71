//! The lines of files, of gzip files and of standard input. No line is larger than the buffer.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use flate2::read::MultiGzDecoder;

/// Longer lines are bad lines.
const LONGEST: usize = 1 << 20;
/// Small, because all files are open at once. It grows with the longest line.
const BUFFER: usize = 1 << 16;

/// A reader that counts the bytes, for the progress.
struct Counted<R> {
    inner: R,
    bytes: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.bytes.fetch_add(read as u64, Relaxed);
        Ok(read)
    }
}

/// Opens a file, or standard input for `-`. What begins as a gzip file is decompressed.
pub fn open(path: &Path, bytes: &Arc<AtomicU64>) -> io::Result<Lines> {
    let raw: Box<dyn Read> = match path.as_os_str() == "-" {
        true => Box::new(io::stdin().lock()),
        false => Box::new(File::open(path)?),
    };
    let mut raw = Counted { inner: raw, bytes: bytes.clone() };
    let mut head = vec![];
    (&mut raw).take(2).read_to_end(&mut head)?;
    let is_gzip = head == [0x1f, 0x8b];
    let all = io::Cursor::new(head).chain(raw);
    let reader: Box<dyn Read> =
        if is_gzip { Box::new(MultiGzDecoder::new(all)) } else { Box::new(all) };
    Ok(Lines { reader, buffer: vec![0; BUFFER], start: 0, end: 0, is_over: false })
}

pub struct Lines {
    reader: Box<dyn Read>,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    is_over: bool,
}

/// A line, or one that is too long.
pub enum Line<'a> {
    Text(&'a [u8]),
    TooLong,
}

impl Lines {
    /// Returns the next line, without its end.
    pub fn next(&mut self) -> io::Result<Option<Line<'_>>> {
        let mut is_long = false;
        let mut searched = 0;
        loop {
            let filled = &self.buffer[self.start..self.end];
            if let Some(length) = memchr::memchr(b'\n', &filled[searched..]) {
                let line = self.start..self.start + searched + length;
                self.start = line.end + 1;
                return Ok(Some(self.line(line, is_long)));
            }
            searched = filled.len();
            if self.is_over {
                let line = self.start..self.end;
                self.start = self.end;
                let has_line = is_long || !line.is_empty();
                return Ok(has_line.then(|| self.line(line, is_long)));
            }
            if self.start > 0 {
                self.buffer.copy_within(self.start..self.end, 0);
                (self.start, self.end) = (0, self.end - self.start);
            } else if self.end == self.buffer.len() && self.end < LONGEST {
                self.buffer.resize(2 * self.end, 0);
            } else if self.end == self.buffer.len() {
                // The rest of the line is left out.
                (is_long, self.end, searched) = (true, 0, 0);
            }
            match self.reader.read(&mut self.buffer[self.end..]) {
                Ok(0) => self.is_over = true,
                Ok(read) => self.end += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn line(&self, range: std::ops::Range<usize>, is_long: bool) -> Line<'_> {
        let text = &self.buffer[range];
        match is_long {
            true => Line::TooLong,
            false => Line::Text(text.strip_suffix(b"\r").unwrap_or(text)),
        }
    }
}

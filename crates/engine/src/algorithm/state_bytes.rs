//! Reads the bytes of a state, as the scripts pack it. Does not know the fields of a state.

use super::arithmetic::EXACT;

/// Reads numbers from the front of the bytes.
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Begins behind the letter of the form; `None` if the bytes begin with another letter.
    pub(super) fn new(bytes: &'a [u8], form: u8) -> Option<Self> {
        let (first, rest) = bytes.split_first()?;
        (*first == form).then_some(Self(rest))
    }

    /// The lowest `size` bytes of an integer.
    fn bits(&mut self, size: usize) -> Option<u64> {
        let (bytes, rest) = self.0.split_at_checked(size)?;
        self.0 = rest;
        Some(bytes.iter().rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte)))
    }

    /// An unsigned integer of `size` bytes.
    pub(super) fn integer(&mut self, size: usize) -> Option<i64> {
        Some(self.bits(size)? as i64)
    }

    /// A signed integer of `size` bytes.
    pub(super) fn signed(&mut self, size: usize) -> Option<i64> {
        let unused = 64 - 8 * size;
        Some((self.bits(size)? << unused) as i64 >> unused)
    }

    /// Unsigned integers of these sizes, in bytes.
    pub(super) fn integers<const N: usize>(&mut self, sizes: [usize; N]) -> Option<[i64; N]> {
        let mut numbers = [0; N];
        for (number, size) in numbers.iter_mut().zip(sizes) {
            *number = self.integer(size)?;
        }
        Some(numbers)
    }

    /// Integers that are stored as doubles, which hold those up to 2^53.
    pub(super) fn doubles<const N: usize>(&mut self) -> Option<[i64; N]> {
        let mut numbers = [0; N];
        for number in &mut numbers {
            let (bytes, rest) = self.0.split_first_chunk()?;
            self.0 = rest;
            *number = f64::from_le_bytes(*bytes) as i64;
            if number.unsigned_abs() > EXACT as u64 {
                return None;
            }
        }
        Some(numbers)
    }

    pub(super) fn is_at_end(&self) -> bool {
        self.0.is_empty()
    }

    /// The bytes that were not read.
    pub(super) fn rest(self) -> &'a [u8] {
        self.0
    }
}

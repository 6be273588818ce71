//! The scripts for Redisson's format: their texts, arguments, replies and status codes. The Lua
//! files describe the other side.

/// A script, by what it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Script {
    Acquire,
    Release,
    AvailablePermits,
    SetRate,
    Expire,
    Config,
}

/// Takes the number of arguments of the script without the common ones, and the files.
macro_rules! text {
    ($args:literal; $($file:literal),+) => {
        (
            &[$($file),+],
            concat!(
                concat!("local ARGS = ", $args, "\n"),
                include_str!("../scripts/limits.lua"),
                $(include_str!(concat!("../scripts/", $file, ".lua"))),+
            ),
        )
    };
}

impl Script {
    pub const ALL: [Self; 6] = [
        Self::Acquire,
        Self::Release,
        Self::AvailablePermits,
        Self::SetRate,
        Self::Expire,
        Self::Config,
    ];

    /// Returns the text, with its comments.
    #[must_use]
    pub const fn text(self) -> &'static str {
        self.parts().1
    }

    /// Returns the files of the text, without `limits`. The last one has the name of the script.
    #[must_use]
    pub const fn files(self) -> &'static [&'static str] {
        self.parts().0
    }

    const fn parts(self) -> (&'static [&'static str], &'static str) {
        match self {
            Self::Acquire => text!(1; "quick", "rate", "log", "acquire"),
            Self::Release => text!(3; "rate", "log", "release"),
            Self::AvailablePermits => text!(0; "rate", "log", "available_permits"),
            Self::SetRate => text!(5; "rate", "log", "set_rate"),
            Self::Expire => text!(1; "rate", "expire"),
            Self::Config => text!(0; "rate", "config"),
        }
    }
}

/// The status codes, which are the first element of a reply.
pub mod status {
    pub const DONE: i64 = 1;
    pub const ABOVE_RATE: i64 = 2;
    pub const NO_RATE: i64 = 3;
    pub const AGAIN: i64 = 4;
    /// The rate is per client, so the script needs all keys.
    pub const PER_CLIENT: i64 = 5;
}

/// Returns the common arguments of all scripts, which are omitted if they are empty.
#[must_use]
pub fn arguments<'a>(template_rate: &'a str, tally: &'a [u8]) -> Vec<&'a [u8]> {
    match (template_rate, tally) {
        ("", []) => vec![],
        _ => vec![template_rate.as_bytes(), tally],
    }
}

/// The size of the entry of an acquire.
pub const ENTRY: usize = 21;

/// Returns the entry of an acquire in the log. It has four bytes for the permits: more are above
/// every rate, so the script denies them, too.
#[must_use]
pub fn entry(id: &[u8; 16], permits: u64) -> [u8; ENTRY] {
    let permits = u32::try_from(permits).unwrap_or(u32::MAX);
    let mut entry = [0; ENTRY];
    entry[0] = id.len() as u8;
    entry[1..17].copy_from_slice(id);
    entry[17..].copy_from_slice(&permits.to_le_bytes());
    entry
}

/// The reply of [`Script::Acquire`]. Times are in microseconds, the interval in milliseconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AcquireReply {
    pub status: i64,
    pub wait: f64,
    pub remaining: f64,
    pub replenish: f64,
    pub reset: f64,
    pub rate: f64,
    pub interval: f64,
    /// What the next step of the call needs.
    pub tally: Vec<u8>,
}

impl AcquireReply {
    const NUMBERS: usize = 7;

    /// Reads the bytes of a reply; `None` if they are too short.
    #[must_use]
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let (numbers, tally) = bytes.split_at_checked(8 * Self::NUMBERS)?;
        let (numbers, _) = numbers.as_chunks::<8>();
        let &[status, wait, remaining, replenish, reset, rate, interval] = numbers else {
            return None;
        };
        Some(Self {
            status: f64::from_le_bytes(status) as i64,
            wait: f64::from_le_bytes(wait),
            remaining: f64::from_le_bytes(remaining),
            replenish: f64::from_le_bytes(replenish),
            reset: f64::from_le_bytes(reset),
            rate: f64::from_le_bytes(rate),
            interval: f64::from_le_bytes(interval),
            tally: tally.to_vec(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_has_seven_numbers_and_the_tally() {
        let numbers = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0].map(f64::to_le_bytes).concat();
        let reply = AcquireReply::read(&[&*numbers, b"tally"].concat()).unwrap();
        assert_eq!((reply.status, reply.interval, &*reply.tally), (1, 7.0, &b"tally"[..]));
        assert_eq!(AcquireReply::read(&numbers[1..]), None);
    }

    #[test]
    fn an_entry_has_the_id_and_the_permits_of_four_bytes() {
        let entry = entry(&[7; 16], u64::MAX);
        assert_eq!((entry[0], &entry[1..17], &entry[17..]), (16, &[7; 16][..], &[255; 4][..]));
    }
}

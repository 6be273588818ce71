//! The ids of acquires, and that of this process. The names of keys, which contain it, are in
//! `keys.rs`.

use std::{
    hash::{BuildHasher, RandomState},
    sync::OnceLock,
};

/// The id of an acquire.
pub type Id = [u8; 16];

/// Returns a random number.
#[must_use]
pub fn random() -> u64 {
    RandomState::new().hash_one(0)
}

/// Returns the id of an acquire, from the number in its decision and a number of this process.
#[must_use]
pub fn id_of(number: u64) -> Id {
    static PROCESS: OnceLock<u64> = OnceLock::new();
    let process = *PROCESS.get_or_init(random);
    (u128::from(process) << 64 | u128::from(number)).to_le_bytes()
}

/// Returns the id of this process: a random UUID, as Redisson makes one for each client.
#[must_use]
pub fn process_id() -> &'static str {
    static ID: OnceLock<String> = OnceLock::new();
    ID.get_or_init(|| {
        let mut bytes = id_of(random());
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
    })
}

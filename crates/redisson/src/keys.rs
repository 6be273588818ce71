//! The names of the keys of a limiter. Commands are in the other files.

/// The keys of a limiter: five with Redisson's names, and two that this crate adds.
#[derive(Debug)]
pub struct Keys {
    pub name: String,
    pub client_id: String,
    pub all: [String; 7],
}

impl Keys {
    /// Returns `None` if the keys would be in several slots of a cluster.
    #[must_use]
    pub fn new(name: &str, client_id: &str) -> Option<Self> {
        if !is_in_one_slot(name) {
            return None;
        }
        let tagged = if name.contains('{') { name.to_owned() } else { format!("{{{name}}}") };
        let overall = |suffix: &str| format!("{tagged}:{suffix}");
        let per_client = |suffix: &str| format!("{tagged}:{suffix}:{client_id}");
        let all = [
            name.to_owned(),
            overall("value"),
            per_client("value"),
            overall("permits"),
            per_client("permits"),
            overall("tally"),
            per_client("tally"),
        ];
        Some(Self { name: name.to_owned(), client_id: client_id.to_owned(), all })
    }

    /// Returns the keys of a rate that is not per client.
    #[must_use]
    pub fn overall(&self) -> [&str; 4] {
        [0, 1, 3, 5].map(|index| &*self.all[index])
    }
}

/// Returns whether the name has the same hash tag as the keys that begin with it (in braces, if it
/// has none).
fn is_in_one_slot(name: &str) -> bool {
    match name.split_once('{') {
        Some((_, rest)) => rest.find('}').is_some_and(|end| end > 0),
        None => !name.is_empty() && !name.contains('}'),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the slot of a key by the rules of Redis Cluster.
    fn slot(key: &str) -> u16 {
        let tag = key
            .split_once('{')
            .and_then(|(_, rest)| rest.split_once('}'))
            .map(|(tag, _)| tag)
            .filter(|tag| !tag.is_empty());
        let crc = tag.unwrap_or(key).bytes().fold(0_u16, |crc, byte| {
            (0..8).fold(crc ^ u16::from(byte) << 8, |crc, _| {
                if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 }
            })
        });
        crc % 16_384
    }

    #[test]
    fn names_whose_keys_would_be_in_several_slots_are_rejected() {
        assert_eq!(slot("123456789"), 0x31c3);
        for name in ["", "a}b", "}", "x{y", "{}z", "{", "}{a}x{", "{}{a}"] {
            assert_eq!(Keys::new(name, "client").is_some(), name == "}{a}x{", "{name}");
        }
        let user = Keys::new("user:{42}", "client").unwrap();
        assert_eq!(user.all[..3], ["user:{42}", "user:{42}:value", "user:{42}:value:client"]);
    }

    proptest! {
        #[test]
        fn the_keys_of_an_accepted_name_are_in_one_slot(
            name in "[ab{}]{0,8}",
            client in "[ab{}]{0,4}",
        ) {
            match Keys::new(&name, &client) {
                Some(keys) => prop_assert!(keys.all.iter().all(|key| slot(key) == slot(&name))),
                // Redisson's own keys would be in several slots.
                None if name.contains('{') => {
                    let value = format!("{name}:value");
                    prop_assert!(slot(&value) != slot(&name));
                }
                None => {
                    let value = format!("{{{name}}}:value");
                    prop_assert!(name.is_empty() || slot(&value) != slot(&name));
                }
            }
        }
    }
}

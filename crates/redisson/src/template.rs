//! A limiter for each key, which inherits the rate of a template: its name, and the rate as an
//! argument of the scripts.

/// The text in a name that is replaced by the key.
pub const PLACEHOLDER: &str = "{key}";

/// Returns whether a name stands for a limiter of each key.
#[must_use]
pub fn is_template(name: &str) -> bool {
    name.contains(PLACEHOLDER)
}

/// Returns the name of the limiter of a key; `None` if a key could address other names, because the
/// template has braces other than a pair around the key, or contains only the key.
#[must_use]
pub fn name_of_key(template: &str, key: &str) -> Option<String> {
    let rest = template.replace("{{key}}", "").replace(PLACEHOLDER, "");
    let is_valid = !rest.is_empty() && !rest.contains(['{', '}']);
    is_valid.then(|| template.replace(PLACEHOLDER, key))
}

/// The rate of a template. Times are in milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct TemplateRate {
    pub rate: u64,
    pub interval: u64,
    pub is_per_client: bool,
    /// The time after which the limiter of an unused key expires.
    pub keep_alive: u64,
}

impl TemplateRate {
    /// Returns the rate as an argument of the scripts.
    #[must_use]
    pub fn argument(self) -> String {
        let Self { rate, interval, is_per_client, keep_alive } = self;
        format!("{rate} {interval} {} {keep_alive}", u8::from(is_per_client))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_replaces_the_placeholder_alone() {
        assert_eq!(name_of_key("api:{key}", "alice").unwrap(), "api:alice");
        assert_eq!(name_of_key("api:{{key}}:v2", "alice").unwrap(), "api:{alice}:v2");
        for template in ["{key}", "{a}{key}", "a}{key}"] {
            assert_eq!(name_of_key(template, "alice"), None, "{template}");
        }
    }

    #[test]
    fn the_argument_has_the_four_numbers() {
        let rate =
            TemplateRate { rate: 5, interval: 1_000, is_per_client: true, keep_alive: 60_000 };
        assert_eq!(rate.argument(), "5 1000 1 60000");
    }
}

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

/// Returns the rate of a template as an argument of the scripts. Times are in milliseconds;
/// `keep_alive` is the time after which the limiter of an unused key expires.
#[must_use]
pub fn rate_argument(rate: u64, interval: u64, is_per_client: bool, keep_alive: u64) -> String {
    format!("{rate} {interval} {} {keep_alive}", u8::from(is_per_client))
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
        assert_eq!(rate_argument(5, 1_000, true, 60_000), "5 1000 1 60000");
    }
}

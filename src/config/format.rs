//! Reads limits by name. The engine has the format of one limit.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, Visitor},
};

use super::limits::Limits;
use crate::{error::ConfigError, limiter::check_name};

impl<'de> Deserialize<'de> for Limits {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Table;

        impl<'de> Visitor<'de> for Table {
            type Value = Limits;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("limits by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut table: A) -> Result<Limits, A::Error> {
                let mut limits = Limits::default();
                while let Some(LimitName(name)) = table.next_key()? {
                    if limits.get(&name).is_some() {
                        return Err(A::Error::custom(format_args!(
                            "limit {name:?}: two limits have this name; rename one"
                        )));
                    }
                    limits.0.insert(name, table.next_value()?);
                }
                Ok(limits)
            }
        }

        deserializer.deserialize_map(Table)
    }
}

/// A valid name of a limit.
#[derive(Deserialize)]
#[serde(try_from = "String")]
struct LimitName(String);

impl TryFrom<String> for LimitName {
    type Error = ConfigError;

    fn try_from(name: String) -> Result<Self, ConfigError> {
        check_name(&name)?;
        Ok(Self(name))
    }
}

//! Deserializes named limits and quotas from TOML, JSON and similar formats, with errors that name
//! the field.

use std::fmt;

use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, Unexpected, Visitor,
};

use super::{
    limits::{Limit, Limits, refill_name},
    settings::{FIELDS, Field, Settings, place_of},
};
use crate::{algorithm::Refill, limiter::check_name, quota::Quota};

/// Reads the quota from text: `10/s burst 20`.
impl<'de> Deserialize<'de> for Quota {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;

        impl Visitor<'_> for Text {
            type Value = Quota;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a quota as text, such as \"10/s burst 20\"")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Quota, E> {
                text.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_str(Text)
    }
}

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
                while let Some(name) = table.next_key_seed(NewName(&limits))? {
                    limits.0.insert(name, table.next_value()?);
                }
                Ok(limits)
            }
        }

        deserializer.deserialize_map(Table)
    }
}

/// Reads a name that the limits do not contain yet.
struct NewName<'a>(&'a Limits);

impl<'de> DeserializeSeed<'de> for NewName<'_> {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for NewName<'_> {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a limit")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<String, E> {
        check_name(name).map_err(E::custom)?;
        match self.0.get(name) {
            None => Ok(name.to_owned()),
            Some(_) => Err(E::custom(format_args!(
                "limit {name:?}: two limits have this name; rename one"
            ))),
        }
    }
}

impl<'de> Deserialize<'de> for Limit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Table;

        impl<'de> Visitor<'de> for Table {
            type Value = Limit;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a limit, which has `algorithm` and `quota`")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut table: A) -> Result<Limit, A::Error> {
                let mut settings = Settings::default();
                while let Some(field) = table.next_key::<Field>()? {
                    if settings.has(field) {
                        return Err(A::Error::duplicate_field(field.name()));
                    }
                    table.next_value_seed(FieldValue { field, settings: &mut settings })?;
                }
                settings.limit().map_err(A::Error::custom)
            }
        }

        deserializer.deserialize_struct("Limit", FIELDS, Table)
    }
}

impl<'de> Deserialize<'de> for Field {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;

        impl Visitor<'_> for Name {
            type Value = Field;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a field")
            }

            fn visit_str<E: Error>(self, name: &str) -> Result<Field, E> {
                let field = Field::ALL.into_iter().find(|field| field.name() == name);
                field.ok_or_else(|| match place_of(name) {
                    Some(place) => E::custom(format_args!("unknown field `{name}`: {place}")),
                    None => E::unknown_field(name, FIELDS),
                })
            }
        }

        deserializer.deserialize_identifier(Name)
    }
}

/// Reads the value of a field. It checks the settings immediately, while the format knows the line.
struct FieldValue<'a> {
    field: Field,
    settings: &'a mut Settings,
}

impl<'de> DeserializeSeed<'de> for FieldValue<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        match self.field {
            Field::Algorithm | Field::Quota | Field::Refill => deserializer.deserialize_str(self),
            Field::Buckets | Field::Overdraft => deserializer.deserialize_u64(self),
        }
    }
}

impl Visitor<'_> for FieldValue<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.field {
            Field::Algorithm => "`algorithm` to be a name, such as \"token-bucket\"",
            Field::Quota => "`quota` to be text, such as \"10/s\"",
            Field::Buckets => "`buckets` to be a number from 1 to 100",
            Field::Refill => "`refill` to be \"continuous\" or \"interval\"",
            Field::Overdraft => "`overdraft` to be a number of tokens, up to 2^46",
        })
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<(), E> {
        match self.field {
            Field::Algorithm => self.settings.algorithm = Some(text.parse().map_err(E::custom)?),
            Field::Quota => self.settings.quota = Some(text.parse().map_err(E::custom)?),
            Field::Refill => {
                let all = [Refill::Continuous, Refill::Interval];
                let refill = all.into_iter().find(|refill| refill_name(*refill) == text);
                let refill = refill.ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self));
                self.settings.refill = Some(refill?);
            }
            _ => return Err(E::invalid_type(Unexpected::Str(text), &self)),
        }
        self.settings.check().map_err(E::custom)
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<(), E> {
        let invalid = |_| E::invalid_value(Unexpected::Unsigned(number), &self);
        match self.field {
            Field::Buckets => {
                self.settings.buckets = Some(number.try_into().map_err(invalid)?);
            }
            Field::Overdraft => self.settings.overdraft = Some(number),
            _ => return Err(E::invalid_type(Unexpected::Unsigned(number), &self)),
        }
        self.settings.check().map_err(E::custom)
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<(), E> {
        match u64::try_from(number) {
            Ok(number) => self.visit_u64(number),
            Err(_) => Err(E::invalid_value(Unexpected::Signed(number), &self)),
        }
    }
}

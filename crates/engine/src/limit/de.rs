//! Deserializes algorithms, quotas and limits, with errors that name the field and have its
//! line. So fields are read one by one: a `try_from` of the whole limit would report conflicts
//! without the line.

use std::{
    fmt::{self, Display},
    str::FromStr,
};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, Error, MapAccess, Unexpected, Visitor, value},
};

use super::{
    Limit,
    settings::{FIELDS, Settings, place_of},
};
use crate::{
    algorithm::{Algorithm, Refill},
    quota::Quota,
};

/// Reads the quota from text: `10/s burst 20`.
impl<'de> Deserialize<'de> for Quota {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(Spelling::text("a quota as text, such as \"10/s burst 20\""))
    }
}

/// Reads the name as text, `"token-bucket"`, or a table with settings:
/// `{ algorithm = "token-bucket", overdraft = 5 }`.
impl<'de> Deserialize<'de> for Algorithm {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = "an algorithm, such as \"token-bucket\", or a table with `algorithm`";
        deserializer.deserialize_any(Spelling {
            table: Some(Settings::only_algorithm),
            ..Spelling::text(name)
        })
    }
}

impl<'de> Deserialize<'de> for Limit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut form = Spelling::new("a limit, which has `algorithm` and `quota`");
        form.table = Some(Settings::limit);
        deserializer.deserialize_struct("Limit", FIELDS, form)
    }
}

type FromText<T> = fn(&str) -> Option<Result<T, String>>;
type FromTable<T> = fn(&Settings) -> Result<T, String>;

/// The spellings of a value. A way that is `None` is an error of the type, and a result that is
/// `None` an invalid value: both report what is expected.
struct Spelling<T, F = fn(T) -> Result<T, String>> {
    expected: &'static str,
    text: Option<FromText<T>>,
    number: Option<fn(u64) -> Option<T>>,
    table: Option<FromTable<T>>,
    /// Uses the value, while the format knows the line.
    then: F,
}

impl<T> Spelling<T> {
    fn new(expected: &'static str) -> Self {
        Self { expected, text: None, number: None, table: None, then: Ok }
    }

    fn text(expected: &'static str) -> Self
    where
        T: FromStr<Err: Display>,
    {
        let parse = |text: &str| Some(text.parse().map_err(|error: T::Err| error.to_string()));
        Self { text: Some(parse), ..Self::new(expected) }
    }

    fn number(expected: &'static str) -> Self
    where
        T: TryFrom<u64>,
    {
        Self { number: Some(|number| number.try_into().ok()), ..Self::new(expected) }
    }

    fn then<F>(self, then: F) -> Spelling<T, F> {
        let Self { expected, text, number, table, .. } = self;
        Spelling { expected, text, number, table, then }
    }
}

impl<'de, T, U, F: FnOnce(T) -> Result<U, String>> Visitor<'de> for Spelling<T, F> {
    type Value = U;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<U, E> {
        let found = Unexpected::Str(text);
        let parse = self.text.ok_or_else(|| E::invalid_type(found, &self))?;
        let parsed = parse(text).ok_or_else(|| E::invalid_value(found, &self))?;
        parsed.and_then(self.then).map_err(E::custom)
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<U, E> {
        let found = Unexpected::Unsigned(number);
        let convert = self.number.ok_or_else(|| E::invalid_type(found, &self))?;
        let number = convert(number).ok_or_else(|| E::invalid_value(found, &self))?;
        (self.then)(number).map_err(E::custom)
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<U, E> {
        let found = Unexpected::Signed(number);
        match u64::try_from(number) {
            Ok(number) => self.visit_u64(number),
            Err(_) if self.number.is_some() => Err(E::invalid_value(found, &self)),
            Err(_) => Err(E::invalid_type(found, &self)),
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut table: A) -> Result<U, A::Error> {
        let finish = self.table.ok_or_else(|| A::Error::invalid_type(Unexpected::Map, &self))?;
        let mut settings = Settings::default();
        while let Some(Field(index)) = table.next_key()? {
            table.next_value_seed(Setting { field: FIELDS[index], settings: &mut settings })?;
        }
        finish(&settings).and_then(self.then).map_err(A::Error::custom)
    }
}

/// The index of one of the [`FIELDS`].
#[derive(Deserialize)]
#[serde(try_from = "String")]
struct Field(usize);

impl TryFrom<String> for Field {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        let index = FIELDS.iter().position(|field| *field == name);
        index.map(Self).ok_or_else(|| match place_of(&name) {
            Some(place) => format!("unknown field `{name}`: {place}"),
            None => value::Error::unknown_field(&name, FIELDS).to_string(),
        })
    }
}

/// Reads the value of a field. It checks the settings immediately, while the format knows the line.
struct Setting<'a> {
    field: &'static str,
    settings: &'a mut Settings,
}

impl<'de> DeserializeSeed<'de> for Setting<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        match self.field {
            "algorithm" => deserializer.deserialize_str(
                Spelling::text("`algorithm` to be a name, such as \"token-bucket\"")
                    .then(|it| self.set(|settings| &mut settings.algorithm, it)),
            ),
            "quota" => deserializer.deserialize_str(
                Spelling::text("`quota` to be text, such as \"10/s\"")
                    .then(|it| self.set(|settings| &mut settings.quota, it)),
            ),
            "buckets" => deserializer.deserialize_u64(
                Spelling::number("`buckets` to be a number from 1 to 100")
                    .then(|it| self.set(|settings| &mut settings.buckets, it)),
            ),
            "refill" => {
                let form = Spelling::new("`refill` to be \"continuous\" or \"interval\"");
                let form = Spelling { text: Some(|text| refill(text).map(Ok)), ..form };
                let set = |it| self.set(|settings| &mut settings.refill, it);
                deserializer.deserialize_str(form.then(set))
            }
            "overdraft" => deserializer.deserialize_u64(
                Spelling::number("`overdraft` to be a number of tokens, up to 2^46")
                    .then(|it| self.set(|settings| &mut settings.overdraft, it)),
            ),
            other => unreachable!("{other} is no field"),
        }
    }
}

impl Setting<'_> {
    fn set<T>(
        self,
        setting: impl FnOnce(&mut Settings) -> &mut Option<T>,
        value: T,
    ) -> Result<(), String> {
        match setting(self.settings).replace(value) {
            None => self.settings.check(),
            Some(_) => Err(format!("duplicate field `{}`", self.field)),
        }
    }
}

fn refill(text: &str) -> Option<Refill> {
    Refill::deserialize(value::StrDeserializer::<value::Error>::new(text)).ok()
}

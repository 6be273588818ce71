//! The record of a dashboard: its panels, with the values of their series over some minutes, as a
//! text that is short and can be compared. It draws nothing.

use std::{fmt, str::FromStr};

use serde_json::Value;

/// Values are kept with this number of digits: a picture shows no more.
const DIGITS: usize = 3;

/// What a dashboard has shown.
#[derive(Debug, Default, PartialEq)]
pub struct Record {
    /// The time between two values, in seconds.
    pub step: u32,
    /// What happened meanwhile.
    pub marks: Vec<Mark>,
    /// The panels, in their order.
    pub panels: Vec<Panel>,
}

/// Something that happened from a second to another one, or at one.
#[derive(Debug, PartialEq)]
pub struct Mark {
    /// A short description.
    pub name: String,
    /// The second of its begin.
    pub from: u32,
    /// The second of its end.
    pub to: u32,
}

/// A panel of the dashboard.
#[derive(Debug, Default, PartialEq)]
pub struct Panel {
    /// Its title.
    pub title: String,
    /// The name of the unit in Grafana, such as `ops`.
    pub unit: String,
    /// Texts that are shown in place of values.
    pub texts: Vec<(u32, String)>,
    /// Its queries.
    pub queries: Vec<Query>,
}

/// A query of a panel.
#[derive(Debug, Default, PartialEq)]
pub struct Query {
    /// The expression.
    pub text: String,
    /// The pattern of the names of its series, such as `{{limiter}}`.
    pub legend: String,
    /// What was found.
    pub series: Vec<Series>,
}

/// The values of a query for a set of labels.
#[derive(Debug, Default, PartialEq)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// None where the series has no value.
    pub values: Vec<Option<f64>>,
}

/// Returns the panels of a dashboard for Grafana, without values.
///
/// # Panics
///
/// If the text is not one.
#[must_use]
pub fn panels(dashboard: &str) -> Vec<Panel> {
    let dashboard: Value = serde_json::from_str(dashboard).expect("JSON");
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let list = |value: &Value| value.as_array().expect("a list").clone();
    let panel = |panel: &Value| {
        let defaults = &panel["fieldConfig"]["defaults"];
        let options = defaults["mappings"][0]["options"].as_object();
        let texts = options.into_iter().flatten().map(|(value, option)| {
            (value.parse().expect("the value of a mapping"), text(&option["text"]))
        });
        let query = |target: &Value| Query {
            text: text(&target["expr"]),
            legend: text(&target["legendFormat"]),
            series: vec![],
        };
        Panel {
            title: text(&panel["title"]),
            unit: text(&defaults["unit"]),
            texts: texts.collect(),
            queries: list(&panel["targets"]).iter().map(query).collect(),
        }
    };
    list(&dashboard["panels"]).iter().map(panel).collect()
}

impl Record {
    /// Returns the time from the first value to the last one, in seconds.
    #[must_use]
    pub fn seconds(&self) -> u32 {
        let series = self.panels.iter().flat_map(|panel| &panel.queries).flat_map(|it| &it.series);
        let longest = series.map(|series| series.values.len()).max().unwrap_or(1);
        self.step * (longest as u32 - 1)
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "step {}", self.step)?;
        for Mark { name, from, to } in &self.marks {
            writeln!(f, "mark {from} {to} {name}")?;
        }
        for Panel { title, unit, texts, queries } in &self.panels {
            writeln!(f, "\npanel {title}\nunit {unit}")?;
            for (value, text) in texts {
                writeln!(f, "text {value} {text}")?;
            }
            for Query { text, legend, series } in queries {
                writeln!(f, "query {text}\nlegend {legend}")?;
                for Series { name, values } in series {
                    writeln!(f, "series {name}")?;
                    write_values(f, values)?;
                }
            }
        }
        Ok(())
    }
}

/// Writes lines of values. Several equal ones in a row are one, with their number: `0*12`.
fn write_values(f: &mut fmt::Formatter<'_>, values: &[Option<f64>]) -> fmt::Result {
    let mut line = String::new();
    let values: Vec<_> = values.iter().map(|value| number(*value)).collect();
    for run in values.chunk_by(|one, other| one == other) {
        let count = if run.len() > 1 { format!("*{}", run.len()) } else { String::new() };
        let word = format!(" {}{count}", run[0]);
        if line.len() + word.len() > 99 {
            writeln!(f, " {line}")?;
            line.clear();
        }
        line += &word;
    }
    writeln!(f, " {line}")
}

fn number(value: Option<f64>) -> String {
    let Some(value) = value else { return String::from("-") };
    let rounded: f64 = format!("{value:.*e}", DIGITS - 1).parse().expect("a number");
    rounded.to_string()
}

/// Reads what `Display` has written.
impl FromStr for Record {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut record = Self::default();
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            record.read(line).ok_or_else(|| format!("{line:?} is not a line of a record"))?;
        }
        Ok(record)
    }
}

impl Record {
    fn read(&mut self, line: &str) -> Option<()> {
        if let Some(values) = line.strip_prefix("  ") {
            let series = &mut self.query()?.series.last_mut()?.values;
            for word in values.split(' ') {
                let (value, count) = word.split_once('*').unwrap_or((word, "1"));
                let value = if value == "-" { None } else { Some(value.parse().ok()?) };
                series.extend(vec![value; count.parse().ok()?]);
            }
            return Some(());
        }
        let (field, rest) = line.split_once(' ')?;
        let text = rest.to_owned();
        match field {
            "step" => self.step = rest.parse().ok()?,
            "mark" => {
                let (from, rest) = rest.split_once(' ')?;
                let (to, name) = rest.split_once(' ')?;
                let (from, to) = (from.parse().ok()?, to.parse().ok()?);
                self.marks.push(Mark { name: name.to_owned(), from, to });
            }
            "panel" => self.panels.push(Panel { title: text, ..Panel::default() }),
            "unit" => self.panels.last_mut()?.unit = text,
            "text" => {
                let (value, text) = rest.split_once(' ')?;
                self.panels.last_mut()?.texts.push((value.parse().ok()?, text.to_owned()));
            }
            "query" => {
                let query = Query { text, ..Query::default() };
                self.panels.last_mut()?.queries.push(query);
            }
            "legend" => self.query()?.legend = text,
            "series" => {
                let series = Series { name: text, values: vec![] };
                self.query()?.series.push(series);
            }
            _ => return None,
        }
        Some(())
    }

    /// Returns the query that was read last.
    fn query(&mut self) -> Option<&mut Query> {
        self.panels.last_mut()?.queries.last_mut()
    }
}

//! The picture of the dashboard, as small charts over one time axis. It draws a record, and
//! evaluates no query.

mod record;

pub use record::{Mark, Panel, Query, Record, Series, panels};

use crate::svg::{MARGIN, Picture, WIDTH, number};

/// What the dashboard has shown of a real run: a Prometheus has scraped the examples.
const RECORD: &str = include_str!("dashboard.txt");

/// The colours of the lines, and of the time of a flood.
pub(crate) const STYLE: &str = "
.series{stroke-width:2;fill:none;stroke-linejoin:round}
.flood{fill:#e0a100;opacity:.2}
.outage{fill:#cf222e;opacity:.13}
.blue{stroke:#0550ae}
.purple{stroke:#8250df}
.red{stroke:#cf222e}
.amber{stroke:#b87f00}
.green{stroke:#1a7f6e}
.grey{stroke:#57606a}
@media (prefers-color-scheme:dark){
.flood{fill:#d29922}
.outage{fill:#f85149;opacity:.2}
.blue{stroke:#79c0ff}
.purple{stroke:#b58bff}
.red{stroke:#f85149}
.amber{stroke:#d29922}
.green{stroke:#39c5a8}
.grey{stroke:#9198a1}
}";

const GAP: f64 = 20.0;
const COLUMN: f64 = (WIDTH - 2.0 * MARGIN - GAP) / 2.0;
/// The width of the labels of an axis.
const LABELS: f64 = 70.0;
const PLOT: f64 = COLUMN - LABELS;
const HEIGHT: f64 = 84.0;
/// The height of a title, with the space below it, and of the numbers of an axis.
const TITLE: f64 = 36.0;
const MINUTES: f64 = 26.0;
/// The height of a line of names.
const LINE: f64 = 23.0;
/// The classes of marks that last.
const SHADES: [&str; 2] = ["flood", "outage"];
/// The classes of lines: those that have the colours of other pictures, and those of all others in
/// their order.
const NAMED: [(&str, &str); 4] =
    [("allowed", "blue"), ("blocked", "purple"), ("denied", "red"), ("waited", "amber")];
const OTHERS: [&str; 6] = ["blue", "amber", "green", "purple", "red", "grey"];

/// Returns the record from which the picture is drawn.
#[must_use]
pub fn record() -> Record {
    RECORD.parse().unwrap_or_else(|error: String| panic!("{error}"))
}

pub(crate) fn dashboard() -> String {
    let record = record();
    let mut picture = Picture::new(
        "The dashboard, over five minutes",
        "The panels of the dashboard while a client floods, Redis is stopped, and a limit is \
         raised",
    );
    picture.style(STYLE);
    picture.y += 8.0;
    for (i, mark) in record.marks.iter().enumerate() {
        picture.y += 26.0;
        let (x, y) = (MARGIN, picture.y);
        match mark.from == mark.to {
            true => picture.line((x + 8.0, y - 14.0), (x + 8.0, y + 2.0), "limit"),
            false => picture.rect(x, y - 14.0, 16.0, 16.0, SHADES[i % SHADES.len()]),
        }
        picture.text(x + 26.0, y, "", &mark.name);
    }
    picture.y += 14.0;
    for row in record.panels.chunks(2) {
        let charts = row.iter().map(Chart::new).collect::<Vec<_>>();
        let tallest = charts.iter().map(Chart::legend_height).fold(0.0, f64::max);
        for (chart, x) in charts.iter().zip([MARGIN, MARGIN + COLUMN + GAP]) {
            chart.draw(&mut picture, x, &record);
        }
        picture.y += TITLE + HEIGHT + MINUTES + tallest + 16.0;
    }
    picture.text(MARGIN, picture.y + 14.0, "", "Series that stay at 0 are left out.");
    picture.y += 16.0;
    picture.finish()
}

/// A panel, without the series that stay at 0, and with the places of their names.
struct Chart<'a> {
    panel: &'a Panel,
    /// Each with its class.
    series: Vec<(&'a Series, &'static str)>,
    /// The line of each name, and where it begins.
    names: Vec<(f64, f64)>,
    top: f64,
}

impl<'a> Chart<'a> {
    fn new(panel: &'a Panel) -> Self {
        let all = panel.queries.iter().flat_map(|query| &query.series);
        let shown = all.filter(|series| series.values.iter().flatten().any(|value| *value > 0.0));
        let series: Vec<_> =
            shown.enumerate().map(|(i, series)| (series, class(&series.name, i))).collect();
        let (mut x, mut line, mut names) = (0.0, 0.0, vec![]);
        for (series, _) in &series {
            let width = 20.0 + width(&series.name);
            if x > 0.0 && x + width > COLUMN {
                (x, line) = (0.0, line + 1.0);
            }
            names.push((line, x));
            x += width + 14.0;
        }
        let values = series.iter().flat_map(|(series, _)| series.values.iter().flatten());
        let top = ceiling(values.copied().fold(0.0, f64::max));
        Self { panel, series, names, top }
    }

    fn legend_height(&self) -> f64 {
        self.names.last().map_or(0.0, |(line, _)| (line + 1.0) * LINE)
    }

    fn draw(&self, picture: &mut Picture, x: f64, record: &Record) {
        let seconds = f64::from(record.seconds());
        let title = picture.y + 20.0;
        picture.text(x, title, "ink", &self.panel.title);
        let (x0, y0) = (x + LABELS, picture.y + TITLE);
        let bottom = y0 + HEIGHT;
        let at = |second: f64| x0 + PLOT * second / seconds;
        for (i, mark) in record.marks.iter().enumerate() {
            let (from, to) = (at(mark.from.into()), at(mark.to.into()));
            match mark.from == mark.to {
                true => picture.line((from, y0), (from, bottom), "limit"),
                false => picture.rect(from, y0, to - from, HEIGHT, SHADES[i % SHADES.len()]),
            }
        }
        for (value, y) in [(self.top, y0), (0.0, bottom)] {
            picture.line((x0, y), (x0 + PLOT, y), if value > 0.0 { "grid" } else { "axis" });
            let label = self.label(value);
            picture.anchored(x0 - 8.0, y + 6.0, "", "end", &label);
        }
        let minutes = record.seconds() / 60;
        for minute in 0..=minutes {
            let x = at(f64::from(minute) * 60.0);
            picture.line((x, bottom), (x, bottom + 5.0), "axis");
            let anchor = if minute == minutes { "end" } else { "middle" };
            picture.anchored(x, bottom + 23.0, "", anchor, &minute.to_string());
        }
        picture.anchored(x0 - 14.0, bottom + 23.0, "", "end", "min");
        // The first one on top.
        for (series, class) in self.series.iter().rev() {
            let points = series.values.iter().enumerate().map(|(i, value)| {
                let x = at(i as f64 * f64::from(record.step));
                Some((x, (bottom - HEIGHT * (*value)? / self.top).round()))
            });
            for part in points.collect::<Vec<_>>().split(Option::is_none) {
                let part: Vec<_> = part.iter().copied().flatten().collect();
                if !part.is_empty() {
                    picture.curve(&simplified(&part), &format!("series {class}"));
                }
            }
        }
        let names = bottom + MINUTES + LINE - 5.0;
        for ((series, class), (line, indent)) in self.series.iter().zip(&self.names) {
            let (x, y) = (x + indent, names + LINE * line);
            picture.line((x, y - 6.0), (x + 14.0, y - 6.0), &format!("series {class}"));
            picture.text(x + 20.0, y, "", &series.name);
        }
    }

    fn label(&self, value: f64) -> String {
        if let Some((_, text)) =
            self.panel.texts.iter().find(|(known, _)| f64::from(*known) == value)
        {
            return text.clone();
        }
        let (factor, unit) = match &*self.panel.unit {
            _ if value == 0.0 => (1.0, ""),
            "ops" => (1.0, "/s"),
            "percentunit" => (100.0, " %"),
            "s" if self.top < 1.0 => (1e3, " ms"),
            "s" => (1.0, " s"),
            _ => (1.0, ""),
        };
        format!("{}{unit}", number(value * factor))
    }
}

fn class(name: &str, index: usize) -> &'static str {
    let named = NAMED.iter().find(|(known, _)| *known == name).map(|(_, class)| *class);
    named.unwrap_or(OTHERS[index % OTHERS.len()])
}

/// Returns about the width of a text.
fn width(text: &str) -> f64 {
    let width = |char| match char {
        'f' | 'i' | 'j' | 'l' | 'r' | 't' | ' ' | '.' | ':' => 5.4,
        'm' | 'w' => 14.5,
        _ => 10.2,
    };
    text.chars().map(width).sum()
}

/// Returns the next number that is easily read.
fn ceiling(value: f64) -> f64 {
    let power = 10_f64.powf(value.max(1e-9).log10().floor());
    let steps = [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0];
    steps.iter().map(|step| step * power).find(|top| *top >= value).unwrap_or(10.0 * power)
}

/// Leaves out the points between neighbours of the same height.
fn simplified(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let is_needed = |i: usize| {
        let neighbours = i.checked_sub(1).map(|i| points[i]).zip(points.get(i + 1).copied());
        neighbours.is_none_or(|(one, other)| one.1 != points[i].1 || other.1 != points[i].1)
    };
    (0..points.len()).filter(|i| is_needed(*i)).map(|i| points[i]).collect()
}

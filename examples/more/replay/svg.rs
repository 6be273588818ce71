//! The drawing: the requests over time, and below, for each quota and algorithm, the denials at the
//! same times. Light or dark by the settings of the reader, and legible at the width of a phone.

use super::{
    Flags,
    candidate::Candidate,
    report::{number, of_keys},
    stamp,
    traffic::Traffic,
};

/// The width of the drawing. It is that of a phone, and grows with the page.
const WIDTH: f64 = 420.0;
const LEFT: f64 = 12.0;
const PLOT: f64 = WIDTH - 2.0 * LEFT;
/// The heights of the requests, of the denials by one algorithm, and of a line of text.
const HEIGHT: f64 = 100.0;
const STRIP: f64 = 26.0;
const LINE: f64 = 17.0;

/// Colours by class: not all programs that draw SVG know CSS variables.
const STYLE: &str = "
text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328}
svg{max-width:900px;width:100%;height:auto}
.title{font-weight:600;font-size:14px}.end{text-anchor:end}.middle{text-anchor:middle}
.paper{fill:#fff}.soft{fill:#59636e}.area{fill:#c3cad3}.grid{stroke:#d9dee4}
.c0{fill:#b35900}.c1{fill:#8250df}.c2{fill:#0969da}.c3{fill:#1a7f37}.c4{fill:#bf3989}
@media (prefers-color-scheme:dark){
text{fill:#e6edf3}
.paper{fill:#0d1117}.soft{fill:#9da7b3}.area{fill:#59636f}.grid{stroke:#2f363f}
.c0{fill:#f0a04b}.c1{fill:#b083f0}.c2{fill:#58a6ff}.c3{fill:#3fb950}.c4{fill:#f778ba}
}";

/// The steps between the times on the axis, in seconds.
const STEPS: [i64; 16] =
    [1, 5, 10, 30, 60, 300, 600, 900, 1_800, 3_600, 7_200, 10_800, 21_600, 43_200, 86_400, 604_800];
/// More times do not fit.
const MAX_TIMES: i64 = 6;

pub fn draw(flags: &Flags, traffic: &Traffic, tried: &[Candidate]) -> String {
    let mut body = String::new();
    let mut y = 26.0;
    let name = flags.files.iter().map(|path| match path.as_os_str().to_str() {
        Some("-") => "standard input".into(),
        _ => path.file_name().unwrap_or(path.as_os_str()).to_string_lossy(),
    });
    let only = flags.only.iter().map(|only| only.to_string().into());
    let name: Vec<_> = name.chain(only).collect();
    body += &label(LEFT, y, "title", &shortened(&name.join(", "), 50));
    y += 18.0;
    let (keys, _) = traffic.distinct.count();
    let summary = format!(
        "{} requests of {}; peak {} in a second",
        number(traffic.requests),
        of_keys(keys),
        number(traffic.peak.1)
    );
    body += &label(LEFT, y, "soft", &summary);
    y += LINE;
    let (first, last) = (stamp::text(traffic.first), stamp::text(traffic.last));
    let last = if last[..10] == first[..10] { &last[11..] } else { &last };
    body += &label(LEFT, y, "soft", &format!("{first} to {last} UTC"));
    y += 16.0;
    body += &requests(traffic, &mut y);
    let mut last = None;
    for candidate in tried {
        if last.replace(candidate.quota) != Some(candidate.quota) {
            y += 30.0;
            body += &label(LEFT, y, "title", &candidate.quota.to_string());
            body += &label_end(WIDTH - LEFT, y, "soft", "denied");
            y += 4.0;
        }
        let group = tried.iter().filter(|other| other.quota == candidate.quota);
        let group = group.map(|other| other.series.like(&traffic.series));
        let top = group.flatten().max().unwrap_or(0).max(1);
        body += &denials(traffic, candidate, top, &mut y);
    }
    let height = y + 16.0;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height:.0}\" \
         role=\"img\" aria-label=\"{}\">\n<style>{STYLE}\n</style>\n\
         <rect class=\"paper\" width=\"{WIDTH}\" height=\"{height:.0}\"/>\n{body}</svg>\n",
        escaped(&summary)
    )
}

/// Draws the requests over time, with the axis.
fn requests(traffic: &Traffic, y: &mut f64) -> String {
    let bins = &traffic.series.bins;
    let top = bins.iter().copied().max().unwrap_or(0).max(1);
    let (start, width) = (*y, traffic.series.width);
    *y += HEIGHT;
    let mut text = area(traffic, bins, top, *y, HEIGHT - 14.0, "area");
    let of = match width {
        1 => "second".to_owned(),
        _ if width.is_multiple_of(60) => format!("{} min", width / 60),
        _ => format!("{width} s"),
    };
    text += &label(LEFT, start + 11.0, "soft", &format!("up to {} requests per {of}", number(top)));
    *y += 15.0;
    for (x, micros) in times(traffic) {
        let time = stamp::text(micros);
        let time = match (&time[11..16], &time[17..]) {
            ("00:00", "00") => &time[5..10],
            (minute, "00") => minute,
            _ => &time[11..],
        };
        text += &label(x, *y, "soft middle", time);
    }
    text
}

/// Returns the places and the times of the axis that are round, and not at its ends, where a text
/// would not fit.
fn times(traffic: &Traffic) -> Vec<(f64, i64)> {
    let seconds = (traffic.series.bins.len().max(1) as u64 * traffic.series.width) as i64;
    let first = traffic.first.div_euclid(1_000_000);
    let week = seconds / (MAX_TIMES * 604_800) + 1;
    let step = STEPS.into_iter().find(|step| seconds <= step * MAX_TIMES);
    let step = step.unwrap_or(week * 604_800);
    let x = |second: i64| LEFT + (second - first) as f64 * PLOT / seconds as f64;
    let times = (first / step..=(first + seconds) / step).map(|it| it * step);
    let fits = |x: &f64| (LEFT + 16.0..LEFT + PLOT - 16.0).contains(x);
    times.map(|it| (x(it), it * 1_000_000)).filter(|(x, _)| fits(x)).collect()
}

/// Draws the denials by one algorithm at the times above. `top` is the height of the group.
fn denials(traffic: &Traffic, candidate: &Candidate, top: u64, y: &mut f64) -> String {
    let (keys, _) = candidate.denied_keys.count();
    let part = candidate.denied as f64 * 100.0 / traffic.requests.max(1) as f64;
    let waits = number(candidate.waits.count());
    let value = match (candidate.denied, candidate.waits.count()) {
        (0, 0) => "none".to_owned(),
        (0, _) => format!("none; {waits} wait"),
        (denied, _) => format!("{} ({part:.1} %) of {}", number(denied), of_keys(keys)),
    };
    *y += LINE;
    let mut text = label(LEFT, *y, "", candidate.algorithm.name());
    text += &label_end(LEFT + PLOT, *y, "soft", &value);
    *y += STRIP + 3.0;
    let class = format!("c{}", color(candidate));
    text + &area(traffic, &candidate.series.like(&traffic.series), top, *y, STRIP, &class)
}

/// Draws counts as an area over a base line, with the times of the axis.
fn area(traffic: &Traffic, bins: &[u64], top: u64, base: f64, height: f64, class: &str) -> String {
    let step = PLOT / bins.len().max(1) as f64;
    // Steps, because a bin is a time.
    let points = bins.iter().enumerate().map(|(index, count)| {
        let (from, y) = (LEFT + index as f64 * step, base - *count as f64 / top as f64 * height);
        format!("{from:.1},{y:.1} {:.1},{y:.1}", from + step)
    });
    let points: Vec<_> = points.collect();
    let end = LEFT + PLOT;
    let mut text = line(LEFT, end, base, base);
    for (x, _) in times(traffic) {
        text += &line(x, x, base - height, base);
    }
    text + &format!(
        "<polygon class=\"{class}\" points=\"{LEFT},{base:.1} {} {end},{base:.1}\"/>\n",
        points.join(" ")
    )
}

fn line(x1: f64, x2: f64, y1: f64, y2: f64) -> String {
    format!("<line class=\"grid\" x1=\"{x1:.1}\" x2=\"{x2:.1}\" y1=\"{y1:.1}\" y2=\"{y2:.1}\"/>\n")
}

fn color(candidate: &Candidate) -> usize {
    let names = ["fixed-window", "sliding-window", "sliding-log", "token-bucket"];
    names.iter().position(|name| *name == candidate.algorithm.name()).unwrap_or(names.len())
}

fn label(x: f64, y: f64, class: &str, text: &str) -> String {
    format!("<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{}</text>\n", escaped(text))
}

fn label_end(x: f64, y: f64, class: &str, text: &str) -> String {
    label(x, y, &format!("{class} end"), text)
}

fn shortened(text: &str, length: usize) -> String {
    match text.chars().count() > length {
        true => text.chars().take(length - 2).chain("..".chars()).collect(),
        false => text.to_owned(),
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;")
}

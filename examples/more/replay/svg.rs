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

const STYLE: &str = "
  :root { --paper: #ffffff; --ink: #1f2328; --soft: #59636e; --area: #d5dae1; --grid: #e4e7eb;
    --c0: #b35900; --c1: #8250df; --c2: #0969da; --c3: #1a7f37; --c4: #bf3989; }
  @media (prefers-color-scheme: dark) { :root { --paper: #0d1117; --ink: #e6edf3;
    --soft: #9da7b3; --area: #4a535f; --grid: #2a3038; --c0: #f0a04b; --c1: #b083f0; --c2: #58a6ff;
    --c3: #3fb950; --c4: #f778ba; } }
  svg { font: 12px system-ui, sans-serif; max-width: 900px; width: 100%; height: auto; }
  .paper { fill: var(--paper); } text { fill: var(--ink); } .soft { fill: var(--soft); }
  .title { font-weight: 600; font-size: 14px; } .area { fill: var(--area); }
  .grid { stroke: var(--grid); } .end { text-anchor: end; }";

pub fn draw(flags: &Flags, traffic: &Traffic, tried: &[Candidate]) -> String {
    let mut body = String::new();
    let mut y = 26.0;
    let name = flags.files.iter().map(|path| path.file_name().unwrap_or(path.as_os_str()));
    let name: Vec<_> = name.map(|name| name.to_string_lossy()).collect();
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
    let mut text = area(bins, top, *y, HEIGHT - 14.0, "class=\"area\"");
    let of = match width {
        1 => "second".to_owned(),
        _ if width.is_multiple_of(60) => format!("{} min", width / 60),
        _ => format!("{width} s"),
    };
    text += &label(LEFT, start + 11.0, "soft", &format!("up to {} requests per {of}", number(top)));
    *y += 15.0;
    let clock = |micros: i64| stamp::text(micros)[5..16].to_owned();
    let end = traffic.first + (bins.len().max(1) as u64 * width) as i64 * 1_000_000;
    text += &label(LEFT, *y, "soft", &clock(traffic.first));
    text + &label_end(LEFT + PLOT, *y, "soft", &format!("{} UTC", clock(end)))
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
    let fill = format!("style=\"fill:var(--c{})\"", color(candidate));
    text + &area(&candidate.series.like(&traffic.series), top, *y, STRIP, &fill)
}

/// Draws counts as an area over a base line.
fn area(bins: &[u64], top: u64, base: f64, height: f64, attributes: &str) -> String {
    let step = PLOT / bins.len().max(1) as f64;
    // Steps, because a bin is a time.
    let points = bins.iter().enumerate().map(|(index, count)| {
        let (from, y) = (LEFT + index as f64 * step, base - *count as f64 / top as f64 * height);
        format!("{from:.1},{y:.1} {:.1},{y:.1}", from + step)
    });
    let points: Vec<_> = points.collect();
    let end = LEFT + PLOT;
    format!(
        "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{end}\" y1=\"{base:.1}\" y2=\"{base:.1}\"/>\n\
         <polygon {attributes} points=\"{LEFT},{base:.1} {} {end},{base:.1}\"/>\n",
        points.join(" ")
    )
}

fn color(candidate: &Candidate) -> usize {
    let names = ["fixed-window", "sliding-window", "sliding-log", "token-bucket"];
    names.iter().position(|name| *name == candidate.algorithm.name()).unwrap_or(names.len())
}

fn label(x: f64, y: f64, class: &str, text: &str) -> String {
    format!("<text class=\"{class}\" x=\"{x}\" y=\"{y:.1}\">{}</text>\n", escaped(text))
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

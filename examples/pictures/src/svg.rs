//! The design of the pictures: one width, one palette for light and dark, and a few shapes. It
//! knows no limiter.

use std::fmt::{Display, Write};

/// A picture is as wide as a column of text, so that its text is legible on a phone, too.
pub const WIDTH: f64 = 600.0;
pub const MARGIN: f64 = 24.0;

const STYLE: &str = "\
text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:18px;\
fill:#57606a}
.title{font-size:20px;font-weight:600;fill:#1f2328}
.ink{fill:#1f2328}
.page{fill:#fff;stroke:#d1d9e0}
.axis{stroke:#818b98;stroke-width:1.5;fill:none}
.grid{stroke:#818b98;stroke-dasharray:3 4;fill:none}
.halo{stroke:#fff;stroke-width:5;fill:none}
.limit{stroke:#1f2328;stroke-width:1.5;stroke-dasharray:6 4;fill:none}
.bracket{stroke:#1f2328;stroke-width:1.5;fill:none}
.box{fill:#f6f8fa;stroke:#818b98}
.line{stroke:#0550ae;stroke-width:2.5;fill:none}
.soft{stroke:#818b98;stroke-width:2;fill:none}
.allowed{fill:#0550ae}
.other{fill:#4a94ef}
.waited{fill:#b87f00}
.denied{fill:#cf222e}
.shade{fill:#cf222e;opacity:.09}
@media (prefers-color-scheme:dark){
text{fill:#9198a1}
.title,.ink{fill:#f0f6fc}
.page{fill:#0d1117;stroke:#3d444d}
.axis{stroke:#656c76}
.grid{stroke:#656c76}
.halo{stroke:#0d1117}
.limit,.bracket{stroke:#f0f6fc}
.box{fill:#151b23;stroke:#656c76}
.line{stroke:#79c0ff}
.soft{stroke:#767e89}
.allowed{fill:#79c0ff}
.other{fill:#2a66b8}
.waited{fill:#d29922}
.denied{fill:#f85149}
.shade{fill:#f85149;opacity:.15}
}";

/// A picture that grows downwards.
pub struct Picture {
    label: String,
    body: String,
    /// Rules of this picture alone.
    style: &'static str,
    /// Where the next row begins.
    pub y: f64,
}

impl Picture {
    /// `label` is the text for readers that do not see the picture.
    pub fn new(title: &str, label: impl Into<String>) -> Self {
        let mut picture = Self { label: label.into(), body: String::new(), style: "", y: 40.0 };
        picture.text(MARGIN, picture.y, "title", title);
        picture.y += 14.0;
        picture
    }

    /// Adds rules to those that all pictures have.
    pub fn style(&mut self, style: &'static str) {
        self.style = style;
    }

    /// Adds squares of colours with their meanings.
    pub fn legend(&mut self, items: &[(&str, &str)]) {
        let mut x = MARGIN;
        self.y += 20.0;
        for (class, text) in items {
            self.rect(x, self.y - 12.0, 12.0, 12.0, class);
            self.text(x + 18.0, self.y, "", text);
            x += 44.0 + 9.6 * text.len() as f64;
        }
        self.y += 14.0;
    }

    /// Adds a heading and a line below it.
    pub fn heading(&mut self, title: &str, result: &str) {
        self.y += 30.0;
        self.text(MARGIN, self.y, "ink", title);
        if !result.is_empty() {
            self.y += 23.0;
            self.text(MARGIN, self.y, "", result);
        }
        self.y += 10.0;
    }

    pub fn text(&mut self, x: f64, y: f64, class: &str, text: &str) {
        self.anchored(x, y, class, "start", text);
    }

    pub fn anchored(&mut self, x: f64, y: f64, class: &str, anchor: &str, text: &str) {
        let text = text.replace('&', "&amp;").replace('<', "&lt;");
        let class = if class.is_empty() { String::new() } else { format!(r#" class="{class}""#) };
        let anchor =
            if anchor == "start" { String::new() } else { format!(r#" text-anchor="{anchor}""#) };
        self.add(format_args!(
            r#"<text x="{}" y="{}"{class}{anchor}>{text}</text>"#,
            number(x),
            number(y)
        ));
    }

    pub fn rect(&mut self, x: f64, y: f64, width: f64, height: f64, class: &str) {
        self.add(format_args!(
            r#"<rect x="{}" y="{}" width="{}" height="{}" class="{class}"/>"#,
            number(x),
            number(y),
            number(width),
            number(height)
        ));
    }

    pub fn circle(&mut self, x: f64, y: f64, radius: f64, class: &str) {
        self.add(format_args!(
            r#"<circle cx="{}" cy="{}" r="{}" class="{class}"/>"#,
            number(x),
            number(y),
            number(radius)
        ));
    }

    pub fn line(&mut self, from: (f64, f64), to: (f64, f64), class: &str) {
        self.path(&[from, to], class);
    }

    /// Adds a dashed line that is visible on bars, too.
    pub fn limit(&mut self, from: (f64, f64), to: (f64, f64)) {
        self.line(from, to, "halo");
        self.line(from, to, "limit");
    }

    /// Adds a bracket with a text above it, both above `y`.
    pub fn bracket(&mut self, from: f64, to: f64, y: f64, text: &str) {
        self.path(&[(from, y), (from, y - 8.0), (to, y - 8.0), (to, y)], "bracket");
        let half = 4.6 * text.len() as f64;
        let x = f64::midpoint(from, to).clamp(MARGIN + half, WIDTH - MARGIN - half);
        self.anchored(x, y - 14.0, "ink", "middle", text);
    }

    pub fn path(&mut self, points: &[(f64, f64)], class: &str) {
        let mut d = String::new();
        for (i, (x, y)) in points.iter().enumerate() {
            let command = if i == 0 { 'M' } else { 'L' };
            let _ = write!(d, "{command}{} {}", number(*x), number(*y));
        }
        self.add(format_args!(r#"<path d="{d}" class="{class}"/>"#));
    }

    /// A path of many points, to the nearest half: by the distances between them, which are shorter
    /// as text.
    pub fn curve(&mut self, points: &[(f64, f64)], class: &str) {
        let halves = |value: f64| (value * 2.0).round() / 2.0;
        let (mut d, mut last) = (String::new(), (0.0, 0.0));
        for (i, (x, y)) in points.iter().enumerate() {
            let command = if i == 0 { 'm' } else { 'l' };
            let _ = write!(d, "{command}{} {}", halves(*x) - last.0, halves(*y) - last.1);
            last = (halves(*x), halves(*y));
        }
        // A minus separates numbers, too.
        self.add(format_args!(r#"<path d="{}" class="{class}"/>"#, d.replace(" -", "-")));
    }

    /// A line with a point at its end.
    pub fn arrow(&mut self, from: (f64, f64), to: (f64, f64)) {
        self.line(from, to, "soft");
        let length = ((to.0 - from.0).powi(2) + (to.1 - from.1).powi(2)).sqrt();
        let (dx, dy) = ((to.0 - from.0) / length, (to.1 - from.1) / length);
        let wing =
            |side: f64| (to.0 - 9.0 * dx - side * 5.0 * dy, to.1 - 9.0 * dy + side * 5.0 * dx);
        self.path(&[wing(1.0), to, wing(-1.0)], "soft");
    }

    fn add(&mut self, element: impl Display) {
        let _ = writeln!(self.body, "{element}");
    }

    /// Returns the file. The background is part of it, because a page can be dark although the
    /// system is light.
    pub fn finish(self) -> String {
        let height = number(self.y + 18.0);
        let (inner_width, inner_height) = (number(WIDTH - 1.0), number(self.y + 17.0));
        let Self { label, body, style, .. } = self;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
             viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\n<title>{label}</title>\n\
             <style>\n{STYLE}{style}\n</style>\n\
             <rect x=\".5\" y=\".5\" width=\"{inner_width}\" height=\"{inner_height}\" rx=\"8\" \
             class=\"page\"/>\n{body}</svg>\n"
        )
    }
}

/// Two digits are more than a screen shows.
pub fn number(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// A time axis with the chart above it.
pub struct Axis {
    pub x: f64,
    pub width: f64,
    pub seconds: f64,
}

impl Axis {
    pub fn wide(seconds: f64) -> Self {
        Self { x: MARGIN, width: WIDTH - 2.0 * MARGIN, seconds }
    }

    pub fn at(&self, seconds: f64) -> f64 {
        self.x + self.width * seconds / self.seconds
    }

    /// Draws the axis at `y`, and the seconds under it.
    pub fn draw(&self, picture: &mut Picture, y: f64, labels: f64, step: usize) {
        picture.line((self.x, y), (self.x + self.width, y), "axis");
        for second in (0..=self.seconds as usize).step_by(step) {
            let x = self.at(second as f64);
            picture.line((x, y), (x, y + 5.0), "axis");
            let (anchor, x) = match second {
                0 => ("start", x),
                _ if second as f64 == self.seconds => ("end", x),
                _ => ("middle", x),
            };
            picture.anchored(x, labels + 22.0, "", anchor, &format!("{second} s"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::STYLE;
    use crate::dashboard;

    /// Returns the relative luminance of `#rgb` or `#rrggbb`, as WCAG 2 defines it.
    fn luminance(color: &str) -> f64 {
        let digits: Vec<u32> = color[1..].chars().map(|it| it.to_digit(16).unwrap()).collect();
        let step = digits.len() / 3;
        let channels = digits.chunks(step).map(|it| f64::from(it[0] * 16 + it[step - 1]) / 255.0);
        let linear = channels
            .map(|it| if it <= 0.040_45 { it / 12.92 } else { ((it + 0.055) / 1.055).powf(2.4) });
        linear.zip([0.2126, 0.7152, 0.0722]).map(|(it, weight)| it * weight).sum()
    }

    fn contrast(one: &str, other: &str) -> f64 {
        let (one, other) = (luminance(one) + 0.05, luminance(other) + 0.05);
        f64::max(one, other) / f64::min(one, other)
    }

    /// Surfaces, and what lies on them without a meaning of its own, need no contrast.
    const SURFACES: [&str; 5] = [".page", ".halo", ".shade", ".flood", ".outage"];

    #[test]
    fn lines_and_bars_have_a_contrast_of_3_and_texts_of_4_5() {
        let media = "@media (prefers-color-scheme:dark){";
        let styles = [STYLE, dashboard::STYLE].map(|style| style.split_once(media).unwrap());
        let pages = |(light, dark)| [(light, "#fff"), (dark, "#0d1117")];
        for (rules, page) in styles.into_iter().flat_map(pages) {
            for rule in rules.split_inclusive('}') {
                let Some((names, properties)) = rule.trim_end_matches('}').split_once('{') else {
                    continue;
                };
                let names = names.trim();
                if SURFACES.contains(&names) {
                    continue;
                }
                let is_text = ["text", ".title", ".ink"].iter().any(|it| names.starts_with(it));
                let least = if is_text { 4.5 } else { 3.0 };
                for property in properties.split(';') {
                    let Some((name, color)) = property.split_once(":#") else { continue };
                    if names == ".box" && name == "fill" {
                        continue;
                    }
                    let contrast = contrast(&format!("#{color}"), page);
                    assert!(contrast >= least, "{names} {property} on {page}: {contrast:.2}");
                }
            }
        }
    }
}

//! Line charts as SVG, small enough to be kept beside the text.

use std::fmt::Write;

/// Size of a panel and of the margins in it, pixels.
const WIDTH: f64 = 400.0;
const HEIGHT: f64 = 270.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 44.0;
/// Of a line of the legend.
const LEGEND: f64 = 16.0;
/// Told apart also by those who do not see all colours.
const COLOURS: [&str; 8] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"];

/// One panel: some lines over the same quantity, both axes logarithmic.
#[derive(Debug, Clone)]
pub struct Panel {
    /// What the vertical axis shows, with its unit.
    pub title: String,
    /// What the horizontal axis shows, with its unit.
    pub x: String,
    /// Name and points of each line; points that are not greater than 0 are left out.
    pub lines: Vec<(String, Vec<(f64, f64)>)>,
}

/// Panels side by side.
#[must_use]
pub fn figure(panels: &[Panel]) -> String {
    let legend = panels.iter().map(|panel| panel.lines.len()).max().unwrap_or(0) as f64 * LEGEND;
    let (width, height) = (WIDTH * panels.len() as f64, HEIGHT + legend);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n"
    );
    for (index, panel) in panels.iter().enumerate() {
        let _ = writeln!(out, "<g transform=\"translate({},0)\">", WIDTH * index as f64);
        panel.draw(&mut out);
        out += "</g>\n";
    }
    out + "</svg>\n"
}

/// Values to pixels, by powers of ten.
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    /// From the power of ten at or below the least value to the one at or above the greatest.
    fn over(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let (low, high) = values
            .map(f64::log10)
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
                (low.min(value), high.max(value))
            });
        if low > high {
            return Self { low: 0.0, high: 1.0, from, to };
        }
        let low = low.floor();
        Self { low, high: high.ceil().max(low + 1.0), from, to }
    }

    fn at(&self, value: f64) -> f64 {
        let share = (value.log10() - self.low) / (self.high - self.low);
        self.from + share * (self.to - self.from)
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        // At most about seven, so that their labels do not touch.
        let step = ((self.high - self.low) / 7.0).ceil().max(1.0) as usize;
        (self.low as i32..=self.high as i32).step_by(step).map(|power| 10f64.powi(power))
    }
}

impl Panel {
    fn draw(&self, out: &mut String) {
        let points = || self.lines.iter().flat_map(|(_, points)| points).filter(visible);
        let x = Axis::over(points().map(|point| point.0), LEFT, WIDTH - RIGHT);
        let y = Axis::over(points().map(|point| point.1), HEIGHT - BOTTOM, TOP);
        let _ = writeln!(
            out,
            "<text x=\"{LEFT}\" y=\"20\" font-size=\"13\" font-weight=\"bold\">{}</text>\n\
             <text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            escaped(&self.title),
            (LEFT + WIDTH - RIGHT) / 2.0,
            HEIGHT - 8.0,
            escaped(&self.x),
        );
        grid(out, &x, &y);
        for (index, (name, points)) in self.lines.iter().enumerate() {
            let colour = COLOURS[index % COLOURS.len()];
            draw_line(out, points, (&x, &y), colour);
            let at = HEIGHT + LEGEND * (index as f64 + 0.5);
            let _ = writeln!(
                out,
                "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{at}\" y2=\"{at}\" stroke=\"{colour}\" \
                 stroke-width=\"2\"/><text x=\"{}\" y=\"{}\">{}{}</text>",
                LEFT + 20.0,
                LEFT + 26.0,
                at + 4.0,
                escaped(name),
                if points.iter().any(|point| visible(&point)) { "" } else { " (0 throughout)" },
            );
        }
    }
}

fn visible(point: &&(f64, f64)) -> bool {
    point.0 > 0.0 && point.1 > 0.0
}

fn grid(out: &mut String, x: &Axis, y: &Axis) {
    for value in x.ticks() {
        let at = x.at(value);
        let _ = writeln!(
            out,
            "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{}\" y2=\"{}\" stroke=\"#ddd\"/>\
             <text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            y.from,
            y.to,
            y.from + 15.0,
            number(value),
        );
    }
    for value in y.ticks() {
        let at = y.at(value);
        let _ = writeln!(
            out,
            "<line x1=\"{}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            x.from,
            x.to,
            x.from - 5.0,
            at + 4.0,
            number(value),
        );
    }
}

fn draw_line(out: &mut String, points: &[(f64, f64)], (x, y): (&Axis, &Axis), colour: &str) {
    let places: Vec<_> = points.iter().filter(visible).map(|p| (x.at(p.0), y.at(p.1))).collect();
    let path: Vec<_> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let _ = writeln!(
        out,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
        path.join(" ")
    );
    for (x, y) in places {
        let _ = writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>");
    }
}

/// A power of ten, as short as can be.
fn number(value: f64) -> String {
    match value {
        v if v >= 1e6 => format!("{:.0}M", v / 1e6),
        v if v >= 1e3 => format!("{:.0}k", v / 1e3),
        v => format!("{}", (v * 1e6).round() / 1e6),
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_goes_from_corner_to_corner() {
        let lines = vec![("a<b".to_owned(), vec![(1.0, 10.0), (0.0, 5.0), (100.0, 1000.0)])];
        let panel = Panel { title: "t".to_owned(), x: "x".to_owned(), lines };
        let text = figure(&[panel]);
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        let points = format!("points=\"{LEFT:.1},{bottom:.1} {right:.1},{TOP:.1}\"");
        assert!(text.contains(&points), "{text}");
        assert!(text.contains("a&lt;b"), "{text}");
    }

    #[test]
    fn nothing_to_draw_is_no_error() {
        let panel = Panel { title: String::new(), x: String::new(), lines: vec![] };
        assert!(figure(&[panel]).ends_with("</svg>\n"));
        assert!(figure(&[]).ends_with("</svg>\n"));
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!([1e-3, 1.0, 100.0, 1e4, 1e7].map(number), ["0.001", "1", "100", "10k", "10M"]);
    }
}

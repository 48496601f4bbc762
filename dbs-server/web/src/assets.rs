//! The files of the page. One frame, and the views of what the page is about.

use crate::subject::View;
use hyper::body::Bytes;

/// A file of the page.
pub(crate) struct Asset {
    pub(crate) kind: &'static str,
    pub(crate) text: Bytes,
}

/// The files of one page.
pub(crate) struct Assets {
    /// The frame, with the views in it.
    index: Bytes,
    /// The script that fills the views: `/view.js`.
    view: &'static str,
}

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
/// Where the views come in the frame.
const PLACE: &str = "<!-- views -->\n";

impl Assets {
    pub(crate) fn of(view: View) -> Self {
        let (html, script) = match view {
            View::Store => {
                (include_str!("../assets/store.html"), include_str!("../assets/store.js"))
            }
            View::Volume => {
                (include_str!("../assets/replicated.html"), include_str!("../assets/replicated.js"))
            }
        };
        let index = include_str!("../assets/index.html").replace(PLACE, html);
        Self { index: index.into(), view: script }
    }

    /// The file at this path.
    pub(crate) fn find(&self, path: &str) -> Option<Asset> {
        let (kind, text) = match path {
            "/" => return Some(Asset { kind: HTML, text: self.index.clone() }),
            "/view.js" => (SCRIPT, self.view),
            "/style.css" => ("text/css; charset=utf-8", include_str!("../assets/style.css")),
            "/icon.svg" => ("image/svg+xml", include_str!("../assets/icon.svg")),
            "/main.js" => (SCRIPT, include_str!("../assets/main.js")),
            "/ask.js" => (SCRIPT, include_str!("../assets/ask.js")),
            "/dom.js" => (SCRIPT, include_str!("../assets/dom.js")),
            "/dialog.js" => (SCRIPT, include_str!("../assets/dialog.js")),
            "/graph.js" => (SCRIPT, include_str!("../assets/graph.js")),
            "/list.js" => (SCRIPT, include_str!("../assets/list.js")),
            "/map.js" => (SCRIPT, include_str!("../assets/map.js")),
            "/volume.js" => (SCRIPT, include_str!("../assets/volume.js")),
            _ => return None,
        };
        Some(Asset { kind, text: Bytes::from_static(text.as_bytes()) })
    }
}

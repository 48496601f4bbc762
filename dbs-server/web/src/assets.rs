//! The files of the page.

/// A file of the page.
pub(crate) struct Asset {
    pub(crate) kind: &'static str,
    pub(crate) text: &'static str,
}

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// The file at this path.
pub(crate) fn find(path: &str) -> Option<Asset> {
    let (kind, text) = match path {
        "/" => (HTML, include_str!("../assets/index.html")),
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
    Some(Asset { kind, text })
}

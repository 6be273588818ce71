//! The pictures in `docs/pictures` are those that the algorithms make.

use std::{fs, path::Path};

#[tokio::test(start_paused = true)]
async fn the_pictures_are_current() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/pictures");
    for (name, text) in pictures::files().await {
        let written = fs::read_to_string(folder.join(&name)).unwrap_or_default();
        assert!(written == text, "docs/pictures/{name} is outdated: cargo run -p pictures");
    }
}

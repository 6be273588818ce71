//! Writes the pictures to `docs/pictures`:
//!
//! ```text
//! cargo run -p pictures
//! cargo run -p pictures -- record # first a run of 8 s with a server that hangs
//! ```

use std::{env, fs, path::Path};

#[tokio::main(flavor = "current_thread")]
async fn main() -> std::io::Result<()> {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    if env::args().nth(1).is_some_and(|arg| arg == "record") {
        fs::write(package.join("src/failure.txt"), pictures::record_failure().await)?;
        println!("recorded; run the program again to draw it");
        return Ok(());
    }
    tokio::time::pause();
    let folder = package.join("../../docs/pictures");
    fs::create_dir_all(&folder)?;
    for (name, text) in pictures::files().await {
        fs::write(folder.join(name), text)?;
    }
    Ok(())
}

//! Writes the pictures to `docs/pictures`:
//!
//! ```text
//! cargo run -p pictures
//! cargo run -p pictures -- record # first a run of 8 s with a server that hangs
//! ```

use std::{env, fs, path::Path};

use tokio::runtime::Builder;

fn main() -> std::io::Result<()> {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let is_recording = env::args().nth(1).is_some_and(|arg| arg == "record");
    let runtime = Builder::new_current_thread().enable_all().start_paused(!is_recording).build()?;
    if is_recording {
        let text = runtime.block_on(pictures::record_failure());
        fs::write(package.join("src/failure.txt"), text)?;
        println!("recorded; run the program again to draw it");
        return Ok(());
    }
    let folder = package.join("../../docs/pictures");
    fs::create_dir_all(&folder)?;
    for (name, text) in runtime.block_on(pictures::files()) {
        fs::write(folder.join(name), text)?;
    }
    Ok(())
}

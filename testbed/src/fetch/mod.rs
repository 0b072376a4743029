//! Fetches the real person detector and the real pedestrian video through the ordinary package clients, verifies them, and keeps them in a
//! cache outside the repository.
//!
//! Start at [`FetchArguments::run`]; whoever uses the files starts at [`Fetched`]. The model comes from an npm package as TFLite and is
//! rewritten as ONNX by [`convert`]; the video comes from a Debian package. Every file is known by its SHA-256, also the converted one.
//!
//! Deliberately absent: no address of any registry, no download by ourselves.

mod clients;
mod convert;
mod flatbuffer;
mod kept;
mod onnx;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use clap::Args;
use sha2::{Digest, Sha256};

pub(crate) use kept::Fetched;

/// A file in the cache.
#[derive(Debug, Clone, Copy)]
struct Item {
    file: &'static str,
    sha256: &'static str,
}

/// The person detector, converted to ONNX; the side of its input in pixels and the file.
const MODELS: [(i64, Item); 6] = [
    (
        160,
        Item {
            file: "person-160.onnx",
            sha256: "7c0db548f026eac34a932e75913cea3eb784fd8a0c72751fc10637310baba81c",
        },
    ),
    (
        224,
        Item {
            file: "person-224.onnx",
            sha256: "a13cd49a6231729e800bbaccb0dcaca919ae529d21908c1d788870aff5396caf",
        },
    ),
    (
        300,
        Item {
            file: "person-300.onnx",
            sha256: "79d79a63a56c7aace12d93769a0f05b8bb204168169e97c6adf3efa6f559abc2",
        },
    ),
    (
        416,
        Item {
            file: "person-416.onnx",
            sha256: "490d325f310f6ce55ba4f7167b3c1bdd86bc81ba92f6fef40a2438900495c6a8",
        },
    ),
    (
        512,
        Item {
            file: "person-512.onnx",
            sha256: "7ba58c1b73503b3b709455c7e3db0c9e0f7c0c05005a054088b1094d4bd94ae9",
        },
    ),
    (
        640,
        Item {
            file: "person-640.onnx",
            sha256: "e2412d2f8f922db1c6d01872c7fd0e4019a0b617ba9867fdecb4a2d460ef76b6",
        },
    ),
];

/// The pedestrian video.
const VIDEO: Item = Item {
    file: "vtest.avi",
    sha256: "45cddc9490be69345cbdab64ca583be65987e864ca408038e648db99e10516cf",
};

/// Inside of the npm package: labels, then the TFLite model.
const PACKED: &str = "objectron_solution_packed_assets.data";
const TFLITE_AT: std::ops::Range<usize> = 184..9_987_912;
const TFLITE_SHA256: &str = "d0a5255bf8c4f5a0bc4240741a76c41d5e939f7655078f945f50ab53a9375da6";
const NPM_PACKAGE: &str = "@mediapipe/objectron@0.4.1675468480";

const DEBIAN_PACKAGE: &str = "opencv-doc";
const VIDEO_IN_PACKAGE: &str = "usr/share/doc/opencv-doc/examples/data/vtest.avi";

/// Fetches the real video and model through the package clients (about 130 MB to download and to keep)
#[derive(Debug, Args)]
pub(crate) struct FetchArguments {
    /// Where they are kept; where `demo --real` looks when absent: $XDG_CACHE_HOME/compass or ~/.cache/compass
    #[arg(long)]
    dir: Option<PathBuf>,
}

impl FetchArguments {
    /// Fetches what is not there yet.
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let folder = match self.dir {
            Some(folder) => folder,
            None => default_folder()?,
        };
        std::fs::create_dir_all(&folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
        // The video is tried even when the model cannot be had, so that one look tells everything that is to be installed.
        let results = [
            provide_models(&folder).context("cannot fetch the person detector"),
            provide_video(&folder).context("cannot fetch the pedestrian video"),
        ];
        let errors: Vec<String> = results
            .into_iter()
            .filter_map(|result| result.err().map(|error| format!("{error:#}")))
            .collect();
        if !compass_client::source::ffmpeg_is_available() {
            println!("note: reading the video needs ffmpeg: {FFMPEG_HOW}");
        }
        ensure!(errors.is_empty(), "{}", errors.join("\nerror: "));
        Ok(())
    }
}

/// How to install what reads the video.
const FFMPEG_HOW: &str = "apt-get install ffmpeg";

fn default_folder() -> anyhow::Result<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(cache) = set("XDG_CACHE_HOME") {
        return Ok(PathBuf::from(cache).join("compass"));
    }
    let home = set("HOME").context("neither XDG_CACHE_HOME nor HOME is set, one of which says where the fetched files are kept")?;
    Ok(PathBuf::from(home).join(".cache/compass"))
}

fn provide_models(folder: &Path) -> anyhow::Result<()> {
    let mut missing = Vec::new();
    for (side, item) in &MODELS {
        if is_kept(folder, item)? {
            continue;
        }
        missing.push((*side, item));
    }
    if missing.is_empty() {
        return Ok(());
    }
    println!("fetching {NPM_PACKAGE}");
    let tflite = fetch_tflite()?;
    for (side, item) in missing {
        keep(folder, item, &convert::to_onnx(&tflite, side)?)?;
    }
    Ok(())
}

fn fetch_tflite() -> anyhow::Result<Vec<u8>> {
    let folder = tempfile::tempdir()?;
    clients::unpack_npm(NPM_PACKAGE, folder.path())?;
    let path = folder.path().join("package").join(PACKED);
    let packed =
        std::fs::read(&path).with_context(|| format!("the package has no file {PACKED}"))?;
    let tflite = packed
        .get(TFLITE_AT)
        .context("the package's file is too short")?;
    verify(tflite, TFLITE_SHA256, "model in the package")?;
    Ok(tflite.to_vec())
}

fn provide_video(folder: &Path) -> anyhow::Result<()> {
    if is_kept(folder, &VIDEO)? {
        return Ok(());
    }
    // Installed already, on a system that keeps documentation.
    let installed = Path::new("/").join(VIDEO_IN_PACKAGE);
    if is_whole(&installed, VIDEO.sha256)? {
        return keep(folder, &VIDEO, &std::fs::read(installed)?);
    }
    println!("fetching {DEBIAN_PACKAGE}");
    let unpacked = tempfile::tempdir()?;
    clients::unpack_deb(DEBIAN_PACKAGE, unpacked.path())
        .with_context(|| format!("{} would hold it", folder.join(VIDEO.file).display()))?;
    let path = unpacked.path().join("unpacked").join(VIDEO_IN_PACKAGE);
    let bytes = std::fs::read(&path)
        .with_context(|| format!("the package has no file {VIDEO_IN_PACKAGE}"))?;
    keep(folder, &VIDEO, &bytes)
}

/// Whether an item is in the folder and whole.
fn is_kept(folder: &Path, item: &Item) -> anyhow::Result<bool> {
    let path = folder.join(item.file);
    let kept = is_whole(&path, item.sha256)?;
    if kept {
        println!("already there: {}", path.display());
    }
    Ok(kept)
}

/// Verifies and writes an item.
fn keep(folder: &Path, item: &Item, bytes: &[u8]) -> anyhow::Result<()> {
    verify(bytes, item.sha256, item.file)?;
    let path = folder.join(item.file);
    // A file of its own first: one that is cut short never has the final name.
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    std::io::Write::write_all(&mut file, bytes)?;
    file.persist(&path)
        .with_context(|| format!("cannot write {}", path.display()))?;
    println!("verified: {}", path.display());
    Ok(())
}

fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// False when it is not there or is another file.
fn is_whole(path: &Path, wanted: &str) -> anyhow::Result<bool> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(sha256(&bytes) == wanted),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

fn verify(bytes: &[u8], wanted: &str, title: &str) -> anyhow::Result<()> {
    let found = sha256(bytes);
    if found != wanted {
        bail!("the {title} is not the known one: its SHA-256 is {found}, expected {wanted}");
    }
    Ok(())
}

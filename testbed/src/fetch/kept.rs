//! What was fetched, for those who use it.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};

use super::{FFMPEG_HOW, Item, MODELS, VIDEO, default_folder, is_whole};

/// How to get what is not there.
const FETCH_HOW: &str =
    "run `cargo run -p compass-testbed -- fetch` first (it needs npm and, for the video, apt-get)";

/// The cache with the detector in it, and the video where that was asked for.
#[derive(Debug, Clone)]
pub(crate) struct Fetched {
    folder: PathBuf,
}

impl Fetched {
    /// The cache, if every file is there and whole, and a program that reads the video.
    ///
    /// # Errors
    /// Names what is missing and how to get it.
    pub(crate) fn find() -> anyhow::Result<Self> {
        let kept = Self::in_folder(&default_folder()?, true)?;
        ensure!(
            compass_client::source::ffmpeg_is_available(),
            "reading the video needs the program ffmpeg: {FFMPEG_HOW}"
        );
        Ok(kept)
    }

    /// The cache, if the detector is there and whole, for a video of the caller's own.
    ///
    /// # Errors
    /// Names what is missing and how to get it.
    pub(crate) fn find_detector() -> anyhow::Result<Self> {
        Self::in_folder(&default_folder()?, false)
    }

    /// With or without the video.
    fn in_folder(folder: &Path, with_video: bool) -> anyhow::Result<Self> {
        let items = MODELS.iter().map(|(_, item)| item);
        let items = items.chain(with_video.then_some(&VIDEO));
        let mut missing = Vec::new();
        for Item { file, sha256 } in items {
            if !is_whole(&folder.join(file), sha256)? {
                missing.push(*file);
            }
        }
        ensure!(
            missing.is_empty(),
            "{} not in {} (missing or damaged: {}): {FETCH_HOW}",
            if with_video {
                "the real video and its detector are"
            } else {
                "the real person detector is"
            },
            folder.display(),
            missing.join(", ")
        );
        let folder = folder.to_owned();
        Ok(Self { folder })
    }

    /// The folder: whatever is derived from the files may be kept there, too.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The video and its SHA-256.
    pub(crate) fn video(&self) -> (PathBuf, &'static str) {
        (self.folder.join(VIDEO.file), VIDEO.sha256)
    }

    /// The file of this SHA-256.
    ///
    /// # Errors
    /// When nothing fetched has it.
    pub(crate) fn model(&self, sha256: &str) -> anyhow::Result<PathBuf> {
        let mut items = MODELS.iter().map(|(_, item)| item);
        let item = items.find(|item| item.sha256 == sha256);
        let item = item.with_context(|| format!("no fetched model has the SHA-256 {sha256}"))?;
        Ok(self.folder.join(item.file))
    }
}

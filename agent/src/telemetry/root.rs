//! A relocatable root for `/sys`, `/proc` and `/dev`: tests lay out a board in a folder, containers mount the host's at `/host`.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// Kernel files are a page; what is longer is not one of those read here.
const FILE_BYTES_MAX: u64 = 256 * 1024;

/// Where the host's file system begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Root(PathBuf);

impl Default for Root {
    fn default() -> Self {
        Self(PathBuf::from("/"))
    }
}

impl Root {
    /// A root at a folder.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self(folder.into())
    }

    /// Where an absolute path lies below this root.
    pub fn path(&self, absolute: impl AsRef<Path>) -> PathBuf {
        let absolute = absolute.as_ref();
        self.0.join(absolute.strip_prefix("/").unwrap_or(absolute))
    }

    /// The text of a file below this root, if there is one that can be read.
    pub fn read(&self, absolute: impl AsRef<Path>) -> Option<String> {
        read_text(&self.path(absolute))
    }
}

/// The text of a small file; bytes that are not UTF-8 are replaced. None when it cannot be read.
pub(super) fn read_text(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    fs::File::open(path)
        .ok()?
        .take(FILE_BYTES_MAX)
        .read_to_end(&mut bytes)
        .ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// The whole number in a file; surrounding blanks and NUL bytes do not matter.
pub(super) fn read_number<T: std::str::FromStr>(path: &Path) -> Option<T> {
    trimmed(&read_text(path)?).parse().ok()
}

/// A kernel value without the blanks and NUL bytes around it.
pub(super) fn trimmed(text: &str) -> &str {
    text.trim_matches(|character: char| character.is_whitespace() || character == '\0')
}

/// The entries of a folder in the order of their names; none when it cannot be read.
pub(super) fn list(folder: &Path) -> Vec<PathBuf> {
    let mut entries: Vec<PathBuf> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    entries.sort();
    entries
}

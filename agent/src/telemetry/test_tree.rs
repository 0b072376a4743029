//! A board or container laid out as files in a temporary folder.

use std::fs;

use super::root::Root;

/// The folder; removed when dropped.
pub(crate) struct Tree(tempfile::TempDir);

impl Tree {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// Adds or replaces a file at an absolute path below the root.
    pub(crate) fn file(self, absolute: &str, text: &str) -> Self {
        self.set(absolute, text);
        self
    }

    /// Adds or replaces a file at an absolute path below the root.
    pub(crate) fn set(&self, absolute: &str, text: &str) {
        let path = self.root().path(absolute);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub(crate) fn root(&self) -> Root {
        Root::new(self.0.path())
    }
}

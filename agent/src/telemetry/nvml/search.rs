//! Finds the management library: `libnvidia-ml.so.1`, then `libnvidia-ml.so`, then a configured path.
//!
//! The unversioned name is no longer shipped by newer drivers, and where it exists it may be a build-time stub. A candidate that is
//! empty, broken or a stub is passed over; without a usable one the node runs CPU-only and [`LibrarySearch::summary`] says why.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{GpuError, GpuLibrary};

/// Names in the order they are tried.
const NAMES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// Where to look.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LibraryPlaces {
    /// Folders to look in; empty: wherever the dynamic loader looks.
    pub folders: Vec<PathBuf>,
    /// A file to try last.
    pub configured: Option<PathBuf>,
}

/// What became of one candidate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LibraryFailure {
    /// The candidate.
    pub path: PathBuf,
    /// Why it was not used.
    pub reason: String,
    /// There is simply no such file.
    pub is_absent: bool,
}

/// The outcome of a search.
pub struct LibrarySearch {
    /// The library, and the candidate it was opened as.
    pub found: Option<(Arc<dyn GpuLibrary>, PathBuf)>,
    /// Candidates passed over.
    pub failures: Vec<LibraryFailure>,
}

impl LibrarySearch {
    /// Tries the candidates in order with `open` and stops at the first that opens.
    pub fn run(
        places: &LibraryPlaces,
        open: impl Fn(&Path) -> Result<Arc<dyn GpuLibrary>, GpuError>,
    ) -> Self {
        let mut failures = Vec::new();
        for path in candidates(places) {
            let has_folder = path.components().count() > 1;
            if has_folder && !path.exists() {
                failures.push(LibraryFailure {
                    path,
                    reason: "no such file".to_owned(),
                    is_absent: true,
                });
                continue;
            }
            match open(&path) {
                Ok(library) => {
                    return Self {
                        found: Some((library, path)),
                        failures,
                    };
                }
                Err(error) => {
                    let reason = error.to_string();
                    let is_absent = !has_folder && reason.contains("No such file");
                    failures.push(LibraryFailure {
                        path,
                        reason,
                        is_absent,
                    });
                }
            }
        }
        Self {
            found: None,
            failures,
        }
    }

    /// One line for people: what was opened, or why the node runs CPU-only; and whether somebody should look into it.
    pub fn summary(&self) -> (String, bool) {
        if let Some((library, path)) = &self.found {
            let driver = library
                .driver_version()
                .unwrap_or_else(|_| "unknown".to_owned());
            return (
                format!("NVML from {}, driver {driver}", path.display()),
                false,
            );
        }
        let broken: Vec<String> = self
            .failures
            .iter()
            .filter(|failure| !failure.is_absent)
            .map(|failure| format!("{}: {}", failure.path.display(), failure.reason))
            .collect();
        if broken.is_empty() {
            ("no NVML library on this host; CPU-only".to_owned(), false)
        } else {
            (
                format!("no usable NVML ({}); CPU-only", broken.join("; ")),
                true,
            )
        }
    }
}

fn candidates(places: &LibraryPlaces) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    for name in NAMES {
        if places.folders.is_empty() {
            paths.push(PathBuf::from(name));
        }
        paths.extend(places.folders.iter().map(|folder| folder.join(name)));
    }
    paths.extend(places.configured.clone());
    paths
}

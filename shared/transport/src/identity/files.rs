//! Writing small files so that a power cut leaves the old content or the new, never half of either.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use zeroize::Zeroizing;

use super::IdentityError;

/// Who may read a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Only the owner (0600).
    Private,
    /// Everyone (0644).
    Public,
}

/// Replaces a file's content: written aside, synced, renamed.
pub(crate) fn replace(path: &Path, content: &[u8], access: Access) -> io::Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    fs::create_dir_all(folder)?;
    let mut aside = path.as_os_str().to_owned();
    aside.push(".new");
    let aside = Path::new(&aside);
    let mode = match access {
        Access::Private => 0o600,
        Access::Public => 0o644,
    };
    // A leftover of an interrupted write may have another mode, and the mode counts only at creation.
    match fs::remove_file(aside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(aside)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(aside, path)?;
    File::open(folder)?.sync_all()
}

/// Reads a text file; `None` when it does not exist.
pub(crate) fn read(path: &Path) -> Result<Option<String>, IdentityError> {
    match fs::read(path) {
        Ok(bytes) => String::from_utf8(bytes)
            .map(Some)
            .map_err(|_| damaged(path, "not text")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(failed(path, source)),
    }
}

/// As [`read`], and refuses a file that others can read.
pub(crate) fn read_private(path: &Path) -> Result<Option<Zeroizing<String>>, IdentityError> {
    let Some(text) = read(path)?.map(Zeroizing::new) else {
        return Ok(None);
    };
    let metadata = fs::metadata(path).map_err(|source| failed(path, source))?;
    let mode = metadata.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(IdentityError::Exposed {
            path: path.display().to_string(),
            mode,
        });
    }
    Ok(Some(text))
}

/// As [`replace`], with the path in the error.
pub(crate) fn write(path: &Path, content: &[u8], access: Access) -> Result<(), IdentityError> {
    replace(path, content, access).map_err(|source| failed(path, source))
}

pub(crate) fn damaged(path: &Path, reason: impl ToString) -> IdentityError {
    IdentityError::Damaged {
        path: path.display().to_string(),
        reason: reason.to_string(),
    }
}

fn failed(path: &Path, source: io::Error) -> IdentityError {
    IdentityError::File {
        path: path.display().to_string(),
        source,
    }
}

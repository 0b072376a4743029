//! A folder of pictures, in the order of their names.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Picture, SIDE_PX_MAX, Source, SourceError};

/// A folder of `.jpg`, `.jpeg` and `.png` files.
#[derive(Debug)]
pub struct ImageFolder {
    folder: PathBuf,
    files: std::vec::IntoIter<PathBuf>,
    frame_every: Duration,
    frame: u64,
}

impl ImageFolder {
    /// Lists the folder.
    ///
    /// # Errors
    /// When it cannot be read or holds no picture.
    pub fn open(folder: &Path, rate_hz: f64) -> Result<Self, SourceError> {
        let name = folder.display().to_string();
        let entries = std::fs::read_dir(folder).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        let entries = entries.map_err(|source| SourceError::Read {
            name: name.clone(),
            source,
        })?;
        let is_picture = |path: &PathBuf| {
            matches!(
                path.extension().and_then(|e| e.to_str()),
                Some("jpg" | "jpeg" | "png")
            )
        };
        let mut files: Vec<_> = entries
            .into_iter()
            .map(|e| e.path())
            .filter(is_picture)
            .collect();
        files.sort();
        if files.is_empty() {
            return Err(SourceError::Unsupported {
                name,
                what: "the folder holds no .jpg, .jpeg or .png file".to_owned(),
            });
        }
        let frame_every = Duration::from_secs_f64(1.0 / rate_hz.max(1e-3));
        Ok(Self {
            folder: folder.to_owned(),
            files: files.into_iter(),
            frame_every,
            frame: 0,
        })
    }
}

impl Source for ImageFolder {
    fn next_picture(&mut self) -> Result<Option<Picture>, SourceError> {
        let Some(path) = self.files.next() else {
            return Ok(None);
        };
        let name = path.display().to_string();
        let bytes = std::fs::read(&path).map_err(|source| SourceError::Read {
            name: name.clone(),
            source,
        })?;
        let at = self.frame_every.mul_f64(self.frame as f64);
        let frame = self.frame;
        self.frame += 1;
        if path.extension().is_some_and(|e| e != "png") {
            return Ok(Some(Picture {
                content: "jpeg".to_owned(),
                bytes,
                at,
            }));
        }
        let broken = |what: String| SourceError::Broken {
            name: name.clone(),
            frame,
            offset: 0,
            what,
        };
        let mut reader =
            image::ImageReader::with_format(std::io::Cursor::new(bytes), image::ImageFormat::Png);
        let mut limits = image::Limits::default();
        limits.max_image_width = Some(SIDE_PX_MAX);
        limits.max_image_height = Some(SIDE_PX_MAX);
        reader.limits(limits);
        let decoded = reader
            .decode()
            .map_err(|error| broken(error.to_string()))?
            .into_rgb8();
        Ok(Some(Picture::rgb(
            decoded.width(),
            decoded.height(),
            decoded.into_raw(),
            at,
        )))
    }

    fn describe(&self) -> String {
        format!("{} (folder of pictures)", self.folder.display())
    }
}
